"""Searches with Optuna: the space, the bookkeeping, and that a stopped one goes on as if it had not been."""

import csv
import json
import sys
from types import SimpleNamespace

import pytest
import yaml
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf
from pretend import composed

from gcfed.study.search import search
from gcfed.utils.lock import locked

SETTINGS = {
    "direction": "maximize", "n_trials": 5, "n_jobs": 1, "seed": 3, "storage": None,
    "params": {"x": "interval(0.0, 1.0)", "y": "choice(1, [2, 3])"},
    "sampler": {"_target_": "optuna.samplers.TPESampler", "n_startup_trials": 3},
}  # fmt: skip


class Launcher:
    """A run is worth ``of(x, number)``; an exception is its failure."""

    def __init__(self, of=lambda x, number: x):
        self.of, self.jobs = of, []

    def launch(self, job_overrides, initial_job_idx):
        returns = []
        for i, job in enumerate(job_overrides):
            self.jobs.append(job)
            values = dict(o.split("=", 1) for o in job)
            result = JobReturn(status=JobStatus.COMPLETED)
            try:
                result.return_value = self.of(float(values["x"]), initial_job_idx + i)
            except ValueError as error:
                result.status = JobStatus.FAILED
                result.return_value = error
            returns.append(result)
        return returns


def go(folder, launcher, *arguments, metric="test/acc_smooth10", file=(), **settings):
    """``file`` are overrides that stand for what the search's file sets."""
    config = OmegaConf.create({"optimized_metric": metric, "hydra": {"sweep": {"dir": str(folder)}}})
    known = {**SETTINGS, **settings}

    def load_sweep_config(_, overrides):
        return composed(*file, *(o for o in overrides if not o.startswith("hparams_search=")))

    context = SimpleNamespace(config_loader=SimpleNamespace(load_sweep_config=load_sweep_config))
    search(config, context, launcher, list(arguments), **{**known, "sampler": OmegaConf.create(known["sampler"])})


def finished(folder, **summary):
    """A run at its end, which returns nothing when it is continued: its folder has the value."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("rounds: 1\n")
    (folder / "overrides.yaml").write_text("[]\n")
    (folder / "metrics.csv").write_text("round,test/acc\n1,0.5\n")
    (folder / "summary.json").write_text(json.dumps({"rounds": 1, **summary}))


def trials(folder):
    with (folder / "trials.csv").open() as file:
        return list(csv.DictReader(file))


def test_without_optuna_one_sentence_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match=r"hparams_search needs Optuna.*\[optuna\]"):
        go(tmp_path, Launcher())


class TestSearch:
    @pytest.fixture(autouse=True)
    def _optuna(self):
        pytest.importorskip("optuna")

    def test_trials_are_jobs_and_leave_a_table(self, tmp_path, capsys):
        launcher = Launcher()
        go(tmp_path, launcher, "hparams_search=try", "rounds=2")
        assert len(launcher.jobs) == 5
        assert launcher.jobs[1][:2] == ["hparams_search=try", "rounds=2"]
        assert launcher.jobs[1][-2:] == [f"hydra.sweep.dir='{tmp_path}'", "hydra.sweep.subdir=trial_0001"]
        rows = trials(tmp_path)
        assert [row["number"] for row in rows] == ["0", "1", "2", "3", "4"]
        assert {row["state"] for row in rows} == {"complete"}
        assert [float(row["value"]) for row in rows] == [float(row["x"]) for row in rows]
        assert {row["y"] for row in rows} <= {"1", "[2,3]"}
        assert all(f"x={row['x']}" in job for row, job in zip(rows, launcher.jobs, strict=True))
        best = yaml.safe_load((tmp_path / "optimization_results.yaml").read_text())
        row = max(rows, key=lambda row: float(row["value"]))
        assert (best["best_trial"], best["folder"]) == (int(row["number"]), row["folder"])
        assert best["best_value"] == float(row["value"])
        assert "trial_0004, 5 of 5: x=" in capsys.readouterr().out

    def test_a_search_that_was_stopped_draws_what_it_would_have_drawn(self, tmp_path):
        go(tmp_path / "straight", Launcher())
        go(tmp_path / "stopped", Launcher(), n_trials=2)

        def killed(x, number):
            if number == 3:
                raise KeyboardInterrupt
            return x

        with pytest.raises(KeyboardInterrupt):
            go(tmp_path / "stopped", Launcher(killed))
        (tmp_path / "stopped" / "trial_0003" / "checkpoints").mkdir(parents=True)
        (tmp_path / "stopped" / "trial_0003" / "checkpoints" / "last.ckpt").touch()
        launcher = Launcher()
        go(tmp_path / "stopped", launcher)
        assert [job[-1] for job in launcher.jobs] == [
            f"ckpt_path='{tmp_path}/stopped/trial_0003/checkpoints/last.ckpt'", "hydra.sweep.subdir=trial_0004",
        ]  # fmt: skip
        keys = ("number", "state", "value", "x", "y")
        straight, stopped = ([[row[k] for k in keys] for row in trials(tmp_path / f)] for f in ("straight", "stopped"))
        assert straight == stopped
        nothing = Launcher()
        go(tmp_path / "stopped", nothing)
        assert nothing.jobs == []

    def test_failures_and_numbers_that_are_none_do_not_end_it(self, tmp_path, caplog):
        """What failed is made up for, what is not finite counts; the exit code says that something failed."""

        def of(x, number):
            if number == 0:
                raise ValueError("gc.lam=2 is outside")
            if number == 2:
                finished(tmp_path / "trial_0002", **{"test/acc_smooth10": 0.5})
            return {1: float("nan"), 2: None}.get(number, x)

        go_on = {"n_jobs": 2, "n_trials": 4}
        with pytest.raises(SystemExit) as stop:
            go(tmp_path, Launcher(of), **go_on)
        assert stop.value.code == 1
        rows = trials(tmp_path)
        assert [row["state"] for row in rows] == ["fail", "pruned", "complete", "complete", "complete"]
        assert [row["value"] for row in rows[:3]] == ["", "", "0.5"]
        assert [row["reason"] for row in rows[:2]] == [
            "ValueError: gc.lam=2 is outside", "test/acc_smooth10 was not reached, or is not finite",
        ]  # fmt: skip
        assert "trial_0000 failed: ValueError: gc.lam=2 is outside" in caplog.text
        nothing = Launcher()
        go(tmp_path, nothing, **go_on)
        assert nothing.jobs == []

    def test_failures_in_a_row_end_it(self, tmp_path):
        launcher = Launcher(lambda x, number: int("no"))
        with pytest.raises(ValueError, match=r"3 trials in a row have failed, the last with ValueError: inv"):
            go(tmp_path, launcher)
        assert [row["state"] for row in trials(tmp_path)] == ["fail"] * 3
        go(tmp_path, Launcher())  # the reason is gone
        assert [row["state"] for row in trials(tmp_path)] == ["fail"] * 3 + ["complete"] * 5

    def test_a_metric_that_runs_do_not_have_ends_it_after_the_first_one(self, tmp_path):
        def of(x, number):
            finished(tmp_path / f"trial_{number:04d}", **{"test/acc": 0.25, "rounds_to_target": {"0.9": None}})

        launcher = Launcher(of)
        with pytest.raises(ValueError, match=r"test/acc_smth is not among what runs measure: .*test/acc"):
            go(tmp_path, launcher, metric="test/acc_smth")
        assert len(launcher.jobs) == 1
        again = Launcher(lambda x, number: None if number == 0 else 0.5)  # the trial goes on, under the right name
        go(tmp_path, again, metric="test/acc")
        assert len(again.jobs) == 5
        assert float(trials(tmp_path)[0]["value"]) == 0.25

    def test_a_target_that_was_not_reached_is_no_typo(self, tmp_path):
        def of(x, number):
            finished(tmp_path / f"trial_{number:04d}", rounds_to_target={"0.9": None})

        for name, metric in (("a", "rounds:test/acc>=0.9"), ("b", "rounds_to_target/0.9")):
            tmp_path = tmp_path / name
            with pytest.raises(ValueError, match="no trial of the search"):
                go(tmp_path, Launcher(of), metric=metric)
            assert {row["state"] for row in trials(tmp_path)} == {"pruned"}

    def test_one_folder_holds_one_search(self, tmp_path):
        go(tmp_path, Launcher(), "rounds=2", n_trials=1)
        go(tmp_path, Launcher(), "rounds=2", "trainer.devices=1", n_trials=2)  # changes no result
        for arguments, file, message in (
            (["rounds=3"], (), "rounds was 2, now 3"),
            (["rounds=2"], ("client.epochs=7",), "client.epochs was .*, now 7"),  # in the search's own file
            (["rounds=2", "x=interval(0.5, 1.0)"], (), "space was"),
        ):
            with pytest.raises(ValueError, match=f"holds another search: {message}"):
                go(tmp_path, Launcher(), *arguments, file=file)
        (tmp_path / "trial_0000").mkdir()
        (tmp_path / "trial_0000" / "config.yaml").touch()
        (tmp_path / "search.db").unlink()
        with pytest.raises(ValueError, match="holds the trials of a search without its database"):
            go(tmp_path, Launcher(), "rounds=2")

    def test_one_process_does_a_search(self, tmp_path):
        with locked(tmp_path / ".lock"), pytest.raises(ValueError, match=r"process \d+ on .* is at the search in"):
            go(tmp_path, Launcher())

    def test_a_trial_that_someone_else_has_ended_ends_it_with_a_sentence(self, tmp_path):
        import optuna

        def of(x, number):
            if number == 1:
                optuna.load_study(study_name="search", storage=f"sqlite:///{tmp_path}/search.db").tell(1, 0.5)
            return x

        with pytest.raises(ValueError, match=r"trial_0001 of .* was ended by someone else: .* One process"):
            go(tmp_path, Launcher(of))

    def test_where_the_launcher_fails_trials_are_left_as_they_are(self, tmp_path):
        class Lost(Launcher):
            def launch(self, job_overrides, initial_job_idx):
                raise RuntimeError("worker killed")

        with pytest.raises(ValueError, match=r"RuntimeError: worker killed: jobs .* may still be running"):
            go(tmp_path, Lost())
        launcher = Launcher()
        go(tmp_path, launcher)
        assert len(launcher.jobs) == 5

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"n_trials": 0}, "n_trials=0 must be"),
            ({"direction": "up"}, "direction=up must be"),
            ({"params": {}}, "params is empty"),
            ({"params": {"x": "interval(1.0, 0.0)"}}, r"x=interval\(1.0, 0.0\) cannot be searched"),
            ({"params": {"x": "interval(0"}}, "is no override"),
            ({"metric": None}, "optimized_metric is not set"),
            ({"metric": "foo:test/acc"}, "optimized_metric=foo:test/acc: .* is not understood"),
        ],
    )
    def test_a_mistake_is_named(self, tmp_path, settings, message):
        with pytest.raises(ValueError, match=message):
            go(tmp_path, Launcher(), **settings)

    def test_hydras_words_become_optunas_distributions(self):
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        from gcfed.study.space import read_space, text_of

        params = {
            "a": "interval(0.5, 2)", "b": "tag(log, interval(0.001, 0.1))", "c": "int(interval(1, 5))",
            "d": "range(1, 10, 3)", "e": "range(0.0, 1.0, 0.25)", "f": "choice(x, 1, [2, 3])", "g": "1,2",
            "h": "interval(0, 1)",
        }  # fmt: skip
        space, fixed, texts = read_space(
            params, ["h=3", "rounds=2", "a=choice(1, 2)", "i=tag(log, int(interval(1, 64)))"]
        )
        assert space == {
            "a": CategoricalDistribution(["1", "2"]),
            "b": FloatDistribution(0.001, 0.1, log=True),
            "c": IntDistribution(1, 5),
            "d": IntDistribution(1, 7, step=3),
            "e": FloatDistribution(0.0, 0.75, step=0.25),
            "f": CategoricalDistribution(["x", "1", "[2,3]"]),
            "g": CategoricalDistribution(["1", "2"]),
            "i": IntDistribution(1, 64, log=True),
        }
        assert fixed == ["h=3", "rounds=2"]
        assert texts["b"] == "tag(log, interval(0.001, 0.1))"
        assert [text_of(v) for v in ("[2,3]", 0.5, 3)] == ["[2,3]", "0.5", "3"]
