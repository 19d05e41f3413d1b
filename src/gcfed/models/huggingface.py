"""Language models and classifiers of texts by transformers, from a local folder.

No code in the folder is run.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gcfed.models.own import fitted
from gcfed.utils.checked import Count, SettingError, checked
from gcfed.utils.instantiate import installed
from gcfed.utils.refusal import message_of


class Logits(nn.Module):
    """Returns a model's logits: tokens, int64 [B, T] → [B, T, C], or with ``last_only`` [B, C].

    Padding is negative.

    A causal model does not see what follows, so padding on the right needs no mask. Texts with a
    class are moved to the left, where positions begin. A classifier with a ``score`` is a causal
    model that reads its last token; its own ``forward`` would take a token for padding if both have
    the same id.
    """

    def __init__(self, net: Any, last_only: bool) -> None:
        super().__init__()
        self.net = net
        self.last_only = last_only
        self.num_tokens = net.config.get_text_config().vocab_size
        self.fill = net.config.get_text_config().pad_token_id or 0

    def forward(self, x_BT: Tensor) -> Tensor:
        if not self.last_only:
            return self.net(input_ids=x_BT.clamp(min=0)).logits
        real_BT, order_BT = (x_BT >= 0).sort(dim=1, descending=True, stable=True)
        ids_BT = x_BT.gather(1, order_BT).where(real_BT, self.fill)
        if hasattr(self.net, "score"):
            h_BTF = self.net.base_model(input_ids=ids_BT)[0]
            last_B11 = (real_BT.sum(1) - 1).clamp(min=0)[:, None, None]
            return self.net.score(
                h_BTF.gather(1, last_B11.expand(-1, 1, h_BTF.shape[2])).squeeze(1)
            )
        # Added to the scores of attention. With a mask [B, T], forward would branch on values,
        # which vmap cannot.
        mask = (~real_BT)[:, None, None].to(next(self.net.parameters()).dtype) * -1e4
        return self.net(input_ids=ids_BT, attention_mask=mask).logits


def _loaded(
    folder: str, last_only: bool, attention: str, settings: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The network of a folder, and transformers' report about its tensors."""
    # take seconds
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        utils,
    )

    utils.logging.disable_progress_bar()
    local = {"trust_remote_code": False, "local_files_only": True}
    config, rest = AutoConfig.from_pretrained(
        folder, return_unused_kwargs=True, **local, **settings
    )
    # The folder's own choice is in the config under this name, and may be code of the hub.
    config._attn_implementation = attention
    kind = AutoModelForSequenceClassification if last_only else AutoModelForCausalLM
    loaded: Any = kind.from_pretrained(
        folder,
        config=config,
        attn_implementation=attention,
        use_safetensors=True,
        dtype=torch.float32,
        output_loading_info=True,
        **local,
        **rest,
    )
    return loaded


def _refuse_random_weights(folder: str, net: Any, report: dict[str, Any], new_head: bool) -> None:
    """Raises SettingError if the folder lacks a tensor of the network, which then starts at random.

    Args:
        new_head: whether the head may be new: what the network has in addition to its base model,
            and a pooler, which language models lack.
    """
    missing = {*report["missing_keys"]}
    mismatched = {entry[0] for entry in report["mismatched_keys"]}
    random = sorted(missing | mismatched)
    if new_head:
        body = f"{net.base_model_prefix}."
        pooler = f"{body}pooler."
        random = [n for n in random if n.startswith(body) and not n.startswith(pooler)]
    if random:
        raise SettingError(
            "folder",
            f"={folder} lacks {len(random)} tensors of {type(net).__name__}, or has them in other"
            f" shapes, and they would start at random: the first is {random[0]}. Write the folder"
            " with save_pretrained.",
        )


@checked
def huggingface_net(
    *,
    folder: str | None,
    input_shape: Sequence[Count],
    num_classes: Count,
    last_only: bool,
    attention: Literal["sdpa", "eager"] = "sdpa",
    **settings: Any,
) -> nn.Module:
    """``AutoModelForCausalLM`` of a folder that ``save_pretrained`` wrote, or
    ``AutoModelForSequenceClassification``.

    Args:
        last_only: there is a class for each text. A head that the folder lacks starts at random,
            drawn from the seed.
        attention: not the folder's choice, which could name code of the hub.
        settings: replace those of ``config.json``, such as ``resid_pdrop`` (dropout).

    Raises SettingError for a folder without safetensors of a model that transformers knows.
    """
    if folder is None or not (Path(folder) / "config.json").is_file():
        raise SettingError(
            "folder", f"={folder} must be a local folder with config.json and model.safetensors."
        )
    if (Path(folder) / "adapter_config.json").exists():
        raise SettingError(
            "folder",
            f"={folder} has adapters, which may name code and other folders: merge them into the"
            " model (merge_and_unload of peft, then save_pretrained). model.lora makes new ones.",
        )
    installed("transformers", "model=huggingface", "huggingface")
    if last_only:
        settings |= {"num_labels": num_classes, "ignore_mismatched_sizes": True}
    try:
        net, report = _loaded(folder, last_only, attention, settings)
    except Exception as error:  # of any type, for a folder with any content
        raise SettingError("folder", f"={folder}: {message_of(error)}") from None
    _refuse_random_weights(folder, net, report, new_head=last_only)
    positions = getattr(net.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and 0 < positions < input_shape[0]:
        raise SettingError(
            "folder",
            f"={folder} reads at most {positions} tokens, and data.length={input_shape[0]}: set"
            f" data.length={positions}.",
        )
    net.config.use_cache = False  # of keys and values, which training does not need
    size = net.config.get_text_config().vocab_size
    if not last_only and size != num_classes:
        raise SettingError(
            "folder",
            f"={folder} has {size} tokens, not {num_classes}: set data.num_classes={size}.",
        )
    return fitted(Logits(net, last_only), input_shape, num_classes)
