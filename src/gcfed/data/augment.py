"""From stored samples to the network's inputs, for whole batches, on the device of the samples."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy import ndarray
from numpy.random import Generator
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
        self.mean = tuple(self.mean)
        self.std = tuple(self.std)
        self._affine: tuple[Tensor, Tensor] | None = None  # scale and shift of the last type

    def check(self, input_shape: tuple[int, ...]) -> None:
        """Raises Refusal if samples of this shape cannot be transformed."""
        channels = input_shape[0]
        for key, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, channels):
                raise Refusal(
                    f"data.transform.{key} has {len(values)} values;"
                    f" data.input_shape={[*input_shape]} has {channels} channels."
                )

    def draw(self, rng: Generator, shape: tuple[int, ...]) -> ndarray | None:
        """Draws the random numbers of ``shape`` samples; None without augmentation.

        ``[*shape, 3]``: row and column of the crop, and flip. With rotation ``[*shape, 4]``: also
        the angle plus ``rotation``, in thousandths of a degree.
        """
        if not (self.crop_padding or self.flip or self.rotation):
            return None
        offsets = 2 * self.crop_padding + 1
        high = [offsets, offsets, 1 + self.flip]
        if self.rotation:
            high.append(2000 * self.rotation + 1)
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
            x_BCHW = self._augmented(x_BCHW, augment_BA)
        scale, shift = self._scale_and_shift(x_BCHW.device, dtype)
        return x_BCHW.to(dtype, memory_format=memory_format).mul_(scale).add_(shift)

    def _augmented(self, x_BCHW: Tensor, augment_BA: Tensor) -> Tensor:
        """uint8 images, rotated, cropped and flipped by the numbers of :meth:`draw`."""
        if self.rotation:
            x_BCHW = rotated(x_BCHW, augment_BA[:, 3] / 1000 - self.rotation)
        if self.crop_padding:
            x_BCHW = cropped(x_BCHW, self.crop_padding, augment_BA[:, 0], augment_BA[:, 1])
        if self.flip:
            is_flipped = augment_BA[:, 2].bool().view(-1, 1, 1, 1)
            x_BCHW = torch.where(is_flipped, x_BCHW.flip(-1), x_BCHW)
        return x_BCHW

    def _scale_and_shift(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The factor and the summand of each channel, ``[C, 1, 1]`` each."""
        if self._affine is not None:
            scale, _ = self._affine
            if scale.device == device and scale.dtype == dtype:
                return self._affine
        mean = on_device(self.mean, device, dtype).view(-1, 1, 1)
        std = on_device(self.std, device, dtype).view(-1, 1, 1)
        self._affine = (1 / (255 * std), -mean / std)
        return self._affine


def cropped(x_BCHW: Tensor, padding: int, row_B: Tensor, column_B: Tensor) -> Tensor:
    """Windows of the images' own size, cut out of the images with a black border.

    Row and column of a window's corner are from 0 to 2 · ``padding``.
    """
    height, width = x_BCHW.shape[2:]
    padded = F.pad(x_BCHW, (padding,) * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)
    image_B = torch.arange(len(x_BCHW), device=x_BCHW.device)
    return windows[image_B, :, row_B, column_B]


def rotated(x_BCHW: Tensor, degrees_B: Tensor) -> Tensor:
    """Images rotated counter-clockwise about their centre: nearest pixel, black outside.

    Bit for bit as ``PIL.Image.rotate`` (torchvision's ``RandomRotation``), which counts in 65536ths
    of a pixel.
    """
    height, width = x_BCHW.shape[2:]
    turn = torch.deg2rad(degrees_B.to(torch.float64)).view(-1, 1, 1)
    cos = turn.cos()
    sin = turn.sin()
    rows = torch.arange(height, device=x_BCHW.device).view(-1, 1)
    columns = torch.arange(width, device=x_BCHW.device)

    def source(by_column: Tensor, by_row: Tensor, middle: float) -> Tensor:
        """The position along one axis from which each pixel is copied, ``[B, H, W]``."""
        start = middle - by_column * (width / 2 - 0.5) - by_row * (height / 2 - 0.5)
        offsets = _in_65536ths(by_column) * columns + _in_65536ths(by_row) * rows
        return (_in_65536ths(start) + offsets) >> 16

    from_column = source(cos, -sin, width / 2)
    from_row = source(sin, cos, height / 2)
    inside = (from_row >= 0) & (from_row < height) & (from_column >= 0) & (from_column < width)
    pixel = torch.where(inside, from_row * width + from_column, 0)
    index = pixel.flatten(1).unsqueeze(1).expand(-1, x_BCHW.shape[1], -1)
    turned = x_BCHW.flatten(2).gather(2, index).view(x_BCHW.shape)
    return turned * inside.unsqueeze(1)


def _in_65536ths(values: Tensor) -> Tensor:
    return (values * 65536 + 0.5).floor().long()


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

    def draw(self, rng: Generator, shape: tuple[int, ...]) -> None:
        """Nothing, because there is no augmentation."""

    def __call__(
        self, x_BT: Tensor, augment_BA: None, dtype: torch.dtype = torch.float32, *_: Any
    ) -> Tensor:
        if x_BT.is_floating_point():
            return x_BT.to(dtype)
        return x_BT.long()


class AutoTransform:
    """Chooses the transform for the samples.

    Images are normalised by the mean and deviation of each channel, unless they are given.
    """

    def __init__(
        self,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        **augmentation: Any,
    ) -> None:
        ImageTransform(mean or [0.0], std or [1.0], **augmentation)  # checks the settings
        self.mean = mean
        self.std = std
        self.augmentation = augmentation

    def __call__(
        self, x: ndarray, aside: ndarray | tuple[()] = ()
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
        samples = np.delete(np.arange(len(x)), aside)
        mean, std = _channel_statistics(x, samples)
        return ImageTransform(self.mean or mean, self.std or std, **self.augmentation)


def _channel_statistics(x_nCHW: ndarray, samples: ndarray) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel of these uint8 images, in units of 0…1."""
    channels = x_nCHW.shape[1]
    levels = np.arange(256) / 255
    counts = np.zeros((channels, 256), np.int64)
    # blocks, because indexing copies
    for block in np.array_split(samples, -(-len(samples) // 1000)):
        for channel in range(channels):
            counts[channel] += np.bincount(x_nCHW[block, channel].ravel(), minlength=256)
    shares = counts / counts[0].sum()
    mean = shares @ levels
    # a constant channel has no deviation
    std = np.sqrt(np.maximum(shares @ levels**2 - mean**2, 1e-4))
    return mean.tolist(), std.tolist()
