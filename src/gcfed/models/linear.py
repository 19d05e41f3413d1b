"""A linear map without a bias that starts at zero, for regressions with a known optimum."""

import math
from collections.abc import Sequence

from torch import nn

from gcfed.models.stages import Staged
from gcfed.utils.checked import Count, checked


class Linear(Staged, nn.Module):
    """One layer, ``fc``, with weight ``[num_classes, D]`` for samples of D numbers."""

    names = ("fc",)

    @checked
    def __init__(self, *, input_shape: Sequence[Count], num_classes: Count) -> None:
        super().__init__()
        self.fc = nn.Linear(math.prod(input_shape), num_classes, bias=False)
        nn.init.zeros_(self.fc.weight)
