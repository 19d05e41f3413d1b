"""What a run was made with, and what that makes of a job's folder: finished, to continue, to start, or in the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gcfed.report import runs
from gcfed.report.groups import setting_of
from gcfed.report.runs import Run, read_run
from gcfed.utils.resolvers import OVERRIDES
from gcfed.utils.settings import IDENTITY

FINISHED, BEGUN, NEW, OTHER = KINDS = ("finished", "to continue", "to start", "not to be run")
_TRAINER = ("precision", "max_time", "limit_train_batches", "limit_val_batches")  # what of the trainer changes numbers
_ELSEWHERE = ("folder", "figures")  # of a metric: where its files go, and whether it draws


@dataclass(frozen=True)
class Made:
    """What a run's numbers rest on: two runs in which this is equal are the same run.

    Attributes:
        setting: dotted key → value, of all that changes what is computed, the seed too, but for the rounds.
        metrics: name → settings, of what is measured beside accuracy and loss.
    """

    setting: Mapping[str, Any]
    rounds: int
    eval_every: int
    metrics: Mapping[str, Any]

    @cached_property
    def key(self) -> str:
        """The setting as text."""
        return repr(sorted(self.setting.items()))

    def seeded(self, seed: int) -> Made:
        return Made({**self.setting, "seed": seed}, self.rounds, self.eval_every, self.metrics)

    def other_setting(self, wanted: Made) -> str:
        """In what this run's setting is not the wanted one: ``client.epochs is 5 there, 2 here``; "" if in nothing."""
        keys = sorted(self.setting.keys() | wanted.setting.keys())
        there, here = ([made.setting.get(key) for key in keys] for made in (self, wanted))
        return _differences(zip(keys, there, here, strict=True))

    def other_measure(self, wanted: Made) -> str:
        """In what it was tested or measured otherwise; it may have measured more. ``rounds`` are not looked at."""
        every = [min(made.eval_every, wanted.rounds) for made in (self, wanted)]  # the last round is always tested
        lines = [("eval_every", *every)]
        lines += [(f"metrics.{name}", self.metrics.get(name), asked) for name, asked in wanted.metrics.items()]
        return _differences(lines)


def _differences(lines: Any) -> str:
    differ = [f"{key} is {there!r} there, {here!r} here" for key, there, here in lines if there != here]
    return "; ".join(differ[:4])


def made_of(run: Run) -> Made:
    """Of a run folder, or of a composed config as :func:`as_run` has it."""
    setting = {key: value for key, value in setting_of(run).items() if key != "rounds"}
    setting |= {f"trainer.{key}": run.get(f"trainer.{key}") for key in _TRAINER} | {"seed": run.seed}
    metrics = {
        name: {k: v for k, v in (settings or {}).items() if k not in _ELSEWHERE}
        for name, settings in (run.get("metrics") or {}).items()
    }
    return Made(setting, int(run.get("rounds", 0)), int(run.get("eval_every", 1)), metrics)


def as_run(cfg: DictConfig) -> Run:
    """A composed config in the shape of a run, as far as :func:`made_of` looks at it."""
    config = {key: _resolved(cfg[key]) for key in ("tags", "rounds", "eval_every", *IDENTITY) if key != "client_store"}
    config["client_store"] = {"dtype": cfg.client_store.dtype}  # its folder is known in a run only
    config["trainer"] = {key: OmegaConf.select(cfg, f"trainer.{key}") for key in _TRAINER}
    config["metrics"] = {
        name: {key: _resolved(settings[key]) for key in settings if key not in _ELSEWHERE}
        for name, settings in (cfg.metrics or {}).items()
        if settings is not None
    }
    return Run(Path(), config, (), {}, {}, "", "")


def _resolved(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


@dataclass(frozen=True)
class State:
    """Of a job's folder.

    Attributes:
        kind: FINISHED; BEGUN: there is a checkpoint; NEW; or OTHER: it holds what neither counts nor can go on.
        rounds: that are done.
        why: it is OTHER.
        foreign: it is OTHER since it is a run of another setting, which the job's folder should not hold.
    """

    kind: str
    rounds: int = 0
    why: str = ""
    foreign: bool = False


def state_of(folder: Path, wanted: Made) -> State:
    """What the folder is to the job whose run is ``wanted``. A run that diverged has come to its end too."""
    run = read_run(folder) if (folder / OVERRIDES).is_file() else None
    begun = checkpoint(folder).is_file()
    if run is None or not (run.summary or begun):
        return State(BEGUN if begun else NEW)
    if not run.config:
        return State(OTHER, why=run.note)
    there = made_of(run)
    done, ended = run.rounds, has_ended(run)
    if odd := there.other_setting(wanted):
        return State(OTHER, done, odd, foreign=True)
    if done > wanted.rounds:
        return State(OTHER, done, f"{done} rounds are done there, {wanted.rounds} are asked for")
    if odd := there.other_measure(wanted):
        return State(OTHER, done, odd)
    if ended and there.rounds == wanted.rounds:
        return State(FINISHED, done)
    if begun and (run.columns or not run.summary):
        return State(BEGUN, done)
    reason = f"after round {done} of {there.rounds}, and without a checkpoint to go on from"
    return State(OTHER, done, reason if run.columns else run.note)


def has_ended(run: Run) -> bool:
    return run.state in (runs.FINISHED, runs.DIVERGED)


def checkpoint(folder: Path) -> Path:
    return folder / "checkpoints" / "last.ckpt"
