"""What local training calls in each step; client parts implement it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

from torch import Tensor

from gcfed.federated.network.stack import ClientStack
from gcfed.federated.network.tap import Output
from gcfed.tasks import Batch


class LocalHooks(Protocol):
    """The hooks of a local step, as :class:`~gcfed.federated.parts.client.ClientPart` has them."""

    task_weight: float

    def overrides(self, *hooks: str) -> list[str]: ...
    def before_step(
        self, stack: ClientStack, batch: Batch, objective: Callable[[], Tensor]
    ) -> None: ...
    def calibrate(self, stack: ClientStack, logits_KBC: Tensor) -> Tensor: ...
    def local_loss(self, stack: ClientStack, batch: Batch, out: Output) -> Tensor | None: ...
    def after_step(self, stack: ClientStack, batch: Batch) -> None: ...


@dataclass(frozen=True)
class StepHooks:
    """What each local step of a round calls. The engine makes it once a round.

    Attributes:
        parts: the client parts of the run's methods, in order.
        after_backward: calls Lightning's hook of this name; None if no callback implements it.
        autocast: makes the context of a forward pass.
        recording: how long a recorded local step stays valid; empty if none can be recorded.
    """

    parts: Sequence[LocalHooks] = ()
    after_backward: Callable[[], object] | None = None
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext
    recording: Literal["", "stack", "run"] = ""

    @cached_property
    def movers(self) -> list[LocalHooks]:
        """The parts with a hook before or after a step, which may move the weights."""
        return [part for part in self.parts if part.overrides("before_step", "after_step")]

    @cached_property
    def terms(self) -> list[LocalHooks]:
        """The parts that change the objective."""
        found = []
        for part in self.parts:
            if part.task_weight != 1 or part.overrides("calibrate", "local_loss"):
                found.append(part)
        return found
