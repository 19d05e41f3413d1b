"""The command for a table: which jobs it skips, continues and refuses.

No test but the last one trains.
"""

import os
import re
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from conftest import forked, run_script
from pretend import Trainer, composed, finish, go, plain

import gcfed.run  # noqa: F401  (forked processes have it)
from gcfed.folders.folder import read_run
from gcfed.utils.resolvers import ROOT
from reproductions import cost

FEDAVG, GCFED = "fedavg_alpha-0.1_s1", "gc-fed_alpha-0.1_s1"
EVERY, PATIENCE = "metrics.gap.every", "callbacks.early_stopping.patience"
TABLE = {
    "overrides": ["rounds=4"],
    "rows": [
        {"label": "FedAvg", "overrides": ["gc=none"]},
        {"label": "GC-Fed", "overrides": ["gc=gcfed"]},
    ],
    "columns": [{"label": "α 0.1", "overrides": ["partition.alpha=0.1"]}],
}


@pytest.fixture
def table(tmp_path, monkeypatch):
    """``table(trainer, *words, name=…, **node)`` runs a table below ``table.root``."""
    plain.logs = tmp_path / "logs"

    def run(trainer, *words, name="try", **node):
        return go(monkeypatch, tmp_path, trainer, TABLE | node, *words, name=name)

    run.root = tmp_path / "logs" / "study"
    return run


def test_finished_jobs_are_skipped_and_unfinished_jobs_continue(table, capsys):
    trainer = Trainer()
    assert table(trainer, "dry_run=true", "rows=[GC-Fed]") == 0
    assert "to start      GC-Fed, α 0.1, seed 1  (gc-fed_alpha-0.1_s1)" in capsys.readouterr().out
    assert not table.root.exists()
    assert table(trainer) == 0
    folder = table.root / "try" / "full"
    assert trainer.folders == [folder / FEDAVG, folder / GCFED]
    assert trainer.jobs[0] == ["partition.alpha=0.1", "rounds=4", "gc=none", "seed=1"]
    said = capsys.readouterr().out
    assert "0 finished, 0 to continue, 2 to start" in said
    assert f"job 2 of 2: GC-Fed, α 0.1, seed 1\n  {folder / GCFED}" in said
    assert re.search(r"\| GC-Fed +\| 50\.00 ", said)

    (folder / FEDAVG / "summary.json").unlink()
    again = Trainer()
    assert table(again) == 0
    assert again.folders == [folder / FEDAVG]
    assert "1 finished, 1 to continue, 0 to start" in capsys.readouterr().out
    more = Trainer()
    table(more, "rounds=6")
    assert len(more.jobs) == 2


def test_an_equal_run_of_another_table_counts_and_a_longer_one_does_not(table):
    table(Trainer(), "rows=[FedAvg]", name="first")
    table(Trainer(), "rounds=6", "rows=[GC-Fed]", name="longer")
    trainer = Trainer()
    table(trainer, name="second")
    assert ["gc=gcfed" in job for job in trainer.jobs] == [True]
    found = (table.root / "second" / "full" / "comparison.csv").read_text()
    assert str(table.root / "first" / "full" / FEDAVG) in found


@pytest.mark.parametrize(
    ("then", "now", "why"),
    [
        ((), ("rounds=2",), "4 rounds are done there, 2 are asked for, and there is no checkpoint"),
        ((), ("eval_every=2",), "eval_every is 1 there, 2 here"),
        ((), (f"{EVERY}=2",), "it has no metrics=gap"),
        ((f"{EVERY}=10",), (f"{EVERY}=2",), f"{EVERY} is 10 there, 2 here"),
        ((f"{PATIENCE}=3",), (f"{PATIENCE}=20",), f"{PATIENCE} is 3 there, 20 here"),
        (("metrics.cohorts.folder=${paths.output_dir}",) * 2 + (None,)),  # the run's own folder
        (("metrics.drift.a=1", f"{EVERY}=10"), (f"{EVERY}=10",), None),  # more metrics than needed
        (("eval_every=7",), ("eval_every=4",), None),  # both test only round 4 of 4
        # it never stopped
        ((f"{PATIENCE}=3",), ("extras.figures=false", "trainer.devices=1", "targets=[0.3]"), None),
    ],
)
def test_a_folder_with_another_run_is_named_and_not_changed(table, capsys, then, now, why):
    trainer, folder = Trainer(), table.root / "try" / "full" / FEDAVG
    then, now = ((words,) if isinstance(words, str) else words for words in (then, now))
    finish(folder, ["gc=none", "partition.alpha=0.1", *then], 4, trainer.compose)
    (folder / "checkpoints" / "last.ckpt").unlink()
    assert table(trainer, *now, "rows=[FedAvg]") == (1 if why else 0)
    assert not trainer.jobs
    assert f"{FEDAVG} holds another run: {why}" in capsys.readouterr().out or why is None


@pytest.mark.parametrize(("words", "goes_on"), [((f"{PATIENCE}=3",), False), ((), True)])
def test_a_job_that_stopped_early_is_finished_if_the_table_asks_for_early_stopping(
    table, words, goes_on
):
    """The job stopped after two of four rounds."""
    trainer, overrides = Trainer(), ["gc=none", "partition.alpha=0.1", f"{PATIENCE}=3"]
    rows = [{"test/acc": 0.5}] * 2
    finish(
        table.root / "try" / "full" / FEDAVG,
        overrides,
        4,
        trainer.compose,
        rows=rows,
        stopped="no better",
    )
    table(trainer, *words, "rows=[FedAvg]")
    assert len(trainer.jobs) == goes_on


def test_a_mistake_is_named_before_any_job(table):
    trainer = Trainer()
    rows = [*TABLE["rows"], {"label": "odd", "overrides": ["client.epochs=${nothing}"]}]
    with pytest.raises(ValueError, match=r"^odd, α 0\.1, seed 1: .*nothing"):
        table(trainer, rows=rows)
    assert not trainer.jobs


def test_cells_that_an_override_makes_equal_are_one_run_and_other_measurements_are_two(
    table, capsys
):
    trainer = Trainer()
    table(trainer, "gc=local")
    assert [job[-1] for job in trainer.jobs] == ["gc=local"]
    columns = [{"label": f"every {n}", "overrides": [f"{EVERY}={n}"]} for n in (1, 2)]
    capsys.readouterr()
    table(Trainer(), "compare=true", "rows=[FedAvg]", columns=columns)
    assert "2 jobs in" in capsys.readouterr().out


def test_two_processes_never_run_the_same_job_and_a_failure_is_reported(table, capsys):
    second = Trainer(lambda values, number: "out of\nmemory")

    def meanwhile(values, number):
        if not second.jobs:
            assert table(second) == 1
            finish(
                table.root / "try" / "full" / GCFED,
                ["gc=gcfed", "partition.alpha=0.1"],
                4,
                second.compose,
            )
        return 0.5

    first = Trainer(meanwhile)
    assert table(first) == 0
    assert [job[2] for job in second.jobs] == ["gc=gcfed"]
    assert [job[2] for job in first.jobs] == ["gc=none"]  # the other job has finished meanwhile
    said = capsys.readouterr().out
    assert (
        f"skipped: FedAvg, α 0.1, seed 1; process {os.getpid()} on {socket.gethostname()} is"
        " running it" in said
    )
    assert "GC-Fed, α 0.1, seed 1: out of\nmemory\n    " in said
    assert "2 of 2 jobs are not finished" in said


def test_hours_are_steps_times_seconds(monkeypatch):
    """The digits have 20 equal clients, 5 per round, 2 epochs in batches of 10."""
    steps = type(
        "Steps",
        (dict,),
        {"__contains__": lambda self, key: True, "__missing__": lambda self, key: 36.0},
    )
    overrides = (
        "client.epochs=2 client.batch_size=10 data.limit_train=1000 data.limit_test=300 rounds=3"
        " eval_every=2"
    )
    cfg = composed(("gc=none", "partition=iid", *overrides.split()))
    assert cost.seconds_a_round(cfg, steps()) == pytest.approx(36 * (5 * 2 * 5 + 300 / 10 / 3 / 2))
    assert 0 < cost.seconds_a_round(cfg, {}) < 36
    monkeypatch.setattr(cost, "seconds_a_round", lambda cfg, steps: 1800.0)
    assert cost.estimate([(cfg, 3), (cfg, 1)]).startswith("about 2.0 h ")


@pytest.mark.slow
def test_a_table_from_the_command_line_names_failed_jobs_and_continues_with_more_rounds(tmp_path):
    words = [
        "rounds=2",
        "client.epochs=1",
        "participation.num_clients=8",
        "data.limit_train=200",
        "data.limit_test=50",
        "extras.figures=false",
        "trainer.devices=1",
    ]
    rows = [
        {"label": "broken", "overrides": ["gc=gcfed", "gc.lam=2"]},
        {"label": "GC-Fed", "overrides": ["gc=gcfed"]},
    ]
    node = {"overrides": words, "rows": rows, "columns": [{"label": "digits"}]}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(node))

    def train(command):
        """Runs the command of a job in a fork, which needs no imports."""
        script, *words = command[1:]
        code = forked(lambda: run_script(Path(script).name, *words), tmp_path / "run.txt")
        print((tmp_path / "run.txt").read_text(), flush=True)
        return SimpleNamespace(returncode=code)

    def call(*arguments, code):
        def command():
            subprocess.run = train
            run_script(str(ROOT / "reproductions/table.py"), str(tmp_path / "tiny.yaml"), *typed)

        typed = (f"paths.log_dir={tmp_path / 'logs'}", *arguments)
        ended = forked(command, printed := tmp_path / "printed.txt")
        assert ended == code, printed.read_text()
        return printed.read_text()

    said = call(code=1)
    assert "gc.lam=2: " in said, said
    assert "1 of 2 jobs are not finished" in said
    run = read_run(tmp_path / "logs/study/tiny/full/gc-fed_digits_s1")
    assert (run.state, run.rounds) == ("finished", 2)

    assert "0 finished, 1 to continue, 0 to start" in call("rows=[gc-fed]", "rounds=3", code=0)
    longer = read_run(run.folder)
    assert (longer.state, longer.rounds, longer.identity) == ("finished", 3, run.identity)
    assert longer.metrics.iloc[:2].equals(run.metrics)
