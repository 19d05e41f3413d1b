"""Multi-layer perceptron: 784-512-256-62 is GC-Fed's network for EMNIST."""

import math
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from gcfed.utils.number import number, numbers

Stage = Callable[[Tensor], Tensor]
"""A part of a network; the stages of a network, one after the other, are its ``forward``."""


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


class MLP(nn.Module):
    """Linear layers ``fc1``, ``fc2``, … with a ReLU between; the last one gives the logits.

    Args:
        input_shape: shape of one sample, (C, H, W) or just (D,); it is flattened.
        num_classes: number of logits.
        hidden: widths of the hidden layers. ``()`` is softmax regression.
    """

    def __init__(self, *, input_shape: Sequence[int], num_classes: int, hidden: Sequence[int] = (512, 256)) -> None:
        super().__init__()
        numbers("model.input_shape", input_shape, 1, whole=True)
        numbers("model.hidden", hidden, 1, whole=True)
        widths = [math.prod(input_shape), *hidden, number("model.num_classes", num_classes, 1, whole=True)]
        self._names = [f"fc{i}" for i in range(1, len(widths))]
        for name, fan_in, fan_out in zip(self._names, widths, widths[1:], strict=False):
            self.add_module(name, nn.Linear(fan_in, fan_out))
        self.apply(init_kaiming)

    def features(self, x_BCHW: Tensor) -> Tensor:
        """The last hidden layer after its ReLU, h_BF."""
        h_BF = x_BCHW.flatten(1)
        for name in self._names[:-1]:
            h_BF = self.get_submodule(name)(h_BF).relu()
        return h_BF

    def head(self, h_BF: Tensor) -> Tensor:
        """Features h_BF to logits_BC."""
        return self.get_submodule(self._names[-1])(h_BF)

    def stages(self) -> dict[str, Stage]:
        """One stage a layer, each with its ReLU."""
        last = self._names[-1]
        return {n: self._hidden(n) for n in self._names[:-1]} | {last: lambda h: self.head(h.flatten(1))}

    def _hidden(self, name: str) -> Stage:
        return lambda h: self.get_submodule(name)(h.flatten(1)).relu()

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.head(self.features(x_BCHW))
