"""The interface of a federated method: a client part, a server part, or both.

Each is a Lightning callback.

A file with a method imports all it needs from here: messages, rounds, stacks, and what clients
keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from enum import IntEnum
from functools import cached_property
from typing import Any, Literal

import torch
from lightning.pytorch import Callback
from torch import Tensor

from gcfed.federated.messages import Download, Upload
from gcfed.federated.received import Received, Round
from gcfed.federated.setup import Setup
from gcfed.federated.state.store import (
    ClientStores,
    Kept,
    Own,
    like_trained,
)  # noqa: F401 (methods import it from here)
from gcfed.federated.training.forward import Output, Params
from gcfed.federated.training.stack import ClientStack
from gcfed.tasks import Batch


class Order(IntEnum):
    """What a part does to a client's step or upload.

    The parts of a run are called in this order.
    """

    # moves them back before others read them; a server part moves the start before others read it
    MOVES_WEIGHTS = 0
    CORRECTS = 1  # terms and corrections of the gradient, GC last
    PROJECTS = 2  # on a subspace, which a gradient that is edited later would leave
    SHORTENS = 3  # clips an update after the others have read it
    ATTACKS = 4  # changes the finished update
    QUANTIZES = 5  # rounds the result
    MEASURES = 6  # sees the upload


#: What a part prepares for the local steps of a stack, by name: ``[K, *shape]``, or ``[*shape]``
#: for all clients.
Prepared = Mapping[str, Any]

FACTS = {
    "moves the start": "its clients do not start at the server's model",
    "corrects drift": (
        "it estimates the clients' drift from their updates; two such methods would correct each"
        " other"
    ),
    "edits the mean": (
        "its ``on_aggregate_end`` reads or edits Δ; another such part would see only the result"
    ),
    "anchors": (
        "it compares a client's weights with the broadcast ones, so the client must start there"
    ),
    "sees the cohort": "it looks at all clients of the cohort at once, as colluding clients do",
    "steps without clients": (
        "its step must not show whether a client answered, so it also happens if none did"
    ),
    "rehearses": "it asks the transport what clients would send",
    "long updates": (
        "its updates may have entries of 2¹¹ and more, for which the mean needs a wider grid"
    ),
}
"""Facts that a part may declare because other parts or the loop depend on them."""

Need = Callable[[Setup, str], None]
"""Takes the setup and the title of a part; raises ValueError if the setup lacks
something that the part needs.
"""


class Part(Callback):
    """One side of a method: what :class:`ClientPart` and :class:`ServerPart` share.

    Attributes:
        order: when its hooks are called.
        facts: the entries of ``FACTS`` that apply to it.
        needs: requirements on the rest of the run (:mod:`gcfed.methods.requirements`).
        keeps: what each client keeps between rounds, by a name that no other part uses. A server
            part keeps a table.
        method: the name of its method; empty for a part that is a method by itself.
        trained_names: the parameters that are trained, in order; known in ``validate``.
    """

    order = Order.CORRECTS
    facts: Set[str] = frozenset()
    needs: Sequence[Need] = ()
    keeps: Mapping[str, Kept] = {}
    method = ""
    trained_names: list[str]
    stores: ClientStores

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self,)

    @property
    def title(self) -> str:
        return self.method or type(self).__name__

    def meet(self, setup: Setup) -> None:
        """Checks the run before the first round.

        Raises ValueError with the key if the part cannot work in it.
        """
        self.trained_names = setup.names
        for need in self.needs:
            need(setup, self.title)
        self.stores = setup.stores
        self.stores.names |= self.keeps.keys()
        self.validate(setup)

    def validate(self, setup: Setup) -> None:
        """Further checks of a part, called by :meth:`meet`. Raises ValueError in the same way."""


class ClientPart(Part):
    """What clients do.

    It sees downloads, its clients' data and their states, and nothing of the server.

    Every hook does nothing by default. The hooks are called in the order below; those from
    ``before_step`` to ``after_step`` are called in each local step of a stack of K clients.
    Lightning's ``on_after_backward`` comes before ``after_step``. It finds the gradients, ``[n,
    *shape]``, in the stack, ``pl_module.clients``. Finished clients have no row there: n ≤ K, and
    client i is row i. Tensors are on the device, in the model's type and memory format.

    Attributes:
        reads: what ``local_loss`` reads from ``out`` in addition to the logits: ``features``,
            ``stages``.
        recordable: how long a recorded local step (a CUDA graph) stays valid. ``"stack"``: in its
            own stack, because the hooks of a step change only tensors on the device. ``"run"``: in
            later stacks too, because they read only tensors of the stack, of the batch, and of what
            ``prepare`` returned. A subclass says so again. Empty: the steps of the run are not
            recorded.
        task_weight: factor of the task's loss, for methods that balance it against their own term.
    """

    reads: Set[str] = frozenset()
    recordable: Literal["", "stack", "run"] = ""
    task_weight = 1.0

    def overrides(self, *hooks: str) -> list[str]:
        """The names among ``hooks`` that it implements."""
        return [
            hook for hook in hooks if getattr(type(self), hook) is not getattr(ClientPart, hook)
        ]

    def on_download(self, download: Download) -> None:
        """Called once a round with the download, before any stack trains."""

    def prepare(self, stack: ClientStack, own: Own, download: Download) -> Prepared | None:
        """May edit ``stack.full``, where clients start.

        Returns what local steps find in ``stack.prepared[self]``.
        """

    def before_step(
        self, stack: ClientStack, batch: Batch, objective: Callable[[], Tensor]
    ) -> None:
        """Before the forward pass; may move the weights, and must move them back in
        ``on_after_backward``.

        ``order`` must be ``MOVES_WEIGHTS``. ``objective()`` is the whole objective, ``[n]``, at the
        present weights. Take its gradients by ``stack.gradients``: with ``client.accumulate``, its
        graph has only a batch's last part.
        """

    def calibrate(self, stack: ClientStack, logits_KBC: Tensor) -> Tensor:
        """Returns the logits that the task's loss takes."""
        return logits_KBC

    def local_loss(self, stack: ClientStack, batch: Batch, out: Output) -> Tensor | None:
        """Returns a term of each client's loss, ``[n]``.

        ``client.accumulate`` takes it as a mean over the samples.
        """

    def after_step(self, stack: ClientStack, batch: Batch) -> None:
        """After the optimizer's step; may move the weights, with ``order =
        Order.MOVES_WEIGHTS``.
        """

    def on_clients_end(self, stack: ClientStack, download: Download) -> Mapping[str, Params] | None:
        """Called after local training: ``stack.full`` has each client's w_k, ``[K, *shape]``.

        May return new states by the names in ``keeps``. They are stored for clients whose w_k and
        states are finite. A personal model besides w_k goes into ``stack.personal``, where metrics
        find it.
        """
        return None

    def observe(self, stack: ClientStack, download: Download) -> Params | None:
        """Returns a measurement of w_k. The server finds it in ``upload.notes[self.title]``."""
        return None

    def send(self, upload: Upload, own: Own, download: Download) -> None:
        """Called before K uploads are sent: may edit ``upload.delta`` and send more with
        ``upload.send``.
        """

    def keep(self, upload: Upload, own: Own, download: Download) -> Mapping[str, Params] | None:
        """Called after the uploads. Returns the clients' new states by the names in ``keeps``:
        ``own.add(…)``, or new tensors ``[K, *shape]``, which the engine stores if the upload is
        finite.
        """
        return None

    def hear(
        self, reply: Mapping[str, Params], own: Own, download: Download
    ) -> Mapping[str, Params] | None:
        """Receives the server's reply to the cohort, for K of its clients.

        Returns new states, as ``keep`` does.
        """
        return None


class ServerPart(Part):
    """What the server does. It sees uploads and its own state, and nothing of a client.

    Every hook does nothing by default. The hooks are called in the order below. Lightning's
    ``on_before_optimizer_step`` comes after ``on_aggregate_end``; there ``pl_module.net`` has the
    pseudo-gradient, ``.grad = −Δ``. ``on_receive`` is called on the process that trained these
    clients, all others on every process.
    """

    def on_broadcast(self, download: Download, round: Round) -> None:
        """Called before the download is sent: may replace entries of ``download.model`` and fill
        ``download.extra``.
        """

    def uploads(self, round: Round) -> dict[str, Params]:
        """What clients send in addition to Δ: name of ``Upload.send`` → tensors shaped like one
        client's.

        ``"delta"`` has the entries of Δ that are sent in other coordinates; ``on_aggregate_end``
        converts them back.
        """
        return {}

    def notes(self, round: Round) -> dict[str, Params]:
        """The entries of ``Upload.notes`` that it reads: name → tensors like those of a note."""
        return {}

    def sums(self, round: Round) -> Params:
        """Its sums of this round, as zeros: name → tensor, of the same shapes on every process.

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
        """A batch of the test split: outputs of the new global model, ``[B, …, C]``, and labels,
        ``[B, …]``.

        Called in tested rounds, on the process that tests this batch.
        """

    def on_round_end(self, row: dict[str, Any], round: Received) -> None:
        """May add columns to the row of metrics."""

    def decode(self, name: str, sent: Tensor) -> Tensor:
        """Converts an entry of Δ as it is sent, ``[…, *sent]``, into an update of the model, ``[…,
        *shape]``.
        """
        return sent

    def server_state(self, name: str, like: Mapping[str, Tensor], *, zeros: bool = True) -> Params:
        """The server's tensors of this name, name → ``[*shape]``, which are edited in place and
        saved in checkpoints. They start as zeros, or as copies of ``like``, which also gives
        shapes, types and devices.
        """
        tensors = self._server.setdefault(name, {})
        for key, t in like.items():
            held = tensors.get(key)
            if held is None:
                tensors[key] = torch.zeros_like(t) if zeros else t.clone()
            elif (held.device, held.dtype, held.stride()) != (t.device, t.dtype, t.stride()):
                tensors[key] = torch.empty_like(t).copy_(held)
        return tensors

    @cached_property
    def _server(self) -> dict[str, Params]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return (
            {"server": {name: dict(tensors) for name, tensors in self._server.items()}}
            if self._server
            else {}
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._server.update({name: dict(tensors) for name, tensors in state_dict["server"].items()})


class Method:
    """A method of several parts. They share its hyperparameters and messages, and nothing else."""

    def __init__(self, *parts: Part) -> None:
        self.parts = parts
        for part in parts:
            part.method = type(self).__name__


def parts_of(methods: Iterable[Method | Part]) -> list[Part]:
    """The parts of these methods in the order of their hooks; raises ValueError for an object that
    is no method.
    """
    methods = list(methods)
    if odd := next((method for method in methods if not isinstance(method, Method | Part)), None):
        raise ValueError(
            f"{type(odd).__name__} is no method: make it a ClientPart, a ServerPart, or a Method of"
            " both."
        )
    return sorted(
        (part for method in methods for part in method.parts), key=lambda part: part.order
    )


def upload_shapes(parts: Iterable[ServerPart], round: Round) -> dict[str, Params]:
    """What a client sends in this round: ``"delta"`` and each name of ``Upload.send`` → tensors
    shaped like its own.
    """
    shapes: dict[str, Params] = {"delta": dict(round.start)}
    for part in parts:
        for name, like in part.uploads(round).items():
            shapes[name] = shapes.get(name, {}) | like
    return shapes
