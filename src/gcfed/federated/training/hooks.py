"""What local training calls in each step."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from gcfed.federated.network.stack import ClientStack
from gcfed.federated.network.tap import Output
from gcfed.tasks import Batch


@dataclass(frozen=True)
class StepHooks:
    """The functions that each local step of a round calls.

    Functions of one kind are in the order of the methods.

    Attributes:
        before_step, calibrate, local_loss, after_step: hooks of client parts
            (:class:`~gcfed.federated.parts.client.ClientPart`).
        task_weight: factor of the task's loss.
        after_backward: calls Lightning's hook of this name; None if no callback implements it.
        autocast: makes the context of a forward pass.
    """

    before_step: Sequence[Callable[[ClientStack, Batch, Callable[[], Tensor]], None]] = ()
    calibrate: Sequence[Callable[[ClientStack, Tensor], Tensor]] = ()
    local_loss: Sequence[Callable[[ClientStack, Batch, Output], Tensor | None]] = ()
    after_step: Sequence[Callable[[ClientStack, Batch], None]] = ()
    task_weight: float = 1.0
    after_backward: Callable[[], object] | None = None
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext

    @cached_property
    def changes_objective(self) -> bool:
        """Whether the objective is not the task's loss."""
        return bool(self.calibrate or self.local_loss or self.task_weight != 1)

    @cached_property
    def reads_gradients(self) -> bool:
        """Whether a hook may read or edit the gradients of a step."""
        return bool(
            self.before_step
            or self.after_step
            or self.changes_objective
            or self.after_backward is not None
        )
