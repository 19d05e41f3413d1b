"""The global model as a LightningModule: one training step is one communication round."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from gcfed.federated.network.blame import blamed
from gcfed.federated.network.lent_network import (
    LentNetwork,
    Traits,
    make_contiguous,
    travelling,
    travelling_state,
)
from gcfed.federated.network.stack import ClientStack
from gcfed.federated.parallel.sums import sum_over_processes
from gcfed.federated.protocol.checks import are_finite
from gcfed.federated.protocol.messages import Params
from gcfed.models.facts import first_weight
from gcfed.models.spectral import restore_unit_norms
from gcfed.models.unchanged import Unedited, evaluating, hand_copies, unchanged
from gcfed.optim.partial import try_optimizer
from gcfed.tasks import CLASSIFICATION, SquaredError, Task, at_least_float32
from gcfed.utils.autocast import outside_autocast
from gcfed.utils.checked import validated
from gcfed.utils.ours import is_ours
from gcfed.utils.refusal import Refusal


class RunsRounds(Protocol):
    """What the module needs of a run, which this package may not import."""

    def run_and_test(self, round_index: int) -> dict[str, Any]:
        """Runs the round with this index and its test. Returns the row of metrics."""


class FederatedModule(LightningModule):
    """Wraps the global network.

    Its optimizer is the server's, its batch is a round, and its validation is the test.

    A training step is a round of the :class:`~gcfed.federated.engine.loop.FederatedLoop`: the
    clients train, the server's optimizer steps along the pseudo-gradient −Δ, and the new model is
    tested. So ``trainer.global_step`` counts finished rounds. The step returns the row of metrics,
    which callbacks receive as ``outputs``.

    Args:
        server: makes the server's optimizer: partial of a ``torch.optim`` class; ``SGD(lr=1)`` is
            FedAvg.
        channels_last: store convolution weights and images in channels_last, the faster layout.
        eval_precision: precision of tests: ``bf16-mixed``, or None for the run's.

    Raises Refusal if the task's columns do not include ``test/loss``, or do not begin with
    ``test/``.
    """

    run: RunsRounds  # set by ``bind_run`` of ``federated/engine``, before the first round

    def __init__(
        self,
        net: nn.Module,
        server: Callable[[Iterable[nn.Parameter]], Optimizer],
        *,
        task: Task = CLASSIFICATION,
        channels_last: bool = True,
        eval_precision: str | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.eval_precision = eval_precision
        has_images = any(isinstance(m, nn.Conv2d) for m in net.modules())
        flat = all(t.dim() < 5 for t in net.parameters())  # no layout for videos
        self.memory_format = torch.contiguous_format
        if channels_last and has_images and flat:
            self.memory_format = torch.channels_last
        self.net = net.to(memory_format=self.memory_format)
        self.travels = travelling(self.net)  # before statistics may become infinite
        self.lent_network = LentNetwork(self.net)
        server = validated("server", server, Callable[..., Any])
        self.make_optimizer = try_optimizer(server, "server")
        self.clients: ClientStack | None = None
        if not hasattr(task, "columns"):
            raise Refusal(
                f"task: {type(task).__name__} is no task: derive it from gcfed.tasks.Classification"
                " or SquaredError."
            )
        self.task = task
        wrong = [column for column in task.columns if not column.startswith("test/")]
        if wrong or "test/loss" not in task.columns:
            raise Refusal(
                f"columns of task={type(task).__name__} must begin with test/, and one be"
                f" test/loss: they are {list(task.columns)}."
            )
        # for each column of the present test: the sum of the scores, and their number
        self.test_sums: dict[str, Tensor] = {}

    @property
    def traits(self) -> Traits:
        """What the probe has found about the network; before it, the defaults."""
        return self.lent_network.traits

    def adopt(self, traits: Traits) -> None:
        """Prepares for the traits that the probe has found (``network/probing/probe.py``)."""
        self.travels = tuple(dict.fromkeys((*self.travels, *traits.averaged)))
        if traits.contiguous:
            self.memory_format = torch.contiguous_format
            make_contiguous(self.net)
        if traits.edits_input and hand_copies not in self.net._forward_pre_hooks.values():
            self.net.register_forward_pre_hook(hand_copies)
        self.lent_network = LentNetwork(self.net, traits, self.task)

    def configure_optimizers(self) -> Optimizer:
        return self.make_optimizer(self.net.parameters())

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.net(x)
        return outputs

    def travelling_state(self) -> Params:
        """A copy of the tensors that are sent to clients, name → ``[*shape]``."""
        return travelling_state(self.net, self.travels)

    def set_update(self, update: Params | None) -> None:
        """Sets ``.grad = −Δ`` for the server optimizer, and adds Δ to buffers.

        Without an update there is no gradient: optimizers then change neither parameters nor their
        own state.
        """
        update = update or {}
        for name, t in self._tensors():
            if t.requires_grad:
                t.grad = update[name].neg() if name in update else None
            elif name in update:
                moved = update[name]
                t.data.add_(moved if t.is_floating_point() else moved.round().to(t.dtype))

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The network's parameters and buffers, by name."""
        yield from self.net.named_parameters()
        yield from self.net.named_buffers()

    def after_backward(self, left_out: Collection[Callback] = ()) -> Callable[[], None] | None:
        """Returns a function that calls ``on_after_backward`` of the callbacks that implement it
        and are not ``left_out``; None if there are none.

        Lightning's ``manual_backward`` would ask every callback, before and after each local step.
        """
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        hooks = []
        for callback in callbacks:
            if watches_steps(callback) and callback not in left_out:
                hooks.append(callback.on_after_backward)
        if not hooks:
            return None

        trainer = self.trainer  # Lightning looks it up on each access

        def call() -> None:
            for hook in hooks:
                hook(trainer, self)

        return call

    def on_fit_start(self) -> None:
        self._move_to_device()

    def on_validation_start(self) -> None:
        """For ``Trainer.validate``."""
        self.test_sums = {}
        self._move_to_device()

    def _move_to_device(self) -> None:
        """Moves the data and the task to the network's device."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        dtype = first_weight(self.net).dtype
        data.to_device(self.device, dtype, self.memory_format)
        self.task.to(self.device, dtype)
        if isinstance(self.task, SquaredError):  # its errors are in the user's units
            std = getattr(data, "scaling", {}).get("y_std", 1.0)
            self.task.target_std = torch.as_tensor(std, dtype=dtype, device=self.device)

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        """One round; returns its row of metrics."""
        round_index = self.trainer.global_step
        # autocast is on again in local training and tests
        with blamed(self.net, self.task, f"in round {round_index + 1}"), outside_autocast():
            return self.run.run_and_test(round_index)

    def test(self, watchers: Sequence[Callable[[Tensor, Tensor], object]] = ()) -> dict[str, float]:
        """Tests the global model on the test split, and on the validation split if there is one,
        over all processes.

        Args:
            watchers: called with outputs ``[B, …, C]`` and labels ``[B, …]`` of each batch of the
                test split.

        Returns:
            The values of the task's columns.
        """
        # Not by trainer.validate: it would set up and tear down the trainer, which is fitting.
        self.test_sums = {}
        self.lent_network.reset_attributes(self.trainer.datamodule.num_clients)  # type: ignore[attr-defined]
        precision = self.trainer.precision_plugin.forward_context()
        with torch.no_grad(), evaluating(self.net), self._keeping_task(), precision:
            loaders = self.trainer.datamodule.val_dataloader()  # type: ignore[attr-defined]
            for index, loader in enumerate(loaders):
                for batch in loader:
                    outputs, y = self.validation_step(batch, 0, index)
                    if index == 0:
                        for watch in watchers:
                            watch(outputs, y)
        return self.scores()

    def _keeping_task(self) -> AbstractContextManager[object]:
        """Encloses a test. Afterwards a task that keeps something between calls is as before."""
        return unchanged(self.task) if self.traits.has_hidden_state else nullcontext()

    def scores(self) -> dict[str, float]:
        """The means of the present test over all processes, by column, with the task's roots and
        exponentials.
        """
        roots = getattr(self.task, "roots", ())
        exponentials = getattr(self.task, "exponentials", ())
        means = []
        sums = sum_over_processes(list(self.test_sums.values()))
        for column, (total, number) in zip(self.test_sums, sums, strict=True):
            mean = total / number
            of_task = column
            if column.startswith("val/"):
                of_task = "test/" + column.removeprefix("val/")
            if of_task in roots:
                mean = mean.sqrt()
            if of_task in exponentials:
                mean = mean.exp()
            means.append(mean)
        return dict(zip(self.test_sums, torch.stack(means).double().tolist(), strict=True))

    def step(self, update: Params | None, before: Params) -> bool:
        """Makes the server optimizer's step along ``update``, Δ by name.

        Without an update the model does not change.

        Args:
            before: the model before the step, name → ``[*shape]``.

        Returns:
            False if the model or the optimizer's state would not be finite. Both are then as
            before.
        """
        self.set_update(update)
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        state = optimizer.optimizer.state
        state_before = {parameter: copied(entries) for parameter, entries in state.items()}
        # calls on_before_optimizer_step, where Global GC edits the pseudo-gradient
        optimizer.step()
        self.net.zero_grad()
        if update is None:
            return True
        model = {name: t for name, t in self._tensors() if name in before}
        numbers = list(model.values())
        for entries in state.values():
            numbers += [value for value in entries.values() if isinstance(value, Tensor)]
        if are_finite(numbers):  # waits for the device, which has nothing else to do
            restore_unit_norms(self.net)
            return True
        with torch.no_grad():
            for name, t in model.items():
                t.copy_(before[name])
        state.clear()
        state.update(state_before)
        return False

    def validation_step(
        self, batch: tuple[int, int], batch_idx: int, dataloader_idx: int = 0
    ) -> Any:
        """Tests a batch. Returns outputs ``[B, …, C]`` and labels ``[B, …]``."""
        x, y = self.trainer.datamodule.fetch_test(batch, dataloader_idx)  # type: ignore[attr-defined]
        precision: AbstractContextManager[None] = nullcontext()
        if self.eval_precision:
            precision = torch.autocast(x.device.type, torch.bfloat16)
        with precision:
            with Unedited(x):
                outputs = self.net(x)
            real = self.task.real(y)
            # a user's loss may edit its outputs in place, and measurements read them, too
            is_users = not is_ours(type(self.task).__module__)
            scores = self.task.scores(outputs.clone() if is_users else outputs, y)
        # in float64: as a float32, 0.7 of the samples is less than a target of 0.7
        zeros = torch.zeros(2, dtype=torch.float64, device=x.device)
        for column in self.task.columns:
            values = at_least_float32(scores[column])
            if dataloader_idx:
                column = "val/" + column.removeprefix("test/")
            total = values.where(real, 0.0).sum(dtype=torch.float64)
            sums = torch.stack([total, real.sum(dtype=torch.float64)])
            self.test_sums[column] = self.test_sums.get(column, zeros) + sums
        return outputs, y

    def on_validation_epoch_end(self) -> None:
        """For ``Trainer.validate``."""
        for name, value in self.scores().items():
            self.log(name, torch.tensor(value, dtype=torch.float64), logger=False)


def watches_steps(callback: Callback) -> bool:
    """Whether a callback implements ``on_after_backward``, in its class or, like
    ``LambdaCallback``, in the object.
    """
    return getattr(callback.on_after_backward, "__func__", None) is not Callback.on_after_backward


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's state of one parameter, with copies of its tensors."""
    return {key: v.clone() if isinstance(v, Tensor) else v for key, v in state.items()}
