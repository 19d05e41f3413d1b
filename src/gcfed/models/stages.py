"""What this package's networks share.

They take ``input_shape``, of one sample, and ``num_classes``, of the logits.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from torch import Tensor, nn

from gcfed.utils.checked import SettingError

Stage = Callable[[Tensor], Tensor]
"""A part of a network. The stages of a network, one after the other, are its ``forward``."""


class StageNetwork:
    """A network that is a chain of stages.

    The last stage is the head; the others compute the features.
    """

    names: Sequence[str]
    """The names of the stages, in order, which are names of layers."""

    def stage(self, name: str, hidden: Tensor) -> Tensor:
        """Applies a stage to the output of the previous one.

        By default: a linear layer, and ReLU unless it is last.
        """
        hidden = self.get_submodule(name)(hidden.flatten(1))  # type: ignore[attr-defined]
        if name == self.names[-1]:
            return hidden
        return hidden.relu()

    def stages(self) -> dict[str, Stage]:
        return {name: partial(self.stage, name) for name in self.names}

    def features(self, x: Tensor) -> Tensor:
        """The input of the head, h_BF."""
        for name in self.names[:-1]:
            x = self.stage(name, x)
        return x

    def head(self, hidden: Tensor) -> Tensor:
        """Features h_BF to logits_BC."""
        return self.stage(self.names[-1], hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def add_linear(net: nn.Module, widths: Sequence[int]) -> list[str]:
    """Adds linear layers ``fc1``, ``fc2``, … between these widths, and returns their names."""
    names = []
    for number, (fan_in, fan_out) in enumerate(pairwise(widths), start=1):
        name = f"fc{number}"
        net.add_module(name, nn.Linear(fan_in, fan_out))
        names.append(name)
    return names


def init_kaiming(module: nn.Module) -> None:
    """Gives a linear or convolutional layer Kaiming-normal weights (fan-in) and a zero bias; for
    ``Module.apply``.
    """
    if isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def image_shape(input_shape: Sequence[int], least: int, reason: str) -> Sequence[int]:
    """Returns ``input_shape``.

    Raises SettingError unless it is (C, H, W) with sides of at least ``least``.
    """
    if len(input_shape) != 3 or min(input_shape[1:]) < least:
        wanted = f"give images, [C, H, W], of at least {least}×{least}"
        raise SettingError("input_shape", f"={[*input_shape]}: {reason}; {wanted}.")
    return input_shape
