"""The server side of a method: the hooks of a server part, in the order of a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gcfed.federated.parts.part import Part
from gcfed.federated.protocol.messages import Download, Params, Upload
from gcfed.federated.protocol.rounds import Received, Round


class ServerPart(Part):
    """What the server does. It sees uploads and its own state, and nothing of a client.

    Every hook does nothing by default. The hooks are called in the order below. Lightning's
    ``on_before_optimizer_step`` comes after ``on_aggregate_end``; there ``pl_module.net`` has the
    pseudo-gradient, ``.grad = −Δ``. ``on_receive`` is called on the process that trained these
    clients, and ``on_test_batch`` on the one that tests this batch; all others on every process.
    ``decode`` is no step of the round: it is called where an upload is read.
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        # It may add other columns than its base class.
        own = vars(cls)
        if "writes" not in own and ("on_round_end" in own or "columns" in own):
            cls.writes = None

    def on_broadcast(self, download: Download, round: Round) -> None:
        """Called before the download is sent.

        May replace entries of ``download.broadcast_model``, and fill ``download.extra``.
        """

    def uploads(self, round: Round) -> dict[str, Params]:
        """What clients send in addition to Δ: name of ``Upload.send`` → tensors shaped like one
        client's.

        Under ``"delta"`` are those entries of Δ that clients send in other coordinates.
        ``on_aggregate_end`` converts them back.
        """
        return {}

    def notes(self, round: Round) -> dict[str, Params]:
        """The entries of ``Upload.notes`` that it reads: name → tensors like those of a note."""
        return {}

    def sums(self, round: Round) -> Params:
        """The part's sums of this round, as zeros, name → tensor: on every process the same shapes.

        The sums over all processes are ``round.sums[self]`` in ``on_aggregate_end`` and
        ``on_round_end``.
        """
        return {}

    def on_receive(self, upload: Upload, round: Round) -> Params | None:
        """Called with K uploads, in any order, before they are aggregated.

        May return terms of its ``sums``.
        """
        return None

    def on_aggregate_end(self, update: Params, round: Received) -> None:
        """May edit the aggregated update Δ, name → ``[*shape]``.

        Called only if ``round.usable``.
        """

    def on_test_batch(self, outputs: Tensor, y: Tensor) -> None:
        """Gets a batch of the test split: outputs of the new global model, ``[B, …, C]``, and
        labels, ``[B, …]``.

        Called in tested rounds, on the process that tests this batch.
        """

    def on_round_end(self, row: dict[str, Any], round: Received) -> None:
        """May add columns to the row of metrics."""

    @property
    def known_columns(self) -> Sequence[str] | None:
        """The columns that it may add to a row; None if any."""
        if type(self).on_round_end is ServerPart.on_round_end:
            return ()
        return self.writes

    def decode(self, name: str, sent: Tensor) -> Tensor:
        """Converts an entry of Δ as it is sent, ``[…, *sent]``, into an update of the model, ``[…,
        *shape]``.
        """
        return sent

    @property
    def converts(self) -> bool:
        """Whether its clients send Δ in other coordinates, which ``decode`` and
        ``on_aggregate_end`` convert back.
        """
        return type(self).decode is not ServerPart.decode

    def server_state(self, name: str, like: Mapping[str, Tensor], *, zeros: bool = True) -> Params:
        """The server's tensors of this name, name → ``[*shape]``, which are edited in place and
        saved in checkpoints. They start as zeros, or as copies of ``like``, which also gives
        shapes, types and devices.
        """
        tensors = self._states.setdefault(name, {})
        for key, t in like.items():
            held = tensors.get(key)
            if held is None:
                tensors[key] = torch.zeros_like(t) if zeros else t.clone()
            elif (held.device, held.dtype, held.stride()) != (t.device, t.dtype, t.stride()):
                tensors[key] = torch.empty_like(t).copy_(held)
        return tensors

    @cached_property
    def _states(self) -> dict[str, Params]:
        return {}

    def forget_states(self) -> None:
        """Begins anew, for another run. A part with state of its own extends it."""
        self._states.clear()

    def state_dict(self) -> dict[str, Any]:
        states = {name: dict(tensors) for name, tensors in self._states.items()}
        return {"server": states} if states else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._states.update({name: dict(tensors) for name, tensors in state_dict["server"].items()})
