"""What a study will cost, before it starts: from its own rounds so far, else from a few steps on random numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from gcfed.study.work import STATES, STEPS, Task, Work

if TYPE_CHECKING:
    from gcfed.report.runs import Run
    from gcfed.study.calibrate import Speed

ROUND_S = 0.05  # a round's own: loop, logs, checkpoint of a small model
JOB_S = 5.0  # a job's own: data, its first steps, figures


class Measured:
    """Seconds a round, and bytes of a model, of the runs that a study has already, by their work and method."""

    def __init__(self, runs: Iterable[tuple[Task, Run]]) -> None:
        self._seconds: dict[Work, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._bytes: dict[Work, int] = {}
        for task, run in runs:
            seconds = run.columns.get("time/round_s", np.empty(0))
            model = run.folder / "global_model.safetensors"
            if len(seconds):
                self._seconds[task.work][task.algorithm].append(typical(seconds))
            if model.is_file():
                self._bytes[task.work] = model.stat().st_size

    def seconds(self, task: Task) -> tuple[float, int] | None:
        """Of a round, and how many runs say so: those of the same method, else all, by what each takes."""
        runs = self._seconds.get(task.work)
        if not runs:
            return None
        if same := runs.get(task.algorithm):
            return float(np.median(same)), len(same)
        scaled = [s / STEPS.get(name, 1.0) for name, seconds in runs.items() for s in seconds]
        return float(np.median(scaled)) * STEPS.get(task.algorithm, 1.0), len(scaled)

    def model_bytes(self, work: Work) -> int | None:
        return self._bytes.get(work)


def typical(seconds: np.ndarray) -> float:
    """Mean seconds of a round [R]; a round longer than five medians, in which the machine slept, counts as five."""
    return float(np.minimum(seconds, 5 * np.median(seconds)).mean())


def calibrated(task: Task, speed: Speed) -> float:
    """Seconds of a round out of the seconds of a step, as if all clients had equally many samples."""
    work = task.work
    turns = ceil(ceil(work.per_round / speed.processes) / speed.at_once)
    training = turns * work.client_steps * speed.step_s * STEPS.get(task.algorithm, 1.0)
    testing = work.test_samples * speed.test_s / speed.processes / task.eval_every
    return training + testing + ROUND_S


def disk(task: Task, model_bytes: int) -> float:
    """Bytes of a finished run: its checkpoint, its final model and the states of the clients that took part."""
    work = task.work
    clients = work.num_clients or 1000
    touched = clients * (1 - (1 - min(1.0, work.per_round / clients)) ** task.rounds)
    return model_bytes * (2 + STATES.get(task.algorithm, 0) * touched)


@dataclass(frozen=True)
class Left:
    """A job that is not finished: the rounds that it has to go, and whether it has yet to begin."""

    name: str
    task: Task
    rounds: int
    fresh: bool


@dataclass(frozen=True)
class Estimate:
    """Seconds of each job that is left, by name; bytes that they will add; and what the figures rest on."""

    seconds: Mapping[str, float]
    bytes: float
    basis: str

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def estimate(left: Sequence[Left], measured: Measured, speed_of: Callable[[Left], Speed]) -> Estimate:
    """Of all jobs that are left; ``speed_of`` is asked once for each kind of work that no run has measured."""
    speeds: dict[Work, Speed] = {}
    seconds: dict[str, float] = {}
    added, runs, guessed = 0.0, 0, 0
    for job in left:
        work = job.task.work
        known = measured.seconds(job.task)
        if known is None:
            if work not in speeds:
                speeds[work] = speed_of(job)
            a_round = calibrated(job.task, speeds[work])
            guessed += 1
        else:
            a_round, count = known
            runs = max(runs, count)
        seconds[job.name] = JOB_S + job.rounds * a_round
        model = speeds[work].model_bytes if work in speeds else measured.model_bytes(work)
        added += disk(job.task, model or 0) if job.fresh else 0.0
    return Estimate(seconds, added, _basis(runs, guessed, len(left)))


def _basis(runs: int, guessed: int, jobs: int) -> str:
    steps = "a few local steps on random numbers, as if clients were equally large and nothing else ran here"
    if not jobs:
        return "nothing is left"
    if not guessed:
        return f"rounds that studies have finished here (up to {runs} runs of a kind)"
    if guessed == jobs:
        return steps
    return f"rounds that studies have finished here; for {guessed} of {jobs} jobs {steps}"


def duration(seconds: float) -> str:
    """As people say it: 40 s, 12 min, 1 h 12 min, 31 h, 12 days."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 600:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{seconds / 3600:.0f} h" if seconds < 3 * 86400 else f"{seconds / 86400:.0f} days"
