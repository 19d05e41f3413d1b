"""The book of a search: its trials in Optuna's database, and the tables that people read."""

from __future__ import annotations

import csv
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from gcfed.report.measures import value
from gcfed.report.runs import Run, read_run
from gcfed.study.launch import Outcome
from gcfed.study.state import has_ended
from gcfed.utils.files import replacing
from gcfed.utils.words import say

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

log = logging.getLogger(__name__)
TABLE, BEST = "trials.csv", "optimization_results.yaml"
IN_A_ROW = 3  # failures of trials that end a search: what they have in common is not their values


def name_of(trial: FrozenTrial) -> str:
    """The name of its folder."""
    return f"trial_{trial.number:04d}"


def values_of(trial: FrozenTrial) -> str:
    return " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in trial.params.items())


class Book:
    """What is known of a search's trials.

    Args:
        root: the folder of the search, in which the trials' lie.
        metric: what it optimizes, a figure of the finished run.
    """

    def __init__(self, study: Study, root: Path, metric: str) -> None:
        self.study, self.root, self.metric = study, root, metric
        self.failed = self.in_a_row = 0  # trials of this process

    def open(self, setting: dict[str, Any]) -> None:
        """Refuses to mix the trials of two searches; before the first value the metric may still be another one."""
        if not self.study.trials and any(self.root.glob("trial_*/config.yaml")):
            raise ValueError(f"{self.root} holds the trials of a search without its database: move them away.")
        then = self.study.user_attrs.get("setting", setting)
        keys = sorted(key for key in then.keys() | setting.keys() if then.get(key) != setting.get(key))
        differ = [f"{key} was {then.get(key)}, now {setting.get(key)}" for key in keys if self.done or key != "metric"]
        if differ:
            raise ValueError(
                f"{self.root} holds another search: {'; '.join(differ[:4])}. Give this one a folder with "
                "hydra.sweep.dir=<folder>."
            )
        self.study.set_user_attr("setting", setting)

    @property
    def done(self) -> list[FrozenTrial]:
        """Trials that count: with a value, or with one that is not finite."""
        return [t for t in self.study.trials if t.state.name in ("COMPLETE", "PRUNED")]

    @property
    def begun(self) -> list[FrozenTrial]:
        return [t for t in self.study.trials if not t.state.is_finished()]

    @property
    def best(self) -> str:
        if not any(trial.state.name == "COMPLETE" for trial in self.study.trials):
            return ""
        return f"; best so far {self.study.best_value:.4g} in {name_of(self.study.best_trial)}"

    def enter(self, trial: FrozenTrial, outcome: Outcome) -> None:
        """Notes how a trial ended.

        Raises:
            ValueError: no trial will have a value, or nobody knows yet whether this one has; the same command goes on.
        """
        folder = self.root / name_of(trial)
        run = read_run(folder) if (folder / "config.yaml").is_file() else None
        found = outcome.value
        if found is None and run is not None and has_ended(run):
            # A run that was at its end before it was continued, a measure over its rounds, or a job that its launcher
            # has lost sight of.
            found = value(run, self.metric)
            if found is None and not _has(run, self.metric):
                known = ", ".join([*run.summary, *(f"last:{column}" for column in run.columns)])
                raise ValueError(f"optimized_metric={self.metric} is not among what runs measure: {known}.")
        elif outcome.lost:
            raise ValueError(
                f"the launcher failed, {outcome.reason}: jobs that it started may still be running. The same command "
                "goes on with them; look before that."
            )
        elif outcome.reason or found is None:
            self._tell(trial, "fail", None, outcome.reason or "its folder holds no finished run")
            return
        if found is not None and math.isfinite(found):
            self._tell(trial, "complete", float(found), "")
        else:
            self._tell(trial, "pruned", None, f"{self.metric} was not reached, or is not finite")

    def _tell(self, trial: FrozenTrial, state: str, found: float | None, reason: str) -> None:
        from optuna.trial import TrialState

        try:
            self.study.tell(trial.number, found, state=TrialState[state.upper()])
        except ValueError as error:
            raise ValueError(
                f"{name_of(trial)} of {self.root} was ended by someone else: {error} One process does a search."
            ) from None
        if reason:
            reasons = self.study.user_attrs.get("reasons", {})
            self.study.set_user_attr("reasons", reasons | {str(trial.number): reason})
            log.error("%s %s: %s", name_of(trial), "failed" if state == "fail" else "counts for nothing", reason)
        self.failed += state == "fail"
        self.in_a_row = self.in_a_row + 1 if state == "fail" else 0
        if self.in_a_row == IN_A_ROW:
            self.write()
            raise ValueError(
                f"{IN_A_ROW} trials in a row have failed, the last with {reason}. See {self.root / TABLE}; once the "
                "reason is gone, the same command goes on."
            )

    def write(self) -> None:
        """``trials.csv``, a row a trial, and the best one."""
        trials, reasons = self.study.trials, self.study.user_attrs.get("reasons", {})
        keys = list(dict.fromkeys(key for trial in trials for key in trial.params))
        with replacing(self.root / TABLE) as temporary, temporary.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["number", "state", "value", "seconds", "folder", *keys, "reason"])
            for trial in trials:
                seconds = "" if trial.duration is None else round(trial.duration.total_seconds(), 1)
                shown = "" if trial.value is None else trial.value
                drawn = [trial.params.get(key, "") for key in keys]
                head = [trial.number, trial.state.name.lower(), shown, seconds, name_of(trial)]
                writer.writerow([*head, *drawn, reasons.get(str(trial.number), "")])
        if self.best:
            best = self.study.best_trial
            found = {
                "name": "optuna", "best_params": best.params, "best_value": best.value, "best_trial": best.number,
                "folder": name_of(best),
            }  # fmt: skip
            with replacing(self.root / BEST) as temporary:
                temporary.write_text(yaml.safe_dump(found, sort_keys=False))

    def close(self) -> None:
        """Says what was found; exit code 1 where a trial of this process has failed."""
        self.write()
        if not self.best:
            raise ValueError(f"no trial of the search in {self.root} has a value: see {TABLE} there.")
        with_value = sum(trial.state.name == "COMPLETE" for trial in self.study.trials)
        failed = f", {self.failed} failed" if self.failed else ""
        say(
            f"search: {with_value} trials with a value{failed}{self.best.replace('so far ', '')}: "
            f"{values_of(self.study.best_trial)}",
            f"  {self.root / TABLE}",
        )
        if self.failed:
            raise SystemExit(1)


def _has(run: Run, metric: str) -> bool:
    """Whether some run with these columns and figures would have the metric, whatever they are."""
    columns = {name: v if name == "round" else np.full_like(v, 1e9) for name, v in run.columns.items()}
    summary = {key: dict.fromkeys(v, 1.0) if isinstance(v, dict) else 1.0 for key, v in run.summary.items()}
    return value(replace(run, columns=columns, summary=summary), metric) is not None
