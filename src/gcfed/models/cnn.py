"""The CNN of two 5×5 convolutions and a few linear layers: GC-Fed's for 28×28 and 32×32 images, LEAF's for FEMNIST and
FedGC's for the handwritten digits.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from gcfed.models.stages import Stage, Staged, image_shape, init_kaiming
from gcfed.utils.number import choice, number, numbers


class CNN(Staged, nn.Module):
    """``conv1`` (32 channels) and ``conv2`` (64), each with ReLU and 2×2 max-pooling, then ``fc1``, ``fc2``, ….

    Args:
        input_shape: (C, H, W) of one image.
        num_classes: number of logits.
        hidden: width of ``fc1``, or of all linear layers but the last; 512 in GC-Fed's experiments, 2,048 in LEAF's,
            [512, 100] in FedGC's.
        init: ``kaiming`` normal or ``torch``, a uniform start of a sixth of that variance, for higher rates.

    Raises:
        ValueError: the image is smaller than 4×4, so that nothing is left after two poolings; an unknown ``init``.
    """

    def __init__(
        self,
        *,
        input_shape: Sequence[int],
        num_classes: int,
        hidden: int | Sequence[int] = 512,
        init: str = "kaiming",
    ) -> None:
        super().__init__()
        choice("model.init", init, ("kaiming", "torch"))
        channels, height, width = image_shape(input_shape, 4, "the CNN pools twice")
        numbers("model.hidden", hidden := [hidden] if isinstance(hidden, int) else hidden, 1, whole=True)
        self.conv1 = nn.Conv2d(channels, 32, kernel_size=5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=5, padding=2)
        widths = [64 * (height // 4) * (width // 4), *hidden, number("model.num_classes", num_classes, 1, whole=True)]
        self._names = [f"fc{i}" for i in range(1, len(widths))]
        for name, fan_in, fan_out in zip(self._names, widths, widths[1:], strict=False):
            self.add_module(name, nn.Linear(fan_in, fan_out))
        if init == "kaiming":
            self.apply(init_kaiming)

    def features(self, x_BCHW: Tensor) -> Tensor:
        """The flattened output of the convolutions, h_BF."""
        return self._block2(self._block1(x_BCHW))

    # ReLU is monotone: it commutes with the pooling, gradients included, and after it has a quarter of the work.
    def _block1(self, x_BCHW: Tensor) -> Tensor:
        return F.max_pool2d(self.conv1(x_BCHW), 2).relu()

    def _block2(self, h_BCHW: Tensor) -> Tensor:
        return F.max_pool2d(self.conv2(h_BCHW), 2).relu().flatten(1)

    def _hidden(self, name: str) -> Stage:
        return lambda h_BF: self.get_submodule(name)(h_BF).relu()

    def head(self, h_BF: Tensor) -> Tensor:
        """Features h_BF to logits_BC, through the linear layers with a ReLU between."""
        for name in self._names[:-1]:
            h_BF = self._hidden(name)(h_BF)
        return self.get_submodule(self._names[-1])(h_BF)

    def stages(self) -> dict[str, Stage]:
        """One stage a layer, each with its ReLU and pooling."""
        linear = {name: self._hidden(name) for name in self._names[:-1]}
        last = {self._names[-1]: self.get_submodule(self._names[-1])}
        return {"conv1": self._block1, "conv2": self._block2} | linear | last
