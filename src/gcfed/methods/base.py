"""The one interface of a federated method: a Lightning callback with a few federated hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from gcfed.federated.aggregate import Upload
    from gcfed.federated.batches import Batch
    from gcfed.federated.loop import FederatedLoop
    from gcfed.federated.round import Round
    from gcfed.federated.stack import ClientStack, Output, Params
    from gcfed.models.module import FederatedModule


class FederatedMethod(Callback):
    """One orthogonal ingredient of an algorithm, client side and server side in one object.

    Every hook does nothing by default. In the order of a round:

    ============================  ====================================================================================
    ``on_broadcast``              before the model goes down: replace entries of ``round.start``, count extra bytes
    ``on_clients_start``          the stack of K clients is made
    ``local_loss``                adds a term to each client's loss, ``[n]``
    ``on_after_backward``         Lightning's: ``pl_module.clients`` has the gradients of a local step, ``[n, *shape]``
    ``on_clients_end``            local training is over: ``stack.full`` has each client's w_k, ``[K, *shape]``
    ``on_upload``                 the K uploads, before they are aggregated
    ``on_aggregate_end``          the aggregated update Δ, name → ``[*shape]``; not in a round without a finite client
    ``on_before_optimizer_step``  Lightning's: ``pl_module.net`` has the pseudo-gradient ``.grad = −Δ``
    ``on_round_end``              may add entries to the row of metrics
    ============================  ====================================================================================

    Hooks between ``on_clients_start`` and ``on_upload`` run for each stack, on the process that trains it; the others
    once a round on every process.

    State that survives rounds goes through Lightning's ``state_dict`` and ``load_state_dict``: tensors and plain
    Python. In a stack, clients that have finished are no longer there: n ≤ K; client i of the stack is always row i.
    """

    needs_features = False
    """Whether ``local_loss`` reads ``out.features_KBF``."""

    def validate(self, loop: FederatedLoop, module: FederatedModule) -> None:
        """Called before the first round; raises ValueError, naming the config key, for what cannot work."""

    def on_broadcast(self, round: Round) -> None: ...

    def on_clients_start(self, stack: ClientStack, round: Round) -> None: ...

    def local_loss(self, stack: ClientStack, batch: Batch, out: Output) -> Tensor | None: ...

    def on_clients_end(self, stack: ClientStack, round: Round) -> None: ...

    def on_upload(self, upload: Upload, round: Round) -> None: ...

    def on_aggregate_end(self, update: Params, round: Round) -> None: ...

    def on_round_end(self, row: dict[str, Any], round: Round) -> None: ...

    # Lightning's hooks, repeated here with the types that a method meets; ``trainer`` is None in a plain loop.
    def on_after_backward(self, trainer: Trainer | None, pl_module: LightningModule) -> None: ...

    def on_before_optimizer_step(
        self, trainer: Trainer | None, pl_module: LightningModule, optimizer: Optimizer
    ) -> None: ...
