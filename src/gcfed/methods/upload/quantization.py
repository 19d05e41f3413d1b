"""Uploads with a few bits per coordinate: unbiased stochastic rounding.

FedPAQ (Reisizadeh et al., AISTATS 2020, Algorithm 1) with its low-precision quantizer, which is
QSGD's (Alistarh et al., NeurIPS 2017): Q(x) = ‖x‖ sign(x) ξ, where sξ is s|x|/‖x‖ rounded up with
the probability of its fraction and down otherwise. So E Q(x) = x and E ‖Q(x) − x‖² ≤ min(d/s²,
√d/s) ‖x‖². Each tensor is quantized with its own norm. d coordinates take ⌈d·bits/8⌉ + 4 bytes; the
4 are the norm.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gcfed.federated.parts import ClientPart, ClientStates, Download, Levels, Order, Params, Upload
from gcfed.utils.checked import checked
from gcfed.utils.rng import torch_seed


@checked
class Quantization(ClientPart):
    """Quantizes each client's update Δ; messages of other methods are not quantized.

    Args:
        bits: per coordinate: a sign and a level 0 … s, s = 2^(bits−1) − 1; at most what float32 can
            represent.
    """

    order = Order.QUANTIZES

    def __init__(self, bits: Annotated[int, Field(ge=2, le=22)] = 8) -> None:
        self.bits = bits
        self.levels = 2 ** (bits - 1) - 1  # s, the levels above 0

    def send(self, upload: Upload, own: ClientStates, download: Download) -> None:
        # Not running statistics: a variance could become negative.
        tensors = list(self.trained(upload.delta).values())
        norms = []
        for row, client in enumerate(upload.clients.tolist()):
            random = torch.Generator(tensors[0].device)
            random.manual_seed(
                torch_seed(download.seed, "quantization", download.round_index, client)
            )
            norms.append(quantize_([t[row] for t in tensors], self.levels, random))
        for name, norm_K in zip(self.trained_names, torch.stack(norms, 1), strict=True):
            upload.levels[name] = Levels(self.bits, norm_K)

    def quantized(self, delta: Params) -> dict[str, int]:
        return dict.fromkeys(self.trained_names, self.bits)


def quantize_(tensors: list[Tensor], levels: int, random: torch.Generator) -> Tensor:
    """Rounds each tensor of a client in place, at random, to a multiple of its norm / ``levels``.

    Returns the norms.

    A tensor with a number that is not finite becomes NaN.
    """
    norms = torch.stack(torch._foreach_norm(tensors)).float()  # as it is sent
    norm_P = torch.cat([norm.expand(t.numel()) for norm, t in zip(norms, tensors, strict=True)])
    x_P = torch.cat([t.flatten() for t in tensors])
    draw_P = torch.rand(len(x_P), generator=random, device=random.device)
    level_P = x_P.abs().div_(norm_P.clamp(min=torch.finfo(norms.dtype).tiny)).mul_(levels)
    level_P.clamp_(max=levels)  # a single coordinate may exceed its rounded norm
    up_P = draw_P < level_P.frac()
    x_P.sign_().mul_(level_P.floor_().add_(up_P)).mul_(norm_P.div_(levels))
    for t, rounded in zip(tensors, x_P.split([t.numel() for t in tensors]), strict=True):
        t.copy_(rounded.view(t.shape))
    return norms
