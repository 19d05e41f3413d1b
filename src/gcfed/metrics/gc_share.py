"""How much of a gradient, of an update and of the model gradient centralization removes."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gcfed.federated.parts import ClientStack, Download, Params, Received, Setup
from gcfed.metrics.base import AT_ONCE, OwnNumbers
from gcfed.metrics.updates import weights_of
from gcfed.utils.checked import Count, checked
from gcfed.utils.device import device_of


@checked
@dataclass(eq=False)
class GCShare(OwnNumbers):
    """The share that P = I − eeᵀ removes from each weight's tensors:
    ``gc/share_{gradient,update,model}/<tensor>``.

    For a tensor G, with a row for each output, the share is ‖(I − P)G‖² / ‖G‖², from 0 to 1:

    - ``gc/share_gradient``: of a client's gradient at the broadcast model, over all its samples;
      mean over the cohort
    - ``gc/share_update``: of the aggregated update Δ, before Global GC
    - ``gc/share_model``: of the broadcast model; GC-Fed's Assumption 1 is that it is 0

    A row of G is Σᵢ δᵢ xᵢᵀ, so behind a layer whose outputs have mean 0, such as LayerNorm, P
    removes nothing.
    """

    every: Count = 10
    writes = ("gc/share_gradient/*", "gc/share_update/*", "gc/share_model/*")

    def bind(self, setup: Setup) -> None:
        super().bind(setup)
        self.weights = weights_of(setup, setup.names)
        self.numbers = tuple(f"gc/share_gradient/{name}" for name in self.weights)

    def measure(self, stack: ClientStack, row: int, own: Params, download: Download) -> Tensor:
        weights = [stack.net.get_parameter(name) for name in self.weights]
        sums = [torch.zeros_like(weight) for weight in weights]
        index = torch.as_tensor(self.data.client(int(stack.clients[row])), device=device_of(own))
        with torch.enable_grad(), stack.lent_network.holding(download.broadcast_model):
            for part in index.split(AT_ONCE):
                x, y = self.data.fetch(part, None)
                loss = stack.task.real_losses(stack.net(x), y).sum()
                grads = torch.autograd.grad(loss, weights, materialize_grads=True)
                torch._foreach_add_(sums, grads)
        return self.shares(dict(zip(self.weights, sums, strict=True)))

    def shares(self, tensors: Params) -> Tensor:
        """The share of each weight, float64 ``[V]``; NaN for a tensor of zeros."""
        shares = []
        for name, by_output in self.weights.items():
            rows = by_output(tensors[name].double().unsqueeze(0))[0]
            removed = rows.mean(1).square().sum() * rows.shape[1]
            shares.append(removed / rows.square().sum())
        return torch.stack(shares)

    def columns(self, round: Received) -> dict[str, float]:
        shares = super().columns(round)
        if round.usable:  # otherwise the update is not yet in the model's coordinates
            shares |= self._columns_of("update", round.update)
        return shares | self._columns_of("model", round.broadcast_model)

    def _columns_of(self, kind: str, tensors: Params) -> dict[str, float]:
        shares = zip(self.weights, self.shares(tensors).tolist(), strict=True)
        return {f"gc/share_{kind}/{name}": share for name, share in shares if not math.isnan(share)}
