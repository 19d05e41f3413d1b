"""A study that tunes each cell first: equal budgets, knobs of their own, and the best goes to every seed."""

import re
from functools import partial

import pandas as pd
import pretend
import pytest
import yaml
from omegaconf import OmegaConf
from pretend import context, plain

from gcfed.study import cost
from gcfed.study.sweep import sweep
from gcfed.utils.resolvers import CONFIGS

pytest.importorskip("optuna")
from gcfed.study.space import read_space

BasicLauncher = partial(pretend.BasicLauncher, compose=plain)
METRIC = "test/acc_smooth10"
ROWS = [
    {"label": "FedAvg", "overrides": ["algorithm=fedavg", "gc=none"]},
    {"label": "FedProx", "overrides": ["algorithm=fedprox", "gc=none"]},
]
SEARCH = {
    "metric": METRIC, "n_trials": 4, "overrides": ["data.validation=0.1", "seed=9"],
    "params": {"client.optimizer.lr": "interval(0.0, 1.0)"},
    "knobs": {"algorithm=fedprox": {"methods.proximal.mu": "interval(0.0, 1.0)"}},
}  # fmt: skip


def go(folder, launcher, **node):
    study = {
        "table": {"rows": ROWS, "columns": [{"label": "digits", "overrides": []}]},
        "seeds": [1, 2],
        "search": SEARCH,
    }
    config = {
        "study": study | node, "scale": "full", "paths": {"log_dir": str(folder)},
        "hydra": {"runtime": {"choices": {"study": "mine"}}, "sweep": {"dir": str(folder / "study")}},
    }  # fmt: skip
    sweep(OmegaConf.create(config), context(plain), launcher, ["rounds=2"])


def result(values, number):
    return {METRIC: 1 - float(values["client.optimizer.lr"])}


def test_each_cell_has_as_many_trials_and_its_runs_have_the_best(tmp_path, capsys):
    launcher = BasicLauncher(result)
    go(tmp_path, launcher)
    jobs = [dict(override.split("=", 1) for override in job) for job in launcher.jobs]
    trials, runs = jobs[:8], jobs[8:]
    assert [job["algorithm"] for job in trials] == ["fedavg"] * 4 + ["fedprox"] * 4
    assert {(job["seed"], job["data.validation"]) for job in trials} == {("9", "0.1")}
    assert [(job["algorithm"], job["seed"]) for job in runs] == [(a, s) for s in "12" for a in ("fedavg", "fedprox")]
    for algorithm, knob in (("fedavg", False), ("fedprox", True)):
        best = min(
            (job for job in trials if job["algorithm"] == algorithm), key=lambda job: float(job["client.optimizer.lr"])
        )
        for job in (job for job in jobs if job["algorithm"] == algorithm):
            assert ("methods.proximal.mu" in job) == knob
        for job in (job for job in runs if job["algorithm"] == algorithm):
            assert "data.validation" not in job
            keys = ["client.optimizer.lr", *["methods.proximal.mu"] * knob]
            assert [float(job[key]) for key in keys] == [float(best[key]) for key in keys]
        table = pd.read_csv(tmp_path / "study" / "searches" / f"{algorithm}_digits" / "trials.csv")
        assert (table["state"] == "complete").sum() == 4
    go(tmp_path, launcher)
    assert len(launcher.jobs) == len(jobs)  # nothing is done twice
    capsys.readouterr()
    go(tmp_path, launcher, dry_run=True)
    assert "4 finished, 0 " in capsys.readouterr().out


def test_a_trial_that_fails_is_one_of_the_budget(tmp_path):
    def fails_once(values, number):
        if number == 1 and "data.validation" in values:
            raise ValueError("too large a rate")
        return result(values, number)

    launcher = BasicLauncher(fails_once)
    go(tmp_path, launcher, search=SEARCH | {"n_jobs": 2})
    assert [len(call) for call in launcher.calls[:4]] == [2, 2, 2, 2]  # four trials a cell, two at once
    assert len(launcher.jobs) == 8 + 4


def test_a_cell_whose_search_finds_nothing_is_named_and_the_others_run(tmp_path, caplog, capsys):
    """It has no runs: with whatever rate the config has they would stand beside tuned ones."""

    def of(values, number):
        return {METRIC: None} if values["algorithm"] == "fedavg" else result(values, number)

    launcher = BasicLauncher(of)
    for trials in (8, 0):  # nor when the study is started again
        with pytest.raises(SystemExit):
            go(tmp_path, launcher)
        runs = [job for job in launcher.jobs[trials:] if "data.validation=0.1" not in job]
        assert [(job[0], "seed=1" in job) for job in runs] == [("algorithm=fedprox", first) for first in (True, False)]
        assert "2 of 4 jobs are finished; these are not" in caplog.text
        for seed in (1, 2):
            assert f"FedAvg, digits, seed {seed}: no trial of its search has a value" in caplog.text
        assert str(tmp_path / "study" / "searches" / "fedavg_digits" / "trials.csv") in caplog.text
        caplog.clear()
    capsys.readouterr()
    go(tmp_path, launcher, dry_run=True)
    assert "2 finished, 0 to continue, 0 to start\n  not to be run: FedAvg, digits, seed 1: " in capsys.readouterr().out
    more = BasicLauncher(result)
    go(tmp_path, more, search=SEARCH | {"n_trials": 5}, rows=["FedAvg"])
    assert ["data.validation=0.1" in job for job in more.jobs] == [True, False, False]


def test_a_dry_run_counts_the_trials_that_are_to_come(tmp_path, capsys, monkeypatch):
    """A round is half an hour, and each run has two and leaves a megabyte; a trial has a run with each of two seeds."""
    monkeypatch.setattr(cost, "cost", lambda cfg, steps: (1800.0, 10**6))
    search = SEARCH | {"seeds": [8, 9]}
    for trials, runs in ((2 * 4, 4), (4, 2)):
        go(tmp_path, None, search=search, dry_run=True)
        hours = 2 * trials + runs
        assert re.search(rf"about {hours}\.0 h on one core,.* and {hours} MB of disk\n", capsys.readouterr().out)
        go(tmp_path, BasicLauncher(result), search=search, rows=["FedAvg"])


def test_a_mistake_in_any_cell_or_a_seed_that_a_run_has_is_named_before_any_search(tmp_path):
    rows = [*ROWS, {"label": "FedSAM", "overrides": ["algorithm=fedsam", "client.epochs=${nothing}"]}]
    table = {"rows": rows, "columns": [{"label": "digits", "overrides": []}]}
    with pytest.raises(ValueError, match=r"^FedSAM, digits, seed \d: .*nothing"):
        go(tmp_path, None, table=table)
    for words in ({"seeds": [7, 9]}, {"seeds": [1], "search": SEARCH | {"overrides": ["data.validation=0.1"]}}):
        with pytest.raises(ValueError, match=r"^seed=[19] is of a search and of a run"):
            go(tmp_path, None, **words)


def test_a_dry_run_and_a_mistake_start_nothing(tmp_path, capsys):
    launcher = BasicLauncher(result)
    go(tmp_path, launcher, dry_run=True)
    assert "2 searches of 4 trials each" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"study\.search\.budget=3 is read by nothing"):
        go(tmp_path, launcher, search=SEARCH | {"budget": 3})
    knobs = {"algorithm=fedprox": {"methods.proximal.mu: interval(0.0": None, "1.0)": None}}  # YAML without quotes
    with pytest.raises(ValueError, match=r"methods\.proximal\.mu: interval\(0\.0=None must be words"):
        go(tmp_path, launcher, search=SEARCH | {"knobs": knobs})
    losses = SEARCH | {"metric": "mean:val/loss[10]"}
    with pytest.raises(ValueError, match=r"better where it is smaller: .* \+study\.search\.direction=minimize"):
        go(tmp_path, launcher, search=losses)
    assert not launcher.jobs


def test_a_loss_is_minimized_and_a_knob_of_no_job_is_named(tmp_path, capsys):
    launcher = BasicLauncher(lambda values, number: {METRIC: 0.5, "val/loss": float(values["client.optimizer.lr"])})
    knobs = {"algorithm=fedprox ": {"methods.proximal.mu": "interval(0.0, 1.0)"}}
    go(tmp_path, launcher, search=SEARCH | {"metric": "val/loss", "direction": "minimize", "knobs": knobs})
    rates = [float(value) for job in launcher.jobs for key, _, value in [job_of.partition("=") for job_of in job]
             if key == "client.optimizer.lr"]  # fmt: skip
    assert {*rates[8:]} == {min(rates[:4]), min(rates[4:8])}
    assert (
        "no job has algorithm=fedprox : study.search.knobs has methods.proximal.mu for nothing"
        in capsys.readouterr().out
    )


def test_the_spaces_of_the_repositorys_own_studies_can_be_searched():
    studies = {
        path.stem: yaml.safe_load(path.read_text()).get("study", {}) for path in (CONFIGS / "study").glob("*.yaml")
    }
    searches = {name: study["search"] for name, study in studies.items() if study.get("search")}
    assert "tuned_cifar10" in searches
    for search in searches.values():
        for params in (search["params"], *search["knobs"].values()):
            space, rest = read_space(params, [])
            assert [*space] == [*params]
            assert not rest
