"""A study as a sweep: says what it will cost, runs what is not finished, and names what failed."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from gcfed.report.runs import FAILURE
from gcfed.study.estimate import Estimate, duration
from gcfed.study.launch import Outcome, launch, one_by_one
from gcfed.study.library import Library, shelf
from gcfed.study.overrides import quoted
from gcfed.study.plan import jobs_of, read_study
from gcfed.study.planning import Planned, estimate_of, listing, plan, summary
from gcfed.study.state import BEGUN, FINISHED, NEW, checkpoint, state_of
from gcfed.utils.compose import Composer
from gcfed.utils.lock import locked
from gcfed.utils.words import say

log = logging.getLogger(__name__)
DONE = Outcome()


def sweep(config: DictConfig, context: HydraContext, launcher: Launcher, arguments: list[str]) -> None:
    """Runs the jobs of ``configs/study/<name>.yaml`` that are not finished; the launcher is the user's choice.

    With Hydra's own launcher jobs start one by one, each announced with the time that is left; another one gets all at
    once. Jobs that fail are listed at the end, and the exit code is then 1; the others are finished all the same.

    Raises:
        ValueError, FileNotFoundError: a study, a part of it or a folder that is not as it must be; before any job.
    """
    name = config.hydra.runtime.choices.get("study")
    if name is None:
        raise ValueError("hydra/sweeper=study needs a study: python src/train.py -m study=<a file of configs/study>.")
    loader = context.config_loader
    compose = Composer(lambda overrides: loader.load_sweep_config(config, overrides), set(loader.list_groups("")))
    node: Any = OmegaConf.to_container(config.study)
    study = read_study(name, config.scale, node, arguments)
    jobs, left_out = jobs_of(study)
    root = Path(config.hydra.sweep.dir).absolute()
    library = Library(shelf(root, study.name))
    planned = plan(jobs, root, library, compose)
    cost = estimate_of(planned, library, compose)
    title, together = f"study {study.name}, scale {study.scale}", not one_by_one(launcher)
    say(f"{title}: {len(planned)} jobs in {root}", *summary(planned, root, left_out, cost, together=together))
    if study.dry_run:
        say(*listing(planned, cost))
        return
    left = [p for p in planned if p.state.kind in (BEGUN, NEW)]
    batches = [left] if together and left else [[p] for p in left]
    close(title, planned, run(batches, root, cost, launcher))


def run(batches: Sequence[Sequence[Planned]], root: Path, cost: Estimate, launcher: Launcher) -> dict[str, Outcome]:
    """Runs one batch after the other; the outcomes by the names of the jobs' folders."""
    outcomes: dict[str, Outcome] = {}
    expected = taken = 0.0  # seconds of the jobs so far whose cost was known
    number, jobs = 0, sum(map(len, batches))
    for i, batch in enumerate(batches):
        pace = taken / expected if expected else 1.0  # this machine's seconds for an estimated one
        rest = pace * sum(cost.seconds[p.job.folder] for later in batches[i:] for p in later)
        about = f"; about {duration(rest)} left" if isfinite(rest) else ""
        first, number = number, number + len(batch)
        with ready(batch, root, outcomes) as mine:
            if not mine:
                continue
            if len(batch) == 1:
                say(f"job {number} of {jobs}: {mine[0].job.title}{about}", f"  {mine[0].folder}")
            started = time.perf_counter()
            found = launch(launcher, [overrides(p, root) for p in mine], first)
        seconds = sum(cost.seconds[p.job.folder] for p in mine)
        if isfinite(seconds):
            expected, taken = expected + seconds, taken + time.perf_counter() - started
        for p, outcome in zip(mine, found, strict=True):
            outcomes[p.job.folder] = outcome
            if outcome.reason:
                log.error("failed: %s, %s", p.job.title, outcome.reason)
    return outcomes


@contextmanager
def ready(batch: Sequence[Planned], root: Path, outcomes: dict[str, Outcome]) -> Iterator[list[Planned]]:
    """Those jobs of a batch that are still to be run, as their folders are now; nobody else can start them meanwhile.

    Hours may have passed since the plan: another process of the same study may have finished some, or be at them.
    """
    mine: list[Planned] = []
    with ExitStack() as locks:
        for p in batch:
            name = p.job.folder
            if holder := locks.enter_context(locked(root / ".locks" / name)):
                outcomes[name] = Outcome(reason=f"{holder} is at it")
                say(f"skipped: {p.job.title}; {holder} is at it")
                continue
            p = replace(p, state=state_of(p.folder, p.made))
            if p.state.kind in (BEGUN, NEW):
                mine.append(p)
            else:
                say(f"skipped: {p.job.title}; meanwhile {p.state.why or 'it was finished'}")
        yield mine


def overrides(planned: Planned, root: Path) -> list[str]:
    """What Hydra composes the job from: its own overrides, its folder, and its checkpoint if it has begun."""
    place = [f"hydra.sweep.dir={quoted(str(root))}", f"hydra.sweep.subdir={quoted(planned.job.folder)}"]
    if planned.state.kind == BEGUN:
        place.append(f"ckpt_path={quoted(str(checkpoint(planned.folder)))}")
    return [*planned.job.overrides, *place]


def close(title: str, planned: Sequence[Planned], outcomes: dict[str, Outcome]) -> None:
    """Says how the study ended, as the folders have it; exit code 1 where a job is not finished."""
    now = [(p, state_of(p.folder, p.made)) for p in planned]
    broken = [(p, state) for p, state in now if state.kind != FINISHED]
    if not broken:
        say(f"{title}: all {len(planned)} jobs are finished")
        return
    lines = [f"{title}: {len(planned) - len(broken)} of {len(planned)} jobs are finished; these are not:"]
    for p, state in broken:
        why = outcomes.get(p.job.folder, DONE).reason or state.why or first_line(p.folder / FAILURE) or "it was stopped"
        lines += [f"  {p.job.title}: {why}", f"    {p.folder}"]
    advice = "The same command tries them again and leaves the finished ones alone."
    if any(state.kind == BEGUN and p.job.folder in outcomes for p, state in broken):
        advice += " What has begun goes on from its checkpoint: move its folder away to start it anew."
    if any(outcome.lost for outcome in outcomes.values()):
        advice += " But the launcher failed, and jobs that it started may still be running: look before that."
    log.error("\n".join([*lines, advice]))
    raise SystemExit(1)


def first_line(path: Path) -> str:
    return path.read_text(errors="replace").split("\n", 1)[0] if path.is_file() else ""
