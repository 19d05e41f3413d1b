"""What local training calls in each step; client parts implement it."""

from collections.abc import Callable
from typing import Protocol

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
