"""ResNets of 6n + 2 layers for small images: ResNet-20, 32, 44, 56 and 110.

"Deep Residual Learning for Image Recognition" (He et al., CVPR 2016), §4.2, with shortcuts of option A, which have no
parameters. Groups of channels are normalized in place of batches, as in this package's other networks, so that clients
can be stacked and have no statistics to average.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from gcfed.models.stages import Stage, Staged, image_shape, init_kaiming
from gcfed.utils.number import number

Norm = Callable[[int], nn.Module]


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside an identity; one that widens also halves the sides, on both ways."""

    def __init__(self, channels_in: int, channels: int, norm: Norm) -> None:
        super().__init__()
        self.widens = channels - channels_in
        stride = 2 if self.widens else 1
        self.conv1 = nn.Conv2d(channels_in, channels, kernel_size=3, stride=stride, padding=1, bias=False)
        self.norm1 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, kernel_size=3, padding=1, bias=False)
        self.norm2 = norm(channels)
        nn.init.zeros_(self.norm2.get_parameter("weight"))

    def forward(self, h_BCHW: Tensor) -> Tensor:
        branch_BCHW = self.norm2(self.conv2(self.norm1(self.conv1(h_BCHW)).relu()))
        if self.widens:
            h_BCHW = F.pad(h_BCHW[..., ::2, ::2], (0, 0, 0, 0, 0, self.widens))
        return (branch_BCHW + h_BCHW).relu()


class ResNetCIFAR(Staged, nn.Module):
    """``conv1`` with ``norm1``, then ``layer1``, ``layer2`` and ``layer3`` of 16, 32 and 64 channels, then ``fc``.

    Kaiming-normal weights (fan-in), and in each block a last norm of scale 0 (Goyal et al. 2017): He et al. warm up
    their 110 layers at a tenth of the rate, which blocks that start as identities can do without.

    Args:
        input_shape: (C, H, W) of one image, of any size.
        num_classes: number of logits.
        depth: number of layers with weights, 6n + 2 with n blocks a stage.
        norm: ``group`` or, for ``client.stack=1``, the paper's ``batch``.
        groups: groups of every GroupNorm.

    Raises:
        ValueError: a depth that is not 8, 14, 20, …; a norm of another name; ``groups`` that do not divide 16.
    """

    def __init__(
        self,
        *,
        input_shape: Sequence[int],
        num_classes: int,
        depth: int = 110,
        norm: str = "group",
        groups: int = 8,
    ) -> None:
        super().__init__()
        if number("model.depth", depth, 8, whole=True) % 6 != 2:
            raise ValueError(f"model.depth={depth} is not 6n + 2; use 20, 32, 44, 56 or 110")
        if norm not in ("group", "batch"):
            raise ValueError(f"model.norm={norm} must be group or batch")
        if 16 % number("model.groups", groups, 1, whole=True):
            raise ValueError(
                f"model.groups={groups} does not divide the 16 channels of the first stage; use 1, 2, 4, 8 or 16"
            )
        make_norm: Norm = nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, groups)
        n = (depth - 2) // 6
        channels, _, _ = image_shape(input_shape, 1, "it takes images")
        self.conv1 = nn.Conv2d(channels, 16, kernel_size=3, padding=1, bias=False)
        self.norm1 = make_norm(16)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(*[BasicBlock(width if i else before, width, make_norm) for i in range(n)])
            for before, width in ((16, 16), (16, 32), (32, 64))
        )
        self.fc = nn.Linear(64, num_classes)
        self.apply(init_kaiming)

    def _stem(self, x_BCHW: Tensor) -> Tensor:
        return self.norm1(self.conv1(x_BCHW)).relu()

    def _last(self, h_BCHW: Tensor) -> Tensor:
        return self.layer3(h_BCHW).mean((2, 3))

    def stages(self) -> dict[str, Stage]:
        """One stage a width, the pooling with the last, between the first convolution and ``fc``."""
        return {
            "conv1": self._stem, "layer1": self.layer1, "layer2": self.layer2, "layer3": self._last, "fc": self.fc,
        }  # fmt: skip
