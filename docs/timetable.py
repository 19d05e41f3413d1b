"""Draws ``docs/images/late_clients.png``: who trains when, by the run's own timetable.

python docs/timetable.py
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from gcfed.participation.buffered import Buffered, BufferedSchedule
from gcfed.participation.clock import Clock
from gcfed.participation.faults import Faults
from gcfed.participation.sampling import UniformSampler
from gcfed.participation.schedule import SynchronousSchedule

STEPS = np.arange(1, 7)  # seconds of each of the six clients
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2")
END = 12.0  # seconds that the picture shows


class Recorded:
    """Notes each download that a client receives."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.bars: list[tuple[int, int, float, float]] = []  # client, version, begin, seconds

    def ask(self, clients: np.ndarray, version: int) -> tuple[np.ndarray, np.ndarray]:
        comes, times = super().ask(clients, version)  # type: ignore[misc]
        for client, seconds in zip(clients.tolist(), times.tolist(), strict=True):
            self.bars.append((client, version, self.seconds, seconds))  # type: ignore[attr-defined]
        return comes, times


class RecordedRounds(Recorded, SynchronousSchedule):
    """Synchronous rounds of all six clients."""


class RecordedBuffer(Recorded, BufferedSchedule):
    """Six clients at a time, and a step after two uploads."""


def main() -> None:
    clock = Clock(step=1.0, jitter=0.0)
    rest = (Faults(), clock, len(STEPS), 1, STEPS.__getitem__, np.ones_like)
    timetables = {
        "synchronous: the server waits for the slowest": RecordedRounds(UniformSampler(6), *rest),
        "buffered: a step after two uploads": RecordedBuffer(Buffered(2, concurrency=6), *rest),
    }
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, (title, timetable) in zip(figure.subplots(1, 2), timetables.items(), strict=True):
        steps = []
        while timetable.seconds < END:
            steps.append(timetable.turn(len(steps)).seconds)
        for client, version, begin, seconds in timetable.bars:
            colour = COLOURS[version % len(COLOURS)]
            axes.barh(client, seconds, left=begin, color=colour, edgecolor="white", height=0.8)
            if begin < END:
                middle = min(begin + seconds / 2, END - 0.3)
                axes.text(middle, client, str(version), ha="center", va="center", fontsize=7)
        for seconds in steps:
            axes.axvline(seconds, color="black", linewidth=0.8, linestyle="--")
        axes.set(
            xlim=(0, END), xlabel="seconds", ylabel="client", title=title, yticks=range(len(STEPS))
        )
        axes.title.set_fontsize(9)
    path = Path(__file__).with_name("images") / "late_clients.png"
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
