"""Hostile clients that know the honest updates of their cohort: ALIE and inner-product
manipulation.

The whole cohort must train in one stack (``client.stack``) on one process.
"""

from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gcfed.attacks.byzantine import Attack, messages
from gcfed.federated.parts import ClientStates, Download, Fact, Setup, Upload
from gcfed.participation.sampling import PoissonSampler
from gcfed.utils.checked import Weight, checked
from gcfed.utils.refusal import Refusal


class Collusion(Attack):
    """Hostile clients send a function of the honest clients' messages, tensor by tensor:
    :meth:`together`.
    """

    facts = {Fact.SEES_COHORT}

    def together(self, honest_nX: Tensor, hostile: int) -> Tensor:
        """The tensors of the n honest clients, ``[n, *shape]`` → the tensor of each hostile client,
        ``[*shape]``.
        """
        raise NotImplementedError

    def validate(self, setup: Setup) -> None:
        super().validate(setup)
        if isinstance(setup.sampler, PoissonSampler):
            raise Refusal(
                f"attack={self.title} needs participation=uniform: a stack has at most per_round"
                " clients."
            )
        if setup.solver.stack != "auto":
            self._see_all(int(setup.solver.stack), setup.cohort_size)

    def _see_all(self, clients: int, cohort_size: int) -> None:
        if clients < cohort_size:
            needed = f"client.stack={cohort_size} or more, trainer.devices=1"
            raise Refusal(f"attack={self.title} must see all clients: {needed}.")

    def send(self, upload: Upload, own: ClientStates, download: Download) -> None:
        """Raises Refusal if the cohort trains in several stacks or processes."""
        self._see_all(len(upload.clients), len(download.cohort))
        hostile = torch.from_numpy(self.is_hostile(upload.clients, download.seed)).to(
            upload.finite.device
        )
        honest = ~hostile & upload.finite
        number = int(hostile.sum())
        if number and honest.any():
            for t in messages(upload):
                t[hostile] = self.together(t[honest], number)
            upload.finite[hostile] = True  # even if their own training diverged


@checked
@dataclass(eq=False)
class ALIE(Collusion):
    """A little is enough: μ − zσ of the honest clients, by coordinate (Baruch et al., NeurIPS 2019,
    Algorithm 3).

    Stronger than its authors' attack, which takes μ and σ from what the hostile clients themselves
    would have sent.

    Args:
        z: standard deviations; None: the paper's z_max, the largest with Φ(z) < (n − m − s)/(n −
            m), where m of n clients are hostile and s = ⌊n/2 + 1⌋ − m.
    """

    z: Annotated[float, Field(ge=0, le=1e6)] | None = 1.5

    def together(self, honest_nX: Tensor, hostile: int) -> Tensor:
        z = z_max(len(honest_nX) + hostile, hostile) if self.z is None else self.z
        return honest_nX.mean(0) - z * honest_nX.std(0, correction=0)


def z_max(n: int, m: int) -> float:
    """The paper's z for m hostile of n clients, at least 0."""
    share = (n - m - (n // 2 + 1 - m)) / (n - m)
    return max(0.0, NormalDist().inv_cdf(share)) if 0 < share < 1 else 0.0


@checked
@dataclass(eq=False)
class IPM(Collusion):
    """Inner-product manipulation: −ε times the honest mean (Xie et al., UAI 2019, Section 4);
    ``epsilon`` is ε.
    """

    epsilon: Weight = 0.5

    def together(self, honest_nX: Tensor, hostile: int) -> Tensor:
        return honest_nX.mean(0) * -self.epsilon
