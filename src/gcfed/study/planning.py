"""What a study has left to do: its jobs, what their folders hold, and what that costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gcfed.study.estimate import Estimate, Left, Measured, duration, estimate
from gcfed.study.library import Library
from gcfed.study.overrides import key_of
from gcfed.study.plan import Job
from gcfed.study.state import FINISHED, KINDS, NEW, OTHER, Made, State, as_run, made_of, state_of
from gcfed.study.work import Task, task_of
from gcfed.utils.words import say, size

if TYPE_CHECKING:
    from gcfed.study.calibrate import Speed

Compose = Callable[[Sequence[str]], DictConfig]
# What a step's time depends on, of what jobs of a study differ in.
_TIMED = (
    "tags.data", "model", "precision", "client.batch_size", "client.stack", "participation.per_round",
    "trainer.accelerator", "trainer.devices",
)  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """A job, what its run is to be made with, the folder that holds or will hold that, and its state.

    Attributes:
        same: titles of other jobs whose run it is too.
        near: in what runs of other studies differ that are of its setting and yet do not count.
    """

    job: Job
    made: Made
    task: Task
    folder: Path
    state: State
    same: tuple[str, ...] = ()
    near: str = ""


def plan(jobs: Sequence[Job], root: Path, library: Library, compose: Compose) -> list[Planned]:
    """Each run with its folder's state; its folder is another study's where that has made the same run.

    Raises:
        ValueError: overrides that do not compose, or folders that hold the runs of another setting.
    """
    cells: dict[tuple[str, ...], tuple[Made, Task]] = {}
    chosen: dict[str, list[Job]] = {}
    for job in jobs:
        cell = _but_seed(job)
        if cell not in cells:
            cells[cell] = _read(job, compose)
        chosen.setdefault(repr(cells[cell][0].seeded(job.seed)), []).append(job)
    planned, strange = [], []
    for job, *others in chosen.values():
        made, task = cells[_but_seed(job)]
        made, folder, near = made.seeded(job.seed), root / job.folder, ""
        state = state_of(folder, made)
        if state.foreign:
            strange.append(f"{folder} holds another run: {state.why}.")
        if state.kind != FINISHED and (twin := library.finished(made)):
            folder, state = twin.folder, State(FINISHED, twin.rounds)
        elif state.kind == NEW:
            near = library.near(made)
        planned.append(Planned(job, made, task, folder, state, tuple(other.title for other in others), near))
    if strange:
        more = [f"… and {len(strange) - 5} more."] if len(strange) > 5 else []
        advice = "Move them away, or choose another place with paths.log_dir=<folder>."
        raise ValueError("\n".join([*strange[:5], *more, advice]))
    return planned


def _but_seed(job: Job) -> tuple[str, ...]:
    return tuple(override for override in job.overrides if key_of(override) != "seed")


def _read(job: Job, compose: Compose) -> tuple[Made, Task]:
    try:
        cfg = compose(_but_seed(job))
        made = made_of(as_run(cfg))
        return made, task_of(made, lambda key: OmegaConf.select(cfg, key))
    except (ValueError, OmegaConfBaseException) as error:
        raise ValueError(f"{job.title}: {' '.join(str(error).split())}") from None


def estimate_of(planned: Sequence[Planned], library: Library, compose: Compose) -> Estimate:
    """Of what is left; the rounds of all studies tell how long one takes. Whatever goes wrong, it is unknown then."""
    left = {
        p.job.folder: Left(p.job.folder, p.task, max(1, p.task.rounds - p.state.rounds), p.state.kind == NEW)
        for p in planned
        if p.state.kind not in (FINISHED, OTHER)
    }
    jobs = {p.job.folder: p.job for p in planned}
    speeds: dict[str, Speed | None] = {}

    def speed_of(job: Left) -> Speed | None:
        cfg = compose(_but_seed(jobs[job.name]))
        timed = repr([OmegaConf.select(cfg, key) for key in _TIMED])
        if timed not in speeds:
            say(f"timing a few local steps of {cfg.tags.model} on inputs as those of {cfg.tags.data} …")
            speeds[timed] = _speed(cfg)
        return speeds[timed]

    return estimate(
        list(left.values()), Measured((task_of(made, run.get), run) for made, run in library.runs), speed_of
    )


def _speed(cfg: DictConfig) -> Speed | None:
    from gcfed.study.calibrate import measure  # torch

    try:
        return measure(cfg)
    except Exception as error:
        say(f"  this could not be timed: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        return None


# --------------------------------------------------------------------------------------------------- what it says
def summary(
    planned: Sequence[Planned], root: Path, left_out: Mapping[str, Sequence[str]], cost: Estimate, *, together: bool
) -> list[str]:
    """How many jobs there are of each state, what does not count, and what the rest will cost."""
    kinds = Counter(p.state.kind for p in planned)
    lines = ["  " + ", ".join(f"{kinds[kind]} {kind}" for kind in KINDS if kinds[kind] or kind != OTHER)]
    own = root.resolve()
    elsewhere = [p.folder.resolve().parent for p in planned]
    if others := sorted({str(place) for place in elsewhere if place != own}):
        count = sum(place != own for place in elsewhere)
        lines.append(f"  {count} of the finished are runs of other studies: {', '.join(others)}")
    for why, count in Counter(p.state.why for p in planned if p.state.kind == OTHER).items():
        lines.append(
            f"  {count} not to be run, their folders hold other runs ({why}): ask for what they have, or take "
            "paths.log_dir=<folder> for runs of their own"
        )
    for why, count in Counter(p.near for p in planned if p.near).items():
        lines.append(
            f"  {count} start although there are runs of the same setting ({why}): ask for that to have them count"
        )
    for p in (p for p in planned if p.same):
        lines.append(f"  the same run: {'; '.join([p.job.title, *p.same])}")
    for reason, cells in left_out.items():
        few = "; ".join(cells[:3]) + (f" and {len(cells) - 3} more" if len(cells) > 3 else "")
        lines.append(f"  left out: {few} ({reason})")
    if cost.seconds:
        lines += _cost(cost, "in one launch" if together else "one job after the other")
    return lines


def _cost(cost: Estimate, order: str) -> list[str]:
    if cost.unknown == len(cost.seconds):
        return ["  estimate: unknown until the first job has finished"]
    line = f"  estimate: {duration(cost.total)} of work on this machine, {order}"
    if cost.bytes:
        line += f", and {size(cost.bytes)} of disk"
    if cost.unknown:
        line += f"; {cost.unknown} of {len(cost.seconds)} jobs unknown and not in it"
    return [line, f"  it rests on {cost.basis}"]


def listing(planned: Sequence[Planned], cost: Estimate) -> list[str]:
    """A line a job: state, estimated time, name and folder."""
    times = {name: duration(seconds) for name, seconds in cost.seconds.items()}
    return [f"  {p.state.kind:<13} {times.get(p.job.folder, ''):>10}  {p.job.title}  ({p.job.folder})" for p in planned]
