"""GC-Fed without a λ to choose: ``gc=auto`` reads the borderline off the clients. Ours; GC-Fed leaves λ open.

A client in training adds up what P takes out of its gradients, one number for each output of a layer: r_k, ``[out]``
(the same sum whether or not it was taken out). The server learns mean_k r_k and mean_k ‖r_k‖² of the m clients of a
round. If each r_k is a + noise_k, with a the same for all, then

    ‖a‖² ≈ (m ‖mean_k r_k‖² − mean_k ‖r_k‖²) / (m − 1)        without bias, for m ≥ 2
    q = ‖a‖² / mean_k ‖r_k‖²                                   0: what P takes out is noise; 1: the clients agree

of each tensor, from running means of numerator and denominator over the rounds. Local GC ends before the first tensor
whose q is above a threshold; Global GC projects the update of all tensors, as in GC-Fed. docs/results.md compares it
with the grid of λ and with three other rules.

State: two numbers a tensor, on the server, and whether its q is above the threshold. Bytes: up ``out`` numbers a tensor
and one beside the model, down one.
"""

from typing import Any

import torch
from torch import Tensor

from gcfed.federated.aggregate import Upload
from gcfed.federated.method import Setup
from gcfed.federated.round import Round
from gcfed.federated.stack import ClientStack, Params
from gcfed.methods.centralization import MEAN_AXES, GradientCentralization
from gcfed.methods.requirements import mean_aggregator
from gcfed.utils.device import on_device
from gcfed.utils.number import number

SENT, SQUARES = "gc_removed", "gc_squares"


class AutoCentralization(GradientCentralization):
    """GC-Fed whose borderline moves. Adds ``gc/signal/<tensor>``, q after the round, and ``gc/local/<tensor>``, whether
    the round had Local GC there, to the row of metrics.

    Args:
        threshold: of q when it rises; when it falls, half of it.
        memory: weight of the past in the running means, a round.
        boundary: as for :class:`GradientCentralization`, of the first round; later rounds follow q.

    Raises:
        ValueError: a setting out of its range; at ``validate``, an aggregator that is no mean or a cohort of one.
    """

    def __init__(self, *, threshold: float = 0.2, memory: float = 0.8, boundary: str | None = "auto") -> None:
        self.threshold = number("gc.threshold", threshold, 0, 1)
        self.memory = number("gc.memory", memory, 0, 1, below=True)
        super().__init__(lam=None if boundary else 1.0, boundary=boundary)

    def validate(self, setup: Setup) -> None:
        super().validate(setup)
        mean_aggregator(setup, "gc=auto", "it compares the mean of what clients take out with its parts")
        if setup.sampler.per_round < 2:
            raise ValueError("gc=auto compares the clients of a round: participation.per_round must be 2 or more.")
        self._names = list(self._server_ndim)

    def uploads(self, round: Round) -> dict[str, Params]:
        outputs = {name: torch.zeros_like(round.start[name].flatten(1)[:, 0]) for name in self._names}
        return {SENT: outputs, SQUARES: {"all": next(iter(outputs.values())).new_zeros(len(outputs))}}

    def on_broadcast(self, round: Round) -> None:
        first = round.start[self._names[0]]
        like = first.new_zeros(len(self._names), dtype=torch.float64)
        # signal: running mean of ‖a‖²; power: of mean ‖r_k‖²; above: 1 where q is above the threshold
        self._state = self.server_state("gc_auto", {"signal": like, "power": like, "above": like})
        if not round.index:
            self._state["above"].copy_(on_device([n not in self._local_ndim for n in self._names], like.device))
        local = (1 - self._state["above"].cummax(0).values).to(first.dtype)
        round.send({"local": local})
        self._local = dict(zip(self._names, local.unbind(), strict=True))

    def on_clients_start(self, stack: ClientStack, round: Round) -> None:
        self._removed = {name: stack.full[name].new_zeros(len(stack), len(round.start[name])) for name in self._names}

    def on_after_backward(self, trainer, pl_module) -> None:  # type: ignore[no-untyped-def]
        """Local GC up to this round's borderline, on the gradients ``[n, *shape]`` of the active clients."""
        clients = pl_module.clients
        for name, local in self._local.items():
            if (grad := clients.leaves[name].grad) is not None:
                axes = MEAN_AXES["out"] if grad.dim() == 5 else tuple(range(2, grad.dim()))
                mean = grad.mean(axes, keepdim=True)
                self._removed[name][: clients.active] += mean.flatten(1)
                grad.sub_(mean * local)

    def on_upload(self, upload: Upload, round: Round) -> None:
        upload.send(SENT, self._removed)
        squares_KL = torch.stack([r.square().sum(1) for r in self._removed.values()], 1)
        upload.send(SQUARES, {"all": squares_KL})

    def on_aggregate_end(self, update: Params, round: Round) -> None:
        m = round.num_finite
        if m < 2:
            return
        power = round.received[SQUARES]["all"].double()
        mean = torch.stack([round.received[SENT][name].double().square().sum() for name in self._names])
        state, past = self._state, self.memory if round.index else 0.0
        state["signal"].mul_(past).add_((m * mean - power) / (m - 1), alpha=1 - past)
        state["power"].mul_(past).add_(power, alpha=1 - past)
        above = self._signal() > torch.where(state["above"] > 0, self.threshold / 2, self.threshold)
        state["above"].copy_(above)

    def _signal(self) -> Tensor:
        """q, ``[L]``."""
        return (self._state["signal"].clamp(min=0) / self._state["power"].clamp(min=1e-300)).clamp(max=1)

    def on_round_end(self, row: dict[str, Any], round: Round) -> None:
        values = torch.stack([self._signal(), torch.stack([*self._local.values()]).double()]).tolist()
        for what, numbers in zip(("signal", "local"), values, strict=True):
            row |= {f"gc/{what}/{name}": number for name, number in zip(self._names, numbers, strict=True)}
