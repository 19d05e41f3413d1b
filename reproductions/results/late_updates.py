"""The cells of the tables of ``late-updates.md``, from its stored runs and from their timetables.

A client makes the same number of steps each time, so the timetable of a run depends only on its
sampler, its clock and its seed.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev

import numpy as np

from gcfed.participation.buffered import Buffered
from gcfed.participation.clock import Clock
from gcfed.participation.faults import Faults
from gcfed.participation.sampling import UniformSampler
from gcfed.participation.schedule import Participation, Turn
from gcfed.reporting.student import two_sided_p
from reproductions.results.cells import (
    Cells,
    Runs,
    interval_text,
    last_tests,
    listed,
    number,
    signed,
)
from reproductions.stored import StoredRun, chosen, rate_of

UPLOADS = 200  # of a run
CHANCE = 10.0  # percent, of ten classes
TESTS = 3  # an accuracy is the mean of so many tests
CLIENTS = 100
CONCURRENCY = 10
STEPS = 5  # of a client
SEEDS = (1, 2, 3)
SPREADS = ("0.7", "1.4")  # σ
IN_TIME = ("0.7",)  # the σ that the plan's rule leaves
PLANNED = 6  # comparisons; D needs both σ
QUARTERS = ("fastest quarter", "second quarter", "third quarter", "slowest quarter")


@dataclass(frozen=True)
class Method:
    """A method of the page.

    Attributes:
        algorithm: its ``algorithm=``.
        per_round: number of uploads in a step of the server.
        late: whether its clients are late.
    """

    algorithm: str
    per_round: int
    late: bool

    def turns(self, spread: str, seed: int) -> tuple[Turn, ...]:
        """The server's steps of a run."""
        return timetable(self.per_round, self.late, float(spread), seed)

    def run(self, runs: Runs, gc: str, spread: str, seed: int) -> StoredRun:
        """Synchronous runs are stored with one spread, because a clock does not change them."""
        of = spread if self.late else SPREADS[0]
        words = (
            f"algorithm={self.algorithm}",
            f"gc={gc}",
            f"participation.clock.spread={of}",
            f"seed={seed}",
        )
        (found,) = chosen(runs, *words)
        return found

    def uploads_at(self, seconds: float, spread: str, seed: int) -> int:
        """How many uploads the server has used at a time on the clock."""
        steps = [turn for turn in self.turns(spread, seed) if turn.seconds <= seconds]
        return self.per_round * len(steps)

    def accuracy(self, run: StoredRun, uploads: int) -> float:
        """The mean of the last three tests up to this number of uploads, in percent.

        Without a step of the server it is that of chance.
        """
        if uploads == 0:
            return CHANCE
        curve = run.curve("test/acc")
        before = curve[curve.index * self.per_round <= uploads]
        return 100 * float(before.tail(TESTS).mean())


METHODS = {
    "FedAvg": Method("fedavg", CONCURRENCY, late=False),
    "SCAFFOLD": Method("scaffold", CONCURRENCY, late=False),
    "FedBuff": Method("fedbuff", 5, late=True),
    "FedAsync": Method("fedasync", 1, late=True),
    "CA²FL": Method("ca2fl", 5, late=True),
}
LATE = ("FedBuff", "FedAsync", "CA²FL")
SYNCHRONOUS = ("FedAvg", "SCAFFOLD")


@cache
def timetable(per_round: int, late: bool, spread: float, seed: int) -> tuple[Turn, ...]:
    """The turns of a run."""
    sampler: Participation = UniformSampler(per_round)
    if late:
        sampler = Buffered(per_round, concurrency=CONCURRENCY)
    clock = Clock(step=0.1, spread=spread, jitter=0.2)

    def planned(clients: np.ndarray) -> np.ndarray:
        return np.full(len(clients), STEPS)

    schedule = sampler.schedule(Faults(), clock, CLIENTS, seed, planned, planned)
    return tuple(schedule.turn(t) for t in range(UPLOADS // per_round))


def mean_seconds(method: Method, spread: str, rounds: Iterable[int]) -> list[float]:
    """The time at the end of each of these rounds, mean over the seeds."""
    of_seeds = [method.turns(spread, seed) for seed in SEEDS]
    return [fmean(turns[round_number - 1].seconds for turns in of_seeds) for round_number in rounds]


# ------------------------------------------------------------------------------------ accuracies
#: A point of a run: (method, spread, seed) → number of uploads.
Point = Callable[[Method, str, int], int]


def equal_uploads(method: Method, spread: str, seed: int) -> int:
    """The end of the run."""
    return UPLOADS


def equal_time(method: Method, spread: str, seed: int) -> int:
    """The uploads until FedBuff's run with this spread and seed ends."""
    end = METHODS["FedBuff"].turns(spread, seed)[-1].seconds
    return method.uploads_at(end, spread, seed)


def accuracies(runs: Runs, name: str, gc: str, spread: str, point: Point) -> np.ndarray:
    """By seed, ``[seeds]``, in percent."""
    method = METHODS[name]
    values = []
    for seed in SEEDS:
        run = method.run(runs, gc, spread, seed)
        values.append(method.accuracy(run, point(method, spread, seed)))
    return np.array(values)


def gains(runs: Runs, name: str, spread: str, point: Point) -> np.ndarray:
    """GC-Fed less no GC, by seed, ``[seeds]``, in points."""
    centralized = accuracies(runs, name, "gcfed", spread, point)
    return centralized - accuracies(runs, name, "none", spread, point)


def mean_gains(
    runs: Runs, names: Sequence[str], spreads: Sequence[str], point: Point
) -> np.ndarray:
    """The mean gain over methods and σ, by seed, ``[seeds]``."""
    cells = itertools.product(names, spreads)
    return np.mean([gains(runs, name, spread, point) for name, spread in cells], axis=0)


def gain_cells(runs: Runs, name: str, spread: str, point: Point) -> list[str | None]:
    """Both accuracies by seed with the rate, the mean gain and its interval."""
    cells: list[str | None] = []
    for gc in ("none", "gcfed"):
        values = accuracies(runs, name, gc, spread, point)
        rate = rate_of(METHODS[name].run(runs, gc, spread, 1))
        cells.append(f"{listed(values)} ({rate})")
    own = gains(runs, name, spread, point)
    return [*cells, signed(fmean(own)), interval_text(own)]


def at_equal_uploads(runs: Runs) -> Cells:
    cells: Cells = {}
    for name, method in METHODS.items():
        if not method.late:
            cells[name, "both"] = gain_cells(runs, name, SPREADS[0], equal_uploads)
            continue
        for spread in SPREADS:
            cells[name, spread] = gain_cells(runs, name, spread, equal_uploads)
    return cells


def at_equal_time(runs: Runs) -> Cells:
    cells: Cells = {}
    for name, method in METHODS.items():
        for spread in SPREADS:
            uploads = [equal_time(method, spread, seed) for seed in SEEDS]
            texts = ", ".join(str(count) for count in uploads)
            cells[name, spread] = [texts, *gain_cells(runs, name, spread, equal_time)]
    return cells


# ----------------------------------------------------------------------------------- comparisons
def differences(runs: Runs, spreads: Sequence[str] = SPREADS) -> dict[str, np.ndarray]:
    """The planned comparisons over these σ, each by seed, ``[seeds]``, in points.

    D compares both σ, so it needs them.
    """
    late = mean_gains(runs, LATE, spreads, equal_uploads)
    synchronous = mean_gains(runs, SYNCHRONOUS, spreads, equal_uploads)
    fedasync = mean_gains(runs, ["FedAsync"], spreads, equal_uploads)
    fedbuff = mean_gains(runs, ["FedBuff"], spreads, equal_uploads)
    found = {"A": late, "B": synchronous, "C": late - synchronous}
    if len(spreads) == 2:
        of_spreads = [mean_gains(runs, LATE, [spread], equal_uploads) for spread in spreads]
        found["D"] = of_spreads[1] - of_spreads[0]
    found["E"] = fedasync - fedbuff
    found["F"] = mean_gains(runs, [*METHODS], spreads, equal_time)
    return found


def p_of(values: np.ndarray) -> float:
    """The two-sided p of "the mean is 0", by Student's t."""
    error = stdev(values) / len(values) ** 0.5
    return two_sided_p(fmean(values) / error, len(values) - 1)


def holm(ps: dict[str, float], planned: int) -> dict[str, float]:
    """Holm's corrected p of each comparison (Holm 1979), for so many planned ones.

    A comparison without runs counts as one with the largest p.
    """
    corrected: dict[str, float] = {}
    largest = 0.0
    for place, name in enumerate(sorted(ps, key=ps.__getitem__)):
        largest = max(largest, (planned - place) * ps[name])
        corrected[name] = min(1.0, largest)
    return corrected


def comparisons(runs: Runs) -> Cells:
    """Of all runs."""
    return comparison_cells(differences(runs))


def comparisons_in_time(runs: Runs) -> Cells:
    """Of the runs that the plan's rule leaves."""
    return comparison_cells(differences(runs, IN_TIME))


def comparison_cells(found: dict[str, np.ndarray]) -> Cells:
    """The row of each comparison, from its numbers by seed."""
    ps = {name: p_of(values) for name, values in found.items()}
    corrected = holm(ps, PLANNED)
    cells: Cells = {}
    for name, values in found.items():
        cells[name,] = [
            None,
            ", ".join(signed(value) for value in values),
            signed(fmean(values)),
            interval_text(values),
            f"{ps[name]:.2g}",
            f"{corrected[name]:.2g}",
        ]
    return cells


# ----------------------------------------------------------------------------------- predictions
def predictions(runs: Runs) -> Cells:
    """The outcome of each prediction, of all runs and of those that the plan's rule leaves."""
    complete = outcomes(runs, SPREADS)
    in_time = outcomes(runs, IN_TIME)
    return {
        (number,): [None, complete[number], in_time.get(number, "not tested")]
        for number in complete
    }


def outcomes(runs: Runs, spreads: Sequence[str]) -> dict[str, str]:
    """By the prediction's number in the plan: its verdict and what it is about, in points."""
    found = differences(runs, spreads)
    of_methods = [mean_gains(runs, [name], spreads, equal_uploads) for name in METHODS]
    least = fmean(min(of_methods, key=fmean))
    late = fmean(found["A"])
    positive = bool((found["A"] > 0).all())
    outcome = {
        "1": verdict(least > 0, f"smallest gain {signed(least)}"),
        "2": verdict(positive and 1 <= late <= 8, f"mean {signed(late)}"),
        "3": near_zero(found["C"]),
    }
    if "D" in found:
        outcome["4"] = near_zero(found["D"])
    leads = [smallest_lead_in_time(runs, spread) for spread in spreads]
    outcome["5"] = verdict(min(leads) > 0, f"smallest lead {signed(min(leads))}")
    ahead = [lead_of_ca2fl(runs, spread) for spread in spreads]
    outcome["6"] = verdict(min(ahead) > 0, ", ".join(signed(lead) for lead in ahead))
    return outcome


def near_zero(values: np.ndarray) -> str:
    """The verdict of "between −2 and 2 points on average"."""
    mean = fmean(values)
    return verdict(-2 <= mean <= 2, f"mean {signed(mean)}")


def verdict(holds: bool, numbers: str) -> str:
    return f"holds ({numbers})" if holds else f"fails ({numbers})"


def smallest_lead_in_time(runs: Runs, spread: str) -> float:
    """How far every late method is at least ahead of FedAvg without GC at equal time, in means over
    the seeds.
    """
    fedavg = fmean(accuracies(runs, "FedAvg", "none", spread, equal_time))
    return min(fmean(accuracies(runs, name, "none", spread, equal_time)) for name in LATE) - fedavg


def lead_of_ca2fl(runs: Runs, spread: str) -> float:
    """How far it is ahead of FedBuff without GC at equal uploads, mean over the seeds."""
    ca2fl = accuracies(runs, "CA²FL", "none", spread, equal_uploads)
    return fmean(ca2fl - accuracies(runs, "FedBuff", "none", spread, equal_uploads))


# ---------------------------------------------------------------------------------- participation
def speed_order(spread: str, seed: int) -> np.ndarray:
    """The clients from the fastest device to the slowest, ``[N]``."""
    clock = Clock(step=1.0, spread=float(spread), jitter=0.0)
    clients = np.arange(CLIENTS)
    draws = [np.random.default_rng(0)] * CLIENTS
    return np.argsort(clock.seconds(clients, np.ones(CLIENTS), draws, seed), kind="stable")


def by_quarter(method: Method, spread: str) -> tuple[np.ndarray, np.ndarray]:
    """Of each quarter of the clients by speed, the share of all uploads in percent and by how many
    steps its uploads are late on average, both ``[4]``, means over the seeds.
    """
    shares = []
    lateness = []
    for seed in SEEDS:
        uploads = np.zeros(CLIENTS)
        steps_late = np.zeros(CLIENTS)
        for t, turn in enumerate(method.turns(spread, seed)):
            np.add.at(uploads, turn.clients, 1)
            np.add.at(steps_late, turn.clients, t - turn.versions)
        order = speed_order(spread, seed).reshape(len(QUARTERS), -1)
        of_quarter = uploads[order].sum(1)
        shares.append(100 * of_quarter / uploads.sum())
        lateness.append(steps_late[order].sum(1) / of_quarter)
    return np.mean(shares, axis=0), np.mean(lateness, axis=0)


def shares(runs: Runs) -> Cells:
    columns = []
    for spread in SPREADS:
        for name in ("FedAvg", "FedBuff", "FedAsync"):
            columns.append(by_quarter(METHODS[name], spread))
    cells: Cells = {}
    for place, quarter in enumerate(QUARTERS):
        row: list[str | None] = []
        for of_uploads, steps_late in columns:
            text = number(of_uploads[place], 1)
            if steps_late.any():
                text += f" ({number(steps_late[place], 1)})"
            row.append(text)
        cells[quarter,] = row
    return cells


def lateness(runs: Runs) -> Cells:
    """The seconds of a run, and how late its uploads are: mean over the seeds and largest."""
    cells: Cells = {}
    for name, method in METHODS.items():
        if name == "CA²FL":
            continue  # its timetable is FedBuff's
        for spread in SPREADS:
            own = [method.turns(spread, seed) for seed in SEEDS]
            seconds = listed(turns[-1].seconds for turns in own)
            late = [_steps_late(turns) for turns in own]
            mean = fmean(values.mean() for values in late)
            largest = max(int(values.max()) for values in late)
            cells[name, spread] = [seconds, number(mean, 1), str(largest)]
    return cells


def _steps_late(turns: Sequence[Turn]) -> np.ndarray:
    """Of each upload, ``[uploads]``."""
    return np.concatenate([t - turn.versions for t, turn in enumerate(turns)])


# ----------------------------------------------------------------------------------------- search
RATES = ("0.01", "0.025", "0.06")
SEARCH_SEED = 100


def search(runs: Runs) -> Cells:
    """The accuracy of each trial on the held-out images, in percent."""
    cells: Cells = {}
    for name, method in METHODS.items():
        for gc, label in (("none", "no GC"), ("gcfed", "GC-Fed")):
            cells[name, label] = [trial(runs, method, gc, rate) for rate in RATES]
    return cells


def trial(runs: Runs, method: Method, gc: str, rate: str) -> str:
    words = (f"algorithm={method.algorithm}", f"gc={gc}", f"client.optimizer.lr={rate}")
    (run,) = chosen(runs, *words, f"seed={SEARCH_SEED}")
    left_out = int(run.metrics["train/nonfinite_clients"].sum())
    undone = int(run.metrics["train/refused_steps"].sum())
    text = number(last_tests(run, TESTS, "val/acc"), 1)
    return f"refused ({text})" if left_out or undone else text
