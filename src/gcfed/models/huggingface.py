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
        self.net, self.last_only = net, last_only
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
    installed("transformers", "model=huggingface", "huggingface")
    # take seconds
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, utils

    if last_only:
        settings |= {"num_labels": num_classes, "ignore_mismatched_sizes": True}
    utils.logging.disable_progress_bar()
    kind = AutoModelForSequenceClassification if last_only else AutoModelForCausalLM
    try:
        net = kind.from_pretrained(
            folder,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            dtype=torch.float32,
            attn_implementation=attention,
            **settings,
        )
    except Exception as error:  # of any type, for a folder with any content
        raise SettingError("folder", f"={folder}: {' '.join(str(error).split())}") from None
    positions = getattr(net.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and 0 < positions < input_shape[0]:
        raise SettingError(
            "folder",
            f"={folder} reads at most {positions} tokens, and data.length={input_shape[0]}: set"
            f" data.length={positions}.",
        )
    net.config.use_cache = False  # of keys and values, which training does not need
    if not last_only and (size := net.config.get_text_config().vocab_size) != num_classes:
        raise SettingError(
            "folder",
            f"={folder} has {size} tokens, not {num_classes}: set data.num_classes={size}.",
        )
    return fitted(Logits(net, last_only), input_shape, num_classes)
