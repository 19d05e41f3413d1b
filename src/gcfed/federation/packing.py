"""Messages as bytes: tensors in safetensors, the rest in its header as JSON, with a version."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from gcfed.federated.forward import Params
from gcfed.federated.messages import Download, Levels, MessageError, Upload, finite_clients, refuse_other

VERSION = 2
BITS = range(2, 23)  # that a level may have, so that a float32 tells it from its neighbours
NUMBERS = range(2**63)  # of rounds: what an index has room for
TENSOR = "tensor|"  # what stands in the place of one: a key that no name of a tensor or part is


def pack(kind: str, content: Mapping[str, Any]) -> bytes:
    """A message.

    Args:
        kind: what it is.
        content: by name, plain numbers, texts, arrays and tensors, which keep their memory format; or dicts of them.
    """
    tensors: Params = {}

    def encoded(value: Tensor | np.ndarray) -> Any:
        if isinstance(value, np.ndarray):
            return value.tolist()
        key = str(len(tensors))  # a copy: two of a message may be one in memory, which safetensors refuses
        tensors[key] = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        return {TENSOR: key, "strides": torch.empty_like(value, device="meta").stride()}

    header = json.dumps({"version": VERSION, "kind": kind, "content": dict(content)}, default=encoded)
    return save(tensors, metadata={"gcfed": header})


def unpack(message: bytes, kind: str) -> dict[str, Any]:
    """The content of a message; its arrays are lists.

    Raises:
        MessageError: it is damaged, of another version or another kind; says which.
    """

    def decoded(node: dict[str, Any]) -> Any:
        if TENSOR not in node:
            return node
        t, step = tensors[node[TENSOR]], 1
        for stride, size in sorted((s, n) for s, n in zip(node["strides"], t.shape, strict=True) if n > 1):
            if stride != step:
                raise ValueError(f"strides {node['strides']} of a tensor of shape {(*t.shape,)}")
            step *= size
        return torch.empty_strided(t.shape, node["strides"], dtype=t.dtype).copy_(t)

    try:
        tensors, size = load(message), int.from_bytes(message[:8], "little")
        text = json.loads(message[8 : 8 + size])["__metadata__"]["gcfed"]
        header = json.loads(text, object_hook=decoded)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise MessageError(f"a message of {len(message):,} bytes cannot be read: {error}") from None
    if header["version"] != VERSION:
        raise MessageError(f"a message of version {header['version']}, and this project reads version {VERSION}.")
    if header["kind"] != kind:
        raise MessageError(f"a message that is a {header['kind']}, where a {kind} was expected.")
    return header["content"]


def pack_download(download: Download) -> bytes:
    return pack("download", vars(download))


def unpack_download(message: bytes, model: Params) -> Download:
    """What the server sent; ``model`` is the receiver's own, of whose names and shapes it must be.

    Raises:
        MessageError: it is not, or of no round; names the tensor.
    """
    content = unpack(message, "download")
    if type(content["round"]) is not int or content["round"] not in NUMBERS:
        raise MessageError(f"a download of round {content['round']!r}, which is none.")
    refuse_other("the model", content["model"], model)
    return Download(**content | {"cohort": np.array(content["cohort"], dtype=np.int64)})


def pack_upload(upload: Upload) -> bytes:
    bits = {name: own.encode(upload.delta[name]) for name, own in upload.levels.items() if own.bits in BITS}
    levels = {name: own._asdict() for name, own in upload.levels.items()}
    return pack("upload", vars(upload) | {"delta": upload.delta | bits, "levels": levels})


def unpack_upload(
    message: bytes, round: int, shapes: Mapping[str, Params], clients: Iterable[int], notes: Mapping[str, Params]
) -> Upload:
    """What K clients sent; who is finite is seen here, too.

    Args:
        round: that they should answer.
        shapes: what each of them should send: ``"delta"`` and the names beside it → tensors of one client.
        clients: that may answer.
        notes: what is read of theirs, as ``shapes``, but not by client.

    Raises:
        MessageError: it answers another round, or is of other clients, names, shapes, types or bits; names them.
    """
    content = unpack(message, "upload")
    if content["round"] != round:
        raise MessageError(f"an upload that answers round {content['round'] + 1}, and this is round {round + 1}.")
    if strangers := sorted(set(content["clients"]) - set(clients)):
        raise MessageError(f"an upload of clients that nobody asked: {strangers}.")
    arrays = {name: np.array(content[name]) for name in ("clients", "num_samples", "num_steps", "num_seen")}
    k, counted = len(arrays["clients"]), {"finite": content["finite"].bool(), "loss": content["loss"].double()}
    if odd := [name for name, a in arrays.items() if a.shape != (k,) or a.dtype.kind != "i" or a.min(initial=0) < 0]:
        raise MessageError(f"an upload of {k} clients with {odd[0]}={content[odd[0]]}.")
    refuse_other("an upload", counted, {"finite": torch.tensor(True), "loss": torch.tensor(0.0).double()}, k)
    delta, levels = content["delta"], {name: Levels(**own) for name, own in content["levels"].items()}
    norms = {name: own.norms for name, own in levels.items()}
    refuse_other("an upload's levels", norms, dict.fromkeys(norms.keys() & shapes["delta"], torch.tensor(0.0)), k)
    for name, own in levels.items():
        if type(own.bits) is not int or own.bits not in BITS:
            raise MessageError(f"an upload has {name} in {own.bits!r} bits, and they may be {BITS[0]} to {BITS[-1]}.")
        if name in delta:
            delta[name] = own.decode(delta[name], shapes["delta"][name])
    if unknown := sorted(content["extra"].keys() - (shapes.keys() - {"delta"})):
        raise MessageError(f"an upload has {unknown[0]} beside Δ, which no method of this run reads.")
    for name, like in shapes.items():
        sent = delta if name == "delta" else content["extra"].get(name, {})
        refuse_other(f"an upload's {name}", sent, like, k)
    noted = {**content["notes"]}
    for name, like in notes.items():
        refuse_other(f"an upload's note {name}", noted.get(name, {}), like)
    finite = torch.stack([counted["finite"], *map(finite_clients, (delta, *content["extra"].values()))]).all(0)
    return Upload(**content | arrays | {"notes": noted, "levels": levels, "finite": finite})
