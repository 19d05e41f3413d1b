"""ResNets of 6n + 2 layers for small images: ResNet-20, 32, 44, 56 and 110.

"Deep Residual Learning for Image Recognition" (He et al., CVPR 2016), §4.2, with shortcuts of option A, which have no
parameters. Groups of channels are normalized in place of batches, so that clients can be stacked and have no statistics
to average.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torchvision.models.resnet import conv3x3

from gcfed.models.stages import Staged, image_shape, init_kaiming
from gcfed.utils.checked import Count, SettingError, checked

Norm = Callable[[int], nn.Module]


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside an identity; one that widens also halves the sides, on both ways."""

    def __init__(self, channels_in: int, channels: int, norm: Norm) -> None:
        super().__init__()
        self.widens = channels - channels_in
        self.conv1, self.norm1 = conv3x3(channels_in, channels, stride=2 if self.widens else 1), norm(channels)
        self.conv2, self.norm2 = conv3x3(channels, channels), norm(channels)
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
        depth: number of layers with weights, 6n + 2 with n blocks a stage.
        norm: ``group`` or, for ``client.stack=1``, the paper's ``batch``.
        groups: groups of every GroupNorm; they divide 16.
    """

    names = ("conv1", "layer1", "layer2", "layer3", "fc")

    @checked
    def __init__(
        self, *, input_shape: Sequence[Count], num_classes: Count, depth: Annotated[int, Field(ge=8)] = 110,
        norm: Literal["group", "batch"] = "group", groups: Count = 8,
    ) -> None:  # fmt: skip
        super().__init__()
        if depth % 6 != 2:
            raise SettingError("depth", f"={depth} is not 6n + 2; use 20, 32, 44, 56 or 110.")
        make_norm: Norm = nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, groups)
        n = (depth - 2) // 6
        channels, _, _ = image_shape(input_shape, 1, "it takes images")
        self.conv1, self.norm1 = conv3x3(channels, 16), make_norm(16)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(*[BasicBlock(width if i else before, width, make_norm) for i in range(n)])
            for before, width in ((16, 16), (16, 32), (32, 64))
        )
        self.fc = nn.Linear(64, num_classes)
        self.apply(init_kaiming)

    def stage(self, name: str, h: Tensor) -> Tensor:
        """One a width, the pooling with the last, between the first convolution and ``fc``."""
        h = self.get_submodule(name)(h)
        if name == "conv1":
            return self.norm1(h).relu()
        return h.mean((2, 3)) if name == "layer3" else h
