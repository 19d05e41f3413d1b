"""Residual networks ("Deep Residual Learning for Image Recognition", He et al., CVPR 2016) without
batch statistics.

Those of clients with different data cannot be averaged ("The Non-IID Data Quagmire", Hsieh et al.,
ICML 2020).
"""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet, conv3x3

from gcfed.models.stages import StageNetwork, image_shape, init_kaiming
from gcfed.utils.checked import Count, SettingError, checked


class ResNet18(StageNetwork, ResNet):
    """ResNet18-GN of GC-Fed and FedACG: torchvision's, with GroupNorm, a 3×3 stem of stride 1 and
    no first max-pooling.

    Args:
        groups: of each GroupNorm; they divide 64.
    """

    names = ("conv1", "layer1", "layer2", "layer3", "layer4", "fc")

    @checked
    def __init__(
        self, *, num_classes: Count, input_shape: Sequence[Count] = (3, 32, 32), groups: Count = 32
    ) -> None:
        channels, _, _ = image_shape(input_shape, 1, "ResNet18 takes images")
        super().__init__(
            BasicBlock,
            [2, 2, 2, 2],
            num_classes=num_classes,
            norm_layer=partial(nn.GroupNorm, groups),
        )
        self.conv1 = conv3x3(channels, 64)
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        self.maxpool = nn.Identity()

    def stage(self, name: str, hidden: Tensor) -> Tensor:
        """FedMLB's six blocks. The pooling belongs to ``layer4``."""
        hidden = self.get_submodule(name)(hidden)
        if name == "conv1":
            return self.relu(self.bn1(hidden))
        if name == "layer4":
            return self.avgpool(hidden).flatten(1)
        return hidden


class Shortcut(nn.Module):
    """Option A: every other pixel, and as many channels of zeros as there are channels."""

    def forward(self, h_BCHW: Tensor) -> Tensor:
        return F.pad(h_BCHW[..., ::2, ::2], (0, 0, 0, 0, 0, h_BCHW.shape[1]))


class ResNetCIFAR(StageNetwork, nn.Module):
    """ResNets of 6n + 2 layers for small images (He et al., §4.2): ResNet-20, 32, 44, 56 and 110.

    ``conv1``, ``norm1``; ``layer1`` to ``layer3`` of 16, 32 and 64 channels; ``fc``. Shortcuts have
    no parameters.

    Weights are Kaiming-normal (fan-in). The last norm of each block has scale 0 (Goyal et al.
    2017), so blocks start as identities. Therefore 110 layers need no warm-up at a tenth of the
    rate, as He et al. have.

    Args:
        depth: number of layers with weights, 6n + 2 with n blocks per stage.
        norm: ``group`` or, for ``client.stack=1``, the paper's ``batch``.
        groups: of each GroupNorm; they divide 16.
    """

    names = ("conv1", "layer1", "layer2", "layer3", "fc")

    @checked
    def __init__(
        self,
        *,
        input_shape: Sequence[Count],
        num_classes: Count,
        depth: Annotated[int, Field(ge=8)] = 110,
        norm: Literal["group", "batch"] = "group",
        groups: Count = 8,
    ) -> None:
        super().__init__()
        if depth % 6 != 2:
            raise SettingError("depth", f"={depth} is not 6n + 2; use 20, 32, 44, 56 or 110.")
        make_norm = nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, groups)
        block = partial(BasicBlock, norm_layer=make_norm)
        num_blocks = (depth - 2) // 6

        def halved(width: int) -> nn.Sequential:
            """A layer of ``width`` channels, after one of half the width and twice the sides."""
            blocks = [block(width // 2, width, 2, Shortcut())]
            blocks += [block(width, width) for _ in range(num_blocks - 1)]
            return nn.Sequential(*blocks)

        channels, _, _ = image_shape(input_shape, 1, "it takes images")
        self.conv1 = conv3x3(channels, 16)
        self.norm1 = make_norm(16)
        self.layer1 = nn.Sequential(*[block(16, 16) for _ in range(num_blocks)])
        self.layer2 = halved(32)
        self.layer3 = halved(64)
        self.fc = nn.Linear(64, num_classes)
        self.apply(init_kaiming)
        for module in self.modules():
            if isinstance(module, BasicBlock):
                nn.init.zeros_(module.bn2.weight)

    def stage(self, name: str, hidden: Tensor) -> Tensor:
        """The pooling belongs to ``layer3``."""
        hidden = self.get_submodule(name)(hidden)
        if name == "conv1":
            return self.norm1(hidden).relu()
        if name == "layer3":
            return hidden.mean((2, 3))
        return hidden


def scalar(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value]))


class FixupConv(nn.Module):
    """A 3×3 convolution between two scalar biases, times a scalar; then perhaps 2×2 max-pooling,
    and ReLU.
    """

    def __init__(self, channels_in: int, channels: int, *, pool: bool) -> None:
        super().__init__()
        self.conv = conv3x3(channels_in, channels)
        self.pool = pool
        self.bias_in = scalar(0.0)
        self.scale = scalar(1.0)
        self.bias_out = scalar(0.0)

    def forward(self, h_BCHW: Tensor) -> Tensor:
        h_BCHW = self.conv(h_BCHW + self.bias_in) * self.scale + self.bias_out
        # ReLU is monotone, so it commutes with the pooling, gradients included. After the pooling
        # it has a quarter of the work.
        if self.pool:
            h_BCHW = F.max_pool2d(h_BCHW, 2)
        return h_BCHW.relu()


class FixupBlock(nn.Module):
    """ReLU of its input plus a branch of two 3×3 convolutions, with a scalar bias before each
    operation.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = conv3x3(channels, channels)
        self.conv2 = conv3x3(channels, channels)
        self.bias1_in = scalar(0.0)
        self.bias1_out = scalar(0.0)
        self.bias2_in = scalar(0.0)
        self.bias2_out = scalar(0.0)
        self.scale = scalar(1.0)

    def forward(self, h_BCHW: Tensor) -> Tensor:
        branch_BCHW = (self.conv1(h_BCHW + self.bias1_in) + self.bias1_out).relu()
        branch_BCHW = self.conv2(branch_BCHW + self.bias2_in) * self.scale + self.bias2_out
        return (h_BCHW + branch_BCHW).relu()


class FixupLinear(nn.Linear):
    """A linear layer after a scalar bias."""

    def __init__(self, features: int, num_classes: int) -> None:
        super().__init__(features, num_classes)
        self.bias_in = scalar(0.0)

    def forward(self, h_BF: Tensor) -> Tensor:
        return super().forward(h_BF + self.bias_in)


class ResNet9(StageNetwork, nn.Module):
    """FedReg's and FedGC's network for CIFAR, with Fixup initialization (Zhang, Dauphin & Ma, ICLR
    2019), from "Acceleration of Federated Learning with Alleviated Forgetting in Local Training"
    (FedReg: Xu et al., ICLR 2022).

    ``conv1``; ``layer1``, ``layer2`` and ``layer3``, which halve the sides; ``fc`` after global
    max-pooling. The four convolutions have 64 to 512 channels. A residual block follows the second
    and the fourth.

    ``fc`` and the last convolution of each branch start at zero, so the first step changes only
    ``fc``. The first convolution of a branch has Kaiming's deviation (fan-out) times L^(−1/(2m−2))
    = L^(−1/2), for L blocks of m = 2 convolutions. Convolutions outside the blocks have Kaiming's
    deviation.
    """

    names = ("conv1", "layer1", "layer2", "layer3", "fc")

    @checked
    def __init__(self, *, input_shape: Sequence[Count], num_classes: Count) -> None:
        super().__init__()
        channels, _, _ = image_shape(input_shape, 8, "ResNet-9 pools by 8")
        self.conv1 = FixupConv(channels, 64, pool=False)
        self.layer1 = nn.Sequential(FixupConv(64, 128, pool=True), FixupBlock(128))
        self.layer2 = FixupConv(128, 256, pool=True)
        self.layer3 = nn.Sequential(FixupConv(256, 512, pool=True), FixupBlock(512))
        self.fc = FixupLinear(512, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        blocks = [module for module in self.modules() if isinstance(module, FixupBlock)]
        for block in blocks:
            block.conv1.weight.data *= len(blocks) ** -0.5
            nn.init.zeros_(block.conv2.weight)
        nn.init.zeros_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)

    def stage(self, name: str, hidden: Tensor) -> Tensor:
        """One per child. The global pooling belongs to ``layer3``."""
        hidden = self.get_submodule(name)(hidden)
        if name == "layer3":
            return F.max_pool2d(hidden, hidden.shape[-2:]).flatten(1)
        return hidden
