"""The timetable of clients that train while the server steps (``participation=buffered``)."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from gcfed.participation.sampling import outside
from gcfed.participation.schedule import Participation, Schedule, Turn
from gcfed.utils.checked import Count, Whole, checked
from gcfed.utils.refusal import Refusal
from gcfed.utils.rng import generator


class Answer(NamedTuple):
    """A client that trains. Answers are sorted by their time, then by the order of asking.

    Attributes:
        seconds: when it answers or is missed.
        draw: number of draws before the one that chose it.
        client, version: its id, and the round of its download.
        comes: whether it answers.
    """

    seconds: float
    draw: int
    client: int
    version: int
    comes: bool


@dataclass
class BufferedSchedule(Schedule):
    """Clients that train while the server steps: the timetable of :class:`Buffered`.

    At one instant answers come first, then the server's step, then new downloads. Answers beyond
    ``per_round`` wait for the next step, so they are one step late. A client that drops out keeps
    its place until it would have answered.
    """

    sampler: Buffered
    draws: int = field(default=0, init=False)
    busy: list[Answer] = field(default_factory=list, init=False)  # a heap
    late: ClassVar[bool] = True

    @property
    def timed(self) -> bool:
        return True

    def versions_in_use(self, round_index: int) -> set[int]:
        """The versions of the clients that train and whose answers will not be lost, as far as it
        is known before this turn.
        """
        versions = set()
        for answer in self.busy:
            if answer.comes and not self._is_too_late(answer, round_index):
                versions.add(answer.version)
        return versions

    def turn(self, round_index: int) -> Turn:
        buffer: dict[int, int] = {}  # client → version
        lost: list[Answer] = []
        num_asked = 0
        while len(buffer) < self.sampler.per_round:
            # clients that wait for the server's step, and those that get the next version
            waiting = [
                *buffer,
                *(answer.client for answer in lost if answer.version == round_index),
            ]
            num_asked += self._ask_idle(round_index, waiting)
            if not self.busy:
                break  # no client is left that could answer
            self.seconds = self.busy[0].seconds
            self._collect(round_index, buffer, lost)
        clients = np.array(sorted(buffer), dtype=np.int64)
        versions = np.array([buffer[client] for client in clients.tolist()], dtype=np.int64)
        too_late = [answer for answer in lost if answer.comes]
        return Turn(clients, versions, num_asked, len(lost), len(too_late), self.seconds)

    def _collect(self, round_index: int, buffer: dict[int, int], lost: list[Answer]) -> None:
        """Takes the answers of this instant, until the buffer is full."""
        while len(buffer) < self.sampler.per_round:
            if not self.busy or self.busy[0].seconds != self.seconds:
                return
            answer = heapq.heappop(self.busy)
            if answer.comes and not self._is_too_late(answer, round_index):
                buffer[answer.client] = answer.version
            else:
                lost.append(answer)

    def _is_too_late(self, answer: Answer, round_index: int) -> bool:
        bound = self.sampler.max_staleness
        return bound is not None and round_index - answer.version > bound

    def _ask_idle(self, version: int, waiting: list[int]) -> int:
        """Sends this version to idle clients, as long as there is a free place.

        Clients that wait for the server's step are not idle. Returns how many were asked.
        """
        places = self.sampler.concurrency - len(self.busy)
        taken = np.array([*(answer.client for answer in self.busy), *waiting], dtype=np.int64)
        if self.clock.available is not None:
            clients = self._draw_available(places, taken)
        else:
            clients = self._draw_idle(places, taken)
        if len(clients) == 0:
            return 0
        comes, times = self.ask(clients, version)
        for client, answers, seconds in zip(
            clients.tolist(), comes.tolist(), times.tolist(), strict=True
        ):
            answer = Answer(self.seconds + seconds, self.draws, client, version, answers)
            heapq.heappush(self.busy, answer)
        self.draws += 1
        return len(clients)

    def _draw_idle(self, places: int, taken: np.ndarray) -> np.ndarray:
        """Idle clients, uniform without replacement, ascending. Never lists the population."""
        taken = np.sort(taken)
        num_idle = self.num_clients - len(taken)
        count = min(places, num_idle)
        if count == 0:
            return np.zeros(0, dtype=np.int64)
        random = generator(self.seed, "cohort", self.draws)
        rank = np.sort(random.choice(num_idle, count, replace=False, shuffle=False))
        return outside(taken, rank)

    def _draw_available(self, places: int, taken: np.ndarray) -> np.ndarray:
        """As :meth:`_draw_idle`, among the clients that can be asked now.

        If nobody trains, the time goes on until a client can be asked.
        """
        idle = np.ones(self.num_clients, bool)
        idle[taken] = False
        if not idle.any():
            return np.zeros(0, dtype=np.int64)
        if not self.busy:
            self.seconds = self.clock.next_available(self.seconds, idle, 1, self.seed)
        available = self.clock.is_available(self.seconds, self.num_clients, self.seed)
        candidates = np.flatnonzero(idle & available)
        count = min(places, len(candidates))
        if count == 0:
            return candidates[:0]
        random = generator(self.seed, "cohort", self.draws)
        chosen = random.choice(len(candidates), count, replace=False, shuffle=False)
        return candidates[np.sort(chosen)]

    def state_dict(self) -> dict[str, Any]:
        busy = [tuple(answer) for answer in self.busy]
        return super().state_dict() | {"draws": self.draws, "busy": busy}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.draws = state_dict["draws"]
        self.busy = [Answer(*fields) for fields in state_dict["busy"]]


@checked
@dataclass(frozen=True)
class Buffered(Participation):
    """Asynchronous rounds (FedBuff, Nguyen et al., AISTATS 2022): ``concurrency`` clients train at
    any time, and the server steps after each ``per_round`` uploads.

    The server asks another client as soon as one has answered. A client whose upload waits for the
    server's step is not asked before it, so a client has each version of the model at most once.
    ``per_round`` 1 is FedAsync.

    Attributes:
        max_staleness: the largest number of server steps since a client's download. Later uploads
            are lost. None: no bound.
    """

    concurrency: Count = 10
    max_staleness: Whole | None = None
    timetable: ClassVar[type[Schedule]] = BufferedSchedule

    def validate(self, num_clients: int) -> None:
        super().validate(num_clients)
        if self.concurrency > num_clients:
            raise Refusal(
                f"participation.sampler.concurrency={self.concurrency} exceeds"
                f" participation.num_clients={num_clients}: lower it."
            )
