"""Measures where the time of a round goes.

It wraps the parts of the loop, so the hot path itself has no clock.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

import gcfed.federated.engine.client as client_module
import gcfed.federated.parallel.sums as sums_module
from gcfed.checkpoints.writing import RoundCheckpoint
from gcfed.federated.engine.loop import FederatedLoop
from gcfed.federated.engine.round_sums import RoundSums
from gcfed.federated.network.module import FederatedModule
from gcfed.federated.network.running import LoneClient
from gcfed.federated.network.stack import ClientStack
from gcfed.federated.parallel.shared import SharedSums
from gcfed.federated.parts import ClientPart, Part, ServerPart
from gcfed.federated.training.batches import BatchPlan
from gcfed.federated.training.objective import LocalObjective
from gcfed.optim.kernels import FusedKernel

HOOKS = {
    name
    for part in (ClientPart, ServerPart)
    for name in dir(part)
    if name.startswith(("on_", "before_", "after_"))
}


class Stopwatch:
    """Adds up each part's own seconds on a CPU, without the seconds of parts inside it.

    Args:
        clock: returns the present time in seconds.
        rest: name of the time outside all parts.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        rest: str = "Lightning, logs and the rest",
    ) -> None:
        self.clock = clock
        self.seconds: Counter[str] = Counter()
        self._inside: list[str] = [rest]
        self._last = clock()

    def charge(self) -> None:
        """Adds the time since the last call to the present part."""
        now = self.clock()
        self.seconds[self._inside[-1]] += now - self._last
        self._last = now

    def clear(self) -> None:
        """Begins anew."""
        self.seconds.clear()
        self._last = self.clock()

    def wrapped(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.charge()
            self._inside.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.charge()
                self._inside.pop()

        return call

    def wrap(self, owner: Any, name: str, part: str) -> None:
        setattr(owner, name, self.wrapped(getattr(owner, name), part))

    def install(self, trainer: Trainer) -> None:
        """Wraps the parts of a run, until this process ends."""
        loop, module = FederatedLoop.of(trainer), trainer.lightning_module
        self.wrap(FederatedModule, "travelling_state", "broadcast")
        self.wrap(ClientStack, "__init__", "broadcast")
        self.wrap(ClientStack, "load", "broadcast")
        self.wrap(loop.solver, "plan", "batch")
        self.wrap(BatchPlan, "batch", "batch")
        self.wrap(LocalObjective, "losses_of_clients", "forward")
        self.wrap(LoneClient, "mean_loss", "forward")
        self.wrap(ClientStack, "backward", "backward")
        self.wrap(LoneClient, "gradients", "backward")
        for part in [*loop.run.simulation.program.parts, *loop.run.server.parts]:
            assert isinstance(part, Part)
            for hook in HOOKS:
                plain = (getattr(side, hook, None) for side in (ClientPart, ServerPart))
                if getattr(type(part), hook, None) not in (None, *plain):
                    self.wrap(part, hook, "hooks")
        self.wrap(loop.solver, "optimizer", "step")
        self.wrap(FusedKernel, "__call__", "step")
        for owner, name in (
            (ClientStack, "delta"),
            (client_module, "finite_clients"),
            (RoundSums, "add"),
        ):
            self.wrap(owner, name, "aggregate")
        self.wrap(RoundSums, "received", "aggregate")
        self.wrap(module, "step", "aggregate")
        self.wrap(sums_module, "_wait", "wait for the other processes")
        self.wrap(SharedSums, "wait_for_all", "wait for the other processes")
        self.wrap(module, "training_step", "loop")
        self.wrap(module, "validation_step", "evaluate")
        self.wrap_checkpoint(trainer)
        self.clear()

    def wrap_checkpoint(self, trainer: Trainer) -> None:
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, RoundCheckpoint):
                self.wrap(callback, "on_train_batch_end", "checkpoint")
