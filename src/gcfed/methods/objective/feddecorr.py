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
from gcfed.methods.requirements import check_learned, network_functions, whole_batches
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
    needs = [
        network_functions("features", "head"),
        whole_batches("correlations are those of a batch"),
    ]

    def __init__(
        self, beta: Weight = 0.001, scale: Literal["paper", "authors"] = "authors"
    ) -> None:
        self.beta = beta
        self.scale = scale

    def local_loss(self, stack: ClientStack, batch: Batch, out: Output) -> Tensor:
        features = check_learned(out, self.title)
        x = features.to(torch.promote_types(features.dtype, torch.float32))
        is_real = x.new_ones(x.shape[:2]) if batch.rows is None else batch.rows.to(x.dtype)
        count = is_real.sum(1)
        is_real = is_real.unsqueeze(-1)
        mean = (x * is_real).sum(1, keepdim=True) / count.view(-1, 1, 1)
        centred = (x - mean) * is_real
        freedom = (count - 1).clamp(min=1)
        variance = centred.square().sum(1, keepdim=True) / freedom.view(-1, 1, 1)
        z = centred * (variance + EPS).rsqrt()
        diagonal = z.square().sum(1).square().sum(1)
        # it would round both products, and their difference matters
        with torch.autocast(z.device.type, enabled=False):
            squares = (z @ z.mT).square().sum((1, 2)) - diagonal
        num_features = z.shape[-1]
        if self.scale == "paper":
            return self.beta * squares / (num_features**2 * freedom**2)
        # With one feature the term is 0, not 0/0.
        pairs = num_features * max(num_features - 1, 1)
        return self.beta * squares / (pairs * count)
