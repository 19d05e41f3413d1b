"""Clients that drop out, are late, or do fewer steps.

Each draw depends only on (seed, round, client).
"""

from dataclasses import dataclass

import numpy as np

from gcfed.participation.clock import Clock
from gcfed.utils.checked import Count, Share, ShareBelow1, Whole, checked
from gcfed.utils.rng import generator


@checked
@dataclass(frozen=True)
class Faults:
    """Faults between the server's broadcast and the clients' uploads. A client that drops out or is
    late gets the broadcast and sends nothing. Its useless training is not simulated.

    Args:
        dropout: probability that a client of the cohort does not answer.
        stragglers: probability that a client does only a random number of its local steps, uniform
            from 1 to all of them, as in FedProx (Li et al., MLSys 2020, Section 5.2, with epochs
            instead of steps).
        deadline: the largest number of local steps of a client.
        extra: number of clients that are drawn in addition to ``participation.per_round``. The
            uploads of the first ``per_round`` clients to finish count (Bonawitz et al., MLSys 2019,
            Section 2.2). Their times are those of ``participation.clock``: by default a client's
            number of local steps times an exponential factor with mean 1, drawn anew each round.
    """

    dropout: ShareBelow1 | None = None
    stragglers: Share | None = None
    deadline: Count | None = None
    extra: Whole | None = None

    def drawn(self, used: int) -> int:
        """How many clients are drawn, so that a round uses this many uploads."""
        return used + (self.extra or 0)

    def used(self, drawn: int) -> int:
        """How many uploads a round uses at most, of this many clients that are drawn."""
        return drawn - (self.extra or 0)

    def steps(
        self, planned: np.ndarray, clients: np.ndarray, round_index: int, seed: int
    ) -> np.ndarray:
        """How many of their planned local steps clients do, ``[K] → [K]``."""
        steps = planned if self.deadline is None else np.minimum(planned, self.deadline)
        if not self.stragglers:
            return steps
        draws = np.zeros((len(clients), 2))
        for row, client in zip(draws, clients.tolist(), strict=True):
            row[:] = generator(seed, "straggler", round_index, client).random(2)
        is_straggler = draws[:, 0] < self.stragglers
        part = 1 + (draws[:, 1] * planned).astype(np.int64)
        return np.where(is_straggler, np.minimum(part, steps), steps)

    def answers(
        self,
        clients: np.ndarray,
        steps: np.ndarray,
        round_index: int,
        seed: int,
        clock: Clock,
        message_bytes: float,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Whether these clients answer, bool ``[K]``, and after how many seconds they do or would
        have done, ``[K]``.
        """
        draws = [generator(seed, "fault", round_index, client) for client in clients.tolist()]
        dropout = self.dropout or 0.0
        answers = np.array([draw.random() >= dropout for draw in draws], bool)
        return answers, clock.seconds(clients, steps, draws, seed, message_bytes)
