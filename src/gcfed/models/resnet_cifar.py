"""ResNets of 6n + 2 layers for small images: ResNet-20, 32, 44, 56 and 110.

"Deep Residual Learning for Image Recognition" (He et al., CVPR 2016), §4.2, with shortcuts of option A, which have no
parameters. GroupNorm replaces batch normalisation, so that clients can be stacked and have no statistics to average.
"""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, conv3x3

from gcfed.models.stages import Staged, image_shape, init_kaiming
from gcfed.utils.checked import Count, SettingError, checked


class Shortcut(nn.Module):
    """Option A: every other pixel, and as many channels of zeros as there are channels."""

    def forward(self, h_BCHW: Tensor) -> Tensor:
        return F.pad(h_BCHW[..., ::2, ::2], (0, 0, 0, 0, 0, h_BCHW.shape[1]))


class ResNetCIFAR(Staged, nn.Module):
    """``conv1`` with ``norm1``, then ``layer1``, ``layer2`` and ``layer3`` of 16, 32 and 64 channels, then ``fc``.

    Weights are Kaiming-normal (fan-in). The last norm of each block has scale 0 (Goyal et al. 2017), so blocks start as
    identities. Therefore 110 layers need no warm-up at a tenth of the rate, as He et al. have.

    Args:
        depth: number of layers with weights, 6n + 2 with n blocks per stage.
        norm: ``group`` or, for ``client.stack=1``, the paper's ``batch``.
        groups: of each GroupNorm; they divide 16.
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
        make_norm = nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, groups)
        block, n = partial(BasicBlock, norm_layer=make_norm), (depth - 2) // 6
        channels, _, _ = image_shape(input_shape, 1, "it takes images")
        self.conv1, self.norm1 = conv3x3(channels, 16), make_norm(16)
        self.layer1 = nn.Sequential(*[block(16, 16) for _ in range(n)])
        self.layer2 = nn.Sequential(block(16, 32, 2, Shortcut()), *[block(32, 32) for _ in range(n - 1)])
        self.layer3 = nn.Sequential(block(32, 64, 2, Shortcut()), *[block(64, 64) for _ in range(n - 1)])
        self.fc = nn.Linear(64, num_classes)
        self.apply(init_kaiming)
        for module in self.modules():
            if isinstance(module, BasicBlock):
                nn.init.zeros_(module.bn2.weight)

    def stage(self, name: str, h: Tensor) -> Tensor:
        """The pooling belongs to ``layer3``."""
        h = self.get_submodule(name)(h)
        if name == "conv1":
            return self.norm1(h).relu()
        return h.mean((2, 3)) if name == "layer3" else h
