"""Messages as bytes: tensors in safetensors, the rest in its header as JSON, with a version."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import safetensors
import torch
from safetensors.torch import load, save
from torch import Tensor

from gcfed.federated.forward import Params
from gcfed.federated.messages import Download, Levels, Upload

VERSION = 1
MOST_BITS = 22  # of a level that a float32 tells from its neighbours; more travel as they are


class MessageError(ValueError):
    """A message that is not what was expected."""


def pack(kind: str, tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> bytes:
    """A message; tensors keep their memory format.

    Args:
        kind: what it is.
        tensors: by name.
        fields: plain numbers, texts, lists and dicts of them.
    """
    flat: Params = {}
    for name, t in tensors.items():
        flat[name] = t.detach().cpu().contiguous()
        if flat[name].data_ptr() == t.data_ptr():  # two of a message may be one in memory, which safetensors refuses
            flat[name] = flat[name].clone()
    strides = {name: torch.empty_like(t).stride() for name, t in tensors.items()}
    header = {"version": VERSION, "kind": kind, "strides": strides, "fields": dict(fields)}
    return save(flat, metadata={"gcfed": json.dumps(header)})


def unpack(message: bytes, kind: str) -> tuple[Params, dict[str, Any]]:
    """The tensors and fields of a message.

    Raises:
        MessageError: it is damaged, of another version or another kind; says which.
    """
    try:
        size = int.from_bytes(message[:8], "little")
        header = json.loads(json.loads(message[8 : 8 + size])["__metadata__"]["gcfed"])
        tensors = load(message)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise MessageError(f"a message of {len(message):,} bytes cannot be read: {error}") from None
    if header["version"] != VERSION:
        raise MessageError(f"a message of version {header['version']}, and this project reads version {VERSION}.")
    if header["kind"] != kind:
        raise MessageError(f"a message that is a {header['kind']}, where a {kind} was expected.")
    came = {}
    for name, strides in header["strides"].items():  # in the sender's order
        came[name] = torch.empty_strided(tensors[name].shape, strides, dtype=tensors[name].dtype).copy_(tensors[name])
    return came, header["fields"]


def pack_download(download: Download) -> bytes:
    fields = {"round": download.round, "seed": download.seed, "lr": download.lr, "cohort": download.cohort.tolist()}
    return pack("download", _named(model={"": download.model}, extra=download.extra), fields)


def unpack_download(message: bytes, model: Mapping[str, Tensor]) -> Download:
    """What the server sent; ``model`` is the receiver's own, of whose names and shapes it must be.

    Raises:
        MessageError: it is not; names the tensor.
    """
    tensors, fields = unpack(message, "download")
    groups = _groups(tensors)
    sent = groups["model"].get("", {})
    refuse_other("the model", sent, {name: t.shape for name, t in model.items()})
    cohort = np.array(fields["cohort"], dtype=np.int64)
    return Download(fields["round"], fields["seed"], fields["lr"], sent, cohort, groups["extra"])


def pack_upload(upload: Upload) -> bytes:
    assert upload.loss is not None
    assert upload.num_seen is not None
    own = {"finite": upload.finite, "loss": upload.loss}
    levels = {name: code for name, code in upload.levels.items() if code.bits <= MOST_BITS}
    delta = {name: levels[name].encode(t) if name in levels else t for name, t in upload.delta.items()}
    norms = {name: code.norms for name, code in levels.items()}
    fields = {
        "round": upload.round, "bits": {name: code.bits for name, code in upload.levels.items()},
        **{name: getattr(upload, name).tolist() for name in ("clients", "num_samples", "num_steps", "num_seen")},
    }  # fmt: skip
    named = _named(delta={"": delta}, extra=upload.extra, notes=upload.notes, own={"": own, "norms": norms})
    return pack("upload", named, fields)


def unpack_upload(message: bytes, round: int, shapes: Mapping[str, Params], clients: Iterable[int]) -> Upload:
    """What K clients sent.

    Args:
        round: that they should answer.
        shapes: what each of them should send: ``"delta"`` and the names beside it → tensors of one client.
        clients: that may answer.

    Raises:
        MessageError: it answers another round, or is of other clients, names or shapes; names them.
    """
    tensors, fields = unpack(message, "upload")
    if fields["round"] != round:
        raise MessageError(f"an upload that answers round {fields['round'] + 1}, and this is round {round + 1}.")
    if strangers := sorted(set(fields["clients"]) - set(clients)):
        raise MessageError(f"an upload of clients that nobody asked: {strangers}.")
    groups, k = _groups(tensors), len(fields["clients"])
    delta, finite, loss = groups["delta"].get("", {}), groups["own"][""]["finite"], groups["own"][""]["loss"]
    norms = groups["own"].get("norms", {})
    levels = {name: Levels(bits, norms.get(name, finite.new_zeros(k))) for name, bits in fields["bits"].items()}
    delta |= {name: levels[name].decode(delta[name], shapes["delta"][name]) for name in norms}
    for name, like in shapes.items():
        sent = delta if name == "delta" else groups["extra"].get(name, {})
        refuse_other(f"an upload's {name}", sent, {n: (k, *t.shape) for n, t in like.items()})
    arrays = (np.array(fields[name]) for name in ("clients", "num_samples", "num_steps", "num_seen"))
    ids, num_samples, num_steps, num_seen = arrays
    return Upload(
        ids, num_samples, num_steps, delta, finite, round, loss, num_seen, groups["extra"], levels,
        groups["notes"],
    )  # fmt: skip


def refuse_other(what: str, sent: Mapping[str, Tensor], shapes: Mapping[str, Iterable[int]]) -> None:
    """Raises MessageError, naming the first tensor that is missing, unknown or of another shape."""
    for name, shape in shapes.items():
        if name not in sent:
            raise MessageError(f"{what} lacks {name}: it is of another model or method.")
        if tuple(sent[name].shape) != tuple(shape):
            raise MessageError(f"{what} has {name} as {tuple(sent[name].shape)}, and here it is {tuple(shape)}.")
    if unknown := sorted(set(sent) - set(shapes)):
        raise MessageError(f"{what} has {unknown[0]}, which is not known here: it is of another model or method.")


def _named(**groups: Mapping[str, Params]) -> Params:
    """Tensors by ``group|part|name``; parts that send nothing are not lost."""
    named = {}
    for group, parts in groups.items():
        for part, tensors in parts.items():
            for name, t in tensors.items():
                named[f"{group}|{part}|{name}"] = t
    return named


def _groups(tensors: Params) -> dict[str, dict[str, Params]]:
    """The inverse of :func:`_named`."""
    groups: dict[str, dict[str, Params]] = {name: {} for name in ("model", "delta", "extra", "notes", "own")}
    for key, t in tensors.items():
        group, part, name = key.split("|", 2)
        groups[group].setdefault(part, {})[name] = t
    return groups


def pack_reply(reply: Mapping[str, Params], round: int) -> bytes:
    return pack("reply", _named(extra=reply), {"round": round})


def unpack_reply(message: bytes) -> tuple[dict[str, Params], int]:
    tensors, fields = unpack(message, "reply")
    return _groups(tensors)["extra"], fields["round"]
