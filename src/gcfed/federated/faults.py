"""Clients that drop out, come late or do less than was asked of them; each drawn from (seed, round, client) alone."""

from dataclasses import dataclass

import numpy as np

from gcfed.utils.checked import Count, Share, ShareBelow1, Whole, checked
from gcfed.utils.rng import generator


@checked
@dataclass(frozen=True)
class Faults:
    """What goes wrong between the server's broadcast and its clients' uploads; null: nothing of the kind.

    Who drops out or comes late gets the broadcast and sends nothing; that it trained in vain is not simulated.

    Args:
        dropout: probability that a client of the cohort does not come back.
        stragglers: probability that a client does only a random number of its local steps, uniform from 1 to all of
            them, as in FedProx (Li et al., MLSys 2020, Section 5.2, where the number is one of epochs).
        deadline: local steps at which every client is cut off.
        extra: clients drawn beyond ``participation.per_round``, of whom the first to finish are taken (Bonawitz et al.,
            MLSys 2019, Section 2.2). A client's time is its number of local steps times a speed, exponential with
            mean 1, drawn anew each round.
    """

    dropout: ShareBelow1 | None = None
    stragglers: Share | None = None
    deadline: Count | None = None
    extra: Whole | None = None

    def steps(self, planned: np.ndarray, clients: np.ndarray, round: int, seed: int) -> np.ndarray:
        """Local steps that clients really do of those planned, ``[K] → [K]``."""
        steps = planned if self.deadline is None else np.minimum(planned, self.deadline)
        if not self.stragglers:
            return steps
        draws = np.array([generator(seed, "straggler", round, k).random(2) for k in clients.tolist()]).reshape(-1, 2)
        part = 1 + (draws[:, 1] * planned).astype(np.int64)
        return np.where(draws[:, 0] < self.stragglers, np.minimum(part, steps), steps)

    def survivors(self, drawn: np.ndarray, steps: np.ndarray, round: int, seed: int) -> np.ndarray:
        """Those of the clients drawn whose uploads count, in their order; perhaps none."""
        if not self.dropout and not self.extra:
            return drawn
        draws = [generator(seed, "fault", round, k) for k in drawn.tolist()]
        stays = np.array([draw.random() >= (self.dropout or 0) for draw in draws])
        times = np.where(stays, steps * np.array([draw.exponential() for draw in draws]), np.inf)
        first = np.lexsort((drawn, times))[: len(drawn) - (self.extra or 0)]
        return drawn[np.sort(first[stays[first]])]
