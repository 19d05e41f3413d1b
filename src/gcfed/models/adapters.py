"""Low-rank adapters in any network, by peft: W = W₀ + (α/r) BA (LoRA, Hu et al., ICLR 2022, arXiv
2106.09685).
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gcfed.utils.checked import Count, SettingError, ShareBelow1, checked
from gcfed.utils.files import replacing
from gcfed.utils.instantiate import installed

A, B = ".lora_A.", ".lora_B."
"""In the names of the factors: A ``[r, in, …]``, B ``[out, r, …]``."""


@checked
def with_adapters(
    net: nn.Module,
    *,
    rank: Count,
    target: str | list[str] | None = None,
    alpha: Count | None = None,
    dropout: ShareBelow1 = 0.0,
    modules_to_save: Sequence[str] | None = None,
    average: Literal["mean", "ffa", "alternate", "fedsa", "svd"] = "mean",
) -> nn.Module:
    """Puts adapters into the network, and freezes all else but ``modules_to_save``; keys as in
    configs/train.yaml.

    Raises SettingError for a module that does not exist or has no adapter in peft.
    """
    installed("peft", "model.lora", "lora")
    from peft import LoraConfig, inject_adapter_in_model  # takes seconds

    from gcfed.models.huggingface import Logits

    # a model of transformers without our wrapper
    inner: Any = net.net if isinstance(net, Logits) else net
    known = [name for name, _ in inner.named_modules() if name]
    there = f"there are {', '.join(known)}"
    target = [target] if isinstance(target, str) and target != "all-linear" else target
    if modules_to_save is None:
        modules_to_save = [
            name for name in ("classifier", "score") if inner is not net and name in known
        ]
    for key, names in (("target", target), ("modules_to_save", modules_to_save)):
        for name in names or () if names != "all-linear" else ():
            if not any(f".{module}".endswith(f".{name}") for module in known):
                raise SettingError(key, f"={name} is no module of {type(inner).__name__}: {there}.")
    try:
        config = LoraConfig(
            r=rank,
            target_modules=target,
            lora_alpha=alpha or rank,
            lora_dropout=dropout,
            modules_to_save=[*modules_to_save] or None,
            base_model_name_or_path=getattr(inner, "name_or_path", None),
            task_type=None if inner is net else "SEQ_CLS" if net.last_only else "CAUSAL_LM",
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the layers of GPT-2 are transposed
            inject_adapter_in_model(config, inner)
    except ValueError as error:
        raise SettingError(
            "target", f"={target or 'null'}: {' '.join(str(error).split())}; {there}."
        ) from None
    for name, p in net.named_parameters() if average != "mean" else ():
        if "lora_embedding" in name:
            raise SettingError(
                "average", f"={average} is not for embeddings, whose A starts at zero."
            )
        p.requires_grad_(p.requires_grad and not (average == "ffa" and A in name))
    return net


def save_adapters(net: nn.Module, folder: Path, about: dict[str, str]) -> None:
    """Writes the adapters, if there are any, as ``PeftModel.from_pretrained(network, folder)``
    reads them.
    """
    for inner in [
        module for module in net.modules() if isinstance(vars(module).get("peft_config"), dict)
    ]:
        from peft import get_peft_model_state_dict

        state = get_peft_model_state_dict(inner, save_embedding_layers=False)
        tensors = {
            f"base_model.model.{n}": t.to("cpu", copy=True).contiguous() for n, t in state.items()
        }
        with replacing(folder / "adapter_model.safetensors") as temporary:
            save_file(tensors, temporary, metadata=about)
        vars(inner)["peft_config"]["default"].save_pretrained(folder)


def centre_a(net: nn.Module) -> bool:
    """Subtracts from each row of A its mean, so that (BA)1 = 0.

    Returns whether there are such factors.
    """
    found = [p.data for name, p in net.named_parameters() if A in name]
    for t in found:
        mean = t.double().mean(tuple(range(1, t.dim())), keepdim=True)
        if mean.abs().max() > 1e-7 * t.abs().max():  # else it is centred, and must keep its bits
            t.copy_(t.double() - mean)
    return bool(found)


def factors(product: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Splits a product ``[out, in]`` into A = V_rᵀ and B = U_r Σ_r, shaped like ``a`` and ``b``.
    The largest entry of each row of A is positive. A rank above the layer's leaves zeros.
    """
    u, s, v = torch.linalg.svd(product, full_matrices=False)
    r = min(len(a), len(s))
    sign = v[:r].gather(1, v[:r].abs().argmax(1, keepdim=True)).sign()
    new_a, new_b = (torch.zeros_like(t.flatten(1)) for t in (a, b))
    new_a[:r], new_b[:, :r] = v[:r] * sign, u[:, :r] * s[:r] * sign.T
    return new_a.view(a.shape), new_b.view(b.shape)
