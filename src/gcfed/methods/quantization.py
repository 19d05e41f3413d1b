"""Uploads with a few bits per coordinate: unbiased stochastic rounding.

FedPAQ (Reisizadeh et al., AISTATS 2020, Algorithm 1) with its low-precision quantizer, which is QSGD's (Alistarh et
al., NeurIPS 2017): Q(x) = ‖x‖ sign(x) ξ, where sξ is s|x|/‖x‖ rounded up with the probability of its fraction and down
otherwise. So E Q(x) = x and E ‖Q(x) − x‖² ≤ min(d/s², √d/s) ‖x‖². Each tensor is quantized with its own norm. d
coordinates take ⌈d·bits/8⌉ + 4 bytes; the 4 are the norm.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gcfed.federated.messages import Levels
from gcfed.federated.method import ClientPart, Download, Order, Own, Upload
from gcfed.utils.checked import checked
from gcfed.utils.rng import torch_seed


@checked
class Quantization(ClientPart):
    """Quantizes each client's update Δ; messages of other methods are not quantized.

    Args:
        bits: per coordinate: a sign and a level 0 … s, s = 2^(bits−1) − 1; at most what float32 can represent.
    """

    order = Order.QUANTIZES

    def __init__(self, bits: Annotated[int, Field(ge=2, le=22)] = 8) -> None:
        self.bits, self.levels = bits, 2 ** (bits - 1) - 1  # s, the levels above 0

    def send(self, upload: Upload, own: Own, download: Download) -> None:
        # Not running statistics: a variance could become negative.
        tensors, norms = [upload.delta[name] for name in self.trained_names], []
        for row, client in enumerate(upload.clients.tolist()):
            random = torch.Generator(tensors[0].device)
            random.manual_seed(torch_seed(download.seed, "quantization", download.round, client))
            norms.append(quantize_([t[row] for t in tensors], self.levels, random))
        upload.levels |= {
            n: Levels(self.bits, own) for n, own in zip(self.trained_names, torch.stack(norms, 1), strict=True)
        }


def quantize_(tensors: list[Tensor], levels: int, random: torch.Generator) -> Tensor:
    """Rounds each tensor of a client in place, at random, to a multiple of its norm / ``levels``. Returns the norms.

    A tensor with a number that is not finite becomes NaN.
    """
    draw = torch.rand(sum(t.numel() for t in tensors), generator=random, device=random.device)
    draws = [u.view(t.shape) for u, t in zip(draw.split([t.numel() for t in tensors]), tensors, strict=True)]
    norms = torch.stack(torch._foreach_norm(tensors)).float()  # as it is sent
    level = torch._foreach_abs(tensors)
    torch._foreach_div_(level, list(norms.clamp(min=torch.finfo(norms.dtype).tiny)))
    torch._foreach_mul_(level, levels)
    torch._foreach_clamp_max_(level, levels)  # a single coordinate may exceed its rounded norm
    up = torch._foreach_frac(level)
    torch._foreach_sub_(up, draws)
    torch._foreach_ceil_(up)  # 1 where the draw is below the fraction, else 0
    torch._foreach_floor_(level)
    torch._foreach_add_(level, up)
    torch._foreach_sign_(tensors)
    torch._foreach_mul_(tensors, level)
    torch._foreach_mul_(tensors, list(norms / levels))
    return norms
