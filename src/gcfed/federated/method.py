"""The interface of a federated method: a client part, a server part, or both, each a Lightning callback.

Who writes one finds all that its hooks meet in this module: messages, rounds, stacks, names of tensors.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import Callback
from torch import Tensor

from gcfed.data.sampling import ClientSampler
from gcfed.federated.aggregate import Aggregator
from gcfed.federated.client_store import ClientStore
from gcfed.federated.forward import Output, Params
from gcfed.federated.messages import Download, Upload
from gcfed.federated.module import FederatedModule
from gcfed.federated.received import Received, Round
from gcfed.federated.solver import LocalSolver
from gcfed.federated.stack import ClientStack, per_client
from gcfed.federated.store import ClientStores
from gcfed.federated.transport import Transport
from gcfed.models.order import ForwardOrder, forward_order
from gcfed.tasks import Batch

log = logging.getLogger(__name__)


class Order(IntEnum):
    """What a part does to a client's step or upload: the order in which the parts of a run are called.

    What moves the weights comes first, so that the others see them where they were; then terms and corrections of the
    gradient, and GC after them; what projects on a subspace after all of them, since a gradient edited later would
    leave it; what shortens an update once the others have read it; attacks on what is ready to be sent; quantization
    after what it rounds; measurements last. A server part that moves where clients start comes first, too.
    """

    MOVES_WEIGHTS = 0
    CORRECTS = 1
    PROJECTS = 2
    SHORTENS = 3
    ATTACKS = 4
    QUANTIZES = 5
    MEASURES = 6


@dataclass(frozen=True)
class Setup:
    """The parts of a run, as they meet before the first round.

    Attributes:
        stores: where a part opens a store: a client part its clients' states, a server part a table by client.
        module: the global model and its server optimizer.
        parts: of all methods of the run, in the order in which their hooks are called.
        rounds: R, the number of communication rounds.
        cohort: clients that train in a round, at most; the sampler also draws ``participation.faults.extra``.
        transport: how messages travel; by it a server part may ask what clients would send.
    """

    sampler: ClientSampler
    solver: LocalSolver
    aggregator: Aggregator
    stores: ClientStores
    data: Any
    module: FederatedModule
    parts: Sequence[Part]
    rounds: int
    cohort: int
    transport: Transport

    @functools.cached_property
    def names(self) -> list[str]:
        """The parameters that are trained, in order."""
        return [name for name, p in self.module.net.named_parameters() if p.requires_grad]

    @functools.cached_property
    def forward_order(self) -> ForwardOrder:
        """How a forward pass on zeros uses the network's parameters; logs what the user may not expect."""
        net = self.module.net
        try:
            like = next(net.parameters())
            x = like.new_zeros(2, *self.data.input_shape, dtype=torch.int64 if hasattr(net, "last_only") else None)
            order = forward_order(net, x)
        except Exception as error:  # of the network, or of a mode that it does not go with
            order = ForwardOrder(net, declared=True)
            reason = " ".join(str(error).split())
            log.warning("gc takes the order of declaration: it could not watch the network's forward pass (%s)", reason)
        for fact in order.facts():
            log.info("gc: %s", fact)
        return order


Prepared = Mapping[str, Any]
"""What a part prepares for the local steps of a stack, by name: tensors ``[K, *shape]``, or ``[*shape]`` for all."""


@dataclass(frozen=True)
class Kept:
    """What each client keeps from one round to the next under one name; the engine reads, writes and checkpoints it.

    Attributes:
        like: of the part and the download: tensors like those of one client, name → ``[*shape]``.
        starts_at_model: whether a client that has kept nothing yet has the broadcast model's tensors, else zeros.
    """

    like: Callable[[Any, Download], Params]
    starts_at_model: bool = False


class Own(dict[str, Params]):
    """What K clients have kept, by the names in ``keeps``: name → ``[K, *shape]``; the part's own copy.

    Attributes:
        version: the round's index in which each client kept it, ``[K]``; −1 where it has kept nothing yet.
        dtype: of what is stored (``client_store.dtype``); None: that of the model.
    """

    def __init__(self, version: Sequence[int] = (), dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.version, self.dtype = np.array(version, dtype=np.int64), dtype

    def as_stored(self, values: Params) -> Params:
        """Values ``[K, *shape]`` rounded as the store rounds them."""
        return values if self.dtype is None else {n: v.to(self.dtype).to(v.dtype) for n, v in values.items()}

    def change(self, name: str, change: Params) -> Params:
        """By how much the stored tensors of this name move if ``change``, ``[K, *shape]``, is added to them."""
        if self.dtype is None:
            return change
        new = self.as_stored({key: t + change[key] for key, t in self[name].items()})
        return {key: t.sub_(self[name][key]) for key, t in new.items()}

    def add(self, name: str, change: Mapping[str, Tensor], finite: Tensor) -> Params:
        """Adds ``[K, *shape]`` in place for the clients that are ``finite``, bool ``[K]``; returns all of this name."""
        for key, t in self[name].items():
            t.add_(torch.where(per_client(finite, t), change[key], 0.0))
        return self[name]


def like_trained(part: Part, download: Download) -> Params:
    """Tensors like the trained parameters."""
    return {name: download.model[name] for name in part.trained_names}


FACTS = {
    "moves the start": "its clients start elsewhere than at the server's model",
    "corrects drift": "it reads the clients' drift off their updates to correct it; two would correct each other",
    "anchors": "it compares a client's weights with the broadcast ones, from which the client must then start",
    "sees the cohort": "it looks at all clients of the cohort at once, as hostile ones do that know each other",
    "rehearses": "it asks by the transport what clients would send",
    "long updates": "it makes updates of 2¹¹ and more, which the mean then takes as well (``Aggregator.narrow``)",
}
"""What a part may say of itself, since other parts or the loop depend on it."""

Need = Callable[[Setup, str], None]
"""Something that a part of this title needs: raises ValueError where the setup lacks it."""


class Part(Callback):
    """One side of a method: what :class:`ClientPart` and :class:`ServerPart` share.

    Attributes:
        order: what it does to a step or an upload, and so when its hooks are called.
        facts: those of ``FACTS`` that hold for it.
        needs: what it asks of the rest of the algorithm (:mod:`gcfed.methods.requirements`).
        keeps: what it keeps of each client, by a name that no other part has; in ``stores`` of the same names.
        method: the name of the method that it is a part of; empty where it is one by itself.
        trained_names: the parameters that are trained, in order; known when ``validate`` is called.
    """

    order = Order.CORRECTS
    facts: Set[str] = frozenset()
    needs: Sequence[Need] = ()
    keeps: Mapping[str, Kept] = {}
    method = ""
    trained_names: list[str]
    stores: Mapping[str, ClientStore]

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self,)

    @property
    def title(self) -> str:
        return self.method or type(self).__name__

    def meet(self, setup: Setup) -> None:
        """Looks at the run before the first round; raises ValueError, naming the key, for what cannot work."""
        self.trained_names = setup.names
        for need in self.needs:
            need(setup, self.title)
        self.stores = {name: setup.stores.open(name) for name in self.keeps}
        self.validate(setup)

    def validate(self, setup: Setup) -> None:
        """What a part looks at by itself; raises ValueError as :meth:`meet`, which calls it."""


class ClientPart(Part):
    """What clients do. It sees downloads, its clients' data and what they stored; nothing of the server's.

    Every hook does nothing by default; they are called in the order in which they stand here, those from
    ``before_step`` to ``after_step`` in each local step of a stack of K clients, the last of them after Lightning's
    ``on_after_backward``, which meets the gradients, ``[n, *shape]``, in the stack, ``pl_module.clients``.
    There clients that have finished are left out: n ≤ K; client i is always row i. State that survives
    rounds is declared in ``keeps``. Tensors are on the device, in the model's type and memory
    format.

    Attributes:
        reads: what ``local_loss`` reads of ``out`` beside the logits: ``features``, ``stages``.
        recordable: how long a recording of a local step, a CUDA graph, stays right. ``"stack"``: for its stack, because
            the hooks of a step change only tensors on the device. ``"run"``: also for later stacks, because they read
            only tensors of the stack, of the batch, and of what ``prepare`` returned; each class says so for itself.
            Empty: the run's steps are not recorded.
        task_weight: factor on the task's own loss, for methods that balance it against their term.
    """

    reads: Set[str] = frozenset()
    recordable: Literal["", "stack", "run"] = ""
    task_weight = 1.0

    @property
    def moves_weights(self) -> bool:
        return self.order is Order.MOVES_WEIGHTS

    def overrides(self, *hooks: str) -> list[str]:
        """Those of these hooks that it has itself."""
        return [hook for hook in hooks if getattr(type(self), hook) is not getattr(ClientPart, hook)]

    def on_download(self, download: Download) -> None:
        """What the server sent has come, once a round, before any stack."""

    def prepare(self, stack: ClientStack, own: Own, download: Download) -> Prepared | None:
        """The stack is made; ``own`` is what its clients have kept. What it returns is ``stack.prepared[self]`` until
        local training is over.
        """

    def before_step(self, stack: ClientStack, batch: Batch, objective: Callable[[], Tensor]) -> None:
        """Before the forward pass; may move the weights, and moves them back in ``on_after_backward``.

        Only with ``order = Order.MOVES_WEIGHTS``. ``objective()`` evaluates the clients' whole objective, ``[n]``, at
        the present weights.
        """

    def calibrate(self, stack: ClientStack, logits_KBC: Tensor) -> Tensor:
        """Changes the logits that enter the task's loss."""
        return logits_KBC

    def local_loss(self, stack: ClientStack, batch: Batch, out: Output) -> Tensor | None:
        """A term of each client's loss, ``[n]``."""

    def after_step(self, stack: ClientStack, batch: Batch) -> None:
        """The clients' optimizer has stepped; may move the weights, with ``order = Order.MOVES_WEIGHTS``."""

    def on_clients_end(self, stack: ClientStack, download: Download) -> Mapping[str, Params] | None:
        """Local training is over: ``stack.full`` has each client's w_k, ``[K, *shape]``.

        May return what clients keep of w_k, by the names in ``keeps``; it is written where w_k is finite.
        """
        return None

    def observe(self, stack: ClientStack, download: Download) -> Params | None:
        """What a measurement notes of w_k; its server part finds it in ``upload.notes[self.title]``."""
        return None

    def send(self, upload: Upload, own: Own, download: Download) -> None:
        """Before K uploads leave: edit ``upload.delta``, ``upload.send`` more."""

    def coded(self) -> dict[str, int]:
        """Entries of Δ that it sends in a few bits (``upload.levels``), and in how many."""
        return {}

    def keep(self, upload: Upload, own: Own, download: Download) -> Mapping[str, Params] | None:
        """The uploads are what has left. What it returns, by the names in ``keeps``, clients keep: ``own.add(…)``, or
        new tensors ``[K, *shape]``, which are written where the upload is finite.
        """
        return None

    def hear(self, reply: Mapping[str, Params], own: Own, download: Download) -> Mapping[str, Params] | None:
        """What the server told the cohort when the round was over; ``own`` is what K of its clients have kept.

        What it returns, they keep where their upload was finite, as with ``keep``.
        """
        return None


class ServerPart(Part):
    """What the server does. It sees uploads and its own state; nothing of a client's.

    Every hook does nothing by default; they are called in the order in which they stand here, Lightning's
    ``on_before_optimizer_step``, when ``pl_module.net`` has the pseudo-gradient ``.grad = −Δ``, before
    ``on_round_end``. ``on_receive`` is called on the process that trained these clients; the others once a round on
    every process.
    """

    def meet(self, setup: Setup) -> None:
        before = set(setup.stores.opened)
        super().meet(setup)
        for name in setup.stores.opened.keys() - before:
            setup.stores.opened[name].servers = not isinstance(self, ClientPart)

    def on_broadcast(self, download: Download, round: Round) -> None:
        """Before the model goes down: replace entries of ``download.model``, fill ``download.extra``."""

    def uploads(self, round: Round) -> dict[str, Params]:
        """What clients send beside Δ: the names given to ``Upload.send`` → tensors shaped like those of one client.

        Under ``"delta"``: entries of Δ that clients put in other coordinates than the model's, which
        ``on_aggregate_end`` turns back.
        """
        return {}

    def notes(self, round: Round) -> dict[str, Params]:
        """What it reads of ``Upload.notes``: their names → tensors like those of a note."""
        return {}

    def sums(self, round: Round) -> Params:
        """What it adds up in this round: zeros, name → tensor, of the same shapes on every process.

        The sums over all processes are ``round.sums[self]`` in ``on_aggregate_end`` and ``on_round_end``.
        """
        return {}

    def on_receive(self, upload: Upload, round: Round) -> Params | None:
        """K uploads have come, in whatever order; before they are aggregated. Returns terms of its ``sums``."""
        return None

    def on_aggregate_end(self, update: Params, round: Received) -> None:
        """The aggregated update Δ, name → ``[*shape]``; not in a round without a finite client."""

    def on_test_batch(self, outputs: Tensor, y: Tensor) -> None:
        """A batch of the test split: outputs of the new global model, ``[B, …, C]``, and labels, ``[B, …]``.

        Called on the process that tests this batch, in rounds that are tested.
        """

    def on_round_end(self, row: dict[str, Any], round: Received) -> None:
        """May add entries to the row of metrics."""

    def decode(self, name: str, sent: Tensor) -> Tensor:
        """An entry of Δ as it travels, ``[…, *sent]`` → as the update that it stands for, ``[…, *shape]``."""
        return sent

    def server_state(self, name: str, like: Mapping[str, Tensor]) -> Params:
        """The server's tensors of this name, name → ``[*shape]``, zeros at first; edit them in place.

        ``like`` gives shapes, types and devices; a checkpoint's tensors are moved there.
        """
        tensors = self._server.setdefault(name, {})
        for key, t in like.items():
            held = tensors.get(key)
            if held is None:
                tensors[key] = torch.zeros_like(t)
            elif (held.device, held.dtype, held.stride()) != (t.device, t.dtype, t.stride()):
                tensors[key] = torch.empty_like(t).copy_(held)
        return tensors

    @functools.cached_property
    def _server(self) -> dict[str, Params]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"server": {name: dict(tensors) for name, tensors in self._server.items()}} if self._server else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._server.update({name: dict(tensors) for name, tensors in state_dict["server"].items()})


class Method:
    """A method of several parts, which share its hyperparameters and messages, and nothing else."""

    def __init__(self, *parts: Part) -> None:
        self.parts = parts
        for part in parts:
            part.method = type(self).__name__

    def meet(self, setup: Setup) -> None:
        for part in self.parts:
            part.meet(setup)


def parts_of(methods: Iterable[Method | Part]) -> list[Part]:
    """The parts of these methods, in the order in which their hooks are called; ValueError for what is no method."""
    methods = list(methods)
    if odd := next((method for method in methods if not isinstance(method, Method | Part)), None):
        raise ValueError(f"{type(odd).__name__} is no method: make it a ClientPart, a ServerPart, or a Method of both.")
    return sorted((part for method in methods for part in method.parts), key=lambda part: part.order)


def upload_shapes(parts: Sequence[Part], round: Round) -> dict[str, Params]:
    """What a client sends in this round: ``"delta"`` and the names of ``Upload.send`` → tensors shaped like its own."""
    shapes: dict[str, Params] = {"delta": dict(round.start)}
    for part in parts:
        if isinstance(part, ServerPart):
            for name, like in part.uploads(round).items():
                shapes[name] = shapes.get(name, {}) | like
    return shapes
