"""GC-Fed's CNN, also LEAF's for FEMNIST and FedGC's for digits, and LEAF's for CelebA (Caldas et
al. 2019).
"""

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from gcfed.models.stages import StageNetwork, add_linear, image_shape, init_kaiming
from gcfed.utils.checked import Count, checked


class CNN(StageNetwork, nn.Module):
    """5×5 convolutions ``conv1`` (32 channels) and ``conv2`` (64), each with ReLU and 2×2
    max-pooling, then ``fc1``, ….

    Args:
        hidden: width of ``fc1``, or of all linear layers but the last; 512 in GC-Fed's experiments,
            2,048 in LEAF's, [512, 100] in FedGC's.
        init: ``kaiming`` (normal), or torch's default, which is uniform with a sixth of that
            variance.
    """

    @checked
    def __init__(
        self,
        *,
        input_shape: Sequence[Count],
        num_classes: Count,
        hidden: Count | Sequence[Count] = 512,
        init: Literal["kaiming", "torch"] = "kaiming",
    ) -> None:
        super().__init__()
        channels, height, width = image_shape(input_shape, 4, "the CNN pools twice")
        self.conv1 = nn.Conv2d(channels, 32, kernel_size=5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=5, padding=2)
        widths = [hidden] if isinstance(hidden, int) else hidden
        num_features = 64 * (height // 4) * (width // 4)
        linear = add_linear(self, [num_features, *widths, num_classes])
        self.names = ["conv1", "conv2", *linear]
        if init == "kaiming":
            self.apply(init_kaiming)

    def stage(self, name: str, hidden: Tensor) -> Tensor:
        if not name.startswith("conv"):
            return super().stage(name, hidden)
        # ReLU is monotone, so it commutes with the pooling, gradients included. After the pooling
        # it has a quarter of the work.
        return F.max_pool2d(self.get_submodule(name)(hidden), 2).relu()

    def features(self, x_BCHW: Tensor) -> Tensor:
        """The flattened output of the convolutions, h_BF."""
        return self.stage("conv2", self.stage("conv1", x_BCHW)).flatten(1)

    def head(self, h_BF: Tensor) -> Tensor:
        """Features h_BF to logits_BC, through all linear layers."""
        for name in self.names[2:]:
            h_BF = self.stage(name, h_BF)
        return h_BF


class CelebACNN(StageNetwork, nn.Module):
    """3×3 convolutions ``conv1`` to ``conv4`` (32 channels), each with ``norm1`` …, 2×2 max-pooling
    and ReLU; ``fc``.

    LEAF uses batch normalisation. GroupNorm replaces it, as in FedACG's ResNet18, so that a
    prediction depends only on its image and clients can be stacked. Pooling pads an odd side.

    Args:
        groups: of each GroupNorm; they divide 32.
    """

    names = ("conv1", "conv2", "conv3", "conv4", "fc")

    @checked
    def __init__(
        self, *, input_shape: Sequence[Count], num_classes: Count, groups: Count = 8
    ) -> None:
        super().__init__()
        channels, height, width = image_shape(input_shape, 1, "it takes images")
        for number in range(1, 5):
            self.add_module(f"conv{number}", nn.Conv2d(channels, 32, kernel_size=3, padding=1))
            self.add_module(f"norm{number}", nn.GroupNorm(groups, 32))
            channels = 32
            height = -(-height // 2)
            width = -(-width // 2)
        self.fc = nn.Linear(32 * height * width, num_classes)
        self.apply(init_kaiming)

    def stage(self, name: str, hidden: Tensor) -> Tensor:
        if name == "fc":
            return super().stage(name, hidden)
        conv = self.get_submodule(name)
        norm = self.get_submodule(name.replace("conv", "norm"))
        return F.max_pool2d(norm(conv(hidden)), 2, ceil_mode=True).relu()
