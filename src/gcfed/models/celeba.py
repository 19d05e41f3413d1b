"""LEAF's network for CelebA (Caldas et al. 2019): four convolutions of 32 channels and one linear layer."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from gcfed.models.stages import Staged, group_norm, image_shape, init_kaiming
from gcfed.utils.checked import Count, checked


class CelebACNN(Staged, nn.Module):
    """``conv1`` … ``conv4`` (3×3), each with GroupNorm ``norm1`` … ``norm4``, 2×2 max-pooling and ReLU, then ``fc``.

    LEAF normalises by the batch, in tests too; groups of channels take its place, as in FedACG's ResNet18, so that a
    prediction depends on its own image alone and clients can be stacked. An odd side is padded when it is pooled.

    Args:
        groups: groups of every GroupNorm; they divide 32.
    """

    names = ("conv1", "conv2", "conv3", "conv4", "fc")

    @checked
    def __init__(self, *, input_shape: Sequence[Count], num_classes: Count, groups: Count = 8) -> None:
        super().__init__()
        make_norm = group_norm(groups, 32)
        channels, height, width = image_shape(input_shape, 1, "it takes images")
        for i in range(1, 5):
            self.add_module(f"conv{i}", nn.Conv2d(channels, 32, kernel_size=3, padding=1))
            self.add_module(f"norm{i}", make_norm(32))
            channels, height, width = 32, -(-height // 2), -(-width // 2)
        self.fc = nn.Linear(32 * height * width, num_classes)
        self.apply(init_kaiming)

    def stage(self, name: str, h: Tensor) -> Tensor:
        if name == "fc":
            return super().stage(name, h)
        conv, norm = self.get_submodule(name), self.get_submodule(name.replace("conv", "norm"))
        return F.max_pool2d(norm(conv(h)), 2, ceil_mode=True).relu()
