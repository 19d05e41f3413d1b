"""Small transformers: ViT (Dosovitskiy et al., ICLR 2021), CCT (Hassani et al. 2021) and GPT
(Radford et al. 2019).

Their blocks are post-LN ("Attention Is All You Need", Vaswani et al., NeurIPS 2017), which has a
norm after each branch, or pre-LN, before it ("On Layer Normalization in the Transformer
Architecture", Xiong et al., ICML 2020).

Shapes: B samples, T tokens, D width; H heads of d = D / H entries. ``settings`` are those of
:class:`Transformer`.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import maybe_current_level

from gcfed.models.stages import StageNetwork, image_shape, init_kaiming
from gcfed.utils.checked import Count, SettingError, ShareBelow1, checked

Norm = Literal["layer", "rms"]
NORMS: dict[Norm, type[nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


class Attention(nn.Module):
    """Self-attention."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.heads = heads
        self.causal = causal

    def forward(self, x_BTD: Tensor) -> Tensor:
        qkv_BT3Hd = self.qkv(x_BTD).unflatten(-1, (3, self.heads, -1))
        q_BHTd, k_BHTd, v_BHTd = qkv_BT3Hd.permute(2, 0, 3, 1, 4)
        if has_fused_attention(q_BHTd):
            mixed_BHTd = F.scaled_dot_product_attention(
                q_BHTd, k_BHTd, v_BHTd, is_causal=self.causal
            )
        else:
            scores_BHTT = (q_BHTd * q_BHTd.shape[-1] ** -0.5) @ k_BHTd.transpose(-1, -2)
            if self.causal:
                future_TT = torch.full_like(scores_BHTT[0, 0], float("-inf")).triu(1)
                scores_BHTT = scores_BHTT + future_TT
            mixed_BHTd = scores_BHTT.softmax(-1) @ v_BHTd
        return self.proj(mixed_BHTd.transpose(1, 2).flatten(2))


def has_fused_attention(queries: Tensor) -> bool:
    """Whether to call ``scaled_dot_product_attention``: on a GPU, outside of ``torch.func``, and
    unless equal runs are asked for, because its gradient adds up in any order.
    """
    return (
        queries.is_cuda
        and maybe_current_level() is None
        and not torch.are_deterministic_algorithms_enabled()
    )


class Block(nn.Module):
    """Attention, then an MLP with GELU. Each is a branch that is added to its input."""

    def __init__(
        self,
        width: int,
        heads: int,
        mlp: int,
        causal: bool,
        norm: Norm,
        first: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.norm1 = NORMS[norm](width)
        self.attn = Attention(width, heads, causal)
        self.norm2 = NORMS[norm](width)
        self.fc1 = nn.Linear(width, mlp)
        self.fc2 = nn.Linear(mlp, width)
        self.norm_first = first
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x_BTD: Tensor) -> Tensor:
        for norm, branch in ((self.norm1, self.attn), (self.norm2, self._mlp)):
            if self.norm_first:
                x_BTD = x_BTD + self.drop(branch(norm(x_BTD)))
            else:
                x_BTD = norm(x_BTD + self.drop(branch(x_BTD)))
        return x_BTD

    def _mlp(self, hidden: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(hidden)))


class Transformer(StageNetwork, nn.Module):
    """``embed``; ``block1``, ``block2``, …; ``norm``, which also pools; ``fc``.

    Matrices start Xavier-uniform.

    Args:
        embed: inputs to tokens ``[B, T, D]``.
        pool: which tokens ``fc`` reads, an index of T. None: their mean, weighted by a softmax of a
            linear score.
        width, depth, heads: D, the number of blocks, and H, which divides D.
        mlp: width of a block's hidden layer, in multiples of D.
        norm: LayerNorm, or RMSNorm (Zhang & Sennrich, NeurIPS 2019), which subtracts no mean.
        norm_first: pre-LN, with a last norm after all blocks; false: post-LN.
        dropout: of each branch's output.
        causal: a token sees only itself and earlier tokens.
    """

    @checked
    def __init__(
        self,
        embed: nn.Module,
        num_classes: Count,
        *,
        pool: int | slice | None,
        width: Count,
        depth: Count = 4,
        heads: Count = 4,
        mlp: Count = 4,
        norm: Norm = "layer",
        norm_first: bool = True,
        dropout: ShareBelow1 = 0.0,
        causal: bool = False,
    ) -> None:
        super().__init__()
        if width % heads:
            raise SettingError("heads", f"={heads} must divide model.width={width}.")
        self.embed = embed
        self.at = pool
        blocks = [f"block{i}" for i in range(1, depth + 1)]
        for name in blocks:
            block = Block(width, heads, mlp * width, causal, norm, norm_first, dropout)
            self.add_module(name, block)
        self.norm = NORMS[norm](width) if norm_first else nn.Identity()
        self.score = nn.Linear(width, 1, bias=False) if pool is None else None
        self.fc = nn.Linear(width, num_classes)
        self.names = ["embed", *blocks, "norm", "fc"]
        for module in self.modules():
            if not isinstance(module, nn.Linear):
                continue
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def stage(self, name: str, hidden: Tensor) -> Tensor:
        hidden = self.get_submodule(name)(hidden)
        if name != "norm":
            return hidden
        if self.score is None:
            return hidden[:, self.at]
        weights_BT1 = self.score(hidden).softmax(1)
        return (weights_BT1.transpose(1, 2) @ hidden).squeeze(1)


class Tokens(nn.Module):
    """Vectors ``[B, T, D]``, or images ``[B, F, H, W]`` with F ``features``, to tokens with
    positions ``[B, T, D]``.

    ``token`` adds a class token in front. It and the positions start normal with deviation 0.02, as
    do GPT's tokens.
    """

    def __init__(
        self, length: int, width: int, features: int | None = None, token: bool = False
    ) -> None:
        super().__init__()
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width)) if token else None
        self.position = nn.Parameter(0.02 * torch.randn(1, length + token, width))
        self.linear = nn.Linear(features, width) if features else nn.Identity()

    def forward(self, hidden: Tensor) -> Tensor:
        h_BTD = self.linear(hidden.flatten(2).transpose(1, 2) if hidden.dim() == 4 else hidden)
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
        self,
        *,
        input_shape: Sequence[Count],
        num_classes: Count,
        patch: Count = 4,
        width: Count = 64,
        **settings: Any,
    ) -> None:
        channels, height, wide = image_shape(input_shape, 1, "model=vit_tiny takes images")
        if height % patch or wide % patch:
            raise SettingError(
                "patch", f"={patch} must divide both sides of the images, {height}×{wide}."
            )
        tokens = Tokens(height * wide // patch**2, width, channels * patch**2, token=True)
        embed = nn.Sequential(nn.PixelUnshuffle(patch), tokens)
        super().__init__(embed, num_classes, pool=0, width=width, **settings)


class CCT(Transformer):
    """A compact convolutional transformer: two convolutions make the tokens.

    The authors' blocks have one more norm.
    """

    @checked
    def __init__(
        self,
        *,
        input_shape: Sequence[Count],
        num_classes: Count,
        width: Count = 128,
        **settings: Any,
    ) -> None:
        channels, height, wide = image_shape(input_shape, 1, "model=cct takes images")
        layers: list[nn.Module] = []
        for inputs, outputs in ((channels, 64), (64, width)):
            conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            layers += [conv, nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
        num_tokens = -(-height // 4) * -(-wide // 4)
        embed = nn.Sequential(*layers, Tokens(num_tokens, width)).apply(init_kaiming)
        super().__init__(embed, num_classes, pool=None, width=width, **settings)


class GPT(Transformer):
    """A language model of characters or bytes, for sequences of at most T tokens.

    Args:
        input_shape: (T,).
        num_classes: C, number of characters and of logits. Token C is padding; a negative token
            is padding, too, and has the last embedding.
        last_only: return logits for the last position only, ``[B, C]`` instead of ``[B, T, C]``.
        vocabulary: number of tokens; None: C + 1.
    """

    @checked
    def __init__(
        self,
        *,
        input_shape: Sequence[Count],
        num_classes: Count,
        width: Count = 128,
        last_only: bool = False,
        vocabulary: Count | None = None,
        **settings: Any,
    ) -> None:
        if len(input_shape) != 1:
            raise SettingError(
                "input_shape",
                f"={[*input_shape]}: model=gpt is for texts; images need model=vit_tiny.",
            )
        token = nn.Embedding(vocabulary or num_classes + 1, width)
        nn.init.normal_(token.weight, std=0.02)
        embed = nn.Sequential(token, Tokens(input_shape[0], width))
        pool = -1 if last_only else slice(None)
        super().__init__(embed, num_classes, pool=pool, width=width, causal=True, **settings)
        self.last_only = last_only
        self.num_tokens = token.num_embeddings

    def stage(self, name: str, hidden: Tensor) -> Tensor:
        if name == "embed":
            hidden = hidden.masked_fill(hidden < 0, self.num_tokens - 1)
        return super().stage(name, hidden)
