"""Studies with a launcher that only pretends to train."""

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from omegaconf import OmegaConf

from gcfed.study.calibrate import Speed
from gcfed.study.state import as_run
from gcfed.study.sweep import sweep
from gcfed.utils.resolvers import ROOT

GROUPS = [path.name for path in (ROOT / "configs").iterdir() if path.is_dir()]
TABLE = {
    "overrides": ["rounds=4"],
    "rows": [{"label": "FedAvg", "overrides": ["gc=none"]}, {"label": "GC-Fed", "overrides": ["gc=gcfed"]}],
    "columns": [{"label": "α 0.1", "overrides": ["partition.alpha=0.1"]}],
}


@cache
def composed(*overrides):
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return compose("train", [*overrides])


def finish(folder, overrides, rounds, **config):
    """What a run leaves behind, as far as a study looks at it; ``config`` are keys that it has otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / "last.ckpt").touch()
    (folder / "overrides.yaml").write_text(yaml.safe_dump(list(overrides)))
    known = json.loads(json.dumps(as_run(composed(*overrides)).config))
    known["trainer"] |= {"accelerator": "auto", "devices": "auto"}
    (folder / "config.yaml").write_text(yaml.safe_dump(known | {"rounds": rounds} | config))
    (folder / "metrics.csv").write_text("".join(["round,time/round_s\n", *(f"{r + 1},1.0\n" for r in range(rounds))]))
    (folder / "summary.json").write_text(json.dumps({"rounds": rounds}))


class Launcher:
    """Writes what a run would, unless its overrides have one of ``broken``; ``before`` the first it does something."""

    def __init__(self, broken=(), before=None):
        self.broken, self.before, self.calls = broken, before, []

    def launch(self, job_overrides, initial_job_idx):
        if self.before is not None and not self.calls:
            self.before()
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
        finish(Path(folder), own, int(values["rounds"]))
        done = JobReturn(status=JobStatus.COMPLETED)
        done.return_value = None
        return done


class BasicLauncher(Launcher):
    """Goes by the name of Hydra's own."""


class Studies:
    """``studies(launcher, *arguments, name=…, **node)`` runs a study below a folder, in which nothing is timed.

    Attributes:
        composed: what was asked of Hydra.
    """

    def __init__(self, folder, monkeypatch):
        monkeypatch.setattr("gcfed.study.calibrate.measure", lambda cfg: Speed(0.01, 0.0, 1, 1, 1000))
        self.root, self.composed = folder / "study", []
        self.loader = SimpleNamespace(load_sweep_config=self._load, list_groups=lambda parent: GROUPS)

    def _load(self, _, overrides):
        self.composed.append(overrides)
        return composed(*overrides)

    def __call__(self, launcher, *arguments, name="try", scale="full", **node):
        place = {"runtime": {"choices": {"study": name}}, "sweep": {"dir": str(self.root / name / scale)}}
        config = OmegaConf.create({"study": {"table": TABLE, **node}, "scale": scale, "hydra": place})
        sweep(config, SimpleNamespace(config_loader=self.loader), launcher, list(arguments))
