"""The one interface of a federated method: a Lightning callback with a few federated hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from gcfed.data.batch import Batch
from gcfed.data.sampling import ClientSampler
from gcfed.federated.aggregate import Aggregator, Upload
from gcfed.federated.module import FederatedModule
from gcfed.federated.round import Order, Round
from gcfed.federated.solver import LocalSolver
from gcfed.federated.stack import ClientStack, Output, Params
from gcfed.federated.store import ClientStores


@dataclass(frozen=True)
class Setup:
    """The parts of a run, as its methods meet them before the first round.

    Attributes:
        sampler: draws the cohort of a round.
        solver: local training.
        aggregator: reduces the uploads to one update.
        stores: where a method opens a store for its clients' state.
        data: the clients' samples.
        module: the global model and its server optimizer.
        methods: all methods of the run, in the order in which their hooks are called.
        rounds: R, the number of communication rounds.
        cohort: clients that train in a round, at most; the sampler also draws ``participation.faults.extra``.
    """

    sampler: ClientSampler
    solver: LocalSolver
    aggregator: Aggregator
    stores: ClientStores
    data: Any
    module: FederatedModule
    methods: Sequence[FederatedMethod]
    rounds: int
    cohort: int


class FederatedMethod(Callback):
    """One orthogonal ingredient of an algorithm, client side and server side in one object.

    Every hook does nothing by default. In the order of a round:

    ============================  ====================================================================================
    ``on_broadcast``              before the model goes down: replace entries of ``round.start``, ``round.send`` more
    ``on_clients_start``          the stack of K clients is made
    ``before_step``               before the forward pass of a local step; may move the weights, and moves them back in
                                  ``on_after_backward``; only with ``order = Order.MOVES_WEIGHTS``
    ``calibrate``                 changes the logits that enter the task's loss
    ``local_loss``                adds a term to each client's loss, ``[n]``
    ``on_after_backward``         Lightning's: ``pl_module.clients`` has the gradients of a local step, ``[n, *shape]``
    ``after_step``                the clients' optimizer has stepped; may move the weights; only with that order
    ``on_clients_end``            local training is over: ``stack.full`` has each client's w_k, ``[K, *shape]``
    ``on_upload``                 the clients' side of K uploads: edit ``upload.delta``, ``upload.send`` more
    ``on_receive``                the server's side of them, before they are aggregated
    ``on_aggregate_end``          the aggregated update Δ, name → ``[*shape]``; not in a round without a finite client
    ``on_before_optimizer_step``  Lightning's: ``pl_module.net`` has the pseudo-gradient ``.grad = −Δ``
    ``on_round_end``              may add entries to the row of metrics
    ============================  ====================================================================================

    Hooks between ``on_clients_start`` and ``on_receive`` run for each stack, on the process that trains it; the others
    once a round on every process. In a stack, clients that have finished are no longer there: n ≤ K; client i of the
    stack is always row i.

    State that survives rounds: the server's in :meth:`server_state`, a client's in a store opened in ``validate``. Both
    are checkpointed. Tensors meet the hooks on the device, in the type and memory format of the model.
    """

    needs_features = False
    """Whether ``local_loss`` reads ``out.features_KBF``."""
    needs_stages = False
    """Whether ``local_loss`` reads ``out.stages``."""
    needs_classes = False
    """Whether labels must be classes and outputs their logits."""
    order = Order.CORRECTS
    """What it does to a step or an upload, and so when its hooks are called."""
    moves_start = False
    """Whether clients start elsewhere than at the server's model."""
    corrects_drift = False
    """Whether it reads the clients' drift off their updates to correct it; two such would each correct the other."""
    anchors = False
    """Whether it compares a client's weights with the broadcast ones, from which the client must then start."""
    graphable = False
    """Whether its hooks of a local step do nothing but to tensors on the device, so that a step can be recorded
    (:mod:`gcfed.federated.recorder`); without it the run's steps are not."""
    task_weight = 1.0
    """Factor on the task's own loss in the clients' objective, for methods that balance it against their term."""

    @property
    def in_steps(self) -> bool:
        """Whether it takes part in local steps."""
        hooks = ("before_step", "calibrate", "local_loss", "on_after_backward", "after_step")
        return any(getattr(type(self), hook) is not getattr(FederatedMethod, hook) for hook in hooks)

    def validate(self, setup: Setup) -> None:
        """Called once, before the first round; raises ValueError, naming the config key, for what cannot work."""

    def uploads(self, round: Round) -> dict[str, Params]:
        """What clients send beside Δ: the names given to ``Upload.send`` → tensors shaped like those of one client.

        Under ``"delta"``: entries of Δ that ``on_upload`` puts in other coordinates than the model's, which
        ``on_aggregate_end`` turns back.
        """
        return {}

    def decode(self, name: str, sent: Tensor) -> Tensor:
        """An entry of Δ as it travels, ``[…, *sent]`` → as the update that it stands for, ``[…, *shape]``."""
        return sent

    def on_broadcast(self, round: Round) -> None: ...

    def on_clients_start(self, stack: ClientStack, round: Round) -> None: ...

    def before_step(self, stack: ClientStack, batch: Batch, objective: Callable[[], Tensor]) -> None:
        """``objective()`` evaluates the clients' whole objective, ``[n]``, at the present weights."""

    def calibrate(self, stack: ClientStack, logits_KBC: Tensor) -> Tensor:
        return logits_KBC

    def local_loss(self, stack: ClientStack, batch: Batch, out: Output) -> Tensor | None: ...

    def after_step(self, stack: ClientStack, batch: Batch) -> None: ...

    def on_clients_end(self, stack: ClientStack, round: Round) -> None: ...

    def on_upload(self, upload: Upload, round: Round) -> None: ...

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


def validate_methods(setup: Setup) -> None:
    """Lets each method of a run refuse what it cannot work with.

    Raises:
        ValueError: a combination that cannot work; names the config key and the reason.
    """
    corrections = [type(method).__name__ for method in setup.methods if method.corrects_drift]
    if len(corrections) > 1:
        raise ValueError(
            f"methods: {' and '.join(corrections)} each correct the clients' drift, and would correct each other: "
            "keep one."
        )
    for method in setup.methods:
        if method.needs_classes and not setup.module.task.has_classes:
            raise ValueError(
                f"{type(method).__name__} works on the logits of classes, and "
                f"task={type(setup.module.task).__name__} has none: leave it out, or take a data set of classes."
            )
        own = [n for n in ("before_step", "after_step") if getattr(type(method), n) is not getattr(FederatedMethod, n)]
        if own and method.order is not Order.MOVES_WEIGHTS:
            raise ValueError(f"{type(method).__name__}.{own[0]} is called only with order = Order.MOVES_WEIGHTS.")
        method.validate(setup)


def upload_shapes(methods: Sequence[FederatedMethod], round: Round) -> dict[str, Params]:
    """What a client sends in this round: ``"delta"`` and the names of ``Upload.send`` → tensors shaped like its own."""
    shapes: dict[str, Params] = {"delta": dict(round.start)}
    for method in methods:
        for name, like in method.uploads(round).items():
            shapes[name] = shapes.get(name, {}) | like
    return shapes
