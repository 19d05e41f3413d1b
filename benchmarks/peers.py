"""What other simulators time: the network of W6 and W7."""

from collections import OrderedDict

from torch import nn


class CNN(nn.Sequential):
    """Two 3×3 convolutions of 32 and 64 channels, one 2×2 max-pooling, dropout, a hidden layer of 128, dropout.

    It is the CNN of Reddi et al., Adaptive Federated Optimization (arXiv 2003.00295), which pfl-research
    (``simple_cnn``) and FLUTE (``cv_cnn_femnist``) train in their benchmarks. It starts as torch does.
    """

    graphable = True

    def __init__(self, input_shape: tuple[int, int, int], num_classes: int) -> None:
        channels, height, width = input_shape
        super().__init__(
            OrderedDict(
                conv1=nn.Conv2d(channels, 32, 3),
                relu1=nn.ReLU(),
                conv2=nn.Conv2d(32, 64, 3),
                relu2=nn.ReLU(),
                pool=nn.MaxPool2d(2),
                drop1=nn.Dropout(0.25),
                flatten=nn.Flatten(),
                fc1=nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
                relu3=nn.ReLU(),
                drop2=nn.Dropout(0.5),
                fc2=nn.Linear(128, num_classes),
            )
        )
