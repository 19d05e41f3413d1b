"""Uploads as contents of a message: made by clients, checked and read by the server.

A site may send anything. So names, shapes and types are compared as they came, before a number is
decoded or a byte of memory is reserved, and only what was compared is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcfed.federated.protocol.checks import refuse_other
from gcfed.federated.protocol.messages import Expected, Levels, MessageError, Params, Upload

FIELDS = frozenset(field.name for field in fields(Upload))
REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The types of a loss."""
LARGEST = 2**63 - 1


def upload_content(upload: Upload) -> dict[str, Any]:
    """An upload for :func:`gcfed.federated.protocol.packing.pack`.

    The quantized entries of Δ are bits, with their norms.
    """
    delta = dict(upload.delta)
    norms = {}
    for name, levels in upload.levels.items():
        delta[name] = to_bits(upload.delta[name], levels)
        norms[name] = levels.norms
    return vars(upload) | {"delta": delta, "levels": norms}


def read_upload(content: Mapping[str, Any], expected: Expected) -> Upload:
    """The upload with this content, which may be anything.

    Raises:
        MessageError: the upload is not what was expected; names the field.
    """
    if content.keys() != FIELDS:
        odd = sorted(content.keys() ^ FIELDS)
        raise MessageError(f"an upload has other fields than expected: {shortened(odd)}.")
    clients = whole_numbers("clients", content["clients"])
    k = len(clients)
    levels = _read_levels(content["levels"], expected.bits, k)
    extra_shapes = {name: like for name, like in expected.shapes.items() if name != "delta"}
    return Upload(
        clients=clients,
        num_samples=whole_numbers("num_samples", content["num_samples"], k),
        num_steps=whole_numbers("num_steps", content["num_steps"], k),
        delta=_read_delta(content["delta"], levels, expected, k),
        finite=_read_tensor("finite", content["finite"], torch.tensor(True), k),
        round_index=whole_number("round_index", content["round_index"]),
        loss=_read_loss(content["loss"], k),
        num_seen=whole_numbers("num_seen", content["num_seen"], k),
        extra=_read_groups("extra", content["extra"], extra_shapes, k),
        levels=levels,
        notes=_read_groups("notes", content["notes"], expected.notes),
    )


def shortened(value: object) -> str:
    """A value as text of at most 200 characters."""
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def whole_number(what: str, value: Any) -> int:
    """An integer below 2⁶³. Raises MessageError for anything else."""
    if type(value) is not int or abs(value) > LARGEST:
        raise MessageError(f"{what} cannot be {shortened(value)}.")
    return value


def whole_numbers(what: str, values: Any, k: int | None = None) -> np.ndarray:
    """A list of K integers as an array, int64 ``[K]``. Without ``k``, K is at least 1.

    Raises MessageError for anything else.
    """
    if not isinstance(values, list) or not values or len(values) != (k or len(values)):
        raise MessageError(f"{what} cannot be {shortened(values)}.")
    numbers = [whole_number(what, value) for value in values]
    return np.array(numbers, dtype=np.int64)


def _read_loss(sent: Any, k: int) -> Tensor:
    """Each client's loss, ``[K]``, of any real type."""
    if not isinstance(sent, Tensor) or sent.dtype not in REAL:
        raise MessageError(f"loss cannot be {shortened(sent)}.")
    return _read_tensor("loss", sent, torch.zeros((), dtype=sent.dtype), k)


def _read_tensor(what: str, sent: Any, like: Tensor, k: int) -> Tensor:
    """A tensor ``[K, *shape]``, where ``like`` is ``[*shape]``."""
    return _read_tensors("an upload", {what: sent}, {what: like}, k)[what]


def _read_tensors(what: str, sent: Any, like: Params, *clients: int) -> Params:
    """Tensors with the names, shapes and types of ``like``, in its order."""
    if not isinstance(sent, dict):
        raise MessageError(f"{what} cannot be {shortened(sent)}.")
    for name, value in sent.items():
        if not isinstance(value, Tensor):
            raise MessageError(f"{what}: {shortened(name)} is no tensor.")
    refuse_other(what, sent, like, *clients)
    return {name: sent[name] for name in like}


def _read_groups(
    what: str, sent: Any, like: Mapping[str, Params], *clients: int
) -> dict[str, Params]:
    """Tensors by name, of each of these names."""
    if not isinstance(sent, dict) or sent.keys() != like.keys():
        known = ", ".join(like) or "none"
        raise MessageError(
            f"{what} cannot be {shortened(sent)}, because the server asked for {known}."
        )
    groups = {}
    for name in like:
        groups[name] = _read_tensors(f"{what}.{name}", sent[name], like[name], *clients)
    return groups


def _read_levels(sent: Any, expected: Mapping[str, int], k: int) -> dict[str, Levels]:
    """The quantized entries of Δ, by name: the norms that were sent, and the expected bits."""
    like = torch.zeros((), dtype=torch.float32)  # in float64 runs, too
    norms = _read_tensors("the norms of levels", sent, dict.fromkeys(expected, like), k)
    for name, norms_K in norms.items():
        if bool((norms_K < 0).any()):
            raise MessageError(f"a norm of {name} is negative.")
    return {name: Levels(bits, norms[name]) for name, bits in expected.items()}


def _read_delta(sent: Any, levels: Mapping[str, Levels], expected: Expected, k: int) -> Params:
    """The updates, name → ``[K, *shape]``. Quantized entries are decoded from their bits."""
    like = expected.shapes["delta"]
    as_sent = dict(like)
    for name, bits in expected.bits.items():
        size = -(-like[name].numel() * bits // 8)
        as_sent[name] = torch.empty(size, dtype=torch.uint8, device="meta")
    delta = _read_tensors("delta", sent, as_sent, k)
    for name, quantized in levels.items():
        delta[name] = from_bits(delta[name], quantized, like[name])
    return delta


def to_bits(values_K: Tensor, levels: Levels) -> Tensor:
    """Quantized values ``[K, *shape]`` as uint8 ``[K, ⌈d·bits/8⌉]``, where d is the number of
    entries of one client.
    """
    flat = values_K.reshape(len(values_K), -1).double()
    level = (flat / levels.unit.to(flat).unsqueeze(1)).nan_to_num(0.0).round().to(torch.int64)
    shifted = (level + 2 ** (levels.bits - 1) - 1).cpu().numpy()
    ones = (shifted[..., None] >> np.arange(levels.bits)) & 1
    return torch.from_numpy(np.packbits(ones.astype(np.uint8).reshape(len(flat), -1), axis=1))


def from_bits(sent: Tensor, levels: Levels, like: Tensor) -> Tensor:
    """The inverse of :func:`to_bits`, in the shape and type of one client's tensor."""
    bits = levels.bits
    ones = np.unpackbits(sent.numpy(), axis=1, count=like.numel() * bits)
    ones_KDB = ones.reshape(len(sent), like.numel(), bits)
    level_KD = np.full(ones_KDB.shape[:2], -(2 ** (bits - 1) - 1), dtype=np.int32)
    for bit in range(bits):
        level_KD += ones_KDB[..., bit].astype(np.int32) << bit
    values = torch.from_numpy(level_KD).to(like.dtype) * levels.unit.to(like.dtype).unsqueeze(1)
    return torch.stack([torch.empty_like(like).copy_(row.view(like.shape)) for row in values])
