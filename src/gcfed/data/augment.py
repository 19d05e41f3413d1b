"""Random crop and flip of whole batches of uint8 images, on the device they lie on."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


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
        if len(mean) != len(std) or min(std) <= 0:
            raise ValueError(f"data.transform.mean={list(mean)} and std={list(std)} must pair up, with std > 0.")
        if not isinstance(crop_padding, int) or crop_padding < 0:
            raise ValueError(
                f"data.transform.crop_padding={crop_padding} must be a number of pixels; 0 turns the crop off."
            )
        self.mean, self.std = tuple(mean), tuple(std)
        self.crop_padding, self.flip = crop_padding, flip
        self._affine: tuple[Tensor, Tensor] | None = None

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
