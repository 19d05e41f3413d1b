"""Small transformers: ViT (Dosovitskiy et al., ICLR 2021), CCT (Hassani et al. 2021) and GPT (Radford et al. 2019).

Their further ``settings`` are those of :class:`~gcfed.models.attention.Transformer`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gcfed.models.attention import Transformer
from gcfed.models.stages import image_shape, init_kaiming
from gcfed.utils.checked import Count, SettingError, checked


class Tokens(nn.Module):
    """Vectors ``[B, T, D]``, or images ``[B, F, H, W]``, to tokens ``[B, T, D]``: adds a vector to each position.

    Images pass a linear layer first if F is given. A class token comes first if there is one. Both kinds of vectors
    start normal with deviation 0.02.
    """

    def __init__(self, length: int, width: int, features: int | None = None, token: bool = False) -> None:
        super().__init__()
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width)) if token else None
        self.position = nn.Parameter(0.02 * torch.randn(1, length + token, width))
        self.linear = nn.Linear(features, width) if features else nn.Identity()

    def forward(self, h: Tensor) -> Tensor:
        h_BTD = self.linear(h.flatten(2).transpose(1, 2) if h.dim() == 4 else h)
        if self.token is not None:
            h_BTD = torch.cat([self.token.expand(len(h_BTD), -1, -1), h_BTD], 1)
        return h_BTD + self.position[:, : h_BTD.shape[1]]


class ViT(Transformer):
    """A vision transformer. Its features are those of the class token.

    Args:
        patch: side of a patch; it divides the images' sides.
    """

    @checked
    def __init__(
        self, *, input_shape: Sequence[Count], num_classes: Count, patch: Count = 4, width: Count = 64, **settings: Any
    ) -> None:
        channels, height, wide = image_shape(input_shape, 1, "model=vit_tiny takes images")
        if height % patch or wide % patch:
            raise SettingError("patch", f"={patch} must divide both sides of the images, {height}×{wide}.")
        tokens = Tokens(height * wide // patch**2, width, channels * patch**2, token=True)
        embed = nn.Sequential(nn.PixelUnshuffle(patch), tokens)
        super().__init__(embed, num_classes, pool=0, width=width, **settings)


class CCT(Transformer):
    """A compact convolutional transformer: two 3×3 convolutions, each with ReLU and max-pooling, make the tokens.

    Its blocks are the others'. The authors' code also applies a norm to the sum after the attention.
    """

    @checked
    def __init__(
        self, *, input_shape: Sequence[Count], num_classes: Count, width: Count = 128, **settings: Any
    ) -> None:
        channels, height, wide = image_shape(input_shape, 1, "model=cct takes images")
        layers = [
            layer for pair in ((channels, 64), (64, width))
            for layer in (nn.Conv2d(*pair, 3, padding=1, bias=False), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))
        ]  # fmt: skip
        embed = nn.Sequential(*layers, Tokens(-(-height // 4) * -(-wide // 4), width)).apply(init_kaiming)
        super().__init__(embed, num_classes, pool=None, width=width, **settings)


class GPT(Transformer):
    """A language model of characters or bytes, for sequences of at most T tokens.

    Args:
        input_shape: (T,).
        num_classes: C, number of characters and of logits. Token C is padding.
        last_only: return logits for the last position only, ``[B, C]`` instead of ``[B, T, C]``.
        vocabulary: number of tokens; None: C + 1.
    """

    @checked
    def __init__(
        self, *, input_shape: Sequence[Count], num_classes: Count, width: Count = 128, last_only: bool = False,
        vocabulary: Count | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        if len(input_shape) != 1:
            what = "model=gpt is for texts (data=tiny_shakespeare); images need model=vit_tiny or model=cct."
            raise SettingError("input_shape", f"={[*input_shape]}: {what}")
        token = nn.Embedding(vocabulary or num_classes + 1, width)
        nn.init.normal_(token.weight, std=0.02)
        embed = nn.Sequential(token, Tokens(input_shape[0], width))
        pool = -1 if last_only else slice(None)
        super().__init__(embed, num_classes, pool=pool, width=width, causal=True, **settings)
        self.last_only = last_only
