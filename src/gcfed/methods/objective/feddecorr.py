"""Decorrelates features, so that they do not collapse to few dimensions: FedDecorr (Shi et al.,
ICLR 2023).

The d features of a batch of B samples are standardised to z, [B, d]; their correlations are ``K =
zᵀz / (B − 1)``. The paper's term is ``β/d² ‖K‖²``, the authors' code (also in FedACG and GC-Fed)
``β/(d(d − 1)) · ‖zᵀz‖²/B`` without the
diagonal: about B times as much. Here both leave out the diagonal. It is constant except for
features that barely vary, and there its gradient would be huge. Since ``‖zᵀz‖ = ‖zzᵀ‖``, only a B ×
B matrix is built.
"""

from typing import Literal

import torch
from torch import Tensor

from gcfed.federated.parts import Batch, ClientPart, ClientStack, Output
from gcfed.methods.requirements import check_learned, network_parts, whole_batches
from gcfed.utils.checked import Weight, checked

# added to a feature's variance, as in the authors' code: a constant feature has no correlations
EPS = 1e-8


@checked
class FedDecorr(ClientPart):
    """Adds β times the mean squared correlation between the network's features over each client's
    batch.

    Features are the input of the head. A batch of one sample has no correlations and adds nothing.

    Args:
        beta: β. In the authors' scale: 0.1 in FedDecorr, 0.01 in FedACG, 0.001 in GC-Fed.
        scale: ``paper`` or ``authors``, as above.
    """

    recordable = "run"
    reads = {"features"}
    needs = [network_parts("features", "head"), whole_batches("correlations are those of a batch")]

    def __init__(
        self, beta: Weight = 0.001, scale: Literal["paper", "authors"] = "authors"
    ) -> None:
        self.beta = beta
        self.scale = scale

    def local_loss(self, stack: ClientStack, batch: Batch, out: Output) -> Tensor:
        features = check_learned(out, self.title)
        x = features.to(torch.promote_types(features.dtype, torch.float32))
        rows = x.new_ones(x.shape[:2]) if batch.rows is None else batch.rows.to(x.dtype)
        rows, count = rows.unsqueeze(-1), rows.sum(1)
        x = (x - (x * rows).sum(1, keepdim=True) / count.view(-1, 1, 1)) * rows
        freedom = (count - 1).clamp(min=1)
        z = x * (x.square().sum(1, keepdim=True) / freedom.view(-1, 1, 1) + EPS).rsqrt()
        diagonal = z.square().sum(1).square().sum(1)
        # it would round both products, and their difference matters
        with torch.autocast(z.device.type, enabled=False):
            squares = (z @ z.mT).square().sum((1, 2)) - diagonal
        d = z.shape[-1]
        # With one feature the term is 0, not 0/0.
        scale = d**2 * freedom**2 if self.scale == "paper" else d * max(d - 1, 1) * count
        return self.beta * squares / scale
