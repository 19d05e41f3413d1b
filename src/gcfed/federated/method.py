"""The interface of a federated method: a client part, a server part, or both, each a Lightning callback.

Who writes one finds all that its hooks meet in this module: messages, rounds, stacks, names of tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from gcfed.data.batch import Batch
from gcfed.data.sampling import ClientSampler
from gcfed.federated.aggregate import Aggregator
from gcfed.federated.client_store import ClientStore
from gcfed.federated.forward import Output, Params
from gcfed.federated.messages import Download, Upload
from gcfed.federated.module import FederatedModule
from gcfed.federated.round import Round
from gcfed.federated.solver import LocalSolver
from gcfed.federated.stack import ClientStack
from gcfed.federated.store import ClientStores
from gcfed.federated.transport import Transport


class Order(IntEnum):
    """What a part does to a client's step or upload: the order in which the parts of a run are called.

    What moves the weights comes first, so that the others see them where they were; then terms and corrections of the
    gradient, and GC after them; what projects on a subspace after all of them, since a gradient edited later would
    leave it; attacks on what is ready to be sent; quantization after what it rounds; measurements last.
    """

    MOVES_WEIGHTS = 0
    CORRECTS = 1
    PROJECTS = 2
    ATTACKS = 3
    QUANTIZES = 4
    MEASURES = 5


@dataclass(frozen=True)
class Setup:
    """The parts of a run, as they meet before the first round.

    Attributes:
        sampler: draws the cohort of a round.
        solver: local training.
        aggregator: reduces the uploads to one update.
        stores: where a part opens a store: a client part its clients' states, a server part a table by client.
        data: the clients' samples.
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


Need = Callable[[Setup, str], None]
"""Something that a part of this title needs: raises ValueError where the setup lacks it."""
Needs = tuple[Need, ...]


class Part(Callback):
    """One side of a method: what :class:`ClientPart` and :class:`ServerPart` share."""

    order = Order.CORRECTS
    """What it does to a step or an upload, and so when its hooks are called."""
    needs_classes = False
    """Whether labels must be classes and outputs their logits."""
    moves_start = False
    """Whether clients start elsewhere than at the server's model."""
    corrects_drift = False
    """Whether it reads the clients' drift off their updates to correct it; two such would each correct the other."""
    anchors = False
    """Whether it compares a client's weights with the broadcast ones, from which the client must then start."""
    sees_cohort = False
    """Whether it looks at all clients of the cohort at once, as hostile ones do that know each other."""
    rehearses = False
    """Whether it asks by the transport what clients would send."""
    needs: Needs = ()
    """What it asks of the rest of the algorithm (:mod:`gcfed.methods.requirements`)."""
    keeps = ""
    """The name under which it keeps something of each client, in ``self.store``."""
    method = ""
    """The name of the method that it is a part of; its class's, where it is one by itself."""
    trained_names: list[str]
    """The parameters that are trained, in order; known when ``validate`` is called."""
    store: ClientStore

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
        if self.keeps:
            self.store = setup.stores.open(self.keeps)
        self.validate(setup)

    def validate(self, setup: Setup) -> None:
        """What a part looks at by itself; raises ValueError as :meth:`meet`, which calls it."""


class ClientPart(Part):
    """What clients do. It sees downloads, its clients' data and what they stored; nothing of the server's.

    Every hook does nothing by default. In the order of a round, from the second on for each stack of K clients:

    ============================  ====================================================================================
    ``on_download``               once a round, before any stack: what the server sent has come
    ``on_clients_start``          the stack is made; from here on it is ``self.stack``
    ``before_step``               before the forward pass of a local step; may move the weights, and moves them back in
                                  ``on_after_backward``; only with ``order = Order.MOVES_WEIGHTS``
    ``calibrate``                 changes the logits that enter the task's loss
    ``local_loss``                adds a term to each client's loss, ``[n]``
    ``on_after_backward``         Lightning's: ``self.stack`` has the gradients of a local step, ``[n, *shape]``
    ``after_step``                the clients' optimizer has stepped; may move the weights; only with that order
    ``on_clients_end``            local training is over: ``stack.full`` has each client's w_k, ``[K, *shape]``
    ``on_upload``                 before K uploads leave: edit ``upload.delta``, ``upload.send`` more
    ``on_sent``                   they have left: what clients keep goes to their stores, ``upload.finite`` tells who
                                  sent finite numbers
    ``on_reply``                  what the server told the cohort when the round was over
    ============================  ====================================================================================

    In a stack, clients that have finished are no longer there: n ≤ K; client i of the stack is always row i. State that
    survives rounds lies in a store opened in ``validate``, which is checkpointed. Tensors meet the hooks on the device,
    in the type and memory format of the model.
    """

    needs_features = False
    """Whether ``local_loss`` reads ``out.features_KBF``."""
    needs_stages = False
    """Whether ``local_loss`` reads ``out.stages``."""
    graphable = False
    """Whether its hooks of a local step do nothing but to tensors on the device, so that a step can be recorded
    (:mod:`gcfed.federated.recorder`); without it the run's steps are not."""
    task_weight = 1.0
    """Factor on the task's own loss in the clients' objective, for methods that balance it against their term."""
    stack: ClientStack
    """The clients that train at present."""

    @property
    def moves_weights(self) -> bool:
        return self.order is Order.MOVES_WEIGHTS

    @property
    def in_steps(self) -> bool:
        """Whether it takes part in local steps."""
        hooks = ("before_step", "calibrate", "local_loss", "on_after_backward", "after_step")
        return any(getattr(type(self), hook) is not getattr(ClientPart, hook) for hook in hooks)

    def on_download(self, download: Download) -> None: ...

    def on_clients_start(self, stack: ClientStack, download: Download) -> None: ...

    def before_step(self, stack: ClientStack, batch: Batch, objective: Callable[[], Tensor]) -> None:
        """``objective()`` evaluates the clients' whole objective, ``[n]``, at the present weights."""

    def calibrate(self, stack: ClientStack, logits_KBC: Tensor) -> Tensor:
        return logits_KBC

    def local_loss(self, stack: ClientStack, batch: Batch, out: Output) -> Tensor | None: ...

    def after_step(self, stack: ClientStack, batch: Batch) -> None: ...

    def on_clients_end(self, stack: ClientStack, download: Download) -> None: ...

    def on_upload(self, upload: Upload, download: Download) -> None: ...

    def on_sent(self, upload: Upload, download: Download) -> None: ...

    def on_reply(self, reply: Mapping[str, Params], download: Download) -> None: ...


class ServerPart(Part):
    """What the server does. It sees uploads and its own state; nothing of a client's.

    Every hook does nothing by default. In the order of a round:

    ============================  ====================================================================================
    ``on_broadcast``              before the model goes down: replace entries of ``download.model``, fill
                                  ``download.extra``
    ``on_receive``                K uploads have come, in whatever order; before they are aggregated
    ``on_aggregate_end``          the aggregated update Δ, name → ``[*shape]``; not in a round without a finite client
    ``on_before_optimizer_step``  Lightning's: ``pl_module.net`` has the pseudo-gradient ``.grad = −Δ``
    ``on_round_end``              may add entries to the row of metrics
    ============================  ====================================================================================

    ``on_receive`` is called on the process that trained these clients; the others once a round on every process.
    """

    def uploads(self, round: Round) -> dict[str, Params]:
        """What clients send beside Δ: the names given to ``Upload.send`` → tensors shaped like those of one client.

        Under ``"delta"``: entries of Δ that clients put in other coordinates than the model's, which
        ``on_aggregate_end`` turns back.
        """
        return {}

    def decode(self, name: str, sent: Tensor) -> Tensor:
        """An entry of Δ as it travels, ``[…, *sent]`` → as the update that it stands for, ``[…, *shape]``."""
        return sent

    def on_broadcast(self, download: Download, round: Round) -> None: ...

    def on_receive(self, upload: Upload, round: Round) -> None: ...

    def on_aggregate_end(self, update: Params, round: Round) -> None: ...

    def on_round_end(self, row: dict[str, Any], round: Round) -> None: ...

    # --------------------------------------------------------------------------------------------- the server's state
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
        """As :meth:`Part.meet`, of all its parts."""
        for part in self.parts:
            part.meet(setup)


def parts_of(methods: Iterable[Method | Part]) -> list[Part]:
    """The parts of these methods, in the order in which their hooks are called."""
    return sorted((part for method in methods for part in method.parts), key=lambda part: part.order)


def validate_parts(setup: Setup) -> None:
    """Lets each part of a run refuse what it cannot work with.

    Raises:
        ValueError: a combination that cannot work; names the config key and the reason.
    """
    corrections = list(dict.fromkeys(part.title for part in setup.parts if part.corrects_drift))
    if len(corrections) > 1:
        raise ValueError(
            f"methods: {' and '.join(corrections)} each correct the clients' drift, and would correct each other: "
            "keep one."
        )
    for part in setup.parts:
        if part.needs_classes and not setup.module.task.has_classes:
            raise ValueError(
                f"{part.title} works on the logits of classes, and "
                f"task={type(setup.module.task).__name__} has none: leave it out, or take a data set of classes."
            )
        if (part.sees_cohort or part.rehearses) and setup.transport.remote:
            does = "sees the whole cohort" if part.sees_cohort else "asks what clients would send"
            raise ValueError(f"{part.title} {does}, which is for simulations (federation=none): leave it out.")
        own = [n for n in ("before_step", "after_step") if getattr(type(part), n, None) is not getattr(ClientPart, n)]
        if isinstance(part, ClientPart) and own and not part.moves_weights:
            raise ValueError(f"{part.title}.{own[0]} is called only with order = Order.MOVES_WEIGHTS.")
        part.meet(setup)


def upload_shapes(parts: Sequence[Part], round: Round) -> dict[str, Params]:
    """What a client sends in this round: ``"delta"`` and the names of ``Upload.send`` → tensors shaped like its own."""
    shapes: dict[str, Params] = {"delta": dict(round.start)}
    for part in parts:
        if isinstance(part, ServerPart):
            for name, like in part.uploads(round).items():
                shapes[name] = shapes.get(name, {}) | like
    return shapes
