"""Who is asked when, and whose uploads make the server's step number t.

A client's time depends on its steps and its device, and not on the model. So the timetable of a run
is known without training: a late client can train when the server uses its upload, from the
download that it was sent. Each round stays one transaction. A schedule's state (the time, and who
is busy with which download) is small and part of the checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from gcfed.participation.clock import Clock
from gcfed.participation.faults import Faults
from gcfed.utils.checked import Count, checked
from gcfed.utils.refusal import Refusal


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


class ClientRecord(NamedTuple):
    """What the server knows of a client that has trained.

    Attributes:
        loss: mean training loss of its last round.
        round_index: of this round.
        samples: number of its training samples.
        seconds: how long it took.
    """

    loss: float
    round_index: int
    samples: int
    seconds: float


@dataclass
class Schedule:
    """The timetable of a run.

    Attributes:
        sampler: the rule of participation.
        planned: clients ``[K]`` → their planned numbers of local steps, ``[K]``.
        sizes: clients ``[K]`` → their numbers of samples, ``[K]``.
        download_bytes, upload_bytes: size of a client's messages in the last round; before the
            first round that of the model.
        seconds: the present time on the clock.
        known: what clients' last training has shown, by client; empty unless the sampler asks.
        late: whether clients may have older downloads than the round's.
    """

    sampler: Participation
    faults: Faults
    clock: Clock
    num_clients: int
    seed: int
    planned: Callable[[np.ndarray], np.ndarray]
    sizes: Callable[[np.ndarray], np.ndarray]
    download_bytes: float = 0.0
    upload_bytes: float = 0.0
    seconds: float = field(default=0.0, init=False)
    known: dict[int, ClientRecord] = field(default_factory=dict, init=False)
    _durations: dict[int, float] = field(default_factory=dict, init=False)  # in the last turn
    late: ClassVar[bool] = False

    @property
    def timed(self) -> bool:
        """Whether the run's rows have the time."""
        return self.clock.step is not None

    @property
    def depends_on_losses(self) -> bool:
        """Whether the cohorts depend on the clients' losses."""
        return self.sampler.depends_on_losses

    def versions_in_use(self, round_index: int) -> set[int]:
        """The versions whose answers this turn or a later one may use."""
        return set()

    def validate(self) -> None:
        """Raises Refusal for settings that do not work together; called before round one."""
        if self.clock.available is None:
            return
        enough = 1 if self.late else self.sampler.per_round
        self.clock.require_enough(self.num_clients, enough, self.seed)

    def expect_bytes(self, download: int, upload: int) -> None:
        """Expects a client's messages of these sizes in bytes from the next turn on."""
        self.download_bytes = float(download)
        self.upload_bytes = float(upload)

    # -------------------------------------------------------------------------------------- turns
    def turn(self, round_index: int) -> Turn:
        """The turn of this round, which follows the last one."""
        raise NotImplementedError

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
        """Keeps the losses of the clients that counted in this round, which was the last turn."""
        clients = list(losses)
        samples = self.sizes(np.array(clients, dtype=np.int64)).tolist()
        for client, size in zip(clients, samples, strict=True):
            seconds = self._durations[client]
            self.known[client] = ClientRecord(losses[client], round_index, int(size), seconds)

    # -------------------------------------------------------------------------------- checkpoints
    def state_dict(self) -> dict[str, Any]:
        """What the next turn depends on; empty if it is only the seed."""
        if not (self.timed or self.depends_on_losses):
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
        self.known = {
            client: ClientRecord(*fields) for client, fields in state_dict["known"].items()
        }


@dataclass
class SynchronousSchedule(Schedule):
    """Synchronous rounds: the timetable of a :class:`Sampler`. Each ends when the last client that
    counts has answered.

    A client that drops out is missed when it would have answered.
    """

    sampler: Sampler

    def validate(self) -> None:
        if not (self.timed or self.faults.extra):
            self.clock.refuse_times()
        preferred = getattr(self.sampler, "preferred", None)
        if preferred is not None and not self.timed:
            raise Refusal("participation.sampler.preferred: set participation.clock.step, too.")
        if self.clock.available is not None and not self.sampler.can_draw_among_available:
            raise Refusal(
                "participation.clock.available combines with participation=uniform and buffered"
                f" only: {type(self.sampler).__name__} draws among all clients."
            )
        super().validate()

    def turn(self, round_index: int) -> Turn:
        drawn = self._draw(round_index)
        comes, times = self.ask(drawn, round_index)
        self._durations = dict(zip(drawn.tolist(), times.tolist(), strict=True))
        is_used = comes
        waits = times
        if self.faults.extra:
            wanted = self.faults.used(self.sampler.per_round)
            is_used = _first_to_answer(drawn, comes, times, wanted)
            if is_used.sum() == wanted:
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

    def _draw(self, round_index: int) -> np.ndarray:
        """The clients that are asked in this round, ascending.

        Raises Refusal if a user's sampler draws anything but distinct clients.
        """
        if self.clock.available is None:
            drawn = self.sampler.choose(round_index, self.num_clients, self.seed, self.known)
            return self._cohort(drawn, self.num_clients)
        everyone = np.ones(self.num_clients, bool)
        self.seconds = self.clock.next_available(
            self.seconds, everyone, self.sampler.per_round, self.seed
        )
        available = self.clock.is_available(self.seconds, self.num_clients, self.seed)
        clients = np.flatnonzero(available)
        drawn = self.sampler.choose(round_index, len(clients), self.seed, self.known)
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


@checked
@dataclass(frozen=True)
class Participation:
    """A rule of who is asked when, which makes the timetable of a run.

    Attributes:
        per_round: number of clients whose uploads a step of the server uses, and the reserve
            clients of ``faults.extra``; with PoissonSampler the mean number.
        timetable: the class of its schedules.
        depends_on_losses: whether it chooses clients by the losses of their last training.
    """

    per_round: Count
    timetable: ClassVar[type[Schedule]]
    depends_on_losses: ClassVar[bool] = False

    def validate(self, num_clients: int) -> None:
        """Raises Refusal if this rule cannot choose from ``num_clients`` clients; called before the
        first round.
        """
        if self.per_round > num_clients:
            drawn = f"participation.per_round={self.per_round}"
            raise Refusal(
                f"{drawn} exceeds participation.num_clients={num_clients}: lower it (or"
                " faults.extra)."
            )

    @property
    def most(self) -> int:
        """The largest number of clients of a round."""
        return self.per_round

    def schedule(
        self,
        faults: Faults,
        clock: Clock,
        num_clients: int,
        seed: int,
        planned: Callable[[np.ndarray], np.ndarray],
        sizes: Callable[[np.ndarray], np.ndarray],
    ) -> Schedule:
        """The timetable of a run; the arguments are those of :class:`Schedule`."""
        return self.timetable(self, faults, clock, num_clients, seed, planned, sizes)


class Sampler(Participation):
    """Draws the clients of each round."""

    timetable = SynchronousSchedule

    @property
    def can_draw_among_available(self) -> bool:
        """Whether it can draw among only those clients that are available now."""
        return False

    def choose(
        self, round_index: int, num_clients: int, seed: int, known: Mapping[int, ClientRecord]
    ) -> np.ndarray:
        """The ids of the cohort, int64 ``[K]``, ascending and distinct.

        Args:
            known: what the server knows, by client, if the sampler ``depends_on_losses``. A client
                that has not trained is missing.
        """
        return self(round_index, num_clients, seed)

    def __call__(self, round_index: int, num_clients: int, seed: int) -> np.ndarray:
        """The ids of the cohort, without the losses."""
        raise NotImplementedError


def _first_to_answer(
    drawn: np.ndarray, comes: np.ndarray, times: np.ndarray, wanted: int
) -> np.ndarray:
    """Which of the drawn clients answer first, bool ``[K]``: as many as are wanted, or all that
    answer. Of two at the same time, the client with the smaller id is first.
    """
    answering = np.flatnonzero(comes)
    in_order = answering[np.lexsort((drawn[answering], times[answering]))]
    is_first = np.zeros(len(drawn), bool)
    is_first[in_order[:wanted]] = True
    return is_first
