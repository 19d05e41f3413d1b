"""The moves of FedLESAM's and FedWMSAM's published code: all entries of a tensor by one number.

Their papers move the weights along a direction d, scaled to the norm ρ. The code flattens d, and
moves *tensor* i by *entry* i of it:

    move of tensor i = ρ d_i / Σ_j |d_j|    for the T tensors of the network, j = 1 … T

This is a constant in each tensor: the direction that gradient centralization removes.

    FedLESAM (MediaBrain-SJTU/FedLESAM)                 d = −(the server's last step)
    FedWMSAM (Huang-Yongzhi/NeurlPS_FedWMSAM)           d = −(the paper's d)

The server of FedLESAM's code sends its whole last step. Only the first T numbers have an effect, so
here it sends these.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gcfed.federated.network.rows import per_client
from gcfed.federated.parts import (
    Batch,
    ClientStack,
    ClientStates,
    Download,
    Method,
    Params,
    Round,
    ServerPart,
)
from gcfed.methods.correction.scaffold import MeanVariate
from gcfed.methods.sharpness.fedwmsam import OwnMomentum, WeightedMeanStep
from gcfed.methods.sharpness.sam import Sam
from gcfed.utils.checked import Inside, Weight, checked

TINY = 1e-12  # instead of a sum of zeros


def first_entries(tensors: Sequence[Tensor]) -> Tensor:
    """The first T of all flattened entries of T tensors, ``[n, *shape]`` each → ``[n, T]``."""
    flat_KP = torch.cat([t.reshape(len(t), -1) for t in tensors], 1)
    return flat_KP[:, : len(tensors)]


def constants(first_KT: Tensor, rho: float) -> Tensor:
    """The moves of T tensors, ``[n, T]``: their absolute values add up to ρ."""
    return first_KT * (rho / first_KT.abs().sum(1, keepdim=True).clamp(min=TINY))


@checked
class ConstantLESAM(Method):
    """FedLESAM as its authors' code has it; ``rho`` is ρ. In the first round nothing moves."""

    def __init__(self, rho: Weight = 0.1) -> None:
        super().__init__(ConstantMove(rho), LastStep())


class ConstantMove(Sam):
    """Moves each tensor by a number that is the same in all local steps of a round."""

    recordable = "run"

    def __init__(self, rho: float) -> None:
        super().__init__(rho)
        self.two_passes = False

    def prepare(self, stack: ClientStack, own: ClientStates, download: Download) -> Params:
        last_step_T = download.extra["last_step"]["first"]
        moves_T = constants(-last_step_T.unsqueeze(0), self.rho)[0]
        return dict(zip(stack.leaves, moves_T, strict=True))

    def perturbation(
        self, stack: ClientStack, batch: Batch, objective: Callable[[], Tensor]
    ) -> Sequence[Tensor]:
        moves = stack.prepared[self]
        return [moves[name].expand_as(weight) for name, weight in stack.leaves.items()]


class LastStep(ServerPart):
    """Sends the first T entries of the server's last step."""

    def on_broadcast(self, download: Download, round: Round) -> None:
        model = {name: round.server_model[name] for name in self.trained_names}
        previous = self.server_state("previous", model, zeros=False)
        steps = [(model[name] - previous[name]).unsqueeze(0) for name in self.trained_names]
        download.extra["last_step"] = {"first": first_entries(steps)[0]}
        torch._foreach_copy_(list(previous.values()), list(model.values()))


@checked
class ConstantWMSAM(Method):
    """FedWMSAM with the moves of its authors' code.

    ``rho`` is ρ, ``alpha`` the α of the first round.
    """

    def __init__(self, rho: Weight = 0.01, *, alpha: Inside = 0.1) -> None:
        super().__init__(ConstantAhead(rho), MeanVariate(), WeightedMeanStep(alpha))


class ConstantAhead(OwnMomentum):
    recordable = "run"

    def move(self, directions: Sequence[Tensor]) -> Sequence[Tensor]:
        first_KT = -first_entries(directions)
        moves_TK = constants(first_KT, self.rho).T
        return [per_client(move_K, t) for move_K, t in zip(moves_TK, directions, strict=True)]
