"""A study as a sweep: what is skipped, continued, refused and named, with a launcher that only pretends to train."""

import json
from functools import cache
from types import SimpleNamespace

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from omegaconf import OmegaConf

import gcfed.study.sweep as sweep
from gcfed.run import refuse_sweeps
from gcfed.study.calibrate import Speed
from gcfed.study.state import as_run
from gcfed.utils.resolvers import ROOT

TABLE = {
    "overrides": ["rounds=4"],
    "rows": [{"label": "FedAvg", "overrides": ["gc=none"]}, {"label": "GC-Fed", "overrides": ["gc=gcfed"]}],
    "columns": [{"label": "α 0.1", "overrides": ["partition.alpha=0.1"]}],
}


@cache
def composed(*overrides):
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return compose("train", [*overrides])


def finish(folder, overrides, rounds, config=None):
    """What a run leaves behind, as far as a study looks at it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / "last.ckpt").touch()
    (folder / "overrides.yaml").write_text(yaml.safe_dump(list(overrides)))
    (folder / "config.yaml").write_text(yaml.safe_dump({**(config or {}), "rounds": rounds}))
    (folder / "metrics.csv").write_text("".join(["round,time/round_s\n", *(f"{r + 1},1.0\n" for r in range(rounds))]))
    (folder / "summary.json").write_text(json.dumps({"rounds": rounds}))


class Launcher:
    """Writes what a run would, unless its overrides have one of ``broken``."""

    def __init__(self, broken=()):
        self.broken, self.calls = broken, []

    def launch(self, job_overrides, initial_job_idx):
        self.calls.append(job_overrides)
        return [self._job(job) for job in job_overrides]

    def _job(self, job):
        values = dict(o.split("=", 1) for o in job)
        if self.broken == "launcher":
            raise HydraException("Could not override 'x'.\nTo append use +x")
        if set(self.broken) & set(job):
            error = JobReturn(status=JobStatus.FAILED)
            error.return_value = ValueError("gc.lam=2 is\noutside")
            return error
        folder = values["hydra.sweep.dir"].strip("'") + "/" + values["hydra.sweep.subdir"].strip("'")
        own = [o for o in job if not o.startswith("hydra.")]
        finish(sweep.Path(folder), own, int(values["rounds"]))
        done = JobReturn(status=JobStatus.COMPLETED)
        done.return_value = None
        return done


class BasicLauncher(Launcher):
    """Goes by the name of Hydra's own."""


@pytest.fixture(autouse=True)
def no_timing(monkeypatch):
    monkeypatch.setattr("gcfed.study.calibrate.measure", lambda cfg: Speed(0.01, 0.0, 1, 1, 1000))


@pytest.fixture
def study(tmp_path):
    """``study(launcher, *arguments, name=…, **node)`` runs a study below the temporary folder."""
    seen = []

    def go(launcher, *arguments, name="try", scale="full", **node):
        config = OmegaConf.create(
            {
                "study": {"table": TABLE, **node},
                "scale": scale,
                "hydra": {
                    "runtime": {"choices": {"study": name}},
                    "sweep": {"dir": str(tmp_path / "study" / name / scale)},
                },
            }
        )

        def load_sweep_config(_, overrides):
            seen.append(overrides)
            return composed(*overrides)

        context = SimpleNamespace(config_loader=SimpleNamespace(load_sweep_config=load_sweep_config))
        return sweep.sweep(config, context, launcher, list(arguments))

    go.composed = seen
    go.root = tmp_path / "study"
    return go


def test_what_is_finished_is_skipped_and_what_has_begun_goes_on(study, capsys):
    launcher = BasicLauncher()
    study(launcher)
    folder = study.root / "try" / "full"
    assert [len(call) for call in launcher.calls] == [1, 1]  # one by one
    assert launcher.calls[0][0] == [
        "partition.alpha=0.1", "rounds=4", "gc=none", "seed=1", f"hydra.sweep.dir='{folder}'",
        "hydra.sweep.subdir='fedavg_alpha-0.1_s1'",
    ]  # fmt: skip
    said = capsys.readouterr().out
    assert "0 finished, 0 to continue, 2 to start" in said
    assert "job 2 of 2: GC-Fed, α 0.1, seed 1; about" in said
    assert "all 2 jobs are finished" in said
    assert len(study.composed) == 2  # the rows share one; the second is that of the calibration

    again = BasicLauncher()
    study(again)
    assert again.calls == []
    assert "2 finished, 0 to continue, 0 to start" in capsys.readouterr().out

    (folder / "fedavg_alpha-0.1_s1" / "summary.json").unlink()
    study(again)
    ((job,),) = again.calls
    assert job[-1] == f"ckpt_path='{folder}/fedavg_alpha-0.1_s1/checkpoints/last.ckpt'"
    assert "1 finished, 1 to continue" in capsys.readouterr().out

    grown = Launcher()
    study(grown, "rounds=6")
    assert [job[-1].startswith("ckpt_path=") for job in grown.calls[0]] == [True, True]  # all at once
    fewer = Launcher()
    study(fewer, "rounds=2")
    assert fewer.calls == []


def test_a_failed_job_is_named_and_the_others_are_finished(study, capsys, caplog):
    launcher = BasicLauncher(broken=["gc=none"])
    with pytest.raises(SystemExit) as stop:
        study(launcher)
    assert stop.value.code == 1
    assert len(launcher.calls) == 2
    end = caplog.records[-1].getMessage()
    assert "1 of 2 jobs are finished" in end
    assert "FedAvg, α 0.1, seed 1: ValueError: gc.lam=2 is outside" in end
    assert str(study.root / "try" / "full" / "fedavg_alpha-0.1_s1") in end
    assert "GC-Fed" not in end
    assert (study.root / "try" / "full" / "gc-fed_alpha-0.1_s1" / "summary.json").is_file()


def test_what_the_launcher_raises_is_a_failure_of_its_jobs(study, caplog):
    with pytest.raises(SystemExit):
        study(Launcher(broken="launcher"))
    end = caplog.records[-1].getMessage()
    assert "0 of 2 jobs are finished" in end
    assert end.count("HydraException: Could not override 'x'. To append use +x") == 2


def test_a_dry_run_starts_nothing(study, capsys):
    launcher = BasicLauncher()
    assert study(launcher, dry_run=True) == []
    assert launcher.calls == []
    said = capsys.readouterr().out
    assert "estimate: " in said
    assert "it rests on a few local steps" in said
    assert "(gc-fed_alpha-0.1_s1)" in said
    assert not (study.root / "try").exists()


def test_the_same_run_of_another_study_counts(study, capsys):
    study(BasicLauncher(), name="first", rows=["FedAvg"])
    launcher = BasicLauncher()
    study(launcher, name="second")
    assert ["gc=gcfed" in job for call in launcher.calls for job in call] == [True]
    said = capsys.readouterr().out
    assert f"1 of the finished are runs of other studies: {study.root / 'first' / 'full'}" in said
    assert "rounds that studies have finished here" not in said  # their configs are stubs, so nothing is measured


def test_a_folder_with_another_run_is_refused_before_anything_starts(study):
    folder = study.root / "try" / "full" / "fedavg_alpha-0.1_s1"
    overrides = ["gc=none", "partition.alpha=0.1", "seed=1", "client.epochs=5"]  # says what is the default
    finish(folder, overrides, 4, dict(as_run(composed(*overrides)).config))
    launcher = BasicLauncher()
    study(launcher)
    assert len(launcher.calls) == 1  # the same run in other words
    overrides[-1] = "client.epochs=2"
    finish(folder, overrides, 4, dict(as_run(composed(*overrides)).config))
    with pytest.raises(ValueError, match=r"fedavg_alpha-0.1_s1 holds another run: client.epochs is 2 there, 5 here"):
        study(launcher)


@pytest.mark.parametrize(
    ("group", "mode", "refused"),
    [("study=gcfed_table5", "RUN", True), ("study=gcfed_table5", "MULTIRUN", True),
     ("hparams_search=digits_optuna", "RUN", True), ("hparams_search=digits_optuna", "MULTIRUN", False)],
)  # fmt: skip
def test_a_study_or_a_search_that_was_composed_as_a_run_names_the_flag(group, mode, refused):
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("train", [group, f"hydra.mode={mode}"], return_hydra_config=True)
    before = HydraConfig.instance().cfg
    try:
        HydraConfig.instance().set_config(cfg)
        if refused:
            with pytest.raises(ValueError, match=r"src/train\.py -m "):
                refuse_sweeps()
        else:
            refuse_sweeps()
    finally:
        HydraConfig.instance().cfg = before


def test_without_a_study_nothing_of_it_is_in_a_config(config):
    assert not {"study", "scale"} & config().keys()
