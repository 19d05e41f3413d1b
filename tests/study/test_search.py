"""Searches with Optuna: the space, the bookkeeping, and that a stopped one goes on as if it had not been."""

import sys
from functools import partial
from pathlib import Path

import pandas as pd
import pretend
import pytest
import yaml
from hydra.errors import HydraException
from omegaconf import OmegaConf
from pretend import context, plain

from gcfed.commands import one_sentence
from gcfed.utils.files import locked
from hydra_plugins.gcfed_sweepers import OptunaSweeper

pytest.importorskip("optuna")
from optuna import load_study
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from gcfed.study.search import search
from gcfed.study.space import read_space
from gcfed.study.sweep import tune

BasicLauncher, Launcher = (partial(kind, compose=plain) for kind in (pretend.BasicLauncher, pretend.Launcher))
METRIC = "test/acc_smooth10"
SETTINGS = {
    "direction": "maximize", "n_trials": 4, "n_jobs": 1, "seed": 3, "seeds": None, "storage": None,
    "params": {"gc.lam": "interval(0.0, 1.0)", "client.epochs": "choice(1, 2)"},
    "sampler": {"_target_": "optuna.samplers.TPESampler", "n_startup_trials": 2},
}  # fmt: skip


PATIENCE = "callbacks.early_stopping.patience"


def result(values, number):
    return {METRIC: float(values["gc.lam"])}


def go(folder, launcher, *arguments, metric=METRIC, **settings):
    config = OmegaConf.create({"optimized_metric": metric, "hydra": {"sweep": {"dir": str(folder)}}})
    return search(config, context(plain), launcher, [*arguments], **SETTINGS | settings)


def trials(folder):
    return pd.read_csv(folder / "trials.csv", dtype=str, keep_default_na=False).to_dict("records")


def test_trials_are_jobs_and_leave_a_table(tmp_path, capsys):
    launcher = BasicLauncher(result)
    assert go(tmp_path, launcher, "rounds=2")
    assert launcher.jobs[1][0] == "rounds=2"
    assert launcher.jobs[1][-2:] == [f"hydra.sweep.dir='{tmp_path}'", "hydra.sweep.subdir='trial_0001'"]
    rows = trials(tmp_path)
    assert [*rows[0]] == ["number", "state", "value", "seconds", "folder", "client.epochs", "gc.lam"]
    assert [row["state"] for row in rows] == ["complete"] * 4
    assert [float(row["value"]) for row in rows] == [float(row["gc.lam"]) for row in rows]
    row = max(rows, key=lambda row: float(row["value"]))
    assert {f"gc.lam={row['gc.lam']}", f"client.epochs={row['client.epochs']}"} < {*launcher.jobs[int(row["number"])]}
    best = yaml.safe_load((tmp_path / "optimization_results.yaml").read_text())
    assert (best["best_trial"], best["folder"]) == (int(row["number"]), row["folder"])
    assert (best["metric"], best["direction"]) == (METRIC, "maximize")
    assert best["best_params"] == {"client.epochs": row["client.epochs"], "gc.lam": float(row["gc.lam"])}
    assert "trial 4 of 4: trial_0003 (" in capsys.readouterr().out


def test_a_search_that_was_stopped_draws_what_it_would_have_drawn(tmp_path):
    def killed(values, number):
        if number == 2:
            raise KeyboardInterrupt
        return result(values, number)

    go(tmp_path / "straight", BasicLauncher(result))
    go(tmp_path / "stopped", BasicLauncher(result), n_trials=1)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "stopped", BasicLauncher(killed))
    checkpoint = tmp_path / "stopped" / "trial_0002" / "checkpoints" / "last.ckpt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    launcher = BasicLauncher(result)
    go(tmp_path / "stopped", launcher)
    assert [job[-1] for job in launcher.jobs] == [f"ckpt_path='{checkpoint}'", "hydra.sweep.subdir='trial_0003'"]
    straight, stopped = ([row | {"seconds": ""} for row in trials(tmp_path / name)] for name in ("straight", "stopped"))
    assert straight == stopped
    go(tmp_path / "stopped", launcher)
    assert len(launcher.jobs) == 2


def test_failures_and_values_that_are_not_finite_count_and_keep_their_reason(tmp_path, caplog):
    def of(values, number):
        if number == 0:
            raise ValueError("gc.lam=2 is\noutside")
        return {METRIC: None} if number == 1 else result(values, number)

    assert not go(tmp_path, BasicLauncher(of), n_jobs=2, n_trials=3)
    reasons = ["gc.lam=2 is outside", f"{METRIC} was not reached, or is not finite", ""]
    states = ["fail", "pruned", "complete"]
    assert [(row["state"], row["reason"]) for row in trials(tmp_path)] == [*zip(states, reasons, strict=True)]
    assert "trial_0000 fail: gc.lam=2 is outside" in caplog.text


def test_a_trial_past_the_edge_is_refused_and_never_the_best(tmp_path, caplog, capsys):
    """The better a trial, the worse it ran: the first left out updates, two exploded in a round, the fourth nearly."""
    losses = [(2.0, 2000.0, 0.1), (2.0, 0.001, 2.1), (2.0, 1999.0, 0.1), (2.0, 1e-4, 1.9)]
    rows = [[{"train/nonfinite_clients": count} for count in (0, 2, 1)]]
    rows += [[{"train/loss": x, "test/loss": 1.0} for x in loss] for loss in losses]

    def of(values, number):
        return {METRIC: round(0.9 - 0.1 * number, 1), "rows": rows[number]}

    assert go(tmp_path, BasicLauncher(of), "rounds=3", n_trials=5)
    table = trials(tmp_path)
    assert [row["state"] for row in table] == ["refused"] * 3 + ["complete"] * 2
    assert [row["value"] for row in table] == ["", "", "", "0.6", "0.5"]
    assert table[0]["reason"] == "3 client updates left out"
    assert table[1]["reason"] == "train/loss rose from 2 to 2e+03 in round 2"
    assert table[2]["reason"] == "train/loss rose from 0.001 to 2.1 in round 3"
    assert yaml.safe_load((tmp_path / "optimization_results.yaml").read_text())["best_value"] == pytest.approx(0.6)
    assert "trial_0001 refused: train/loss rose" in caplog.text
    assert "5 trials, 0 failed, 3 refused; best 0.6 with trial_0003" in capsys.readouterr().out


def test_one_seed_past_the_edge_refuses_its_trial(tmp_path):
    def of(values, number):
        return {METRIC: 0.5, "rows": [{"train/refused_steps": int(number == 1)}]}

    assert not go(tmp_path, BasicLauncher(of), seeds=[4, 5], n_trials=1)  # none is left
    assert trials(tmp_path)[0]["reason"] == "seed_5: 1 server steps taken back"
    assert not (tmp_path / "optimization_results.yaml").exists()
    study = load_study(study_name="search", storage=f"sqlite:///{tmp_path}/search.db")
    assert study.trials[0].constraints == {"edges": 1.0}
    go(
        tmp_path,
        BasicLauncher(lambda *_: {METRIC: 0.3, "rows": [{"train/refused_steps": 0}]}),
        seeds=[4, 5],
        n_trials=2,
    )
    assert trials(tmp_path)[1]["state"] == "complete"
    study = load_study(study_name="search", storage=f"sqlite:///{tmp_path}/search.db")
    assert study.trials[1].constraints == {"edges": 0.0}  # Optuna's GP wants one of every trial


def test_a_negative_loss_has_no_edge(tmp_path):
    rows = [{"train/loss": x, "test/loss": -x} for x in (0.5, -1.0, 0.6)]
    assert go(tmp_path, BasicLauncher(lambda *_: {METRIC: 0.5, "rows": rows}), "rounds=3", n_trials=1)
    assert trials(tmp_path)[0]["state"] == "complete"


def test_a_kill_while_a_trial_is_drawn_or_written_loses_nothing(tmp_path):
    go(tmp_path / "straight", BasicLauncher(result))
    go(tmp_path / "stopped", BasicLauncher(result), n_trials=1)
    load_study(study_name="search", storage=f"sqlite:///{tmp_path}/stopped/search.db").ask()  # draws nothing
    go(tmp_path / "stopped", BasicLauncher(result))
    (tmp_path / "stopped" / "trials.csv").unlink()
    go(tmp_path / "stopped", BasicLauncher(result))
    straight, stopped = ([row | {"seconds": ""} for row in trials(tmp_path / name)] for name in ("straight", "stopped"))
    assert straight == stopped


@pytest.mark.parametrize(
    ("words", "settings", "message"),
    [
        (["seed=1,2,3"], {}, r"seed would be searched.*hydra\.sweeper\.seeds=\[1,2,3\]"),
        (["client.epochs=tag(log, range(1,1000))"], {}, r"tag\(log, …\) is known for intervals alone"),
        (["gc.lam=tag(logarithmic, interval(0.1,1))"], {}, r"tag\(logarithmic, …\)"),
        ([], {"sampler": {"_target_": "optuna.samplers.BruteForceSampler"}}, r"sampler ends a study by itself"),
    ],
)
def test_what_would_be_searched_otherwise_than_meant_is_refused(tmp_path, words, settings, message):
    with pytest.raises(ValueError, match=message):
        go(tmp_path, BasicLauncher(result), *words, **settings)


def test_a_trial_has_a_run_a_seed_and_their_mean_is_its_value(tmp_path):
    def of(values, number):  # at one seed a trial has 0; the second fails at one, and is not finite at one
        trial, seed = divmod(number, 3)
        if (trial, seed) == (1, 2):
            raise ValueError("killed")
        return {METRIC: None if (trial, seed) == (1, 0) else 0.0 if seed == trial else float(values["gc.lam"])}

    launcher = BasicLauncher(of)
    assert not go(tmp_path, launcher, "seed=9", seeds=[4, 5, 6], n_trials=3, n_jobs=3)
    assert len(launcher.calls) == 1
    assert [[o for o in job if o.startswith(("seed=", "hydra.sweep.subdir"))] for job in launcher.jobs] == [
        [f"seed={seed}", f"hydra.sweep.subdir='seed_{seed}'"] for seed in (4, 5, 6)
    ] * 3
    rows = trials(tmp_path)
    assert [row["state"] for row in rows] == ["complete", "fail", "complete"]
    assert rows[1]["reason"] == "seed_6: killed"
    for row in (rows[0], rows[2]):
        assert float(row["value"]) == pytest.approx(2 / 3 * float(row["gc.lam"]), rel=1e-12)
    with pytest.raises(ValueError, match=r"holds another search: seed is \[4, 5, 6\] there, 9 here"):
        go(tmp_path, launcher, "seed=9", n_trials=4)


def test_a_metric_that_runs_do_not_have_ends_it_after_the_first_one(tmp_path):
    launcher = BasicLauncher(lambda *_: {"test/acc_best": 0.5, "rounds_to_target": {"0.9": None}})
    with pytest.raises(ValueError, match=r"test/acc_bst is not among .*: .*test/acc_best.*last:test/acc"):
        go(tmp_path, launcher, metric="test/acc_bst")
    assert len(launcher.jobs) == 1
    go(tmp_path, launcher, metric="test/acc_best")  # the trial goes on, under the right name
    assert len(launcher.jobs) == 5
    target = {"metric": "rounds_to_target/0.9", "n_trials": 1}
    assert not go(tmp_path / "target", launcher, **target, direction="minimize")  # no typo: pruned
    with pytest.raises(ValueError, match=r"rounds_to_target/0\.9 is better where it is smaller"):
        go(tmp_path / "most", launcher, **target)


def test_one_folder_holds_one_search_of_one_process(tmp_path):
    go(tmp_path, BasicLauncher(result), "rounds=2", n_trials=1)
    go(tmp_path, BasicLauncher(result), "rounds=2", "trainer.devices=1", n_trials=2)  # changes no result
    for arguments, message in (
        (["rounds=3"], "rounds is 2 there, 3 here"),
        (["rounds=2", f"{PATIENCE}=3"], f"{PATIENCE} is None there, 3 here"),
        (["rounds=2", "client.optimizer.lr=0.5"], "client.optimizer.lr is .* there, 0.5 here"),
        (["rounds=2", "gc.lam=interval(0.5, 1.0)"], "params.gc.lam is .*low=0.0.* there, .*low=0.5"),
    ):
        with pytest.raises(ValueError, match=f"holds another search: {message}"):
            go(tmp_path, BasicLauncher(), *arguments)
    (tmp_path / "search.db").rename(tmp_path / "search.old")
    with pytest.raises(ValueError, match=r"does not know of .*trial_0000: move the folder away"):
        go(tmp_path, BasicLauncher(), "rounds=2", "gc.lam=interval(0.5, 1.0)")
    with locked(tmp_path / ".lock"), pytest.raises(ValueError, match=r"process \d+ on .* is at the search in"):
        go(tmp_path, BasicLauncher(), "rounds=2")


def test_where_a_launcher_that_is_not_hydras_own_fails_no_trial_has_failed(tmp_path):
    def lost(values, number):
        raise HydraException("worker\nkilled")

    with pytest.raises(ValueError, match=r"worker killed\. Jobs .* still be running"):
        go(tmp_path, Launcher(lost), n_trials=1)
    go(tmp_path, BasicLauncher(result), n_trials=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bogus": 1}, "^hydra.sweeper.bogus=1 is read by nothing"),
        ({"params": {"gc.lam": "interval(1.0, 0.0)"}}, r"gc.lam=interval\(1.0, 0.0\) cannot be searched"),
        ({"metric": "foo:test/acc"}, "^optimized_metric='foo:test/acc' is not understood"),
    ],
)
def test_a_mistake_is_named(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        go(tmp_path, BasicLauncher(), **settings)


def test_without_optuna_one_sentence_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "gcfed.study.search")
    with pytest.raises(SystemExit), one_sentence():
        OptunaSweeper().sweep([])
    said = "A search needs Optuna, which is an extra: .venv/bin/uv pip install -e '.[optuna]'"
    assert capsys.readouterr().err.startswith(said)
    with pytest.raises(ValueError, match="A search needs Optuna"):
        tune([], {}, Path(), None, None, None, None)


@pytest.mark.parametrize(
    ("words", "distribution"),
    [
        ("tag(log, interval(0.001, 0.1))", FloatDistribution(0.001, 0.1, log=True)),
        ("int(interval(1, 5))", IntDistribution(1, 5)),
        ("range(1, 10, 3)", IntDistribution(1, 7, step=3)),
        ("range(0.0, 1.0, 0.25)", FloatDistribution(0.0, 0.75, step=0.25)),
        ("choice(x, 1, [2, 3])", CategoricalDistribution(["x", "1", "[2,3]"])),
        ("1,2", CategoricalDistribution(["1", "2"])),
    ],
)
def test_hydras_words_become_optunas_distributions_and_the_command_line_wins(words, distribution):
    assert read_space({"a": "interval(0, 1)", "b": "choice(1, 2)"}, [f"a={words}", "b=3"]) == (
        {"a": distribution},
        ["b=3"],
    )
