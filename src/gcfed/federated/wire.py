"""Messages as bytes: a safetensors file with the tensors. Its header has everything else as JSON."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from gcfed.federated.messages import Download, Levels, MessageError, Upload
from gcfed.federated.training.forward import Params

TENSOR = "tensor|"  # the key of a dict that stands for a tensor; no tensor or part has this name


def pack(content: Mapping[str, Any]) -> bytes:
    """Makes a message of numbers, texts, arrays and tensors, and of dicts and lists of them, by name."""
    tensors: Params = {}

    def encoded(value: Tensor | np.ndarray) -> Any:
        if isinstance(value, np.ndarray):
            return value.tolist()
        dense, key = value.detach().to("cpu", copy=True), str(len(tensors))
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
            raise ValueError(f"a tensor of shape {(*t.shape,)} has the strides {t.stride()}")
        return t

    try:
        tensors, size = load(message), int.from_bytes(message[:8], "little")
        text = json.loads(message[8 : 8 + size])["__metadata__"]["gcfed"]
        return {**json.loads(text, object_hook=decoded)}
    except Exception as error:  # a real site may send anything
        raise MessageError(f"a message cannot be read: {type(error).__name__}: {error}") from None


def unpack_download(message: bytes) -> Download:
    """The download of the message ``pack(vars(download))``."""
    content = unpack(message)
    return Download(**content | {"cohort": np.array(content["cohort"], dtype=np.int64)})


def upload_content(upload: Upload) -> dict[str, Any]:
    """An upload for :func:`pack`, with its quantized entries of Δ as bits."""
    bits = {name: to_bits(upload.delta[name], levels) for name, levels in upload.levels.items()}
    return vars(upload) | {"delta": upload.delta | bits}


def read_upload(content: Mapping[str, Any], like: Params) -> Upload:
    """The upload with this content; ``like`` has tensors shaped like one client's Δ."""
    levels = {name: Levels(*own) for name, own in content["levels"].items()}
    delta = {name: from_bits(content["delta"][name], own, like[name]) for name, own in levels.items()}
    lists = ("clients", "num_samples", "num_steps", "num_seen")
    arrays = {name: np.array(content[name], dtype=np.int64) for name in lists}
    return Upload(**{**content, **arrays, "delta": content["delta"] | delta, "levels": levels})


def to_bits(values_K: Tensor, levels: Levels) -> Tensor:
    """Quantized values ``[K, *shape]`` as uint8 ``[K, ⌈d·bits/8⌉]``, where d is the number of entries of one client."""
    flat = values_K.reshape(len(values_K), -1).double()
    level = (flat / levels.unit.to(flat).unsqueeze(1)).nan_to_num(0.0).round().to(torch.int64)
    shifted = (level + 2 ** (levels.bits - 1) - 1).cpu().numpy()
    ones = (shifted[..., None] >> np.arange(levels.bits)) & 1
    return torch.from_numpy(np.packbits(ones.astype(np.uint8).reshape(len(flat), -1), axis=1))


def from_bits(sent: Tensor, levels: Levels, like: Tensor) -> Tensor:
    """The inverse of :func:`to_bits`, in the shape and type of one client's tensor."""
    bits = levels.bits
    ones = np.unpackbits(sent.numpy(), axis=1, count=like.numel() * bits).reshape(len(sent), -1, bits)
    level = (ones.astype(np.int64) << np.arange(bits)).sum(-1) - (2 ** (bits - 1) - 1)
    values = torch.from_numpy(level).to(like.dtype) * levels.unit.to(like.dtype).unsqueeze(1)
    return torch.stack([torch.empty_like(like).copy_(row.view(like.shape)) for row in values])
