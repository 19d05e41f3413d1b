"""Who is asked when, and whose uploads make the server's step number t.

A client's time depends on its steps and its device, and not on the model. So the timetable of a run
is known without training: a late client can train when the server uses its upload, from the
download that it was sent. Each round stays one transaction. A schedule's state (the time, and who
is busy with which download) is small and part of the checkpoints.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from gcfed.data.clock import Clock
from gcfed.data.faults import Faults
from gcfed.data.sampling import Buffered, LossSampler, Trained, UniformSampler
from gcfed.utils.refusal import Refusal
from gcfed.utils.rng import generator


class Turn(NamedTuple):
    """Whose uploads a step of the server uses.

    Attributes:
        clients: ids, ``[K]``, ascending.
        versions: index of the round whose download each of them has, ``[K]``.
        num_asked: number of clients that are sent this round's download.
        num_lost: number of clients that were asked and whose uploads the server does not use.
        num_too_late: number of these lost clients that sent their upload, which came too late.
        seconds: time of the step on the clock.
    """

    clients: np.ndarray
    versions: np.ndarray
    num_asked: int
    num_lost: int
    num_too_late: int
    seconds: float


@dataclass
class Schedule:
    """Synchronous rounds. Each ends when the last client that counts has answered.

    A client that drops out is missed when it would have answered.

    Attributes:
        planned: clients ``[K]`` → their planned numbers of local steps, ``[K]``.
        sizes: clients ``[K]`` → their numbers of samples, ``[K]``.
        download_bytes, upload_bytes: size of a client's messages in the last round; before the
            first round that of the model.
        seconds: the present time on the clock.
        known: what clients' last training has shown, by client; empty unless the sampler asks.
        late: whether clients may have older downloads than the round's.
    """

    sampler: UniformSampler
    faults: Faults
    clock: Clock
    num_clients: int
    seed: int
    planned: Callable[[np.ndarray], np.ndarray]
    sizes: Callable[[np.ndarray], np.ndarray]
    download_bytes: float = 0.0
    upload_bytes: float = 0.0
    seconds: float = field(default=0.0, init=False)
    known: dict[int, Trained] = field(default_factory=dict, init=False)
    _durations: dict[int, float] = field(default_factory=dict, init=False)  # in the last turn
    late: ClassVar[bool] = False

    @property
    def timed(self) -> bool:
        """Whether the run's rows have the time."""
        return self.clock.step is not None

    @property
    def hears_losses(self) -> bool:
        """Whether the cohorts depend on the clients' losses."""
        return isinstance(self.sampler, LossSampler)

    def versions_in_use(self, round_index: int) -> set[int]:
        """The versions whose answers this turn or a later one may use."""
        return set()

    def validate(self) -> None:
        """Raises Refusal for settings that do not work together; called before round one."""
        preferred = getattr(self.sampler, "preferred", None)
        if preferred is not None and not self.timed:
            raise Refusal("participation.sampler.preferred: set participation.clock.step, too.")
        if self.clock.available is None:
            return
        if type(self.sampler) not in (UniformSampler, Buffered):
            raise Refusal(
                "participation.clock.available combines with participation=uniform and buffered"
                f" only: {type(self.sampler).__name__} draws among all clients."
            )
        enough = 1 if self.late else self.sampler.per_round
        self.clock.require_enough(self.num_clients, enough, self.seed)

    def expect_bytes(self, size: int) -> None:
        """Expects messages of the model's size in bytes, as long as there was no round."""
        if self.download_bytes == 0:
            self.download_bytes = float(size)
            self.upload_bytes = float(size)

    # -------------------------------------------------------------------------------------- turns
    def turn(self, round_index: int) -> Turn:
        """The turn of this round, which follows the last one."""
        drawn = self._draw(round_index)
        comes, times = self.ask(drawn, round_index)
        self._durations = dict(zip(drawn.tolist(), times.tolist(), strict=True))
        is_used = comes
        waits = times
        if self.faults.extra:
            is_used = self._first_to_answer(drawn, comes, times)
            if is_used.sum() == self._wanted:
                waits = times[is_used]  # the server does not wait for the others
        self.seconds += float(waits.max(initial=0.0))
        clients = drawn[is_used]
        return Turn(
            clients=clients,
            versions=np.full(len(clients), round_index),
            num_asked=len(drawn),
            num_lost=len(drawn) - len(clients),
            num_too_late=0,
            seconds=self.seconds,
        )

    @property
    def _wanted(self) -> int:
        """The number of uploads after which the server does not wait for others."""
        return self.sampler.per_round - (self.faults.extra or 0)

    def _first_to_answer(
        self, drawn: np.ndarray, comes: np.ndarray, times: np.ndarray
    ) -> np.ndarray:
        """Which of the drawn clients answer first, bool ``[K]``: as many as the server wants, or
        all that answer. Of two at the same time, the client with the smaller id is first.
        """
        answering = np.flatnonzero(comes)
        in_order = answering[np.lexsort((drawn[answering], times[answering]))]
        is_first = np.zeros(len(drawn), bool)
        is_first[in_order[: self._wanted]] = True
        return is_first

    def _draw(self, round_index: int) -> np.ndarray:
        """The clients that are asked in this round, ascending.

        Raises Refusal if a user's sampler draws anything but distinct clients.
        """
        if isinstance(self.sampler, LossSampler):
            drawn = self.sampler.choose(round_index, self.num_clients, self.seed, self.known)
            return self._cohort(drawn, self.num_clients)
        if self.clock.available is None:
            drawn = self.sampler(round_index, self.num_clients, self.seed)
            return self._cohort(drawn, self.num_clients)
        everyone = np.ones(self.num_clients, bool)
        self.seconds = self.clock.next_available(
            self.seconds, everyone, self.sampler.per_round, self.seed
        )
        available = self.clock.is_available(self.seconds, self.num_clients, self.seed)
        clients = np.flatnonzero(available)
        drawn = self.sampler(round_index, len(clients), self.seed)
        return clients[self._cohort(drawn, len(clients))]

    def _cohort(self, drawn: Sequence[int] | np.ndarray, num_clients: int) -> np.ndarray:
        """The ids that a sampler has drawn, int64 ``[K]``, ascending.

        Raises Refusal if they are no whole numbers from 0 to ``num_clients`` − 1, or not
        distinct.
        """
        clients = np.asarray(drawn)
        are_ids = clients.ndim == 1 and (clients.dtype.kind in "iu" or len(clients) == 0)
        if not are_ids or ((clients < 0) | (clients >= num_clients)).any():
            raise Refusal(
                f"{self._sampler} must draw ids from 0 to {num_clients - 1}, and has drawn {drawn}."
            )
        clients = np.sort(clients)
        if (clients[1:] == clients[:-1]).any():
            raise Refusal(
                f"{self._sampler} has drawn a client twice: {clients.tolist()}. Draw without"
                " replacement."
            )
        return clients.astype(np.int64)

    @property
    def _sampler(self) -> str:
        return f"participation.sampler={type(self.sampler).__name__}"

    def ask(self, clients: np.ndarray, version: int) -> tuple[np.ndarray, np.ndarray]:
        """Whether these clients answer the download of round ``version``, and after how many
        seconds, both ``[K]``.
        """
        if not (self.timed or self.late or self.faults.dropout or self.faults.extra):
            return np.ones(len(clients), bool), np.zeros(len(clients))
        steps = self.steps(clients, version)
        message_bytes = self.download_bytes + self.upload_bytes
        return self.faults.answers(clients, steps, version, self.seed, self.clock, message_bytes)

    def steps(self, clients: np.ndarray, version: int) -> np.ndarray:
        """How many local steps these clients do from the download of round ``version``, ``[K]``."""
        return self.faults.steps(self.planned(clients), clients, version, self.seed)

    def learn(self, losses: Mapping[int, float], round_index: int) -> None:
        """Notes the losses of the clients that counted in this round, which was the last turn."""
        clients = list(losses)
        samples = self.sizes(np.array(clients, dtype=np.int64)).tolist()
        for client, size in zip(clients, samples, strict=True):
            seconds = self._durations[client]
            self.known[client] = Trained(losses[client], round_index, int(size), seconds)

    # -------------------------------------------------------------------------------- checkpoints
    def state_dict(self) -> dict[str, Any]:
        """What the next turn depends on; empty if it is only the seed."""
        if not (self.timed or self.hears_losses):
            return {}
        known = {client: tuple(trained) for client, trained in self.known.items()}
        return {
            "seconds": self.seconds,
            "download_bytes": self.download_bytes,
            "upload_bytes": self.upload_bytes,
            "known": known,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.seconds = state_dict["seconds"]
        self.download_bytes = state_dict["download_bytes"]
        self.upload_bytes = state_dict["upload_bytes"]
        self.known = {client: Trained(*fields) for client, fields in state_dict["known"].items()}


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
        return rank + np.searchsorted(taken - np.arange(len(taken)), rank, side="right")

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


def schedule_of(
    sampler: UniformSampler,
    faults: Faults,
    clock: Clock,
    num_clients: int,
    seed: int,
    planned: Callable[[np.ndarray], np.ndarray],
    sizes: Callable[[np.ndarray], np.ndarray],
) -> Schedule:
    """The schedule of a rule of participation; the arguments are those of :class:`Schedule`."""
    rest = (faults, clock, num_clients, seed, planned, sizes)
    if isinstance(sampler, Buffered):
        return BufferedSchedule(sampler, *rest)
    return Schedule(sampler, *rest)
