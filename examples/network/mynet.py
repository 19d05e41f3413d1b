"""An own network: any ``nn.Module``. ``num_classes`` and ``input_shape`` come from the data set."""

from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes, input_shape, width=16):
        super().__init__()
        channels, height, size = input_shape
        self.body = nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(width * height * size, num_classes)

    def forward(self, x):
        return self.head(self.body(x))
