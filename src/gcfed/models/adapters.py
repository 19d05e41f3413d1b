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
from gcfed.utils.refusal import message_of

# In the names of the factors.
FACTOR_A = ".lora_A."  # ``[r, in, …]``
FACTOR_B = ".lora_B."  # ``[out, r, …]``


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
    """Puts adapters into the network, and freezes all other tensors except ``modules_to_save``.

    configs/train.yaml explains the arguments.

    Raises SettingError for a module that does not exist or has no adapter in peft.
    """
    installed("peft", "model.lora", "lora")
    from peft import LoraConfig, inject_adapter_in_model  # takes seconds

    from gcfed.models.huggingface import Logits

    inner: Any = net
    task = None
    if isinstance(net, Logits):  # a model of transformers in our wrapper
        inner = net.net
        task = "SEQ_CLS" if net.last_only else "CAUSAL_LM"
    known = [name for name, _ in inner.named_modules() if name]
    if isinstance(target, str) and target != "all-linear":
        target = [target]
    if modules_to_save is None:
        modules_to_save = []
        if inner is not net:
            modules_to_save = [name for name in ("classifier", "score") if name in known]
    if isinstance(target, list):
        _require_modules(inner, "target", target)
    _require_modules(inner, "modules_to_save", modules_to_save)
    try:
        config = LoraConfig(
            r=rank,
            target_modules=target,
            lora_alpha=alpha or rank,
            lora_dropout=dropout,
            modules_to_save=[*modules_to_save] or None,
            base_model_name_or_path=getattr(inner, "name_or_path", None),
            task_type=task,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the layers of GPT-2 are transposed
            inject_adapter_in_model(config, inner)
    except ValueError as error:
        reason = message_of(error)
        raise SettingError(
            "target", f"={target or 'null'}: {reason}; there are {', '.join(known)}."
        ) from None
    if average != "mean":
        for name, parameter in net.named_parameters():
            if "lora_embedding" in name:
                raise SettingError(
                    "average", f"={average} is not for embeddings, whose A starts at zero."
                )
            if average == "ffa" and FACTOR_A in name:
                parameter.requires_grad_(False)
    return net


def _require_modules(net: nn.Module, key: str, names: Sequence[str]) -> None:
    """Raises SettingError for a name that no module of the network ends in."""
    known = [name for name, _ in net.named_modules() if name]
    for name in names:
        if not any(f".{module}".endswith(f".{name}") for module in known):
            raise SettingError(
                key,
                f"={name} is no module of {type(net).__name__}: there are {', '.join(known)}.",
            )


def save_adapters(net: nn.Module, folder: Path, about: dict[str, str]) -> None:
    """Writes the adapters, if there are any, in the form that ``PeftModel.from_pretrained(network,
    folder)`` reads.
    """
    for inner in list(net.modules()):
        if not isinstance(vars(inner).get("peft_config"), dict):
            continue
        from peft import get_peft_model_state_dict

        state = get_peft_model_state_dict(inner, save_embedding_layers=False)
        tensors = {}
        for name, t in state.items():
            tensors[f"base_model.model.{name}"] = t.to("cpu", copy=True).contiguous()
        with replacing(folder / "adapter_model.safetensors") as temporary:
            save_file(tensors, temporary, metadata=about)
        vars(inner)["peft_config"]["default"].save_pretrained(folder)


def centre_a(net: nn.Module) -> bool:
    """Subtracts from each row of A its mean, so that (BA)1 = 0.

    Returns whether there are such factors.
    """
    factors_a = [parameter.data for name, parameter in net.named_parameters() if FACTOR_A in name]
    for factor in factors_a:
        mean = factor.double().mean(tuple(range(1, factor.dim())), keepdim=True)
        # a centred factor must keep its bits
        if mean.abs().max() > 1e-7 * factor.abs().max():
            factor.copy_(factor.double() - mean)
    return bool(factors_a)


def factors(product: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Splits a product ``[out, in]`` into A = V_rᵀ and B = U_r Σ_r, shaped like ``a`` and ``b``.

    The largest entry of each row of A is positive. If the rank is larger than the layer's, the rest
    is zero.
    """
    left, lengths, right = torch.linalg.svd(product, full_matrices=False)
    rank = min(len(a), len(lengths))
    rows = right[:rank]
    sign = rows.gather(1, rows.abs().argmax(1, keepdim=True)).sign()
    new_a = torch.zeros_like(a.flatten(1))
    new_b = torch.zeros_like(b.flatten(1))
    new_a[:rank] = rows * sign
    new_b[:, :rank] = left[:, :rank] * lengths[:rank] * sign.T
    return new_a.view(a.shape), new_b.view(b.shape)
