"""A sweep or search says which job begins, and how long the rest takes."""

import re
import shlex
from types import SimpleNamespace

import pytest
from conftest import read_rows, type_command
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from gcfed import jobs
from gcfed.jobs import SweepProgress, jobs_of_sweep

FAST = (
    "rounds=1",
    "data.limit_train=100",
    "data.limit_test=40",
    "client.epochs=1",
    "model.hidden=[8]",
    "participation.num_clients=8",
    "extras.figures=false",
    "trainer.devices=1",
    "logger=csv",
)
BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


def sweep_of(*overrides, **sweeper):
    """The part of a sweep's config that the callback reads."""
    task = {"task": [*overrides]}
    return OmegaConf.create({"hydra": {"sweeper": sweeper, "overrides": task}})


@pytest.mark.parametrize(
    ("overrides", "sweeper", "jobs"),
    [
        (("seed=1,2,3", "algorithm=fedavg,gcfed"), {"_target_": BASIC}, 6),
        (("seed=range(1,5)",), {"_target_": BASIC, "params": {"gc.lam": "0,1"}}, 8),
        (("seed=1,2", "seed=3"), {"_target_": BASIC}, 1),  # the last word counts
        (("gc.lam=interval(0,1)",), {"_target_": BASIC}, None),  # refused by the sweeper
        ((), {"_target_": "hydra_plugins.gcfed_optuna.OptunaSweeper", "n_trials": 30}, 30),
        (("seed=1,2",), {"_target_": "elsewhere.Sweeper"}, None),
    ],
)
def test_the_number_of_jobs_is_that_of_the_sweeper(monkeypatch, overrides, sweeper, jobs):
    nothing = SimpleNamespace(config_loader=lambda: None)
    monkeypatch.setattr("gcfed.jobs.GlobalHydra.instance", lambda: nothing)
    assert jobs_of_sweep(sweep_of(*overrides, **sweeper)) == jobs


def test_the_time_left_comes_from_jobs_that_were_trained_here(tmp_path, monkeypatch, capsys):
    """Job 1 was finished by an earlier sweep, job 3 fails, and jobs 2 and 4 take 60 and 180 s."""
    now = [0.0]
    monkeypatch.setattr(jobs.time, "monotonic", lambda: now[0])
    progress = SweepProgress()
    progress.total = 6
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "summary.json").touch()
    ends = [(2, True), (60, True), (1, False), (180, True), (0, True)]
    for number, (seconds, completed) in enumerate(ends):
        job = {"job": {"num": number}, "runtime": {"output_dir": str(tmp_path / str(number))}}
        config = OmegaConf.create({"hydra": job})
        progress.on_job_start(config)
        now[0] += seconds
        status = JobStatus.COMPLETED if completed else JobStatus.FAILED
        progress.on_job_end(config, JobReturn(status=status))
    assert capsys.readouterr().out.splitlines() == [
        "job 1 of 6",
        "job 2 of 6",
        "job 3 of 6, about 4 min left",  # 4 · 60 s
        "job 4 of 6, about 3 min left",  # 3 · 60 s
        "job 5 of 6, about 4 min left",  # 2 · 120 s
    ]


@pytest.mark.parametrize(
    ("target", "jobs", "last"),
    [
        (BASIC, 2, "2 jobs are done. gcfed-report 'roots=[sweep]' compares them.\n"),
        (BASIC, 1, ""),  # there is nothing to compare
        ("hydra_plugins.gcfed_optuna.OptunaSweeper", 2, ""),  # trials are not compared
    ],
)
def test_a_sweep_ends_with_the_command_that_compares_its_jobs(
    tmp_path, monkeypatch, capsys, target, jobs, last
):
    monkeypatch.chdir(tmp_path)
    progress = SweepProgress()
    for number in range(jobs):
        folder = {"runtime": {"output_dir": str(tmp_path / "sweep" / str(number))}}
        job = OmegaConf.create({"hydra": folder})
        progress.on_job_end(job, JobReturn(status=JobStatus.COMPLETED))
    progress.on_job_end(job, JobReturn(status=JobStatus.FAILED))
    progress.on_multirun_end(sweep_of(_target_=target))
    assert capsys.readouterr().out == last


def test_the_command_that_compares_jobs_names_a_folder_with_odd_letters(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    name = "it's a = b, (c)"
    progress = SweepProgress()
    progress.root = tmp_path / name
    progress.num_done = 2
    progress.on_multirun_end(sweep_of(_target_=BASIC))
    printed = capsys.readouterr().out
    _, word, *_ = shlex.split(printed.partition(". ")[2])
    (override,) = OverridesParser.create().parse_overrides([word])
    assert [str(root) for root in override.value()] == [name]


@pytest.mark.slow
def test_a_sweep_with_a_refused_job_counts_on_and_ends_with_its_reason(tmp_path):
    words = (*FAST, f"paths.log_dir={tmp_path / 'logs'}", "server.lr=1,1e39", "seed=1,2", "-m")
    printed = type_command(tmp_path, "train.py", *words, code=1)
    first, *later = re.findall(r"^job .*$", printed, re.MULTILINE)
    assert first == "job 1 of 4"
    assert len(later) == 3
    for number, line in enumerate(later, start=2):
        assert re.fullmatch(rf"job {number} of 4, about \d+ s left", line)
    reason = "server: value cannot be converted to type float without overflow"
    assert printed.count(f"this job has failed: {reason}") == 2
    assert printed.strip().splitlines()[-1].endswith(reason)
    assert len([*(tmp_path / "logs").rglob("summary.json")]) == 2


def test_a_measure_of_a_search_ends_a_sweep_before_its_first_job(tmp_path):
    words = (*FAST, f"paths.log_dir={tmp_path / 'logs'}", "seed=1,2", "-m")
    printed = type_command(tmp_path, "train.py", *words, "optimized_metric=final:test/acc", code=1)
    assert printed.strip() == (
        "optimized_metric=final:test/acc has no effect without a search, such as -m"
        " hparams_search=digits_optuna."
    )
    assert not (tmp_path / "logs").exists()


def test_a_sweep_continues_its_jobs_with_more_rounds(tmp_path):
    words = (*FAST, f"paths.log_dir={tmp_path / 'logs'}", "seed=1,2", "-m")
    type_command(tmp_path, "train.py", *words)
    before = sorted((tmp_path / "logs").rglob("metrics.csv"))
    said = type_command(tmp_path, "train.py", *words, "rounds=3", "ckpt_path=last")
    assert sorted((tmp_path / "logs").rglob("metrics.csv")) == before
    assert [len(read_rows(path)) for path in before] == [3, 3]
    assert said.count("resuming ") == 2
    said = type_command(tmp_path, "train.py", *words, "rounds=3", "ckpt_path=last")
    assert said.count("all 3 rounds of ") == 2
    assert "resuming" not in said


def test_a_single_run_prints_no_such_line(tmp_path):
    words = (*FAST, f"paths.output_dir={tmp_path / 'run'}")
    assert "job 1" not in type_command(tmp_path, "train.py", *words)
