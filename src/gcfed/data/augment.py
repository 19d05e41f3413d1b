"""From the samples of whole batches, as they are kept, to what a network takes, on the device they lie on."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gcfed.utils.number import flag, number, numbers


class Transform(Protocol):
    """What the data module asks of a transform; draws are of one kind for all samples, or None."""

    def check(self, input_shape: tuple[int, ...]) -> None:
        """Raise ValueError if samples of this shape cannot be transformed."""

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray | None:
        """Random augmentation of ``shape`` samples, ``[*shape, A]``."""

    def __call__(
        self,
        x_B: Tensor,
        augment_BA: Tensor | None,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> Tensor:
        """uint8 ``[B, *input]`` → the network's inputs, of the same shape."""
        ...


class ImageTransform:
    """uint8 images → normalised floats, with random crop and horizontal flip where draws are given.

    Args:
        mean, std: of the channels, in units of the range 0…1; one value serves all channels.
        crop_padding: pixels of black on every side, out of which a window of the image's size is cut; 0: no crop.
        flip: mirror each training image with probability ½.
    """

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], *, crop_padding: int = 0, flip: bool = False
    ) -> None:
        self.mean = tuple(numbers("data.transform.mean", mean))
        self.std = tuple(numbers("data.transform.std", std, 0, above=True))
        if not len(mean) == len(std) > 0:
            raise ValueError(f"data.transform.mean={list(mean)} and data.transform.std={list(std)} must pair up.")
        self.crop_padding = number("data.transform.crop_padding", crop_padding, 0, 1000, whole=True)
        self.flip = flag("data.transform.flip", flip)
        self._affine: tuple[Tensor, Tensor] | None = None

    def check(self, input_shape: tuple[int, ...]) -> None:
        """Raises ValueError for statistics of another number of channels."""
        if len(self.mean) not in (1, input_shape[0]):
            raise ValueError(
                f"data.transform.mean has {len(self.mean)} values; data.input_shape={list(input_shape)} has "
                f"{input_shape[0]} channels."
            )

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray | None:
        """Crop offsets and flips of ``shape`` images, ``[*shape, 3]``: row, column, flip. None without augmentation."""
        if not self.crop_padding and not self.flip:
            return None
        high = [2 * self.crop_padding + 1, 2 * self.crop_padding + 1, 1 + self.flip]
        return rng.integers(0, high, size=(*shape, 3), dtype=np.int64)

    def __call__(
        self,
        x_BCHW: Tensor,
        augment_B3: Tensor | None,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> Tensor:
        """uint8 ``[B, C, H, W]`` → ``dtype`` of the same shape; ``augment_B3`` as from :meth:`draw`."""
        if augment_B3 is not None:
            x_BCHW = self._crop_and_flip(x_BCHW, augment_B3)
        if self._affine is None or self._affine[0].device != x_BCHW.device or self._affine[0].dtype != dtype:
            mean = torch.tensor(self.mean, dtype=dtype, device=x_BCHW.device).view(-1, 1, 1)
            std = torch.tensor(self.std, dtype=dtype, device=x_BCHW.device).view(-1, 1, 1)
            self._affine = (1 / (255 * std), -mean / std)
        scale, shift = self._affine
        return x_BCHW.to(dtype, memory_format=memory_format).mul_(scale).add_(shift)

    def _crop_and_flip(self, x: Tensor, augment: Tensor) -> Tensor:
        if pad := self.crop_padding:
            height, width = x.shape[-2:]
            windows = F.pad(x, (pad, pad, pad, pad)).unfold(2, height, 1).unfold(3, width, 1)
            x = windows[torch.arange(len(x), device=x.device), :, augment[:, 0], augment[:, 1]]
        if self.flip:
            x = torch.where(augment[:, 2].bool().view(-1, 1, 1, 1), x.flip(-1), x)
        return x


class TextTransform:
    """uint8 tokens → int64, as an embedding takes them; no augmentation, whatever the type of the network."""

    def check(self, input_shape: tuple[int, ...]) -> None:
        """Raises ValueError for anything but one length."""
        if len(input_shape) != 1:
            raise ValueError(f"data.input_shape={list(input_shape)} must be [length] for a text or for vectors.")

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> None:
        return None

    def __call__(
        self,
        x_BT: Tensor,
        augment_BA: None,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> Tensor:
        """uint8 ``[B, T]`` → int64 of the same shape; the other arguments are those of images."""
        return x_BT.long()


class VectorTransform(TextTransform):
    """Float vectors as they are, in the type of the network."""

    def __call__(
        self,
        x_Bd: Tensor,
        augment_BA: None,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> Tensor:
        """Floats ``[B, d]`` → ``dtype``; the other arguments are those of images."""
        return x_Bd.to(dtype)
