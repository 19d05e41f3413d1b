"""The folders of runs."""

import multiprocessing
import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from gcfed.folders.folder import read_run
from gcfed.folders.place import check_folder, job_dir, new_folder, run_dir, sweep_dir
from gcfed.run import train

FAST = (
    "rounds=2",
    "participation.num_clients=8",
    "client.epochs=1",
    "data.limit_train=100",
    "data.limit_test=40",
)


def test_the_newest_run_of_the_same_identity_with_a_checkpoint_continues(tmp_path, caplog):
    def where(ckpt_path, **config):
        return Path(run_dir(str(tmp_path), ckpt_path, "now", _root_=OmegaConf.create(config)))

    for stamp, seed, begun in (("1", 1, True), ("2", 2, True), ("3", 1, False), ("4", 5, True)):
        (tmp_path / stamp / "checkpoints").mkdir(parents=True)
        OmegaConf.save(
            OmegaConf.create({"seed": seed, "rounds": 3}), tmp_path / stamp / "config.yaml"
        )
        if begun:  # its first round was finished before a kill
            (tmp_path / stamp / "checkpoints/last.ckpt").touch()
    (tmp_path / "4" / "config.yaml").write_text("a: [")
    assert where(None, seed=1) == tmp_path / "now"
    assert where("last", seed=1, rounds=9) == tmp_path / "1"
    assert where("last", seed=3, rounds=3) == tmp_path / "now"
    assert where(str(tmp_path / "2/checkpoints/last.ckpt"), seed=9) == tmp_path / "2"
    assert f"{tmp_path / '4'} is skipped" in caplog.text


def test_the_name_of_a_folder_lists_the_overrides_and_is_valid_in_ckpt_path(tmp_path):
    def named(changed):
        return run_dir(str(tmp_path), None, "now", changed, _root_={})

    folder = named("data.root=/home/me/flowers,gc.lam=0.5,'methods=[a]',targets=[0.5,0.9]")
    assert (
        Path(folder).name == "now_data.root-home-me-flowers_gc.lam-0.5_-methods-a-_targets-0.5_0.9"
    )
    assert OverridesParser.create().parse_override(f"ckpt_path={folder}").value() == folder


@pytest.mark.parametrize(
    ("changed", "kept", "named"),
    [
        (
            "client.optimizer.momentum=0.95,client.optimizer.weight_decay=0.001,gc.lam=0.5,rounds=20,x=[1,2]",
            "client.optimizer.momentum=0.95,gc.lam=0.5,rounds=20,x=[1,2]",
            "client.optimizer.momentum-0.95_gc.lam-0.5_rounds-20_x-1_2",
        ),
        ("gc={_target_:mine.GC,lam:0.5},seed=1", "seed=1", "seed-1"),
        ("targets=[0.5,0.9],data.root=" + "日" * 99, "targets=[0.5,0.9]", "targets-0.5_0.9"),
    ],
)
def test_a_long_name_has_whole_overrides_no_dicts_and_80_bytes_before_its_digest(
    tmp_path, changed, kept, named
):
    job = job_dir(changed)
    run = Path(run_dir(str(tmp_path), None, "now", changed, _root_={})).name
    assert re.fullmatch(re.escape(kept) + "-[0-9a-f]{12}", job)
    assert re.fullmatch(rf"now_{named}-[0-9a-f]{{12}}", run)
    assert len(kept.encode()) <= 80
    assert job != job_dir(f"{changed},client.epochs=2") != job_dir(f"{changed},client.epochs=3")


def test_two_runs_never_get_the_same_new_folder(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        made = [*pool.map(lambda _: new_folder(tmp_path / "logs" / "now"), range(24))]
    assert {path.name for path in made} == {"now", *(f"now_{i}" for i in range(2, 25))}


def test_only_one_of_several_processes_trains_in_a_folder(config, tmp_path):
    """They start at the same time. The others are refused, and no row is lost."""
    context = multiprocessing.get_context("fork")
    start = context.Barrier(3)
    cfg = config(*FAST, folder=tmp_path / "run")

    def begin():
        start.wait(60)
        try:
            train(cfg)
        except ValueError as error:
            (tmp_path / f"refused_{os.getpid()}").write_text(str(error))

    processes = [context.Process(target=begin) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    said = [path.read_text() for path in tmp_path.glob("refused_*")]
    assert len(said) == 2
    assert all(
        re.search(r"/run (is in use by |holds this run already)", sentence) for sentence in said
    )
    run = read_run(tmp_path / "run")
    assert run.state == "finished"
    assert run.metrics.index.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("left", "goes"),
    [
        (("failure.txt", "partition.npz"), True),
        (("metrics.csv",), True),
        (("metrics.csv", "seed"), False),
        (("checkpoints/best.ckpt",), False),
        (("summary.json",), False),
        (("global_model.safetensors",), False),
    ],
)
def test_a_folder_is_refused_if_results_would_be_lost(tmp_path, left, goes):
    """Rounds without a checkpoint may be lost: the same run repeats them with the same numbers."""
    (tmp_path / "checkpoints").mkdir()
    for name in left:
        (tmp_path / name).write_text("round,test/acc\n1,0.5\n")
    cfg = OmegaConf.create({"seed": 1, "ckpt_path": None})
    config = tmp_path / "config.yaml"
    OmegaConf.save(OmegaConf.create({"seed": 2 if "seed" in left else 1}), config)
    with (
        nullcontext()
        if goes
        else pytest.raises(ValueError, match=r"holds (another run: seed is 2|this run already)")
    ):
        check_folder(cfg, tmp_path)
    config.unlink()
    with (
        nullcontext()
        if goes and "metrics.csv" not in left
        else pytest.raises(ValueError, match=r"no config\.yaml")
    ):
        check_folder(cfg, tmp_path)


def test_a_job_of_a_sweep_is_one_folder_named_by_its_overrides():
    assert job_dir("gc.lam=0.5,seed=1") == "gc.lam=0.5,seed=1"
    assert "/" not in job_dir("data.root=a/b") != job_dir("data.root=a-b")


def test_the_newest_sweep_with_the_same_overrides_continues(tmp_path, monkeypatch):
    for stamp, overrides in (
        ("2026-01-01", ["seed=1,2", "trainer=cpu"]),
        ("2026-01-02", ["gc.lam=0,1"]),
    ):
        (tmp_path / f"multirun_{stamp}").mkdir()
        sweep = OmegaConf.create({"hydra": {"overrides": {"task": overrides}}})
        OmegaConf.save(sweep, tmp_path / f"multirun_{stamp}" / "multirun.yaml")
    monkeypatch.setattr("sys.argv", ["train.py", "-m", "seed=1,2", "ckpt_path=last"])
    # the newer sweep was over λ
    assert sweep_dir(str(tmp_path), "last") == str(tmp_path / "multirun_2026-01-01")
    # a later start searches for this
    assert Path(sweep_dir(str(tmp_path), None)).name.startswith("multirun_20")
    monkeypatch.setattr(
        "sys.argv", ["train.py", "-m", "hydra/launcher=joblib", "seed=1,2", "ckpt_path=last"]
    )
    # the launcher does not count
    assert sweep_dir(str(tmp_path), "last") == str(tmp_path / "multirun_2026-01-01")
    monkeypatch.setattr("sys.argv", ["train.py", "-m", "~gc", "seed=1,2", "ckpt_path=last"])
    assert not Path(sweep_dir(str(tmp_path), "last")).exists()


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"TORCHELASTIC_RUN_ID": "abc", "WORLD_SIZE": "2"}, "job_abc"),
        (
            {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "3"},
            "job_7-1",
        ),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, "now"),  # a batch script without srun
        ({"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}, None),
    ],
)
def test_processes_of_one_job_write_into_one_folder(monkeypatch, tmp_path, environment, folder):
    for key in (
        "TORCHELASTIC_RUN_ID",
        "WORLD_SIZE",
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "SLURM_NTASKS",
        "SLURM_PROCID",
    ):
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    with nullcontext() if folder else pytest.raises(ValueError, match="--standalone"):
        assert run_dir(str(tmp_path), None, "now", _root_={}) == f"{tmp_path}/{folder}"


def test_a_folder_of_one_long_override_does_not_begin_with_a_dash():
    assert re.fullmatch(r"[0-9a-f]{12}", job_dir(f"model.start={'a' * 90}"))
