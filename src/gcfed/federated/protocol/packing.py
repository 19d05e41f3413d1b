"""Messages as bytes.

A message is a safetensors file with the tensors. Its header has everything else as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from gcfed.federated.protocol.messages import Download, MessageError, Params
from gcfed.utils.refusal import Refusal

TENSOR = "tensor|"  # the key of a dict that stands for a tensor; no tensor or part has this name


def pack(content: Mapping[str, Any]) -> bytes:
    """Makes a message of numbers, texts, arrays and tensors, and of dicts and lists of them, by
    name.
    """
    tensors: Params = {}

    def encoded(value: Tensor | np.ndarray) -> Any:
        if isinstance(value, np.ndarray):
            return value.tolist()
        dense = value.detach().to("cpu", copy=True)
        key = str(len(tensors))
        tensors[key] = dense.as_strided((dense.numel(),), (1,))  # as it lies in memory
        return {TENSOR: key, "shape": dense.shape, "strides": dense.stride()}

    header = json.dumps(dict(content), default=encoded)
    return save(tensors, metadata={"gcfed": header})


def unpack(message: bytes) -> dict[str, Any]:
    """The content of a message. Tensors have the memory format that they had; arrays are lists.

    Raises:
        MessageError: the message is damaged.
    """

    def decoded(node: dict[str, Any]) -> Any:
        if TENSOR not in node:
            return node
        t = tensors[node[TENSOR]].as_strided(node["shape"], node["strides"])
        if torch.empty_like(t, device="meta").stride() != t.stride():
            raise Refusal(f"a tensor of shape {(*t.shape,)} has the strides {t.stride()}")
        return t

    try:
        tensors = load(message)
        size = int.from_bytes(message[:8], "little")
        text = json.loads(message[8 : 8 + size])["__metadata__"]["gcfed"]
        return {**json.loads(text, object_hook=decoded)}
    except Exception as error:  # a real site may send anything
        raise MessageError(f"a message cannot be read: {type(error).__name__}: {error}") from None


def unpack_download(message: bytes) -> Download:
    """The download of the message ``pack(vars(download))``."""
    content = unpack(message)
    return Download(**content | {"cohort": np.array(content["cohort"], dtype=np.int64)})
