"""LEAF's network for CelebA (Caldas et al. 2019): four convolutions of 32 channels and one linear layer."""

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from gcfed.models.stages import Stage, Staged, image_shape, init_kaiming
from gcfed.utils.number import number


class CelebACNN(Staged, nn.Module):
    """``conv1`` … ``conv4`` (3×3), each with GroupNorm ``norm1`` … ``norm4``, 2×2 max-pooling and ReLU, then ``fc``.

    LEAF normalises by the batch, in tests too; groups of channels take its place, as in FedACG's ResNet18, so that a
    prediction depends on its own image alone and clients can be stacked.

    Args:
        input_shape: (C, H, W) of one image; 84×84 in LEAF. An odd side is padded when it is pooled.
        num_classes: number of logits.
        groups: groups of every GroupNorm.

    Raises:
        ValueError: ``groups`` does not divide 32.
    """

    def __init__(self, *, input_shape: Sequence[int], num_classes: int, groups: int = 8) -> None:
        super().__init__()
        if 32 % number("model.groups", groups, 1, whole=True):
            raise ValueError(f"model.groups={groups} does not divide 32 channels; use 1, 2, 4, 8, 16 or 32")
        channels, height, width = image_shape(input_shape, 1, "it takes images")
        for i in range(1, 5):
            self.add_module(f"conv{i}", nn.Conv2d(channels, 32, kernel_size=3, padding=1))
            self.add_module(f"norm{i}", nn.GroupNorm(groups, 32))
            channels, height, width = 32, -(-height // 2), -(-width // 2)
        self.fc = nn.Linear(32 * height * width, num_classes)
        self.apply(init_kaiming)

    def _block(self, i: int) -> Callable[[Tensor], Tensor]:
        conv, norm = self.get_submodule(f"conv{i}"), self.get_submodule(f"norm{i}")

        def run(h_BCHW: Tensor) -> Tensor:
            h_BCHW = F.max_pool2d(norm(conv(h_BCHW)), 2, ceil_mode=True).relu()
            return h_BCHW.flatten(1) if i == 4 else h_BCHW

        return run

    def stages(self) -> dict[str, Stage]:
        """One stage a convolution, with its norm, pooling and ReLU, and one for ``fc``."""
        return {f"conv{i}": self._block(i) for i in range(1, 5)} | {"fc": self.fc}
