"""``-m hparams_search=…``: its search space and its records.

A stopped search continues without a difference.
"""

import re
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pandas as pd
import pytest
import yaml
from conftest import composer, forked, refuses, run_script
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf
from run_folders import accuracies, write_run

from gcfed.folders.lock import locked
from gcfed.folders.run_columns import RunColumns
from gcfed.search import space_of
from gcfed.utils.resolvers import CONFIGS
from hydra_plugins.gcfed_optuna import OptunaSweeper

pytest.importorskip("optuna")
from optuna import load_study
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

METRIC = "final:test/acc"
SETTINGS = {
    "direction": "maximize",
    "n_trials": 4,
    "n_jobs": 1,
    "seed": 3,
    "storage": None,
    "params": {"gc.lam": "interval(0.0, 1.0)", "client.epochs": "choice(1, 2)"},
    "sampler": {"_target_": "optuna.samplers.TPESampler", "n_startup_trials": 2},
}


def plain(config, overrides):
    """A config with these values and a few others.

    Reading the files of Hydra's config would take long.
    """
    few = "seed=1 rounds=1 eval_every=1 client.optimizer.lr=0.01 paths.output_dir=run"
    return OmegaConf.from_dotlist([*few.split(), *overrides])


def whole(config, overrides):
    return composer(overrides)


class Launcher:
    """Writes a run with the accuracy ``of(values, number)``.

    If ``of`` raises an error, the run fails with it.
    """

    def __init__(
        self,
        of=lambda values, number: float(values["gc.lam"]),
        columns=lambda acc: {},
        summary=None,
    ):
        self.of = of
        self.columns = columns
        self.summary = summary
        self.calls = []

    @property
    def jobs(self):
        return [job for call in self.calls for job in call]

    def launch(self, job_overrides, initial_job_idx):
        self.calls.append(job_overrides)
        return [self.job(job, i) for i, job in enumerate(job_overrides, start=initial_job_idx)]

    def job(self, job, number):
        overrides = OverridesParser.create().parse_overrides(job)
        values = {override.key_or_group: str(override.value()) for override in overrides}
        done = JobReturn(status=JobStatus.COMPLETED)
        try:
            accuracy = self.of(values, number)
            folder = Path(values["hydra.sweep.dir"], values["hydra.sweep.subdir"])
            rows = accuracies(accuracy, **self.columns(accuracy))
            write_run(folder, rows, rounds=1, summary=self.summary)
        except ValueError as error:
            done.status = JobStatus.FAILED
            done.return_value = error
        return done


def go(folder, launcher, *arguments, metric=METRIC, load=plain, **settings):
    sweeper = OptunaSweeper(**OmegaConf.create(SETTINGS | settings))
    sweeper.cfg = OmegaConf.create(
        {"optimized_metric": metric, "hydra": {"sweep": {"dir": str(folder)}}}
    )
    sweeper.load = load
    sweeper.launch = launcher.launch
    with ExitStack() as patches:
        if load is not whole:
            anything = RunColumns((), is_open=True)
            patches.enter_context(patch("gcfed.assemble.check_buildable", lambda cfg: anything))
        if load is plain:
            patches.enter_context(patch("gcfed.assemble.declared_result", lambda cfg: ""))
        sweeper.sweep([*arguments])


def trials(folder):
    return pd.read_csv(folder / "trials.csv", dtype=str, keep_default_na=False).to_dict("records")


def test_trials_are_jobs_and_leave_a_table(tmp_path):
    launcher = Launcher()
    go(tmp_path, launcher, "rounds=1")
    assert launcher.jobs[1][0] == "rounds=1"
    assert launcher.jobs[1][-2:] == [
        f"hydra.sweep.dir='{tmp_path}'",
        "hydra.sweep.subdir=trial_0001",
    ]
    rows = trials(tmp_path)
    assert [*rows[0]] == ["number", "state", "value", "client.epochs", "gc.lam"]
    assert [row["state"] for row in rows] == ["complete"] * 4
    assert [float(row["value"]) for row in rows] == [float(row["gc.lam"]) for row in rows]
    row = max(rows, key=lambda row: float(row["value"]))
    assert {f"gc.lam={row['gc.lam']}", f"client.epochs={row['client.epochs']}"} < {
        *launcher.jobs[int(row["number"])]
    }
    best = yaml.safe_load((tmp_path / "optimization_results.yaml").read_text())
    assert best["best_trial"] == int(row["number"])
    assert best["metric"] == METRIC
    assert best["direction"] == "maximize"
    assert best["best_params"] == {
        "client.epochs": row["client.epochs"],
        "gc.lam": float(row["gc.lam"]),
    }


def test_a_search_may_be_in_a_folder_with_odd_letters(tmp_path):
    folder = tmp_path / "it's (a = b), c"
    go(folder, Launcher(), "rounds=1", n_trials=1)
    assert [row["state"] for row in trials(folder)] == ["complete"]
    assert (folder / "trial_0000" / "summary.json").is_file()


def test_a_stopped_search_draws_the_same_values_as_one_that_was_not_stopped(tmp_path):
    def killed(values, number):
        if number == 2:
            raise KeyboardInterrupt
        return float(values["gc.lam"])

    go(tmp_path / "straight", Launcher())
    go(tmp_path / "stopped", Launcher(), n_trials=1)
    # killed before a draw
    load_study(study_name="search", storage=f"sqlite:///{tmp_path}/stopped/search.db").ask()
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "stopped", Launcher(killed))
    checkpoint = tmp_path / "stopped" / "trial_0002" / "checkpoints" / "last.ckpt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    launcher = Launcher()
    go(tmp_path / "stopped", launcher)
    assert [job[-1] for job in launcher.jobs] == [
        f"ckpt_path='{checkpoint}'",
        "hydra.sweep.subdir=trial_0003",
    ]
    assert trials(tmp_path / "straight") == trials(tmp_path / "stopped")


def test_failures_and_values_that_are_not_finite_count_and_keep_their_reason(tmp_path):
    def of(values, number):
        if number == 0:
            raise ValueError("gc.lam=2 is\noutside")
        return float("nan") if number == 1 else float(values["gc.lam"])

    with pytest.raises(SystemExit, match=r"trial_0000: gc\.lam=2 is outside"):
        go(tmp_path, Launcher(of), n_jobs=2, n_trials=3)
    reasons = ["gc.lam=2 is outside", "the test loss of round 1 is not finite", ""]
    states = ["fail", "pruned", "complete"]
    assert [(row["state"], row["reason"]) for row in trials(tmp_path)] == [
        *zip(states, reasons, strict=True)
    ]


def test_one_folder_holds_one_search_of_one_process(tmp_path):
    go(tmp_path, Launcher(), "rounds=2", n_trials=1)
    # this setting changes no result
    go(tmp_path, Launcher(), "rounds=2", "trainer.devices=1", n_trials=2)
    for arguments, message in (
        (["rounds=2", "client.optimizer.lr=0.5"], "client.optimizer.lr is .* there, 0.5 here"),
        (
            ["rounds=2", "gc.lam=interval(0.5, 1.0)"],
            "params.gc.lam is .*low=0.0.* there, .*low=0.5",
        ),
    ):
        with refuses(f"holds another search: {message}.* folder, hydra.sweep.dir=<folder>"):
            go(tmp_path, Launcher(), *arguments)
    with (
        locked(tmp_path / ".lock"),
        refuses(r"process \d+ on .* is at the search in"),
    ):
        go(tmp_path, Launcher(), "rounds=2")


@pytest.mark.parametrize(
    ("words", "settings", "message"),
    [
        (["seed=1,2,3"], {}, "without seed"),
        (
            ["client.epochs=tag(log, range(1,1000))"],
            {},
            r"tag\(log, …\) is known for intervals alone",
        ),
        ([], {"n_trials": "x"}, r"^hydra\.sweeper\.n_trials=x must be a whole number"),
        ([], {"n_jobs": 0}, r"^hydra\.sweeper\.n_jobs=0 must be at least 1"),
        (
            [],
            {"params": {"gc.lam": "interval(1.0, 0.0)"}},
            r"gc\.lam=interval\(1\.0, 0\.0\) cannot be searched",
        ),
        (
            [],
            {"metric": "final:test/loss"},
            r"better where it is smaller: set hydra\.sweeper\.direction=minimize",
        ),
        (
            [],
            {"metric": "rounds:0.8"},
            r"rounds:0\.8 is better where it is smaller: set hydra\.sweeper\.direction=minimize",
        ),
        (
            [],
            {"metric": "last10:val/acc", "direction": "minimize"},
            r"last10:val/acc is better where it is larger: set .*direction=maximize",
        ),
        (
            [],
            {"metric": "final:test/acd"},
            r"^optimized_metric=final:test/acd: a run .* did you mean test/acc\?",
        ),
        (
            ["data.validation=null"],
            {"metric": "final:val/acc"},
            r"^optimized_metric=final:val/acc: .* never writes val/acc: set data\.validation=0\.1",
        ),
        (
            [],
            {"metric": "final:cka/fc1"},
            "^optimized_metric=final:cka/fc1: .* never writes cka/fc1: set metrics=cka",
        ),
    ],
)
def test_invalid_searches_are_refused(tmp_path, words, settings, message):
    launcher = Launcher()
    load = whole if "metric" in settings else plain
    with refuses(message):
        go(tmp_path, launcher, *words, load=load, **settings)
    assert not launcher.jobs


def test_a_metric_that_no_trial_has_written_is_refused_after_the_first_one(tmp_path):
    """The columns of a user's part, and the stages of a network, are known after the first run."""
    launcher = Launcher()
    with refuses("optimized_metric=final:cka/fc1 is not among what runs measure: .*test/acc"):
        go(tmp_path, launcher, "metrics=cka", metric="final:cka/fc1", load=whole)
    assert len(launcher.jobs) == 1


def with_ditto(config, overrides):
    """A config with a method whose clients use their own models."""
    cfg = plain(config, [*overrides, "model={}", "gc=null", "privacy=null"])
    cfg.merge_with(OmegaConf.create({"attack": None, "quantization": None}))
    cfg.methods = {"ditto": {"_target_": "gcfed.methods.personal.ditto.Ditto", "lam": 0.1}}
    return cfg


@pytest.mark.parametrize("metric", ["last10:val/acc", "test/acc", "best:test/acc", "rounds:0.8"])
def test_a_personal_method_is_not_searched_by_the_global_model(tmp_path, metric):
    launcher = Launcher()
    direction = "minimize" if metric == "rounds:0.8" else "maximize"
    message = (
        f"optimized_metric={metric} compares global models, and the result of this method is"
        " personal/local_acc: choose by final:personal/local_acc, with metrics=personal"
        " data.client_test=0.2."
    )
    with refuses(re.escape(message)):
        go(tmp_path, launcher, metric=metric, direction=direction, load=with_ditto)
    assert not launcher.jobs


def test_a_personal_method_is_searched_by_its_result(tmp_path):
    launcher = Launcher(columns=lambda acc: {"personal/local_acc": [1 - acc]})
    go(tmp_path, launcher, metric="final:personal/local_acc", load=with_ditto)
    rows = trials(tmp_path)
    assert [float(row["value"]) for row in rows] == [
        pytest.approx(1 - float(row["gc.lam"])) for row in rows
    ]


def test_a_search_over_algorithms_stops_at_the_first_personal_one(tmp_path):
    """Only the run's summary says that it is one."""
    launcher = Launcher(summary={"rounds": 1, "result": "personal/local_acc"})
    with refuses("the result of this method is personal/local_acc"):
        go(tmp_path, launcher)
    assert len(launcher.jobs) == 1


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
def test_hydras_functions_become_optunas_distributions_and_the_last_override_wins(
    words, distribution
):
    given = ["a=interval(0, 1)", "b=choice(1, 2)", f"a={words}", "b=3", "ckpt_path=last"]
    assert space_of(given) == ({"a": distribution}, ["b=3"])


def test_the_settings_of_these_tests_have_the_keys_of_the_config():
    node = OmegaConf.to_container(OmegaConf.load(CONFIGS / "hydra/sweeper/optuna.yaml"))
    assert node.pop("_target_") == f"{OptunaSweeper.__module__}.OptunaSweeper"
    assert {key for key in node if key[0] != "_"} == {*SETTINGS}


@pytest.mark.slow
def test_a_search_from_the_command_line_continues(tmp_path):
    words = [
        "-m",
        "hparams_search=digits_optuna",
        f"hydra.sweep.dir={tmp_path}/search",
        "rounds=1",
        "client.epochs=1",
        "data.limit_train=200",
        "data.limit_test=50",
        "extras.figures=false",
        "trainer.devices=1",
        "logger=csv",
    ]

    def twice():  # one fork imports Optuna's database only once
        for n in (1, 2):
            run_script("train.py", *words, f"hydra.sweeper.n_trials={n}")
            assert [row["state"] for row in trials(tmp_path / "search")] == ["complete"] * n

    ended = forked(twice, tmp_path / "printed.txt")
    printed = (tmp_path / "printed.txt").read_text()
    assert ended == 0, printed[-4000:]
    assert re.findall(r"^job .*$", printed, re.MULTILINE) == ["job 1 of 1", "job 2 of 2"]


def test_a_searched_key_that_no_trial_reads_is_refused_before_the_first_one(tmp_path):
    launcher = Launcher()
    params = {"gc.lam": "interval(0.0, 1.0)"}
    with refuses(r"^gc\.lam has no effect with gc\.local=false"):
        go(tmp_path, launcher, "gc=global", load=whole, params=params)
    assert not launcher.jobs


@pytest.mark.slow
def test_a_trial_may_draw_a_key_that_its_other_draws_make_idle(tmp_path):
    """As FedBuff's a with constant weights."""
    words = [
        "-m",
        "hydra/sweeper=optuna",
        "data.validation=0.1",
        "optimized_metric=last:val/acc",
        f"hydra.sweep.dir={tmp_path / 'search'}",
        "hydra.sweeper.n_trials=2",
        "rounds=1",
        "data.limit_train=200",
        "data.limit_test=50",
        "extras.figures=false",
        "trainer.devices=1",
        "logger=csv",
        "algorithm=fedbuff",
        "methods.fedbuff.weight=choice(constant)",
        "methods.fedbuff.a=interval(0.1, 0.5)",
    ]
    ended = forked(lambda: run_script("train.py", *words), tmp_path / "printed.txt")
    assert ended == 0, (tmp_path / "printed.txt").read_text()[-4000:]
    assert [row["state"] for row in trials(tmp_path / "search")] == ["complete"] * 2
