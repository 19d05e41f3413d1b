"""A method of several parts, and what the parts of a run have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gcfed.federated.parts.client import ClientPart
from gcfed.federated.parts.part import Part
from gcfed.federated.parts.server import ServerPart
from gcfed.federated.protocol.messages import Expected, Params, quantized_nbytes
from gcfed.federated.protocol.rounds import Round
from gcfed.utils.refusal import Refusal


class Method:
    """A method of several parts. They share its hyperparameters and messages, and nothing else."""

    def __init__(self, *parts: Part) -> None:
        self.parts = parts
        for part in parts:
            part.method = type(self).__name__


def parts_of(methods: Iterable[Method | Part]) -> list[Part]:
    """The parts of these methods in the order of their hooks; raises Refusal for an object that is
    no method.
    """
    parts: list[Part] = []
    for method in methods:
        if not isinstance(method, Method | Part):
            raise Refusal(
                f"{type(method).__name__} is no method: make it a ClientPart, a ServerPart, or a"
                " Method of both."
            )
        parts += method.parts
    return sorted(parts, key=lambda part: part.order)


def result_of(parts: Iterable[Part]) -> str:
    """The column that these parts declare as their result; "" for the test of the global model.

    Raises Refusal if two methods declare different columns.
    """
    declared = {part.result: part.title for part in parts if part.result}
    if len(declared) > 1:
        texts = [f"{title} by {column}" for column, title in declared.items()]
        raise Refusal(
            f"A run has one result, and its methods are judged by different columns:"
            f" {', '.join(texts)}. Leave one of them out."
        )
    return next(iter(declared), "")


def upload_shapes(parts: Iterable[ServerPart], round: Round) -> dict[str, Params]:
    """The tensors that a client sends in this round: ``"delta"`` and each name of ``Upload.send`` →
    tensors shaped like its own.
    """
    shapes: dict[str, Params] = {"delta": dict(round.broadcast_model)}
    for part in parts:
        for name, like in part.uploads(round).items():
            shapes[name] = shapes.get(name, {}) | like
    return shapes


def expected_upload(parts: Sequence[Part], round: Round) -> Expected:
    """The tensors that a client sends in this round, with their bytes and its notes."""
    server_parts = [part for part in parts if isinstance(part, ServerPart)]
    shapes = upload_shapes(server_parts, round)
    delta = shapes["delta"]
    notes: dict[str, Params] = {}
    for server_part in server_parts:
        notes.update(server_part.notes(round))
    bits: dict[str, int] = {}
    sent_bytes: dict[str, int] = {}
    for part in parts:
        if isinstance(part, ClientPart):
            bits.update(part.quantized(delta))
            sent_bytes.update(part.sent_bytes(delta))
    for name, bits_per_number in bits.items():
        sent_bytes[name] = quantized_nbytes(delta[name].numel(), bits_per_number)
    return Expected(shapes, notes, bits, sent_bytes)
