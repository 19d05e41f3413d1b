"""Uploads with the largest entries only, and the rest kept for later: Top-k with error feedback,
the classic variant.

    send   C(e_k + Δ_k), the k entries of each tensor that are largest in absolute value
    keep   e_k ← e_k + Δ_k − C(e_k + Δ_k), the residual

This is Qsparse-local-SGD (Basu et al., NeurIPS 2019, Algorithm 1) without its quantizer: Sparsified
SGD with memory (Stich et al., NeurIPS 2018) after local steps. It is not EF21, whose server keeps
an estimate of each gradient. ``comm/up_bytes`` counts each entry's own bytes and 4 for its place; a
real wire also carries the zeros.
"""

from collections.abc import Mapping

import torch

from gcfed.federated.parts import (
    ClientPart,
    ClientStates,
    Download,
    KeptState,
    Order,
    Params,
    Setup,
    Upload,
    like_trained,
)
from gcfed.utils.checked import PositiveShare, checked
from gcfed.utils.refusal import Refusal


@checked
class TopK(ClientPart):
    """Makes each client's update Δ sparse; messages of other methods and running statistics are
    sent whole.

    Args:
        ratio: k/d, the share of the d entries of each tensor that is sent; at least one entry.
    """

    order = Order.QUANTIZES
    keeps = {"topk": KeptState(like_trained)}

    def __init__(self, ratio: PositiveShare = 0.1) -> None:
        self.ratio = ratio

    def validate(self, setup: Setup) -> None:
        orders = Order.PROJECTS, Order.QUANTIZES
        others = [part.title for part in setup.parts if part.order in orders and part is not self]
        if others:
            raise Refusal(
                f"TopK does not combine with {others[0]}: its residual is one of whole, exact"
                " updates."
            )

    def send(self, upload: Upload, own: ClientStates, download: Download) -> None:
        """Also makes the new residuals, in ``own``."""
        for name, residual in own["topk"].items():
            delta = upload.delta[name]
            if not delta.numel():  # the tensor stays on the client
                continue
            flat = residual.add_(delta).reshape(len(delta), -1)
            count = self._count(flat.shape[1])
            # with GC, ±x are equal but for rounding
            indices = flat.abs().float().topk(count, 1).indices
            sent = torch.zeros_like(flat)
            sent.scatter_(1, indices, flat.gather(1, indices))
            sent = sent.view(delta.shape)
            delta.copy_(sent)
            residual.sub_(sent)

    def sent_bytes(self, delta: Params) -> dict[str, int]:
        sizes = {}
        for name in self.trained_names:
            like = delta[name]
            if like.numel():
                sizes[name] = self._count(like.numel()) * (like.element_size() + 4)
        return sizes

    def _count(self, entries: int) -> int:
        """k, the number of entries that are sent of a tensor with this number of entries."""
        return max(1, round(self.ratio * entries))

    def keep(self, upload: Upload, own: ClientStates, download: Download) -> Mapping[str, Params]:
        """A client whose upload does not count keeps its old residual."""
        return {"topk": own["topk"]}
