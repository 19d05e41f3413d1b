"""Studies and searches with a launcher that only pretends to train."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace

from conftest import composer
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf
from run_folders import write_run


@cache
def composed(*overrides):
    return composer(overrides)


def plain(*overrides):
    """A config of these values and a few others, without the files that Hydra takes long to read."""
    few = "seed=1 rounds=1 eval_every=1 metrics={} callbacks={} client.optimizer.lr=0.01 tags.data=x tags.model=y"
    return OmegaConf.from_dotlist([*few.split(), *overrides])


def context(compose):
    """Hydra's, as far as a sweep asks for it."""
    groups = composer.groups if compose is composed else ()
    load = {"list_groups": lambda parent: groups, "load_sweep_config": lambda _, overrides: compose(*overrides)}
    return SimpleNamespace(config_loader=SimpleNamespace(**load))


def finish(folder, overrides, rounds, *, rows=None, compose=composed, **summary):
    """What a run leaves behind when it has ended after so many rounds, by default of equal rows."""
    cfg = OmegaConf.to_container(compose(*overrides, f"rounds={rounds}", "paths.output_dir=run"), resolve=True)
    run = write_run(folder, rows or [{"test/acc": 0.5}] * rounds, summary={"rounds": rounds, **summary}, **cfg)
    (run.folder / "checkpoints").mkdir(exist_ok=True)
    (run.folder / "checkpoints" / "last.ckpt").touch()


def outcome(error=None):
    done = JobReturn(status=JobStatus.FAILED if error else JobStatus.COMPLETED)
    done.return_value = error
    return done


class BasicLauncher:
    """Goes by the name of Hydra's own. Writes what a run would, with what ``of(values, number)`` says in its summary,
    and in its ``rows``.

    ``of`` takes the job's overrides, key → text, and its number; an error that it raises is the run's failure.
    """

    def __init__(self, of=lambda values, number: {}, compose=composed):
        self.of, self.compose, self.calls = of, compose, []

    @property
    def jobs(self):
        return [job for call in self.calls for job in call]

    def launch(self, job_overrides, initial_job_idx):
        self.calls.append(job_overrides)
        return [self._job(job, i) for i, job in enumerate(job_overrides, start=initial_job_idx)]

    def _job(self, job, number):
        values = {key: value.strip("'") for key, value in (override.split("=", 1) for override in job)}
        try:
            summary = self.of(values, number)
        except ValueError as error:
            return outcome(error)
        own = [override for override in job if not override.startswith(("hydra.", "ckpt_path"))]
        folder = Path(values["hydra.sweep.dir"]) / values["hydra.sweep.subdir"]
        finish(folder, own, int(values.get("rounds", 1)), compose=self.compose, **summary)
        return outcome()


class Launcher(BasicLauncher):
    """Takes all jobs at once."""
