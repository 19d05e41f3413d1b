"""VGG11, "Very Deep Convolutional Networks for Large-Scale Image Recognition" (Simonyan &
Zisserman, ICLR 2015).
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torchvision.models.vgg import VGG, cfgs, make_layers

from gcfed.models.stages import Stage, image_shape
from gcfed.utils.checked import Count, Share, checked


class VGG11(VGG):
    """Torchvision's VGG11, with its initialization and dropout.

    ``features`` are torchvision's, the convolutions. The features that methods read are
    :meth:`penultimate`.

    Args:
        dropout: probability in the two hidden layers of ``classifier``.
    """

    @checked
    def __init__(
        self,
        *,
        num_classes: Count,
        input_shape: Sequence[Count] = (3, 64, 64),
        dropout: Share = 0.5,
    ) -> None:
        channels, _, _ = image_shape(input_shape, 32, "VGG11 pools five times")
        layers = make_layers(cfgs["A"])
        layers[0] = nn.Conv2d(channels, 64, kernel_size=3, padding=1)
        super().__init__(layers, num_classes=num_classes, dropout=dropout)

    def penultimate(self, x_BCHW: Tensor) -> Tensor:
        """The 4,096 inputs of the last linear layer, after dropout, h_BF: GC-Fed's features of
        VGG11.
        """
        h_BCHW = self.avgpool(self.features(x_BCHW))
        return self.classifier[:-1](h_BCHW.flatten(1))

    def head(self, h_BF: Tensor) -> Tensor:
        """Features h_BF to logits_BC."""
        return self.classifier[-1](h_BF)

    def stages(self) -> dict[str, Stage]:
        """One stage up to each max-pooling, then one per linear layer, with the ReLU and dropout
        before it.
        """
        stages: dict[str, Stage] = {}
        start = 0
        for end, layer in enumerate(self.features, start=1):
            if isinstance(layer, nn.MaxPool2d):
                stages[f"block{len(stages) + 1}"] = self.features[start:end]
                start = end
        stages["fc1"] = nn.Sequential(self.avgpool, nn.Flatten(1), self.classifier[:3])
        stages["fc2"] = self.classifier[3:6]
        stages["fc3"] = self.classifier[6:]
        return stages
