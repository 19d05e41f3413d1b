"""A local step: the objective's gradients, what methods do with them, and the optimizer's step."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

from torch import Tensor

from gcfed.data.datamodule import FederatedDataModule
from gcfed.federated.network.rows import client_norms, per_client
from gcfed.federated.network.stack import ClientStack
from gcfed.federated.training.batches import Kind
from gcfed.federated.training.hooks import StepHooks
from gcfed.federated.training.local_training import LocalTraining
from gcfed.federated.training.objective import LocalObjective
from gcfed.optim.kernels import FusedKernel
from gcfed.tasks import Batch


@dataclass(frozen=True, eq=False)
class LocalStep:
    """Makes the local steps of a stack, one at each call.

    Attributes:
        training: the clients' tensors, batches and optimizer.
        data: has the samples of the batches.
        hooks: what methods do in a step.
        objective: what the clients minimise.
        clip_norm: bound on the norm of each client's gradient; None: no clipping.
    """

    training: LocalTraining
    data: FederatedDataModule
    hooks: StepHooks
    objective: LocalObjective
    clip_norm: float | None

    def __call__(self, number: int | Tensor, kind: Kind) -> None:
        """Makes the step of this number and kind, of all active clients."""
        training = self.training
        stack = training.stack
        hooks = self.hooks
        batch = training.plan.batch(self.data, number, kind)
        stack.drop_grads()
        # Each hook has a context of its own, because autocast caches the weights that it has cast.
        for before_step in hooks.before_step:
            with hooks.autocast():
                before_step(stack, batch, partial(self._objective_now, batch))
        with hooks.autocast():
            task, objective = self.objective.losses(batch)
        optimizer_step = self._back_propagate(objective)
        if hooks.after_backward is not None:
            hooks.after_backward()
        if self.clip_norm is not None:
            clip_gradients(stack, self.clip_norm)
        optimizer_step()
        for after_step in hooks.after_step:
            with hooks.autocast():
                after_step(stack, batch)
        training.keep_losses(number, task.detach(), batch.count)

    def _objective_now(self, batch: Batch) -> Tensor:
        """The whole objective at the present weights, ``[n]``."""
        _, objective = self.objective.losses_of_clients(batch)
        return objective

    def _back_propagate(self, objective: Tensor) -> Callable[[], object]:
        """Computes the gradients of the objective. Returns the optimizer's step along them.

        The leaves get the gradients, except where only a lone client's kernel reads them.
        """
        stack = self.training.stack
        optimizer_step = self.training.optimizer_step
        lone = None if self._shows_gradients else stack.lone
        if lone is not None and isinstance(optimizer_step, FusedKernel):
            return partial(optimizer_step, lone.gradients(objective))
        stack.backward(objective)
        return optimizer_step

    @cached_property
    def _shows_gradients(self) -> bool:
        """Whether anything but the optimizer reads the gradients of a step."""
        is_split = self.objective.num_pieces > 1
        return self.hooks.reads_gradients or self.clip_norm is not None or is_split


def clip_gradients(stack: ClientStack, bound: float) -> None:
    """Scales the gradient of each active client to at most this norm."""
    (grads,) = stack.with_grads()
    scale_K = (bound / (client_norms(grads) + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(per_client(scale_K, grad))
