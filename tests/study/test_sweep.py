"""A study as a sweep: what is skipped, continued, refused and named, with a launcher that only pretends to train."""

import os
import socket

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from pretend import BasicLauncher, Launcher, Studies, composed, finish

from gcfed.assemble import refuse_sweeps
from gcfed.study.calibrate import Speed
from gcfed.study.state import as_run
from gcfed.utils.resolvers import ROOT


@pytest.fixture
def study(tmp_path, monkeypatch):
    return Studies(tmp_path, monkeypatch)


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
    assert study.composed == [["gc=none"], ["gc=gcfed"]]  # values are set on copies

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
    assert "2 to continue" in capsys.readouterr().out
    study(again, "rounds=6")
    assert len(again.calls) == 1


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
    study(launcher, dry_run=True)
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
    assert "it rests on rounds of such runs that lie here" in said


def test_a_folder_with_another_run_is_refused_before_anything_starts(study):
    """A config that was edited since gives another run under the same overrides, too."""
    folder = study.root / "try" / "full" / "fedavg_alpha-0.1_s1"
    overrides = ["gc=none", "partition.alpha=0.1", "seed=1", "client.epochs=5"]  # says what is the default
    finish(folder, overrides, 4)
    launcher = BasicLauncher()
    study(launcher)
    assert len(launcher.calls) == 1  # the same run in other words
    overrides[-1] = "client.epochs=2"
    finish(folder, overrides, 4)
    with pytest.raises(ValueError, match=r"fedavg_alpha-0.1_s1 holds another run: client.epochs is 2 there, 5 here"):
        study(launcher)
    same = ["partition.alpha=0.1", "rounds=4", "gc=none", "seed=1"]
    older = as_run(composed(*same)).config["participation"] | {"per_round": 3}
    finish(folder, same, 4, participation=older)
    with pytest.raises(ValueError, match=r"participation.per_round is 3 there, 5 here"):
        study(launcher)
    assert len(launcher.calls) == 1


# ---------------------------------------------------------------------------------- while others are at work, too
def test_two_processes_never_run_the_same_job(study, capsys, caplog):
    second = BasicLauncher()

    def meanwhile():
        with pytest.raises(SystemExit):
            study(second)

    first = BasicLauncher(before=meanwhile)
    study(first)
    assert [job[0][2] for job in second.calls] == ["gc=gcfed"]
    assert [job[0][2] for job in first.calls] == ["gc=none"]  # and not what the second has finished meanwhile
    at_it = f"process {os.getpid()} on {socket.gethostname()} is at it"
    said = capsys.readouterr().out
    assert f"skipped: FedAvg, α 0.1, seed 1; {at_it}" in said
    assert "skipped: GC-Fed, α 0.1, seed 1; meanwhile it was finished" in said
    assert f"FedAvg, α 0.1, seed 1: {at_it}" in caplog.text
    assert "all 2 jobs are finished" in said


def test_a_job_that_another_process_has_begun_meanwhile_goes_on_from_there(study):
    folder = study.root / "try" / "full" / "gc-fed_alpha-0.1_s1"

    begun = ["partition.alpha=0.1", "rounds=2", "gc=gcfed", "seed=1"]
    launcher = BasicLauncher(before=lambda: finish(folder, begun, 2))
    study(launcher)
    assert launcher.calls[1][0][-1] == f"ckpt_path='{folder}/checkpoints/last.ckpt'"


def test_where_a_launcher_fails_the_folders_say_what_is_finished(study, caplog):
    class Preempted(Launcher):
        def launch(self, job_overrides, initial_job_idx):
            super().launch(job_overrides[:1], initial_job_idx)
            raise RuntimeError("job 7 has timed out")

    with pytest.raises(SystemExit):
        study(Preempted())
    end = caplog.records[-1].getMessage()
    assert "1 of 2 jobs are finished" in end
    assert "GC-Fed, α 0.1, seed 1: RuntimeError: job 7 has timed out" in end
    assert "FedAvg" not in end
    assert "jobs that it started may still be running" in end


def test_a_begun_job_that_fails_says_how_to_start_it_anew(study, caplog):
    study(BasicLauncher(), rows=["FedAvg"])
    (study.root / "try" / "full" / "fedavg_alpha-0.1_s1" / "summary.json").unlink()
    with pytest.raises(SystemExit):
        study(BasicLauncher(broken=["gc=none"]), rows=["FedAvg"])
    assert "move its folder away to start it anew" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("kind", ["raises", "nan"])
def test_an_estimate_that_fails_stops_no_study(study, capsys, monkeypatch, kind):
    def measure(cfg):
        if kind == "raises":
            raise RuntimeError("CUDA out of memory")
        return Speed(float("nan"), 0.0, 1, 1, 1000)

    monkeypatch.setattr("gcfed.study.calibrate.measure", measure)
    launcher = BasicLauncher()
    study(launcher)
    assert len(launcher.calls) == 2
    said = capsys.readouterr().out
    assert "estimate: unknown until the first job has finished" in said
    assert ("this could not be timed: RuntimeError: CUDA out of memory" in said) is (kind == "raises")


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
