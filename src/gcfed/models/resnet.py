"""ResNet18 with group normalization.

"Deep Residual Learning for Image Recognition" (He et al., CVPR 2016); groups instead of batch statistics, since those
of clients with different data cannot be averaged ("The Non-IID Data Quagmire", Hsieh et al., ICML 2020).
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

from gcfed.models.stages import Stage, Staged, image_shape
from gcfed.utils.number import number


class ResNet18(Staged, ResNet):
    """Torchvision's ResNet18 for small images: GroupNorm, a 3×3 stride-1 stem and no max-pooling after it."""

    def __init__(self, *, in_channels: int, num_classes: int, groups: int) -> None:
        super().__init__(BasicBlock, [2, 2, 2, 2], num_classes=num_classes, norm_layer=partial(nn.GroupNorm, groups))
        self.conv1 = nn.Conv2d(in_channels, 64, kernel_size=3, padding=1, bias=False)
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        self.maxpool = nn.Identity()

    def _stem(self, x_BCHW: Tensor) -> Tensor:
        return self.maxpool(self.relu(self.bn1(self.conv1(x_BCHW))))

    def _last(self, h_BCHW: Tensor) -> Tensor:
        return self.avgpool(self.layer4(h_BCHW)).flatten(1)

    def stages(self) -> dict[str, Stage]:
        """FedMLB's six blocks; the pooling goes with ``layer4``."""
        return {
            "conv1": self._stem, "layer1": self.layer1, "layer2": self.layer2, "layer3": self.layer3,
            "layer4": self._last, "fc": self.fc,
        }  # fmt: skip


def resnet18_gn(*, num_classes: int, input_shape: Sequence[int] = (3, 32, 32), groups: int = 32) -> ResNet18:
    """ResNet18-GN of GC-Fed and FedACG: 62 parameter tensors, the last two in ``fc``.

    Args:
        num_classes: number of logits.
        input_shape: (C, H, W) of one image; the network takes any size.
        groups: groups of every GroupNorm; the channels are 64, 128, 256 and 512.

    Raises:
        ValueError: ``groups`` does not divide 64.
    """
    if 64 % number("model.groups", groups, 1, whole=True):
        raise ValueError(
            f"model.groups={groups} does not divide the 64 channels of the first stage; use 1, 2, 4, …, 32 or 64"
        )
    channels, _, _ = image_shape(input_shape, 1, "ResNet18 takes images")
    return ResNet18(in_channels=channels, num_classes=num_classes, groups=groups)
