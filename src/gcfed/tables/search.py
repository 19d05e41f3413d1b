"""An equal search for each cell of a table, with Optuna: as many trials for each, none past the
edge of stability.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml
from omegaconf import DictConfig

from gcfed.folders.columns import better, named_better
from gcfed.folders.folder import CONFIG, RESULTS, TRIALS, Run, read_run
from gcfed.folders.measures import check_direction, check_judges, parse
from gcfed.folders.reading import read_yaml
from gcfed.search import (
    folder_name,
    has_choices,
    locked_search,
    next_trial,
    number_of_ended,
    open_study,
    overrides_of,
    possible_draw,
    space_of,
    write_trials,
)
from gcfed.tables import running
from gcfed.tables.plan import Job
from gcfed.tables.records import Search
from gcfed.utils.checked import validated
from gcfed.utils.compose import composed, without_idle
from gcfed.utils.instantiate import installed
from gcfed.utils.refusal import Refusal, message_of

SAMPLER = {"_target_": "optuna.samplers.TPESampler", "n_startup_trials": 8}
SEED = 1  # the seed of Optuna's sampler
RISE = 1000.0  # a loss that grows by this factor was past the edge of stability
LOST_UPDATES = {
    "train/nonfinite_clients": "client updates left out",
    "train/refused_steps": "server steps taken back",
}


@dataclass(frozen=True)
class CellSearch:
    """The search of one cell."""

    cell: str
    folder: Path
    space: Mapping[str, Any]  # key → Optuna's distribution
    overrides: Sequence[str]  # of all trials, without the seeds of the search
    cfg: DictConfig

    def best(self) -> list[str] | None:
        """The overrides of the best trial; None if no trial has a value.

        Raises Refusal for an edited file.
        """
        path = self.folder / RESULTS
        if not path.is_file():
            return None
        try:
            found = validated("best_params", read_yaml(path).get("best_params"), dict[str, Any])
        except (Refusal, yaml.YAMLError) as error:
            raise Refusal(f"{path} cannot be read: {message_of(error)}") from None
        return without_idle(self.overrides, [f"{key}={value}" for key, value in found.items()])

    def failed(self) -> str:
        """How many trials cannot be the best, in brackets; "" if all can."""
        states = pd.read_csv(self.folder / TRIALS)["state"]
        number = int(states.isin(("fail", "refused")).sum())
        return f" ({number} of {len(states)} trials failed or were refused)" if number else ""

    def trials_left(self, search: Search) -> int:
        """How many trials have not begun."""
        return max(0, search.n_trials - len([*self.folder.glob("trial_*")]))


@dataclass
class Tuned:
    """What the searches of a table found."""

    jobs: dict[str, Job] = field(default_factory=dict)  # with the best parameters of their cells
    best: dict[str, list[str]] = field(default_factory=dict)  # those parameters, by cell
    failed: dict[str, str] = field(default_factory=dict)  # how many trials failed, by cell
    lost: dict[str, str] = field(default_factory=dict)  # why a job is left out, by its title
    # cells whose jobs a dry run counts without the parameters that their search will choose
    open_cells: list[str] = field(default_factory=list)
    # the trials that a dry run leaves to do: their configs and rounds
    left: list[tuple[DictConfig, int]] = field(default_factory=list)


def tune(
    search: Search, jobs: Mapping[str, Job], root: Path, *, dry_run: bool, train: bool
) -> Tuned:
    """Searches each cell of the jobs. A job whose search has chosen nothing is left out.

    Args:
        dry_run: counts the trials that are left instead, and keeps the jobs that wait for them.
        train: False: the searches are read as they are.

    Raises Refusal, before any search, if a config or a space is invalid, or if a job and a search
    share a seed.
    """
    installed("optuna", "search")
    cells = {job.cell: job for job in jobs.values()}
    run_seeds = {job.seed for job in jobs.values()}
    searches = [_cell_search(search, job, root) for job in cells.values()]
    for one in searches:
        _check(search, one, run_seeds)
    # after the check, which suggests names for a mistyped metric
    direction = direction_of(search)
    _report_unused(search, cells.values())
    for one in searches:
        if train and (one.folder / TRIALS).is_file():
            _opened(search, one, direction)
    tuned = Tuned()
    for one in searches:
        if dry_run:
            left = one.trials_left(search)
            tuned.left += [(one.cfg, one.cfg.rounds)] * (left * (len(search.seeds) or 1))
        elif train:
            print(f"search for {one.cell}", flush=True)
            run_trials(search, one, direction)
        chosen = one.best()
        if chosen is not None:
            tuned.best[one.cell] = chosen
            tuned.failed[one.cell] = one.failed()
        elif dry_run and left:
            tuned.open_cells.append(one.cell)
    for folder, job in jobs.items():
        if job.cell in tuned.best:
            tuned.jobs[folder] = job._replace(overrides=[*job.overrides, *tuned.best[job.cell]])
        elif job.cell in tuned.open_cells:
            tuned.jobs[folder] = job
        else:
            trials = root / "searches" / job.cell / TRIALS
            has_begun = trials.is_file()
            why = f"no trial of its search has a value: see {trials}"
            tuned.lost[job.title] = why if has_begun else "its search has not begun"
    return tuned


def direction_of(search: Search) -> str:
    """``maximize`` or ``minimize``.

    Raises Refusal for a measure that cannot choose between trials, or whose direction is not known.
    """
    metric = search.metric
    asked = parse(metric, "search.metric")
    if not asked.is_to_target and better(asked.column) == "neither":
        raise Refusal(
            f"search.metric={metric}: neither more nor less of {asked.column} is better: choose by"
            " another column, such as last:val/acc."
        )
    if search.direction is not None:
        check_direction(metric, search.direction, "search.metric", "search.direction")
        return search.direction
    if not asked.is_to_target and named_better(asked.column) is None:
        raise Refusal(
            f"search.metric={metric}: it is not known whether more or less of {asked.column} is"
            " better: set search.direction=maximize or minimize."
        )
    return "maximize" if asked.higher_is_better else "minimize"


def _cell_search(search: Search, job: Job, root: Path) -> CellSearch:
    words = dict(search.params)
    for override, more in search.knobs.items():
        if override in job.overrides:
            words |= more
    space, _ = space_of([f"{key}={word}" for key, word in words.items()])
    overrides = [word for word in job.overrides if not word.startswith("seed=")]
    overrides += search.overrides
    return CellSearch(
        cell=job.cell,
        folder=root / "searches" / job.cell,
        space=space,
        overrides=overrides,
        cfg=composed(overrides),
    )


def _check(search: Search, one: CellSearch, run_seeds: set[int]) -> None:
    """Raises Refusal if the trials cannot run, or if the search cannot choose for the runs."""
    from gcfed.assemble import declared_result  # torch

    drawn = possible_draw(one.space)
    if has_choices(one.space):
        drawn = without_idle(one.overrides, drawn)
    overrides = [*one.overrides, *drawn]
    trial = Job(f"search for {one.cell}", overrides, "", one.cell, one.cfg.seed)
    work = running.composed_work(trial, one.folder)
    key = f"search.metric={search.metric}"
    running.check_cells([work], {trial.cell: {search.metric: key}})
    key = f"{one.cell}: {key}"
    check_judges(parse(search.metric).column, declared_result(one.cfg), key)
    both = {*(search.seeds or [one.cfg.seed])} & run_seeds
    if both:
        raise Refusal(
            f"seed={min(both)} is in a search and in a run: set other seeds, or other search.seeds."
        )


def _report_unused(search: Search, jobs: Any) -> None:
    used = {word for job in jobs for word in job.overrides}
    for override in search.knobs.keys() - used:
        print(f"no job has {override}: its search.knobs are unused")


def _opened(search: Search, one: CellSearch, direction: str) -> Any:
    """Raises Refusal if the folder holds another search."""
    return open_study(
        one.folder,
        one.cfg,
        one.space,
        f"{search.metric} {search.seeds}",
        direction,
        remedy="Move this folder away, or write paths.log_dir=<folder>",
    )


def run_trials(search: Search, one: CellSearch, direction: str) -> None:
    """Runs trials until ``n_trials`` have ended.

    A stopped trial continues with the values that it had drawn.
    """
    with locked_search(one.folder, "give each process other rows"):
        study = _opened(search, one, direction)
        if not study.trials:
            for point in search.points:
                study.enqueue_trial(point)
        while number_of_ended(study) < search.n_trials:
            trial = next_trial(study, one.space, SAMPLER, SEED)
            _run_trial(search, one, study, trial)
            write_trials(study, one.folder, search.metric)
        write_trials(study, one.folder, search.metric)


def _run_trial(search: Search, one: CellSearch, study: Any, trial: Any) -> None:
    """Trains the runs of one trial, and reports their mean to Optuna."""
    from optuna.trial import TrialState

    drawn = overrides_of(trial)
    title = f"trial {trial.number + 1}"
    print(f"{title} of {search.n_trials}: {' '.join(drawn)}", flush=True)
    place = one.folder / folder_name(trial)
    results = []
    runs: dict[Path, list[str]] = {}
    for seed in search.seeds:
        runs[place / f"seed_{seed}"] = [f"seed={seed}"]
    in_effect = without_idle(one.overrides, drawn)
    for folder, words in (runs or {place: []}).items():
        failure = running.train([*one.overrides, *in_effect, *words], folder)
        results.append(result_of(folder, search.metric, failure))
    reasons = "; ".join(result.why for result in results if result.why)
    if reasons:
        trial.set_user_attr("reason", reasons)
        print(f"{title}: {reasons}", flush=True)
    values = [result.value for result in results if result.value is not None]
    if len(values) < len(results):
        study.tell(trial, state=TrialState.FAIL)
        return
    # above 0: never the best
    trial.set_constraint("edges", sum(result.past for result in results))
    study.tell(trial, float(np.mean(values)))


class TrialResult(NamedTuple):
    """A run of a trial."""

    value: float | None  # of the metric
    past: float  # how far it was past the edge of stability; 0: not at all
    why: str  # why it has no value, or is refused


def result_of(folder: Path, metric: str, failure: str) -> TrialResult:
    """What a run of a trial measured."""
    value = None
    reason = ""
    if (folder / CONFIG).is_file():
        run = read_run(folder)
        reason = run.reason
        if run.has_ended:
            value, _ = parse(metric).bounded(run)
    if value is None:
        return TrialResult(
            None, 0.0, f"{folder.name}: {failure or reason or f'{metric} is not finite'}"
        )
    past_edges = edges(run)
    past = sum(how_far for how_far, _ in past_edges)
    return TrialResult(value, past, "; ".join(f"{folder.name}: {words}" for _, words in past_edges))


def edges(run: Run) -> list[tuple[float, str]]:
    """How far a run was past the edge of stability, with a description: updates left out, server
    steps taken back, or a loss that grew a thousandfold and above its value in the first round
    (never a negative loss).
    """
    past_edges = []
    for column, what in LOST_UPDATES.items():
        count = float(run.curve(column).sum())
        if count:
            past_edges.append((count, f"{count:g} {what}"))
    for column in ("train/loss", "test/loss"):
        curve = run.curve(column)
        least = curve.cummin().shift()  # of the rounds before
        past = curve[(least >= 0) & (curve >= RISE * least) & (curve > curve.head(1).sum())]
        if len(past):
            t = past.idxmax()
            words = f"{column} rose from {least[t]:.3g} to {curve[t]:.3g} in round {t}"
            past_edges.append((float(np.log10(min(curve[t] / least[t], 1e30))), words))
    return past_edges
