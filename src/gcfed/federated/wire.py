"""Messages as bytes, and the schema of what clients send.

A message is a file of safetensors: its tensors, and everything else as JSON in the header.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from gcfed.federated.messages import Download, Levels, MessageError, Upload, finite_clients
from gcfed.federated.training.forward import Params

ROUNDS = range(2**63)  # what an index has room for
MOST = 1e20  # of a loss or a score: times a weight it is finite in float32
TENSOR = "tensor|"  # the key that stands for a tensor: no name of a tensor or part


def pack(kind: str, content: Mapping[str, Any]) -> bytes:
    """A message.

    Args:
        kind: what it is.
        content: by name, plain numbers, texts, arrays and tensors, which keep their memory format; or dicts and lists
            of them.
    """
    tensors: Params = {}

    def encoded(value: Tensor | np.ndarray) -> Any:
        if isinstance(value, np.ndarray):
            return value.tolist()
        key = str(len(tensors))  # a copy: two of a message may be one in memory, which safetensors refuses
        tensors[key] = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        return {TENSOR: key, "strides": torch.empty_like(value, device="meta").stride()}

    header = json.dumps({"kind": kind, "content": dict(content)}, default=encoded)
    return save(tensors, metadata={"gcfed": header})


def unpack(message: bytes, kind: str) -> dict[str, Any]:
    """The content of a message; its arrays are lists.

    Raises:
        MessageError: it is damaged, or of another kind.
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
        found, content = header["kind"], {**header["content"]}
    except Exception as error:  # another machine may send anything
        raise MessageError(f"a message cannot be read: {type(error).__name__}: {error}") from None
    if found != kind:
        raise MessageError(f"a message is of kind {found!r}, where {kind!r} was expected.")
    return content


def match(key: str, value: Any, rule: Any) -> None:
    """Checks what another machine has sent.

    Args:
        rule: a dict of rules, by exactly these keys; a list of rules, one an entry; a tensor of this shape and type; a
            set or range of whole numbers or texts; the bounds of a number; or None for anything.

    Raises:
        MessageError: the value does not follow the rule; names the key.
    """
    if isinstance(rule, Mapping):
        found = value if isinstance(value, dict) else {}
        if odd := sorted(rule.keys() ^ found.keys()):
            raise MessageError(f"{key} {'has' if odd[0] in found else 'lacks'} {odd[0]!r}.")
        for name, own in rule.items():
            match(f"{key}.{name}", value[name], own)
    elif isinstance(rule, list):
        if not isinstance(value, list) or len(value) != len(rule):
            raise MessageError(f"{key}={value!r} must be a list of {len(rule)}.")
        for entry, own in zip(value, rule, strict=True):
            match(key, entry, own)
    elif isinstance(rule, Tensor):
        sent, expected = ((*t.shape, t.dtype) if isinstance(t, Tensor) else type(t).__name__ for t in (value, rule))
        if sent != expected:
            raise MessageError(f"{key} is {sent}, and must be {expected}.")
    elif isinstance(rule, tuple):
        if type(value) not in (int, float) or not rule[0] <= value <= rule[1]:
            raise MessageError(f"{key}={value!r} must be a number from {rule[0]:g} to {rule[1]:g}.")
    elif isinstance(rule, range):
        if type(value) is not int or value not in rule:  # of another type it would look at every number
            raise MessageError(f"{key}={value!r} must be a whole number from {rule[0]} to {rule[-1]}.")
    elif rule is not None and (type(value) not in (int, str) or value not in rule):
        raise MessageError(f"{key}={value!r} must be one of {sorted(rule)}.")


def entries(value: Any, rule: Any) -> list[Any]:
    """The rule for a list of any length: every entry follows this rule."""
    return [rule] * len(value) if isinstance(value, list) else []


def pack_download(download: Download) -> bytes:
    return pack("download", vars(download))


def unpack_download(message: bytes, model: Params) -> Download:
    """What the server sent; ``model`` is the receiver's own, of whose names and shapes it must be.

    Raises:
        MessageError: it is not, or of no round; names the key.
    """
    content = unpack(message, "download")
    match("round", content["round"], ROUNDS)
    match("model", content["model"], model)
    return Download(**content | {"cohort": np.array(content["cohort"], dtype=np.int64)})


def upload_content(upload: Upload) -> dict[str, Any]:
    """An upload for :func:`pack`: entries of Δ that travel in a few bits as these bits, and their norms."""
    coded = {name: own.encode(upload.delta[name]) for name, own in upload.levels.items()}
    norms = {name: own.norms for name, own in upload.levels.items()}
    assert upload.loss is not None
    return vars(upload) | {"delta": upload.delta | coded, "levels": norms, "loss": upload.loss.double()}


@dataclass(frozen=True)
class UploadSchema:
    """All that an upload of a round may contain.

    Attributes:
        round: index of the round.
        clients: ids of the clients that were asked → size of their data set, most local steps, most samples of a step.
        bits: names of ``delta`` that travel in a few bits → how many.
        shapes: ``"delta"`` and the names of ``extra`` → tensors of one client.
        notes: names of ``notes`` → tensors.
    """

    round: int
    clients: Mapping[int, tuple[int, int, int]]
    bits: Mapping[str, int]
    shapes: Mapping[str, Params]
    notes: Mapping[str, Params]

    def read(self, content: Mapping[str, Any]) -> Upload:
        """The upload of K clients with this content; which of them are finite is seen here, too.

        Raises:
            MessageError: it does not follow the schema; names the key.
        """
        ids, like = content.get("clients"), self.shapes["delta"]
        match("upload.clients", ids, entries(ids, self.clients.keys()))
        k, known = len(ids), [self.clients[client] for client in ids]  # type: ignore[arg-type, union-attr]

        def of_each(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(k, *shape, dtype=dtype, device="meta")

        shapes = {part: {n: of_each(t.dtype, *t.shape) for n, t in own.items()} for part, own in self.shapes.items()}
        coded = {n: of_each(torch.uint8, -(-like[n].numel() * bits // 8)) for n, bits in self.bits.items()}
        rules = {
            "clients": entries(ids, self.clients.keys()), "round": {self.round},
            "num_samples": [{size} for size, _, _ in known],
            "num_steps": [range(steps + 1) for _, steps, _ in known],
            "num_seen": [range(steps * batch + 1) for _, steps, batch in known],
            "finite": of_each(torch.bool), "loss": of_each(torch.float64), "notes": self.notes,
            "levels": dict.fromkeys(self.bits, of_each(torch.float32)), "delta": shapes.pop("delta") | coded,
            "extra": shapes,
        }  # fmt: skip
        match("upload", content, rules)
        if (content["loss"].nan_to_num(0.0, 0.0, 0.0).abs() > MOST).any():
            raise MessageError(f"upload.loss={content['loss'].tolist()} must be at most {MOST:g}.")
        levels = {n: Levels(bits, content["levels"][n]) for n, bits in self.bits.items()}
        delta = content["delta"] | {n: own.decode(content["delta"][n], like[n]) for n, own in levels.items()}
        finite = [content["finite"], *map(finite_clients, (delta, *content["extra"].values()))]
        arrays = {n: np.array(content[n], dtype=np.int64) for n in ("clients", "num_samples", "num_steps", "num_seen")}
        changed = {"delta": delta, "levels": levels, "finite": torch.stack(finite).all(0)}
        return Upload(**{**content, **arrays, **changed})
