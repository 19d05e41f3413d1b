"""Studies and searches with a launcher that only pretends to train."""

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from gcfed.runs.identity import counts
from gcfed.study.sweep import sweep
from gcfed.utils.compose import Composer
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


COMPOSE = Composer(lambda overrides: composed(*overrides), GROUPS)
LOADER = SimpleNamespace(list_groups=lambda parent: GROUPS, load_sweep_config=lambda _, overrides: composed(*overrides))
CONTEXT = SimpleNamespace(config_loader=LOADER)


def finish(folder, overrides, rounds, **summary):
    """What a run leaves behind when it has ended after so many rounds, as far as a sweep looks at it."""
    cfg = COMPOSE([*overrides, f"rounds={rounds}"])
    config = {key: cfg[key] for key in cfg if counts(key) or key in ("rounds", "eval_every")}
    config = OmegaConf.to_container(OmegaConf.create(config, parent=cfg), resolve=True)
    (folder / "checkpoints").mkdir(exist_ok=True, parents=True)
    (folder / "checkpoints" / "last.ckpt").touch()
    config["metrics"] = {name: {} for name in cfg.metrics or ()}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "metrics.csv").write_text("".join(["round,test/acc\n", *(f"{r + 1},0.5\n" for r in range(rounds))]))
    (folder / "summary.json").write_text(json.dumps({"rounds": rounds, **summary}))


def outcome(error=None):
    done = JobReturn(status=JobStatus.FAILED if error else JobStatus.COMPLETED)
    done.return_value = error
    return done


class Launcher:
    """Writes what a run would, unless its overrides have one of ``broken``; ``before`` the first it does something."""

    def __init__(self, broken=(), before=lambda: None):
        self.broken, self.before, self.calls = broken, before, []

    def launch(self, job_overrides, initial_job_idx):
        if not self.calls:
            self.before()
        self.calls.append(job_overrides)
        return [self._job(job) for job in job_overrides]

    def _job(self, job):
        if set(self.broken) & set(job):
            return outcome(ValueError("gc.lam=2 is\noutside"))
        values = {key: value.strip("'") for key, value in (override.split("=", 1) for override in job)}
        own = [override for override in job if not override.startswith(("hydra.", "ckpt_path"))]
        finish(Path(values["hydra.sweep.dir"]) / values["hydra.sweep.subdir"], own, int(values["rounds"]))
        return outcome()


class BasicLauncher(Launcher):
    """Goes by the name of Hydra's own."""


class Studies:
    """``studies(launcher, *arguments, name=…, **node)`` runs a study below a folder."""

    def __init__(self, folder):
        self.root = folder / "study"

    def __call__(self, launcher, *arguments, name="try", **node):
        place = {"runtime": {"choices": {"study": name}}, "sweep": {"dir": str(self.root / name / "full")}}
        config = {"study": {"table": TABLE, **node}, "scale": "full", "hydra": place}
        sweep(OmegaConf.create(config | {"paths": {"log_dir": str(self.root.parent)}}), CONTEXT, launcher, [*arguments])
