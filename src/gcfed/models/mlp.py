"""A multi-layer perceptron (784-512-256-62 is GC-Fed's network for EMNIST), and a linear map."""

import math
from collections.abc import Sequence

from torch import nn

from gcfed.models.stages import StageNetwork, add_linear, init_kaiming
from gcfed.utils.checked import Count, checked


class MLP(StageNetwork, nn.Module):
    """Linear layers ``fc1``, ``fc2``, … with ReLU between them. Each layer is a stage.

    Args:
        hidden: widths of the hidden layers; ``()`` is softmax regression.
    """

    @checked
    def __init__(
        self,
        *,
        input_shape: Sequence[Count],
        num_classes: Count,
        hidden: Sequence[Count] = (512, 256),
    ) -> None:
        super().__init__()
        self.names = add_linear(self, [math.prod(input_shape), *hidden, num_classes])
        self.apply(init_kaiming)


class Linear(StageNetwork, nn.Module):
    """One layer, ``fc``, without a bias; its weight ``[num_classes, D]`` starts at zero.

    For a known optimum.
    """

    names = ("fc",)

    @checked
    def __init__(self, *, input_shape: Sequence[Count], num_classes: Count) -> None:
        super().__init__()
        self.fc = nn.Linear(math.prod(input_shape), num_classes, bias=False)
        nn.init.zeros_(self.fc.weight)
