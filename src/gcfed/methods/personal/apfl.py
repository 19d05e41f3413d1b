"""A mixture of a personal and the global model: APFL (Deng, Kamani and Mahdavi 2020, arXiv
2003.13461, Algorithm 1).

    mixture        v̄ = αv + (1 − α)w
    local step     v ← v − η α ∇F_k(v̄)
                   α ← α − η ⟨v − w, ∇F_k(v̄)⟩, clamped to [0, 1]
                   FedAvg's step on w

All three are on the same mini-batch. A client keeps v and its α; v starts at the broadcast model of
its first round. In the authors' code (FedTorch) α moves in a round's first step only, with another
gradient and a term 0.02 α. For other methods and GC see :mod:`~gcfed.methods.personal.ditto`.

Which model is tested: as in Ditto, with v̄ instead of v.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gcfed.federated.parts import (
    ClientStack,
    ClientStates,
    Download,
    KeptState,
    Params,
    Prepared,
    inner_products,
    per_client,
)
from gcfed.methods.personal.ditto import SecondModel
from gcfed.utils.checked import Share, checked


@checked
class APFL(SecondModel):
    """Trains v and α beside w; ``alpha`` is α in a client's first round, in the
    authors' code 0.5.
    """

    recordable = "run"
    keeps = SecondModel.keeps | {  # α − ``alpha``
        "apfl": KeptState(
            lambda part, download: {
                "alpha": next(iter(download.broadcast_model.values())).new_zeros(())
            }
        )
    }

    def __init__(self, alpha: Share = 0.5) -> None:
        self.alpha = alpha

    def prepare(self, stack: ClientStack, own: ClientStates, download: Download) -> Prepared:
        alpha = own["apfl"]["alpha"] + self.alpha
        return {**super().prepare(stack, own, download), "alpha": alpha}

    def gradients(
        self, stack: ClientStack, objective: Callable[[], Tensor], w: Params
    ) -> list[Tensor]:
        alpha = stack.prepared[self]["alpha"][: stack.active]
        leaves = list(stack.leaves.values())
        v = [leaf.detach().clone() for leaf in leaves]
        alphas = [per_client(alpha, t) for t in v]
        differences = [t - w[name] for name, t in zip(stack.leaves, v, strict=True)]
        mixtures = []
        for weight, share, difference in zip(v, alphas, differences, strict=True):
            mixtures.append(weight + (share - 1) * difference)
        with torch.no_grad():
            torch._foreach_copy_(leaves, mixtures)
        grads = list(stack.gradients(objective()).values())
        with torch.no_grad():
            torch._foreach_copy_(leaves, v)
        slopes = inner_products(differences, grads)
        torch._foreach_mul_(grads, alphas)
        # not before: ``alphas`` are views of it
        alpha.sub_(slopes * stack.prepared[self]["lr"]).clamp_(0, 1)
        return grads

    def on_clients_end(self, stack: ClientStack, download: Download) -> Mapping[str, Params]:
        states = super().on_clients_end(stack, download)
        alpha = stack.prepared[self]["alpha"]
        mixtures = {}
        for name in self.trained_names:
            w = stack.full[name]
            v = states["second_model"][name]
            mixtures[name] = torch.lerp(w, v, per_client(alpha, w).to(w.dtype))
        stack.personal = stack.personal | mixtures
        return {**states, "apfl": {"alpha": alpha - self.alpha}}
