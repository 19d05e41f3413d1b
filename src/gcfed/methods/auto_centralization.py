"""Gradient centralization that reads its borderline off the clients: ``gc=auto``. Ours; GC-Fed leaves λ open.

A client in training adds up what P takes out of its gradients, one number for each output of a layer: r_k, ``[out]``
(the same sum whether or not it was taken out). The server learns mean_k r_k and mean_k ‖r_k‖² of the m clients of a
round. If each r_k is a + noise_k, with a the same for all and σ² the noise's expected squared length, then

    ‖a‖² ≈ (m ‖mean_k r_k‖² − mean_k ‖r_k‖²) / (m − 1)        without bias, for m ≥ 2
    q = ‖a‖² / mean_k ‖r_k‖²                                   the signal's share: 0 noise, 1 agreed

of each tensor, from running means of numerator and denominator over the rounds. Four rules:

============  ========================================================================================================
``agree``     Local GC in every tensor whose q is above a threshold, Global GC in all: a drift that all clients share is
              the one that no mean over clients takes out
``disagree``  Local GC in every tensor whose q is below it, Global GC in all: what P takes out is noise there
``border``    Local GC up to the first tensor whose q is above it, as with GC-Fed's λ; Global GC in all
``soft``      no threshold and no Global GC: clients take out the share of the mean that is no signal, 1 − ‖a‖² / (‖a‖²
              + σ²/m), Wiener's estimate of a
============  ========================================================================================================

State: two numbers a tensor, on the server, and where Local GC is on. Bytes: up ``out`` + 1 numbers a tensor beside the
model, down one a tensor.
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
from gcfed.utils.number import choice, number

RULES = ("agree", "disagree", "border", "soft")
SENT = "gc_removed"
SQUARES = "gc_squares"


class AutoCentralization(GradientCentralization):
    """Local GC by how far the clients agree about what it takes out. Adds ``gc/signal/<tensor>``, q, and
    ``gc/local/<tensor>``, the share of the mean that the clients of this round took out, to the row of metrics.

    Args:
        rule: ``agree``, ``disagree``, ``border`` or ``soft``.
        threshold: of q, when it rises; when it falls, half of it.
        memory: weight of the past in the running means, a round.
        boundary: module from which on the first round has no Local GC; later rounds follow q.
        tensors: as for :class:`GradientCentralization`.

    Raises:
        ValueError: a setting out of its range; at ``validate``, an aggregator that is no mean or a cohort of one.
    """

    def __init__(
        self,
        *,
        rule: str = "agree",
        threshold: float = 0.1,
        memory: float = 0.8,
        boundary: str | None = "auto",
        tensors: str = "weights",
    ) -> None:
        self.rule = choice("gc.rule", rule, RULES)
        self.threshold = number("gc.threshold", threshold, 0, 1)
        self.memory = number("gc.memory", memory, 0, 1, below=True)
        super().__init__(server=rule != "soft", lam=None if boundary else 1.0, boundary=boundary, tensors=tensors)

    def validate(self, setup: Setup) -> None:
        super().validate(setup)
        mean_aggregator(setup, "gc=auto", "it compares the mean of what clients take out with its parts")
        if setup.sampler.per_round < 2:
            raise ValueError("gc=auto compares the clients of a round: participation.per_round must be 2 or more.")
        self._first, least = set(self.local_names), 2 if self.tensors == "weights" else 1
        self._names = [name for name, p in setup.module.net.named_parameters() if p.dim() >= least]

    def uploads(self, round: Round) -> dict[str, Params]:
        outputs = {name: torch.zeros_like(round.start[name].flatten(1)[:, 0]) for name in self._names}
        return {SENT: outputs, SQUARES: {"all": next(iter(outputs.values())).new_zeros(len(outputs))}}

    def on_broadcast(self, round: Round) -> None:
        first = round.start[self._names[0]]
        like = first.new_zeros(len(self._names), dtype=torch.float64)
        # signal: running mean of ‖a‖²; power: of mean ‖r_k‖²; off: 1 where Local GC is off
        self._state = self.server_state("gc_auto", {"signal": like, "power": like, "off": like})
        if not round.index:
            self._state["off"].copy_(on_device([name not in self._first for name in self._names], like.device))
        strength = self._strength(len(round.cohort)).to(first.dtype)
        round.send({"strength": strength})
        self._strengths = dict(zip(self._names, strength.unbind(), strict=True))

    def _share(self) -> Tensor:
        """q, ``[L]``."""
        return (self._state["signal"].clamp(min=0) / self._state["power"].clamp(min=1e-300)).clamp(max=1)

    def _strength(self, clients: int) -> Tensor:
        """How much of its mean a client takes out of a gradient, ``[L]``."""
        q = self._share()
        if self.rule == "soft":
            return 1 - q / (q + (1 - q) / clients)
        off = self._state["off"]
        return 1 - (off.cummax(0).values if self.rule == "border" else off)

    def on_clients_start(self, stack: ClientStack, round: Round) -> None:
        self._removed = {name: stack.full[name].new_zeros(len(stack), len(round.start[name])) for name in self._names}

    def on_after_backward(self, trainer, pl_module) -> None:  # type: ignore[no-untyped-def]
        """Local GC of the strength of this round, on the gradients ``[n, *shape]`` of the active clients."""
        clients = pl_module.clients
        for name, strength in self._strengths.items():
            if (grad := clients.leaves[name].grad) is not None:
                axes = MEAN_AXES["out"] if grad.dim() == 5 else tuple(range(2, grad.dim()))
                mean = grad.mean(axes, keepdim=True)
                self._removed[name][: clients.active] += mean.flatten(1)
                grad.sub_(mean * strength)

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
        q = self._share()
        if self.rule == "agree":
            off = q <= torch.where(state["off"] > 0, self.threshold, self.threshold / 2)
        else:
            off = q > torch.where(state["off"] > 0, self.threshold / 2, self.threshold)
        state["off"].copy_(off)

    def on_round_end(self, row: dict[str, Any], round: Round) -> None:
        values = torch.stack([self._share(), torch.stack([*self._strengths.values()]).double()]).tolist()
        for what, numbers in zip(("signal", "local"), values, strict=True):
            row |= {f"gc/{what}/{name}": number for name, number in zip(self._names, numbers, strict=True)}
