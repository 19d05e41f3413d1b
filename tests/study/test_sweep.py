"""A study as a sweep: what is skipped, continued, refused and named, with a launcher that only pretends to train."""

import gc
import os
import re
import socket
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict
from pretend import BasicLauncher, Launcher, composed, context, finish, outcome

from gcfed.check import refuse_sweeps
from gcfed.study import cost
from gcfed.study.jobs import launch
from gcfed.study.sweep import sweep
from gcfed.utils.resolvers import ROOT

FEDAVG, GCFED = "fedavg_alpha-0.1_s1", "gc-fed_alpha-0.1_s1"
STOP, PATIENCE = "callbacks=early_stopping", "callbacks.early_stopping.patience"


TABLE = {
    "overrides": ["rounds=4"],
    "rows": [{"label": "FedAvg", "overrides": ["gc=none"]}, {"label": "GC-Fed", "overrides": ["gc=gcfed"]}],
    "columns": [{"label": "α 0.1", "overrides": ["partition.alpha=0.1"]}],
}


@pytest.fixture
def study(tmp_path):
    """``study(launcher, *arguments, name=…, **node)`` runs a study below ``study.root``."""

    def run(launcher, *arguments, name="try", **node):
        place = {"runtime": {"choices": {"study": name}}, "sweep": {"dir": str(run.root / name / "full")}}
        config = {"study": {"table": TABLE, **node}, "scale": "full", "hydra": place}
        config = OmegaConf.create(config | {"paths": {"log_dir": str(tmp_path)}})
        sweep(config, context(composed), launcher, [*arguments])

    run.root = tmp_path / "study"
    return run


def test_what_is_finished_is_skipped_and_what_has_begun_goes_on(study, capsys):
    launcher = BasicLauncher()
    study(launcher)
    folder = study.root / "try" / "full"
    assert [len(call) for call in launcher.calls] == [1, 1]  # one by one
    assert launcher.calls[0][0] == [
        "partition.alpha=0.1", "rounds=4", "gc=none", "seed=1", f"hydra.sweep.dir='{folder}'",
        f"hydra.sweep.subdir='{FEDAVG}'",
    ]  # fmt: skip
    said = capsys.readouterr().out
    assert "0 finished, 0 to continue, 2 to start" in said
    assert f"job 2 of 2: GC-Fed, α 0.1, seed 1\n  {folder / GCFED}" in said
    assert "all 2 jobs are finished" in said
    assert f"report: python src/report.py 'roots=[{folder}]'" in said

    (folder / FEDAVG / "summary.json").unlink()
    again = BasicLauncher()
    study(again)
    ((job,),) = again.calls
    assert job[-1] == f"ckpt_path='{folder / FEDAVG}/checkpoints/last.ckpt'"
    assert "1 finished, 1 to continue, 0 to start" in capsys.readouterr().out

    more = Launcher()
    study(more, "rounds=6")
    assert [job[-1].startswith("ckpt_path=") for job in more.calls[0]] == [True, True]  # all at once


def test_the_same_run_of_another_study_counts_and_a_longer_one_does_not(study, capsys):
    study(BasicLauncher(), name="first", rows=["FedAvg"])
    study(BasicLauncher(), "rounds=6", name="longer", rows=["GC-Fed"])
    launcher = BasicLauncher()
    study(launcher, name="second")
    assert ["gc=gcfed" in job for job in launcher.jobs] == [True]
    said = capsys.readouterr().out
    assert f"roots=[{study.root / 'first' / 'full'},{study.root / 'second' / 'full'}]" in said


@pytest.mark.parametrize(
    ("then", "now", "why"),
    [
        ((), ("rounds=2",), "4 rounds are done there, 2 are asked for, and there is no checkpoint"),
        ((), ("eval_every=2",), "eval_every is 1 there, 2 here"),
        ((), ("metrics=drift",), "it has no metrics=drift"),
        (("metrics=gap",), ("metrics=gap", "metrics.gap.every=2"), "metrics.gap.every is 10 there, 2 here"),
        (("metrics=cohorts",), ("metrics=cohorts",), None),  # whose folder is the run's own
        (("client.epochs=2",), (), "client.epochs is 2 there, 5 here"),
        (("metrics=[drift,gap]",), ("metrics=gap",), None),  # more than is asked for
        (("metrics=drift",), ("metrics=[drift,gap]", "metrics.gap=null"), None),
        (("eval_every=7",), ("eval_every=4",), None),  # of four rounds the last alone
        ((STOP, f"{PATIENCE}=3"), (STOP,), f"{PATIENCE} is 3 there, 20 here"),
        ((), (STOP,), "it has no callbacks=early_stopping"),
        ((STOP,), (), None),  # it never ended it
        (("client.epochs=5",), ("extras.figures=false", "trainer.devices=1", "targets=[0.3]"), None),
    ],
)
def test_a_folder_with_another_run_is_named_and_left_alone(study, capsys, then, now, why):
    launcher, folder = BasicLauncher(), study.root / "try" / "full" / FEDAVG
    finish(folder, ["gc=none", "partition.alpha=0.1", *then], 4)
    (folder / "checkpoints" / "last.ckpt").unlink()
    with pytest.raises(SystemExit) if why else nullcontext():
        study(launcher, *now, rows=["FedAvg"])
    assert not launcher.calls
    assert f"{FEDAVG} holds another run: {why}" in capsys.readouterr().out or why is None


@pytest.mark.parametrize(
    ("words", "goes_on"),
    [((STOP,), False), ((), True), ((STOP, "rounds=9"), True), ((STOP, "rounds=3"), True)],
    ids=str,
)
def test_a_job_that_was_stopped_early_is_finished_where_that_is_asked_for(study, words, goes_on):
    """After two of four rounds. Where nine are asked for it stops at once, to be compared with those of nine."""
    overrides, rows = ["gc=none", "partition.alpha=0.1", STOP], [{"test/acc": 0.5}] * 2
    finish(study.root / "try" / "full" / FEDAVG, overrides, 4, rows=rows, stopped="no better")
    launcher = BasicLauncher()
    study(launcher, *words, rows=["FedAvg"])
    assert [job[-1].startswith("ckpt_path=") for job in launcher.jobs] == [True] * goes_on


def test_a_mistake_is_named_before_any_job(study):
    with pytest.raises(ValueError, match=r"FedAvg, α 0\.1, seed 1: .*nothing"):
        study(None, "client.nothing=1")


def test_cells_that_an_override_makes_equal_are_one_run(study):
    launcher = BasicLauncher()
    study(launcher, "gc=local")
    assert [job[0][-3] for job in launcher.calls] == ["gc=local"]


@pytest.mark.parametrize(("chosen", "key"), [("metrics=gap", "metrics.gap.every"), (STOP, PATIENCE)])
def test_cells_that_measure_or_end_otherwise_are_two_runs(study, capsys, chosen, key):
    columns = [{"label": f"every {n}", "overrides": [chosen, f"{key}={n}"]} for n in (1, 2)]
    study(BasicLauncher(), dry_run=True, table={**TABLE, "columns": columns}, rows=["FedAvg"])
    assert "2 jobs in" in capsys.readouterr().out


def test_two_processes_never_run_the_same_job(study, capsys, caplog):
    second = BasicLauncher()

    def meanwhile(values, number):
        if not second.calls:
            with pytest.raises(SystemExit):
                study(second)
        return {}

    first = BasicLauncher(meanwhile)
    study(first)
    assert [job[0][2] for job in second.calls] == ["gc=gcfed"]
    assert [job[0][2] for job in first.calls] == ["gc=none"]  # and not what the second has finished meanwhile
    at_it = f"process {os.getpid()} on {socket.gethostname()} is at it"
    said = capsys.readouterr().out
    assert f"skipped: FedAvg, α 0.1, seed 1; {at_it}" in said
    assert "skipped: GC-Fed, α 0.1, seed 1; it is finished by now" in said
    assert f"FedAvg, α 0.1, seed 1: {at_it}" in caplog.text


def test_a_failed_job_lets_go_of_its_model():
    """Of those in the frames of its causes, too, and without a collection of garbage."""
    alive = []

    def train(error, cause=None):
        model = set()  # stands for what fills the GPU
        alive.append(weakref.ref(model))
        try:
            if cause is not None:
                train(cause)
        finally:
            raise error

    def run(job_overrides, initial_job_idx):
        try:
            train(ValueError("lower\nclient.batch_size"), RuntimeError("out of memory"))
        except ValueError as error:
            return [outcome(error)]

    gc.disable()
    try:
        assert launch(SimpleNamespace(launch=run), [], 0) == ["lower client.batch_size"]
        assert [ref() for ref in alive] == [None, None]
    finally:
        gc.enable()


def test_a_dry_run_names_jobs_hours_and_disk(study, capsys):
    study(None, dry_run=True, seeds=[2], rows=["GC-Fed"])
    said = capsys.readouterr().out
    assert "to start      GC-Fed, α 0.1, seed 2  (gc-fed_alpha-0.1_s2)" in said
    assert re.search(r"about 0\.\d h on one core, without what methods add to a step, and 1\.34 MB of disk", said)
    assert not (study.root / "try").exists()


def test_hours_are_steps_times_seconds_and_disk_what_is_kept(monkeypatch, tmp_path):
    """20 equal clients of the digits, 5 a round, 2 epochs in batches of 10, as SCAFFOLD keeps a state of each."""
    timed = cost.step
    monkeypatch.setattr(cost, "step", lambda *args: 36.0 if timed(*args) > 0 else 0.0)
    overrides = "client.epochs=2 client.batch_size=10 data.limit_train=1000 data.limit_test=300 rounds=3 eval_every=2"
    cfg = composed("algorithm=scaffold", "gc=none", "partition=iid", *overrides.split()).copy()
    with open_dict(cfg):
        cfg.hydra = {"folder": "???", "file": "${hydra.folder}"}  # as in a sweep, where it is known in a run only
    (line,) = cost.estimate([(cfg, 3), (OmegaConf.merge(cfg, {"seed": 2}), 1)])
    steps = 5 * 2 * 5 + 300 / 10 / 3 / 2
    model = 4 * sum(a * b + b for a, b in ((64, 512), (512, 256), (256, 10)))
    assert line.startswith(f"about {4 * steps * 36 / 3600:,.1f} h")
    assert line.endswith(f"{2 * model * (2 + 15) / 1e6:.3g} MB of disk")
    absent = composed("data=cifar100", f"paths.data_dir={tmp_path}")
    nothing, why = cost.estimate([(absent, 3), (absent, 2)])
    assert nothing == "hours and disk: unknown"  # not 0 h
    assert "not counted: cifar100, mlp: data set cifar100: " in why
    part = cost.estimate([(absent, 3), (cfg, 3)])[0]
    assert part.startswith(f"about {3 * steps * 36 / 3600:,.1f} h")
    assert part.endswith(", of 1 of 2 jobs; the rest is unknown")


@pytest.mark.parametrize("overrides", ["study=ssf_table2 hydra.mode=MULTIRUN", "hparams_search=digits_optuna"])
def test_a_study_or_a_search_that_was_composed_as_a_run_names_the_flag(overrides, monkeypatch):
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("train", overrides.split(), return_hydra_config=True)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", cfg)
    with pytest.raises(ValueError, match=r"src/train\.py -m "):
        refuse_sweeps()
