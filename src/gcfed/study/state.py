"""What a job's folder holds: a finished run, one to continue, or nothing yet; and whether it is this job's at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gcfed.report.groups import setting_of
from gcfed.report.runs import Run, read_run
from gcfed.study.overrides import identity
from gcfed.study.plan import Job
from gcfed.utils.resolvers import OVERRIDES
from gcfed.utils.settings import IDENTITY

FINISHED, BEGUN, NEW = "finished", "to continue", "to start"


@dataclass(frozen=True)
class State:
    """FINISHED, BEGUN (there is a checkpoint) or NEW; the rounds that are done; what the folder holds."""

    kind: str
    rounds: int = 0
    run: Run | None = None


def state_of(folder: Path, rounds: int) -> State:
    """Of a job that is to have so many rounds. A run that diverged has come to its end too."""
    run = read_run(folder) if (folder / OVERRIDES).is_file() else None
    done = int(run.summary.get("rounds", 0)) if run else 0
    if done >= rounds:
        return State(FINISHED, done, run)
    if checkpoint(folder).is_file():
        return State(BEGUN, run.rounds if run else 0, run)
    return State(NEW)


def checkpoint(folder: Path) -> Path:
    return folder / "checkpoints" / "last.ckpt"


def conflict(run: Run, job: Job, compose: Callable[[Sequence[str]], DictConfig]) -> str:
    """In what the run differs from the job, as "client.epochs is 5 there, 2 here"; "" if in nothing.

    The job's config is composed only where the overrides differ as texts.
    """
    if identity(run.overrides) == identity(job.overrides):
        return ""
    there = setting_of(run) | {"seed": run.seed}
    here = setting_of(as_run(compose(job.overrides))) | {"seed": job.seed}
    differ = sorted(k for k in there.keys() | here.keys() if k != "rounds" and there.get(k) != here.get(k))
    return "; ".join(f"{key} is {there.get(key)!r} there, {here.get(key)!r} here" for key in differ[:4])


def as_run(cfg: DictConfig) -> Run:
    """A composed config in the shape of a run, with what tells settings apart."""
    config: dict[str, Any] = {}
    for key in ("tags", "rounds", *IDENTITY):
        node = cfg[key]
        if key == "client_store":
            config[key] = {"dtype": node.dtype}  # its folder is known in a run only
        else:
            config[key] = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    return Run(Path(), config, (), {}, {}, "", "")
