"""What a study will cost, before it starts: from its own rounds so far, else from a few steps on random numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from typing import TYPE_CHECKING

import numpy as np

from gcfed.report.runs import Run
from gcfed.study.work import Task

if TYPE_CHECKING:
    from gcfed.study.calibrate import Speed

ROUND_S = 0.05  # a round's own: loop, logs, checkpoint of a small model
JOB_S = 5.0  # a job's own: data, its first steps, figures

# A round's training with each method, as a multiple of FedAvg's; those that are not named took 0.94 to 1.09. Measured
# with the CNN on CIFAR-10's shapes, one epoch a round, batches of 50, in seconds of one thread. What is done
# once a round, such as FedCurv's Fisher information and SSF's bases, weighs less where there are more epochs.
STEPS = {
    "fedcurv": 5.4, "fedgc": 1.2, "fedmlb": 1.6, "fedntd": 1.2, "fedreg": 18.0, "fedsam": 1.8, "fedsol": 2.3,
    "fedsub": 4.1, "moon": 1.5, "ssf": 2.6,
}  # fmt: skip
# Models that a method keeps of each client, on the disk once the client has taken part.
STATES = {"feddc": 2, "fedcurv": 2, "fedvarp": 1, "feddyn": 1, "ssf": 1, "fedsub": 1, "moon": 1, "scaffold": 1}


class Measured:
    """Seconds a round, and bytes of a model, of the runs that there are already, by kind of work and method."""

    def __init__(self, runs: Iterable[tuple[Task, Run]]) -> None:
        self._seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._bytes: dict[str, int] = {}
        for task, run in runs:
            seconds = typical(run.columns.get("time/round_s", np.empty(0)))
            model = run.folder / "global_model.safetensors"
            if isfinite(seconds):
                self._seconds[task.kind][task.algorithm].append(seconds)
            if model.is_file():
                self._bytes[task.kind] = model.stat().st_size

    def seconds(self, task: Task) -> float | None:
        """Of a round: as in runs of the same method, else in all, by what each takes."""
        runs = self._seconds.get(task.kind)
        if not runs:
            return None
        if same := runs.get(task.algorithm):
            return float(np.median(same))
        scaled = [s / STEPS.get(name, 1.0) for name, seconds in runs.items() for s in seconds]
        return float(np.median(scaled)) * STEPS.get(task.algorithm, 1.0)

    def model_bytes(self, task: Task) -> int | None:
        return self._bytes.get(task.kind)


def typical(seconds: np.ndarray) -> float:
    """Mean seconds of a round [R]; a round longer than five medians, in which the machine slept, counts as five."""
    seconds = seconds[np.isfinite(seconds)]
    return float(np.minimum(seconds, 5 * np.median(seconds)).mean()) if len(seconds) else float("nan")


def calibrated(task: Task, speed: Speed) -> float | None:
    """Seconds of a round out of the seconds of a step, as if all clients had equally many samples."""
    if task.client_steps is None or task.test_samples is None:
        return None
    turns = ceil(ceil(task.per_round / speed.processes) / speed.at_once)
    training = turns * task.client_steps * speed.step_s * STEPS.get(task.algorithm, 1.0)
    testing = task.test_samples * speed.test_s / speed.processes / task.eval_every
    return training + testing + ROUND_S


def disk(task: Task, model_bytes: float) -> float:
    """Bytes of a finished run: its checkpoint, its final model and the states of the clients that took part."""
    touched = task.num_clients * (1 - (1 - min(1.0, task.per_round / task.num_clients)) ** task.rounds)
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
    """Seconds of the jobs that are left, by name, NaN where unknown; bytes that they will add; what it rests on."""

    seconds: Mapping[str, float]
    bytes: float
    basis: str

    @property
    def total(self) -> float:
        """Seconds of the jobs of which they are known."""
        return float(np.nansum([*self.seconds.values()]))

    @property
    def unknown(self) -> int:
        """Jobs of which nothing is known."""
        return sum(not isfinite(seconds) for seconds in self.seconds.values())


def estimate(left: Sequence[Left], measured: Measured, speed_of: Callable[[Left], Speed | None]) -> Estimate:
    """Of all jobs that are left; ``speed_of`` is asked once for each kind of work that no run has measured."""
    speeds: dict[str, Speed | None] = {}
    seconds: dict[str, float] = {}
    added, timed = 0.0, 0
    for job in left:
        kind, a_round, model = job.task.kind, measured.seconds(job.task), measured.model_bytes(job.task)
        if a_round is None:
            if kind not in speeds:
                speeds[kind] = speed_of(job)
            if (speed := speeds[kind]) is not None:
                a_round, model = calibrated(job.task, speed), speed.model_bytes
                timed += a_round is not None
        seconds[job.name] = JOB_S + job.rounds * a_round if a_round is not None else float("nan")
        added += disk(job.task, model or 0) if job.fresh else 0.0
    known = sum(map(isfinite, seconds.values()))
    rounds = "rounds of such runs that lie here"
    steps = "a few local steps on random numbers, as if clients were equally large and nothing else ran here"
    basis = steps if timed == known else rounds if not timed else f"{rounds}; for {timed} of {known} jobs {steps}"
    return Estimate(seconds, added, basis if known else "nothing")


def duration(seconds: float) -> str:
    """As people say it: 40 s, 12 min, 1 h 12 min, 31 h, 12 days; unknown."""
    if not isfinite(seconds):
        return "unknown"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 600:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{seconds / 3600:.0f} h" if seconds < 3 * 86400 else f"{seconds / 86400:.0f} days"
