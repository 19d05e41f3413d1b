"""ResNet-9 without normalization, under Fixup initialization: the network of FedReg and FedGC for CIFAR.

"Fixup Initialization: Residual Learning Without Normalization" (Zhang, Dauphin & Ma, ICLR 2019), in the layout of
"Acceleration of Federated Learning with Alleviated Forgetting in Local Training" (FedReg: Xu et al., ICLR 2022): four
convolutions of 64, 128, 256 and 512 channels, with a residual block after the second and the fourth.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.resnet import conv3x3

from gcfed.models.stages import Staged, image_shape
from gcfed.utils.checked import Count, checked


def scalar(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value]))


class FixupConv(nn.Module):
    """A 3×3 convolution between two scalar biases, times a scalar; then perhaps 2×2 max-pooling, and ReLU."""

    def __init__(self, channels_in: int, channels: int, *, pool: bool) -> None:
        super().__init__()
        self.conv, self.pool = conv3x3(channels_in, channels), pool
        self.bias_in, self.scale, self.bias_out = scalar(0.0), scalar(1.0), scalar(0.0)

    def forward(self, h_BCHW: Tensor) -> Tensor:
        h_BCHW = self.conv(h_BCHW + self.bias_in) * self.scale + self.bias_out
        # ReLU is monotone, so it commutes with the pooling, gradients included. After it, it has a quarter of the work.
        return (F.max_pool2d(h_BCHW, 2) if self.pool else h_BCHW).relu()


class FixupBlock(nn.Module):
    """ReLU of its input plus a branch of two 3×3 convolutions, with a scalar bias before each operation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = conv3x3(channels, channels), conv3x3(channels, channels)
        self.bias1_in, self.bias1_out, self.bias2_in, self.bias2_out = (scalar(0.0) for _ in range(4))
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


class ResNet9(Staged, nn.Module):
    """``conv1``; ``layer1``, ``layer2`` and ``layer3``, which halve the sides; ``fc`` after global max-pooling.

    ``fc`` and the last convolution of each branch start at zero, so the first step changes only ``fc``. The first
    convolution of a branch has Kaiming's deviation (fan-out) times L^(−1/(2m−2)) = L^(−1/2), for L blocks of m = 2
    convolutions. Convolutions outside the blocks have Kaiming's deviation.
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
        for zero in (self.fc.weight, self.fc.bias, *(block.conv2.weight for block in blocks)):
            nn.init.zeros_(zero)

    def stage(self, name: str, h: Tensor) -> Tensor:
        """One per child. The global pooling belongs to ``layer3``."""
        h = self.get_submodule(name)(h)
        return F.max_pool2d(h, h.shape[-2:]).flatten(1) if name == "layer3" else h
