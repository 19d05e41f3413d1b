"""From stored samples to the network's inputs, for whole batches, on the device of the samples."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from gcfed.utils.checked import Number, Positive, checked
from gcfed.utils.device import on_device
from gcfed.utils.refusal import Refusal


@checked
@dataclass(eq=False)
class ImageTransform:
    """uint8 images → normalised floats.

    Training images are randomly rotated, cropped and flipped, in this order.

    mean, std: of each channel, in units of the range 0…1; one value is for all channels.
    crop_padding: black pixels around an image before a window of its size is cut out; 0: no crop.
    flip: mirror each image with probability ½.
    rotation: largest angle in degrees; 0: no rotation.
    """

    mean: Sequence[Number]
    std: Sequence[Positive]
    _: KW_ONLY
    crop_padding: Annotated[int, Field(ge=0, le=1000)] = 0
    flip: bool = False
    rotation: Annotated[int, Field(ge=0, le=180)] = 0

    def __post_init__(self) -> None:
        self.mean, self.std = tuple(self.mean), tuple(self.std)
        self._affine: tuple[Tensor, Tensor] | None = None

    def check(self, input_shape: tuple[int, ...]) -> None:
        """Raises ValueError if samples of this shape cannot be transformed."""
        for key, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, input_shape[0]):
                what = f"data.input_shape={[*input_shape]} has {input_shape[0]} channels"
                raise Refusal(f"data.transform.{key} has {len(values)} values; {what}.")

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray | None:
        """Random numbers for ``shape`` samples: row and column of the crop, and flip, ``[*shape,
        3]``. With rotation also the angle plus ``rotation``, in thousandths of a degree, ``[*shape,
        4]``. None without augmentation.
        """
        if not (self.crop_padding or self.flip or self.rotation):
            return None
        offsets = 2 * self.crop_padding + 1
        high = [offsets, offsets, 1 + self.flip, *[2000 * self.rotation + 1] * bool(self.rotation)]
        return rng.integers(0, high, size=(*shape, len(high)), dtype=np.int64)

    def __call__(
        self,
        x_BCHW: Tensor,
        augment_BA: Tensor | None,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> Tensor:
        """uint8 → ``dtype``, ``[B, C, H, W]``, with the numbers of :meth:`draw`, ``[B, A]``."""
        if augment_BA is not None:
            if self.rotation:
                x_BCHW = rotated(x_BCHW, augment_BA[:, 3] / 1000 - self.rotation)
            if pad := self.crop_padding:
                windows = (
                    F.pad(x_BCHW, (pad,) * 4)
                    .unfold(2, x_BCHW.shape[2], 1)
                    .unfold(3, x_BCHW.shape[3], 1)
                )
                image = torch.arange(len(x_BCHW), device=x_BCHW.device)
                x_BCHW = windows[image, :, augment_BA[:, 0], augment_BA[:, 1]]
            if self.flip:
                x_BCHW = torch.where(
                    augment_BA[:, 2].bool().view(-1, 1, 1, 1), x_BCHW.flip(-1), x_BCHW
                )
        if (
            self._affine is None
            or self._affine[0].device != x_BCHW.device
            or self._affine[0].dtype != dtype
        ):
            mean, std = (
                on_device(v, x_BCHW.device, dtype).view(-1, 1, 1) for v in (self.mean, self.std)
            )
            self._affine = (1 / (255 * std), -mean / std)
        scale, shift = self._affine
        return x_BCHW.to(dtype, memory_format=memory_format).mul_(scale).add_(shift)


def rotated(x_BCHW: Tensor, degrees_B: Tensor) -> Tensor:
    """Images rotated counter-clockwise about their centre: nearest pixel, black outside.

    Bit for bit as ``PIL.Image.rotate`` (torchvision's ``RandomRotation``), which counts in 65536ths
    of a pixel.
    """
    height, width = x_BCHW.shape[2:]
    turn = torch.deg2rad(degrees_B.to(torch.float64)).view(-1, 1, 1)
    cos, sin = turn.cos(), turn.sin()
    rows = torch.arange(height, device=x_BCHW.device).view(-1, 1)
    columns = torch.arange(width, device=x_BCHW.device)

    def source(by_column: Tensor, by_row: Tensor, middle: float) -> Tensor:
        """The position along one axis from which each pixel is copied, ``[B, H, W]``."""
        start = middle - by_column * (width / 2 - 0.5) - by_row * (height / 2 - 0.5)
        start, by_column, by_row = (
            (t * 65536 + 0.5).floor().long() for t in (start, by_column, by_row)
        )
        return (start + by_column * columns + by_row * rows) >> 16

    from_column, from_row = source(cos, -sin, width / 2), source(sin, cos, height / 2)
    inside = (from_row >= 0) & (from_row < height) & (from_column >= 0) & (from_column < width)
    index = torch.where(inside, from_row * width + from_column, 0).flatten(1).unsqueeze(1)
    turned = x_BCHW.flatten(2).gather(2, index.expand(-1, x_BCHW.shape[1], -1)).view(x_BCHW.shape)
    return turned * inside.unsqueeze(1)


class PlainTransform:
    """Tokens → int64, float vectors → the network's type, ``[B, T]``.

    Accepts settings that turn augmentation off.
    """

    def __init__(self, *, crop_padding: int = 0, flip: bool = False, rotation: float = 0) -> None:
        if crop_padding or flip or rotation:
            raise Refusal(
                "data.transform: crops, flips and rotations are for images, not for texts and"
                " vectors."
            )

    def check(self, input_shape: tuple[int, ...]) -> None:
        if len(input_shape) != 1:
            raise Refusal(
                f"data.input_shape={list(input_shape)} must be [length] for a text or for vectors."
            )

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> None:
        """Nothing, because there is no augmentation."""

    def __call__(
        self, x_BT: Tensor, augment_BA: None, dtype: torch.dtype = torch.float32, *_: Any
    ) -> Tensor:
        return x_BT.to(dtype) if x_BT.is_floating_point() else x_BT.long()


class AutoTransform:
    """Chooses the transform.

    That of images has the mean and deviation of each channel, unless they are given.
    """

    def __init__(
        self,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        **augmentation: Any,
    ) -> None:
        ImageTransform(mean or [0.0], std or [1.0], **augmentation)  # checks the settings
        self.mean, self.std, self.augmentation = mean, std, augmentation

    def __call__(
        self, x: np.ndarray, aside: np.ndarray | tuple[()] = ()
    ) -> ImageTransform | PlainTransform:
        """The transform for training samples [n, …].

        The statistics leave out the indices ``aside``.
        """
        if x.ndim != 4:
            if self.mean or self.std:
                raise Refusal(
                    "data.transform: mean and std are for images; vectors have data.standardize."
                )
            return PlainTransform(**self.augmentation)
        channels, levels = x.shape[1], np.arange(256) / 255
        counts = np.zeros((channels, 256), np.int64)
        samples = np.delete(np.arange(len(x)), aside)
        # blocks, because indexing copies
        for block in np.array_split(samples, -(-len(samples) // 1000)):
            counts += [np.bincount(x[block, c].ravel(), minlength=256) for c in range(channels)]
        shares = counts / counts[0].sum()
        mean = shares @ levels
        # a constant channel has no deviation
        std = np.sqrt(np.maximum(shares @ levels**2 - mean**2, 1e-4))
        return ImageTransform(
            self.mean or mean.tolist(), self.std or std.tolist(), **self.augmentation
        )
