"""ResNet18 with group normalization.

"Deep Residual Learning for Image Recognition" (He et al., CVPR 2016). Batch statistics of clients with different data
cannot be averaged ("The Non-IID Data Quagmire", Hsieh et al., ICML 2020).
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet, conv3x3

from gcfed.models.stages import Staged, image_shape
from gcfed.utils.checked import Count, checked


class ResNet18(Staged, ResNet):
    """ResNet18-GN of GC-Fed and FedACG: torchvision's, with GroupNorm, a 3×3 stem of stride 1 and no first max-pooling.

    Args:
        groups: of each GroupNorm; they divide 64.
    """

    names = ("conv1", "layer1", "layer2", "layer3", "layer4", "fc")

    @checked
    def __init__(self, *, num_classes: Count, input_shape: Sequence[Count] = (3, 32, 32), groups: Count = 32) -> None:
        channels, _, _ = image_shape(input_shape, 1, "ResNet18 takes images")
        super().__init__(BasicBlock, [2, 2, 2, 2], num_classes=num_classes, norm_layer=partial(nn.GroupNorm, groups))
        self.conv1 = conv3x3(channels, 64)
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        self.maxpool = nn.Identity()

    def stage(self, name: str, h: Tensor) -> Tensor:
        """FedMLB's six blocks. The pooling belongs to ``layer4``."""
        h = self.get_submodule(name)(h)
        if name == "conv1":
            return self.relu(self.bn1(h))
        return self.avgpool(h).flatten(1) if name == "layer4" else h


resnet18_gn = ResNet18
