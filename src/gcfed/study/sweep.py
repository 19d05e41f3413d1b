"""A study as a sweep: says what it will cost, runs what is not finished, and names what failed."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from gcfed.report.runs import FAILURE
from gcfed.study.estimate import Estimate, Left, Measured, duration, estimate
from gcfed.study.launch import launch, one_by_one, reason_of
from gcfed.study.library import Library, shelf
from gcfed.study.overrides import key_of, quoted
from gcfed.study.plan import Job, jobs_of, read_study
from gcfed.study.state import BEGUN, FINISHED, NEW, State, checkpoint, conflict, state_of
from gcfed.study.work import Task, task_of
from gcfed.utils.words import size

if TYPE_CHECKING:
    from gcfed.study.calibrate import Speed

log = logging.getLogger(__name__)
Compose = Callable[[Sequence[str]], DictConfig]

# What leaves the work of a round as it is, but for what the method takes: jobs that differ in it share a composed
# config. Not an algorithm that sets the clients' steps.
METHOD = ("algorithm", "gc", "quantization", "server", "aggregator", "methods", "seed", "partition")
SETS_STEPS = ("algorithm=fedgc",)


@dataclass(frozen=True)
class Planned:
    """A job with its folder, its task and what its folder holds."""

    job: Job
    folder: Path
    task: Task
    state: State


def sweep(config: DictConfig, context: HydraContext, launcher: Launcher, arguments: list[str]) -> list[JobReturn]:
    """Runs the jobs of ``configs/study/<name>.yaml`` that are not finished; the launcher is the user's choice.

    With Hydra's own launcher jobs start one by one, each announced with the time that is left; another one gets all at
    once. Jobs that fail are listed at the end, and the exit code is then 1; the others are finished all the same.

    Raises:
        ValueError, FileNotFoundError: a study, a part of it or a folder that is not as it must be; before any job.
    """
    name = config.hydra.runtime.choices.get("study")
    if name is None:
        raise ValueError("hydra/sweeper=study needs a study: python src/train.py -m study=<a file of configs/study>.")

    def compose(overrides: Sequence[str]) -> DictConfig:
        return context.config_loader.load_sweep_config(config, list(overrides))

    node: Any = OmegaConf.to_container(config.study)
    study = read_study(name, config.scale, node, arguments)
    jobs, left_out = jobs_of(study)
    root = Path(config.hydra.sweep.dir).absolute()
    library = Library(shelf(root, study.name))
    planned = plan(jobs, root, library, compose)
    cost = estimate_of(planned, library, compose)
    title = f"study {study.name}, scale {study.scale}"
    say(f"{title}: {len(planned)} jobs in {root}", *summary(planned, root, left_out, cost))
    if study.dry_run:
        say(*listing(planned, cost))
        return []
    returns = run([p for p in planned if p.state.kind != FINISHED], root, cost, launcher)
    close(title, planned, returns)
    return list(returns.values())


def plan(jobs: Sequence[Job], root: Path, library: Library, compose: Compose) -> list[Planned]:
    """Each job with its task and its folder's state; its folder is another study's where that has made the same run.

    Raises:
        ValueError: folders that hold the runs of another setting.
    """
    tasks: dict[tuple[str, ...], Task] = {}
    planned, strange = [], []
    for job in jobs:
        work = tuple(o for o in job.overrides if key_of(o).split(".")[0] not in METHOD or o in SETS_STEPS)
        if work not in tasks:
            cfg = compose(work)
            tasks[work] = task_of(lambda key, cfg=cfg: OmegaConf.select(cfg, key))  # type: ignore[misc]
        task = tasks[work].by(next((o.split("=")[1] for o in job.overrides if key_of(o) == "algorithm"), None))
        folder = root / job.folder
        state = state_of(folder, task.rounds)
        if state.kind == NEW and (twin := library.finished(job.overrides, task.rounds)):
            folder, state = twin.folder, State(FINISHED, twin.rounds, twin)
        planned.append(Planned(job, folder, task, state))
        if state.run and (odd := conflict(state.run, job, compose)):
            strange.append(f"{folder} holds another run: {odd}.")
    if strange:
        more = [f"… and {len(strange) - 5} more."] if len(strange) > 5 else []
        advice = "Move them away, or choose another place with paths.log_dir=<folder>."
        raise ValueError("\n".join([*strange[:5], *more, advice]))
    return planned


def estimate_of(planned: Sequence[Planned], library: Library, compose: Compose) -> Estimate:
    """Of what is left; the rounds of all studies tell how long one takes."""
    left = {
        p.job.folder: Left(p.job.folder, p.task, max(1, p.task.rounds - p.state.rounds), p.state.kind == NEW)
        for p in planned
        if p.state.kind != FINISHED
    }
    jobs = {p.job.folder: p.job for p in planned}

    def speed_of(job: Left) -> Speed:
        from gcfed.study.calibrate import measure  # torch

        say(f"timing a few local steps of {job.task.work.model} on inputs as those of {job.task.work.data} …")
        return measure(compose(jobs[job.name].overrides))

    return estimate(list(left.values()), Measured(library.tasks()), speed_of)


def run(left: Sequence[Planned], root: Path, cost: Estimate, launcher: Launcher) -> dict[str, JobReturn]:
    """The jobs' returns by the names of their folders."""
    batches = [[p] for p in left] if one_by_one(launcher) else [list(left)] if left else []
    returns: dict[str, JobReturn] = {}
    expected = taken = 0.0
    for i, batch in enumerate(batches):
        if len(batches) == len(left):
            pace = taken / expected if expected else 1.0  # this machine's seconds for an estimated one
            rest = pace * sum(cost.seconds[p.job.folder] for p in left[i:])
            (p,) = batch
            say(f"job {i + 1} of {len(left)}: {p.job.title}; about {duration(rest)} left", f"  {p.folder}")
        started = time.perf_counter()
        for p, result in zip(batch, launch(launcher, [overrides(p, root) for p in batch], i), strict=True):
            returns[p.job.folder] = result
            expected += cost.seconds[p.job.folder]
            if reason := reason_of(result):
                log.error("failed: %s, %s", p.job.title, reason)
        taken += time.perf_counter() - started
    return returns


def overrides(planned: Planned, root: Path) -> list[str]:
    """What Hydra composes the job from: its own overrides, its folder, and its checkpoint if it has begun."""
    place = [f"hydra.sweep.dir={quoted(str(root))}", f"hydra.sweep.subdir={quoted(planned.job.folder)}"]
    if planned.state.kind == BEGUN:
        place.append(f"ckpt_path={quoted(str(checkpoint(planned.folder)))}")
    return [*planned.job.overrides, *place]


def close(title: str, planned: Sequence[Planned], returns: dict[str, JobReturn]) -> None:
    """Says how the study ended; exit code 1 where a job is not finished."""
    reasons = {p.job.folder: reason_of(returns.get(p.job.folder)) for p in planned}
    broken = [p for p in planned if reasons[p.job.folder] or state_of(p.folder, p.task.rounds).kind != FINISHED]
    if not broken:
        say(f"{title}: all {len(planned)} jobs are finished")
        return
    lines = [f"{title}: {len(planned) - len(broken)} of {len(planned)} jobs are finished; these are not:"]
    for p in broken:
        lines.append(f"  {p.job.title}: {reasons[p.job.folder] or first_line(p.folder / FAILURE) or 'it was stopped'}")
        lines.append(f"    {p.folder}")
    log.error("\n".join([*lines, "The same command tries them again and leaves the finished ones alone."]))
    raise SystemExit(1)


# --------------------------------------------------------------------------------------------------- what it says
def summary(planned: Sequence[Planned], root: Path, left_out: dict[str, list[str]], cost: Estimate) -> list[str]:
    lines = [
        "  " + ", ".join(f"{sum(p.state.kind == kind for p in planned)} {kind}" for kind in (FINISHED, BEGUN, NEW))
    ]
    if elsewhere := sorted({str(p.folder.parent) for p in planned if p.folder.parent != root}):
        count = sum(p.folder.parent != root for p in planned)
        lines.append(f"  {count} of the finished are runs of other studies: {', '.join(elsewhere)}")
    for reason, cells in left_out.items():
        few = "; ".join(cells[:3]) + (f" and {len(cells) - 3} more" if len(cells) > 3 else "")
        lines.append(f"  left out: {few} ({reason})")
    if cost.seconds:
        time_and_disk = (
            f"{duration(cost.total)} on this machine, one job after the other, and {size(cost.bytes)} of disk"
        )
        lines += [f"  estimate: {time_and_disk}", f"  it rests on {cost.basis}"]
    return lines


def listing(planned: Sequence[Planned], cost: Estimate) -> list[str]:
    """A line a job: state, estimated time, name and folder."""
    times = {name: duration(seconds) for name, seconds in cost.seconds.items()}
    return [f"  {p.state.kind:<11} {times.get(p.job.folder, ''):>10}  {p.job.title}  ({p.job.folder})" for p in planned]


def say(*lines: str) -> None:
    """To the terminal: the study's own words, apart from the jobs' log."""
    sys.stdout.write("\n".join([*lines, ""]))
    sys.stdout.flush()


def first_line(path: Path) -> str:
    return path.read_text(errors="replace").split("\n", 1)[0] if path.is_file() else ""
