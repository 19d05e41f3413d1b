"""A linear map without a bias, from zero: the network of regressions whose optimum is known."""

import math
from collections.abc import Sequence

from torch import nn

from gcfed.models.stages import Staged
from gcfed.utils.checked import Count, checked


class Linear(Staged, nn.Module):
    """One layer, ``fc``, of a sample's D numbers; its weight ``[num_classes, D]`` starts at zero."""

    names = ("fc",)

    @checked
    def __init__(self, *, input_shape: Sequence[Count], num_classes: Count) -> None:
        super().__init__()
        self.fc = nn.Linear(math.prod(input_shape), num_classes, bias=False)
        nn.init.zeros_(self.fc.weight)
