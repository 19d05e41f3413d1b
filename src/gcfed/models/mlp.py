"""Multi-layer perceptron: 784-512-256-62 is GC-Fed's network for EMNIST."""

import math
from collections.abc import Sequence

from torch import Tensor, nn

from gcfed.models.stages import Stage, Staged, init_kaiming
from gcfed.utils.number import number, numbers


class MLP(Staged, nn.Module):
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
        """The last hidden layer after its ReLU, h_BF; without one, the sample."""
        return super().features(x_BCHW).flatten(1)

    def stages(self) -> dict[str, Stage]:
        """One stage a layer, each with its ReLU."""
        last = self._names[-1]
        return {n: self._hidden(n) for n in self._names[:-1]} | {last: lambda h: self.get_submodule(last)(h.flatten(1))}

    def _hidden(self, name: str) -> Stage:
        return lambda h: self.get_submodule(name)(h.flatten(1)).relu()
