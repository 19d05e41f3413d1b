"""A table that first tunes each cell: budgets are equal, and all seeds of a cell use its best
parameters.
"""

import re

import pandas as pd
import pytest
import yaml
from conftest import refuses
from pretend import Trainer, finish, go, plain, whole
from run_folders import accuracies

from gcfed.metrics.base import ServerMetric
from gcfed.tables import cost
from gcfed.tables.reading import load, names

pytest.importorskip("optuna")
from optuna import load_study

from gcfed.search import space_of

METRIC = "last:test/acc"
ROWS = [
    {"label": "FedAvg", "overrides": ["algorithm=fedavg", "gc=none"]},
    {"label": "FedProx", "overrides": ["algorithm=fedprox", "gc=none"]},
]
SEARCH = {
    "metric": METRIC,
    "n_trials": 2,
    "overrides": ["data.validation=0.1", "seed=9"],
    "params": {"client.optimizer.lr": "interval(0.0, 1.0)"},
    "knobs": {"algorithm=fedprox": {"methods.proximal.mu": "interval(0.0, 1.0)"}},
}
TABLE = {
    "rows": ROWS,
    "columns": [{"label": "digits"}],
    "scales": {"full": {"seeds": [1, 2]}},
    "search": SEARCH,
}


class Own(ServerMetric):
    def columns(self, round):
        return {"test/own": 0.5}


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """``tuned(trainer, *words, **search)`` returns the exit code; ``tuned.folder`` has the
    searches.
    """
    plain.logs = tmp_path / "logs"

    def run(trainer, *words, **node):
        return go(monkeypatch, tmp_path, trainer, TABLE | node, "rounds=1", *words, name="mine")

    run.folder = tmp_path / "logs/study/mine/full/searches"
    return run


def trainer(of=lambda values, number: 1 - float(values["client.optimizer.lr"])):
    return Trainer(of, compose=plain)


def trials(folder, cell):
    return pd.read_csv(folder / cell / "trials.csv", dtype=str, keep_default_na=False).to_dict(
        "records"
    )


def test_a_metric_without_direction_is_refused_before_the_first_trial(tuned):
    going = trainer()
    with refuses("^search.metric=last:train/samples: neither more nor less of train/samples"):
        tuned(going, search=SEARCH | {"metric": "last:train/samples"})
    assert not going.jobs


def test_a_metric_of_unknown_direction_needs_one(tuned):
    def measured(values, number):
        return accuracies(0.5, **{"mine/rank": [float(values["client.optimizer.lr"])]})

    search = SEARCH | {"metric": "last:mine/rank"}
    going = trainer(measured)
    with refuses("^search.metric=last:mine/rank: .* set search.direction=maximize or minimize"):
        tuned(going, search=search)
    with refuses("^last:test/acc is better where it is larger: set search.direction=maximize"):
        tuned(going, search=SEARCH | {"direction": "minimize"})
    assert not going.jobs
    assert tuned(going, search=search | {"direction": "minimize"}) == 0
    results = yaml.safe_load((tuned.folder / "fedavg_digits/optimization_results.yaml").read_text())
    assert results["direction"] == "minimize"
    assert results["best_value"] == min(
        float(row["value"]) for row in trials(tuned.folder, "fedavg_digits")
    )


def test_a_metric_that_no_trial_writes_is_refused_before_the_first_one(tuned):
    going = Trainer(compose=whole)
    with refuses(r"search.metric=last:test/ac: a run .* did you mean test/acc\?"):
        tuned(going, search=SEARCH | {"metric": "last:test/ac"})
    with refuses(r"search.metric=last:val/acc: .* set data.validation=0.1"):
        overrides = ["data.validation=null", "seed=9"]
        tuned(going, search=SEARCH | {"metric": "last:val/acc", "overrides": overrides})
    assert not going.jobs


@pytest.mark.parametrize("measure", ["last:test/ac", "test/acc_smoth10@5", "bestround"])
def test_a_measure_that_no_job_writes_is_refused_before_the_first_one(tuned, measure):
    going = Trainer(compose=whole)
    with refuses(rf"^FedAvg, digits, seed 1: measure={measure}: a run .*: did you mean .*\?"):
        tuned(going, measure=measure)
    assert not going.jobs


def test_a_class_of_the_user_may_write_any_column(tuned, tmp_path):
    mine = [f"+metrics.mine._target_={__name__}.Own"]
    columns = {"test/own": [0.5]}
    going = Trainer(lambda values, number: accuracies(0.5, **columns), compose=whole)
    logs = f"paths.log_dir={tmp_path / 'logs'}"  # else those of this clone
    assert tuned(going, logs, overrides=mine, measure="last:test/own") == 0
    assert (tuned.folder / "fedavg_digits").is_dir()


def test_a_personal_method_is_not_tuned_by_the_global_model(tuned):
    def with_ditto(overrides):
        cfg = plain([*overrides, "model={}", "gc=null", "privacy=null", "attack=null"])
        cfg.methods = {"ditto": {"_target_": "gcfed.methods.personal.ditto.Ditto", "lam": 0.1}}
        return cfg

    going = Trainer(compose=with_ditto)
    message = (
        "fedavg_digits: search.metric=last:test/acc compares global models, and the result"
        " of this method is personal/local_acc: choose by"
    )
    with refuses(message):
        tuned(going)
    assert not going.jobs


def test_all_cells_have_equally_many_trials_and_their_runs_use_the_best(tuned):
    going = trainer()
    assert tuned(going) == 0
    jobs = [dict(override.split("=", 1) for override in job) for job in going.jobs]
    tried = jobs[:4]
    runs = jobs[4:]
    assert [job["algorithm"] for job in tried] == ["fedavg"] * 2 + ["fedprox"] * 2
    assert {(job["seed"], job["data.validation"]) for job in tried} == {("9", "0.1")}
    assert [(job["algorithm"], job["seed"]) for job in runs] == [
        (a, s) for s in "12" for a in ("fedavg", "fedprox")
    ]
    for algorithm, knob in (("fedavg", False), ("fedprox", True)):
        own = [job for job in tried if job["algorithm"] == algorithm]
        best = min(own, key=lambda job: float(job["client.optimizer.lr"]))
        for job in (job for job in jobs if job["algorithm"] == algorithm):
            assert ("methods.proximal.mu" in job) == knob
        for job in (job for job in runs if job["algorithm"] == algorithm):
            assert "data.validation" not in job
            keys = ["client.optimizer.lr", *["methods.proximal.mu"] * knob]
            assert [float(job[key]) for key in keys] == [float(best[key]) for key in keys]
        assert [row["state"] for row in trials(tuned.folder, f"{algorithm}_digits")] == [
            "complete"
        ] * 2
    tuned(going)
    assert len(going.jobs) == len(jobs)  # no job runs twice
    rates = [float(job["client.optimizer.lr"]) for job in runs[:2]]
    written = (tuned.folder.parent / "comparison.md").read_text()
    assert f"The search chose FedAvg, digits: client.optimizer.lr={rates[0]:.3g}; " in written
    assert f"FedProx, digits: client.optimizer.lr={rates[1]:.3g} methods.proximal.mu=" in written
    assert "trials failed" not in written


def test_a_trial_has_one_run_per_seed_and_their_mean_is_its_value(tuned):
    def of(values, number):  # one seed of each trial has 0; trial 1 also fails with another seed
        if "data.validation" not in values:
            return 0.5
        trial, seed = divmod(number, 3)
        return (
            "killed"
            if (trial, seed) == (1, 2)
            else 0.0
            if seed == trial
            else float(values["client.optimizer.lr"])
        )

    going = trainer(of)
    search = SEARCH | {"seeds": [4, 5, 6], "n_trials": 3}
    assert tuned(going, "rows=[FedAvg]", search=search) == 0
    assert [folder.name for folder in going.folders[:9]] == ["seed_4", "seed_5", "seed_6"] * 3
    written = (tuned.folder.parent / "comparison.md").read_text()
    assert " (1 of 3 trials failed or were refused)." in written
    rows = trials(tuned.folder, "fedavg_digits")
    assert [row["state"] for row in rows] == ["complete", "fail", "complete"]
    assert rows[1]["reason"] == "seed_6: killed"
    for row in (rows[0], rows[2]):
        assert float(row["value"]) == pytest.approx(
            2 / 3 * float(row["client.optimizer.lr"]), rel=1e-12
        )


def test_the_folder_of_another_search_is_refused_with_what_a_table_can_do(tuned):
    """Also by a dry run, and before the first trial of another cell."""
    tuned(trainer(), "rows=[FedProx]")
    wide = {"client.optimizer.lr": "interval(0.0, 2.0)"}
    going = trainer()
    for words in ([], ["dry_run=true"]):
        with refuses("another search: .* Move this folder away, or write paths.log_dir=<folder>.$"):
            tuned(going, *words, search=SEARCH | {"params": wide})
    assert not going.jobs


def test_a_stopped_search_continues_with_the_values_it_drew(tuned):
    def killed(values, number):
        if number == 1:
            raise KeyboardInterrupt
        return 1 - float(values["client.optimizer.lr"])

    first = trainer(killed)
    with pytest.raises(KeyboardInterrupt):
        tuned(first, "rows=[FedAvg]")
    second = trainer()
    tuned(second, "rows=[FedAvg]")
    assert first.jobs[1] == second.jobs[0]
    assert second.folders[0].name == "trial_0001"
    assert len(trials(tuned.folder, "fedavg_digits")) == 2


def test_an_unstable_trial_is_refused_and_never_the_best(tuned):
    """Trials 0 to 2 have lost updates or exploding losses, trial 5 a refused step. A loss below the
    limit (3) and a negative loss (4) are allowed.
    """
    losses = [(2.0, 2000.0, 0.1), (2.0, 0.001, 2.1), (2.0, 1999.0, 0.1), (0.5, -1.0, 0.6)]
    lost = [{"train/nonfinite_clients": count} for count in (0, 2, 1)]
    rows = [
        lost,
        *([{"train/loss": x, "test/loss": 1.0} for x in loss] for loss in losses),
        [{"train/refused_steps": 1}] * 3,
    ]

    def of(values, number):
        own = rows[number] if number < 6 else [{}] * 3
        return [row | {"test/acc": round(0.9 - 0.1 * number, 1)} for row in own]

    tuned(trainer(of), "rows=[FedAvg]", "rounds=3", search=SEARCH | {"n_trials": 6})
    written = (tuned.folder.parent / "comparison.md").read_text()
    assert " (4 of 6 trials failed or were refused)." in written
    found = trials(tuned.folder, "fedavg_digits")
    assert [row["state"] for row in found] == ["refused"] * 3 + ["complete"] * 2 + ["refused"]
    assert [row["value"] for row in found] == ["", "", "", "0.6", "0.5", ""]
    assert [row["reason"] for row in found] == [
        "trial_0000: 3 client updates left out",
        "trial_0001: train/loss rose from 2 to 2e+03 in round 2",
        "trial_0002: train/loss rose from 0.001 to 2.1 in round 3",
        "",
        "",
        "trial_0005: 3 server steps taken back",
    ]
    best = yaml.safe_load((tuned.folder / "fedavg_digits/optimization_results.yaml").read_text())
    assert best["best_value"] == pytest.approx(0.6)
    assert best["best_trial"] == 3
    study = load_study(
        study_name="search", storage=f"sqlite:///{tuned.folder}/fedavg_digits/search.db"
    )
    assert study.trials[0].constraints == {"edges": 3.0}


def test_a_cell_without_a_successful_trial_is_named_and_the_others_run(tuned, capsys):
    """That cell has no runs, because an untuned rate would not compare with tuned ones."""

    def of(values, number):
        return (
            "too large a rate"
            if values["algorithm"] == "fedavg"
            else 1 - float(values["client.optimizer.lr"])
        )

    going = trainer(of)
    assert tuned(going, "search.n_trials=1") == 1
    assert [job[0] for job in going.jobs if "data.validation=0.1" not in job] == [
        "algorithm=fedprox"
    ] * 2
    said = capsys.readouterr().out
    assert "Not finished, 2 of 4 jobs:" in said
    assert (
        "FedAvg, digits, seed 2: no trial of its search has a value: see"
        f" {tuned.folder}/fedavg_digits" in said
    )


def test_a_dry_run_counts_the_planned_trials(tuned, capsys, monkeypatch):
    """A run takes one hour. A trial has two runs, one for each seed."""
    monkeypatch.setattr(cost, "seconds_a_round", lambda cfg, steps: 3600.0)
    tuned(trainer(), "dry_run=true", search=SEARCH | {"seeds": [8, 9]})
    said = capsys.readouterr().out
    assert "8 runs of searches before them" in said  # 2 cells · 2 trials · 2 seeds
    assert "about 12.0 h on one core" in said  # with the 4 runs


def test_mistakes_and_seeds_of_runs_are_named_before_any_search(tuned, capsys):
    going = trainer()
    for search, message in (
        ({"budget": 3}, r"the key search\.budget is unknown"),
        (
            {"params": {"client.optimizer.lr": "interval(1, 0)"}},
            r"lr=interval\(1, 0\) cannot be searched",
        ),
        ({"seeds": [2, 9]}, "^seed=2 is in a search and in a run"),
    ):
        with refuses(message):
            tuned(going, search=SEARCH | search)
    assert not going.jobs
    tuned(
        going,
        "dry_run=true",
        search=SEARCH | {"knobs": {"algorithm=fedprox ": {"x": "choice(1, 2)"}}},
    )
    assert "no job has algorithm=fedprox : its search.knobs are unused" in capsys.readouterr().out


def test_the_spaces_of_the_repositorys_own_tables_can_be_searched():
    searches = [table.search for table in map(load, names()) if table.search]
    assert len(searches) >= 3
    for search in searches:
        for params in (search.params, *search.knobs.values()):
            space, rest = space_of([f"{key}={words}" for key, words in params.items()])
            assert [*space] == [*params]
            assert not rest


def test_a_search_starts_with_its_points(tuned):
    points = [{"client.optimizer.lr": value} for value in (0.25, 0.75, 0.5)]
    going = trainer()
    for n_trials in (2, 4):  # the second command continues the search
        tuned(
            going,
            "rows=[FedAvg]",
            "seeds=[1]",
            search=SEARCH | {"n_trials": n_trials, "points": points},
        )
    *first, drawn = [
        float(row["client.optimizer.lr"]) for row in trials(tuned.folder, "fedavg_digits")
    ]
    assert first == [0.25, 0.75, 0.5]
    assert drawn not in first


def test_before_its_search_no_run_is_a_cells(tuned, capsys):
    """A run with the default settings has finished in each cell's folder, and elsewhere."""
    going = trainer()
    defaults = ["rounds=1", "algorithm=fedavg", "gc=none", "seed=1"]
    for folder in (tuned.folder.parent / "fedavg_digits_s1", plain.logs / "elsewhere"):
        finish(folder, defaults, 1, plain)
    assert tuned(going, "compare=true") == 0
    said = capsys.readouterr().out
    assert said.count("its search has not begun") == 4
    assert "0 finished" in said
    assert "50.00" not in said
    assert tuned(going, "dry_run=true") == 0
    said = capsys.readouterr().out
    assert "0 finished, 0 to continue, 4 to start" in said
    assert not going.jobs


@pytest.mark.parametrize("text", ["", "[1]", "best_params: 3", "best_params: {1: 2}", "a: ["])
def test_an_edited_result_of_a_search_is_named(tuned, text):
    going = trainer()
    tuned(going)
    path = tuned.folder / "fedavg_digits" / "optimization_results.yaml"
    path.write_text(text)
    with refuses(re.escape(f"{path} cannot be read: ")):
        tuned(going, "compare=true")


def test_a_trial_and_the_runs_leave_out_a_drawn_key_that_has_no_effect(tuned):
    """Constant weights of FedBuff, which win here, do not read a."""
    drawn = {
        "methods.fedbuff.weight": "choice(constant,polynomial)",
        "methods.fedbuff.a": "interval(0.1,0.5)",
    }
    going = Trainer(
        lambda values, number: 0.5 + 0.1 * (values["methods.fedbuff.weight"] == "constant"),
        compose=whole,
    )
    search = SEARCH | {"params": drawn, "n_trials": 6, "knobs": {}}
    rows = [{"label": "FedBuff", "overrides": ["algorithm=fedbuff", "gc=none"]}]
    logs = f"paths.log_dir={tuned.folder.parents[3]}"
    assert tuned(going, logs, rows=rows, search=search) == 0
    weights = set()
    for job in going.jobs:
        values = dict(word.split("=", 1) for word in job)
        weights.add(values["methods.fedbuff.weight"])
        is_read = values["methods.fedbuff.weight"] == "polynomial"
        assert ("methods.fedbuff.a" in values) == is_read
    assert weights == {"constant", "polynomial"}
    assert len(going.jobs) == 6 + 2
    assert "methods.fedbuff.weight=constant" in going.jobs[-1]
