"""Which runs are a job's own, which of other studies count for it, and which only look like it."""

import re

import pytest
from pretend import BasicLauncher, Studies

FEDAVG = "fedavg_alpha-0.1_s1"


@pytest.fixture
def study(tmp_path, monkeypatch):
    return Studies(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("then", "now", "why"),
    [
        ((), ("rounds=2",), "4 rounds are done there, 2 are asked for"),
        ((), ("eval_every=2",), "eval_every is 1 there, 2 here"),
        (("eval_every=3",), (), "eval_every is 3 there, 1 here"),
        ((), ("metrics=drift",), "metrics.drift is None there"),
        (("metrics=gap",), ("metrics=gap", "metrics.gap.every=5"), "metrics.gap is {.*10.* there, {.*5.* here"),
    ],
)
def test_a_finished_run_of_other_rounds_tests_or_metrics_does_not_count_and_is_not_touched(
    study, capsys, caplog, then, now, why
):
    launcher = BasicLauncher()
    study(launcher, *then, rows=["FedAvg"])
    with pytest.raises(SystemExit):
        study(launcher, *now, rows=["FedAvg"])
    assert len(launcher.calls) == 1
    said = capsys.readouterr().out
    assert "0 finished, 0 to continue, 0 to start, 1 not to be run" in said
    assert re.search(rf"1 not to be run, their folders hold other runs \({why}", said)
    assert "paths.log_dir=<folder>" in said
    assert "0 of 1 jobs are finished" in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (("metrics=all",), ("metrics=gap",)),  # more than is asked for
        (("eval_every=7",), ("eval_every=4",)),  # of four rounds the last alone
        ((), ("extras.figures=false", "trainer.devices=1", "targets=[0.3]")),
    ],
)
def test_what_changes_no_number_leaves_a_run_finished(study, then, now):
    launcher = BasicLauncher()
    study(launcher, *then, rows=["FedAvg"])
    study(launcher, *now, rows=["FedAvg"])
    assert len(launcher.calls) == 1


def test_numbers_of_another_precision_are_of_another_run(study):
    study(BasicLauncher(), rows=["FedAvg"])
    for other in ("trainer.precision=bf16-mixed", "trainer.limit_val_batches=1"):
        with pytest.raises(ValueError, match=other.split("=")[0]):
            study(BasicLauncher(), f"+{other}" if "limit" in other else other, rows=["FedAvg"])


def test_a_run_whose_checkpoint_is_gone_is_not_started_over(study, caplog):
    launcher = BasicLauncher()
    study(launcher, rows=["FedAvg"])
    folder = study.root / "try" / "full" / FEDAVG
    (folder / "checkpoints" / "last.ckpt").unlink()
    with pytest.raises(SystemExit):
        study(launcher, "rounds=6", rows=["FedAvg"])
    assert len(launcher.calls) == 1
    assert "after round 4 of 4, and without a checkpoint to go on from" in caplog.records[-1].getMessage()
    assert (folder / "summary.json").is_file()


def test_a_longer_run_of_another_study_is_named_and_does_not_count(study, capsys):
    study(BasicLauncher(), "rounds=6", name="first", rows=["FedAvg"])
    launcher = BasicLauncher()
    study(launcher, name="second", rows=["FedAvg"])
    assert len(launcher.calls) == 1
    said = capsys.readouterr().out
    assert f"1 start although there are runs of the same setting (rounds is 6 there, 4 here: {study.root}" in said


def test_cells_that_an_override_makes_equal_are_one_run(study, capsys):
    rows = [{"label": model, "overrides": [f"model={model}"]} for model in ("mlp", "cnn")]
    table = {"rows": rows, "columns": [{"label": "c", "overrides": ["gc=none", "rounds=4"]}]}
    launcher = BasicLauncher()
    study(launcher, table=table, overrides=["model=mlp"])
    assert len(launcher.calls) == 1
    assert "the same run: mlp, c, seed 1; cnn, c, seed 1" in capsys.readouterr().out


def test_an_override_that_hydra_refuses_is_named_with_its_job_before_anything_starts(study):
    launcher = BasicLauncher()
    with pytest.raises(ValueError, match=r"FedAvg, α 0\.1, seed 1: .*nothing"):
        study(launcher, "client.nothing=1")
    assert not launcher.calls
