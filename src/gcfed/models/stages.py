"""What this package's networks share: a chain of stages, how they begin, and what images they take."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from gcfed.utils.number import numbers

Stage = Callable[[Tensor], Tensor]
"""A part of a network; the stages of a network, one after the other, are its ``forward``."""


class Staged:
    """A network that is a chain of stages: the last one is its head, the others make the features."""

    def stages(self) -> dict[str, Stage]:
        """Name → stage, in their order."""
        raise NotImplementedError

    def features(self, x: Tensor) -> Tensor:
        """What enters the head, h_BF."""
        for stage in list(self.stages().values())[:-1]:
            x = stage(x)
        return x

    def head(self, h: Tensor) -> Tensor:
        """Features h_BF to logits_BC."""
        return list(self.stages().values())[-1](h)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def init_kaiming(module: nn.Module) -> None:
    """Give a linear or convolutional layer Kaiming-normal weights (fan-in) and a zero bias; for ``Module.apply``."""
    if isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def image_shape(input_shape: Sequence[int], least: int, reason: str) -> Sequence[int]:
    """``input_shape``, if it is (C, H, W) with sides of at least ``least``.

    Raises:
        ValueError: it is not; says the ``reason``.
    """
    numbers("model.input_shape", input_shape, 1, whole=True, length=3)
    if min(input_shape[1:]) < least:
        raise ValueError(f"model.input_shape={[*input_shape]}: {reason}; give images of at least {least}×{least}.")
    return input_shape
