"""Trial passes of a few samples through a network: what they return, and what they change."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gcfed.federated.network.lent_network import LentNetwork, make_contiguous
from gcfed.federated.network.probing.closeness import are_equal
from gcfed.federated.protocol.messages import Params
from gcfed.models.facts import leaves
from gcfed.models.own import reason
from gcfed.models.snapshot import Snapshot
from gcfed.models.unchanged import mark
from gcfed.tasks import Batch, Task
from gcfed.utils.refusal import Refusal
from gcfed.utils.rng import seed_generators

GLOBAL = {"torch": torch.default_generator, "numpy": np.random.mtrand._rand, "python": random._inst}


class Pass(NamedTuple):
    out: Tensor  # [B, …]
    grads: list[Tensor]  # the gradients of the trained parameters
    tensors: Params  # the network's tensors afterwards
    changed: list[str]  # the names of those that the pass changed


class Passes:
    """Runs passes in the user's own network, on copies of its tensors.

    Args:
        fresh: the network before all passes.
        x_B, y_B: samples, ``[B, *input]``, and their labels.
        others_B: other samples.

    Attributes:
        before: the network's tensors before all passes, by name.
        trained: names of the tensors that have gradients.
        contiguous: whether the network fails in ``channels_last``.
        edits_input: whether a pass wrote to its input.
        unregistered: ids of tensors that get gradients and are no parameters.
        replaced: names for which a pass made a new tensor.
        draws: the global generators that passes used.
    """

    def __init__(
        self,
        net: nn.Module,
        fresh: Snapshot,
        x_B: Tensor,
        y_B: Tensor,
        others_B: Tensor,
        task: Task,
    ) -> None:
        self.net = net
        self.fresh = fresh
        self.x = x_B
        self.y = y_B
        self.others = others_B
        self.task = task
        self.name = f"model: {type(net).__name__}"
        self.lent_network = LentNetwork(net)
        self.trained = [name for name, t in self.lent_network.tensors.items() if t.requires_grad]
        self.contiguous = False
        self.edits_input = False
        self.unregistered = set[int]()
        self.replaced = set[str]()
        self.draws = set[str]()
        self._first_task = Snapshot(task)
        self._task_is_checked = False

    def first(self) -> Pass:
        """The first pass, forward and backward.

        It finds out whether the network needs the contiguous layout.
        """
        self.before = {name: t.detach().clone() for name, t in self.lent_network.tensors.items()}
        try:
            return self.run(self.x, y=self.y)
        except Exception:
            if self.contiguous:
                raise
        self.contiguous = True
        self.begin_anew()
        self.x = self.x.clone(memory_format=torch.contiguous_format)
        self.others = self.others.clone(memory_format=torch.contiguous_format)
        return self.first()

    def begin_anew(self) -> None:
        """Gives the network its first state, in the layout that it needs to run."""
        self.fresh.restore()
        if self.contiguous:
            make_contiguous(self.net)

    def scaled(self, tensors: Params, factor: float) -> Params:
        """These tensors. The trained ones are multiplied by a factor."""
        scaled = dict(tensors)
        for name in self.trained:
            scaled[name] = tensors[name] * factor
        return scaled

    def run(
        self,
        x: Tensor,
        training: bool = True,
        y: Tensor | None = None,
        start: Params | None = None,
        num_real: int | None = None,
    ) -> Pass:
        """Runs a forward pass on copies of ``start``, by default of the network's tensors. With
        labels ``y`` it runs a backward pass, too. All passes draw the same random numbers.

        Args:
            num_real: the number of samples. The other rows are padding.
        """
        seed_generators(x.device, 0)
        generators = {name: mark(generator) for name, generator in GLOBAL.items()}
        begun = self.before if start is None else start
        self.lent_network.find_tensors()
        self.lent_network.lend({name: t.clone() for name, t in begun.items()})
        self.net.train(training)
        seen = x.clone()
        try:
            with torch.set_grad_enabled(y is not None):
                out = self._call(seen, training)
                returned = out.detach().clone()  # a loss may edit it
                if y is not None:
                    self._backward(out, x, y, num_real)
            self._collect_effects(seen, x, generators)
            tensors = self.lent_network.present()
            expected = self.before | begun
            return Pass(
                out=returned,
                grads=grads_of([self.lent_network.tensors[name] for name in self.trained]),
                tensors=tensors,
                changed=[name for name, t in tensors.items() if not are_equal(t, expected[name])],
            )
        finally:
            self.lent_network.take_back()
            for t in self.lent_network.tensors.values():
                t.grad = None

    def _call(self, x: Tensor, training: bool) -> Tensor:
        """The network's output. Raises Refusal with one sentence if the network fails."""
        mode = "training" if training else "evaluation"
        try:
            out = self.net(x)
        except Exception as error:
            raise Refusal(
                f"{self.name} fails on {len(x)} samples in {mode} mode: {reason(error, x)}"
            ) from error
        if not isinstance(out, Tensor):
            raise Refusal(
                f"{self.name} returns a {type(out).__name__} in {mode} mode: its forward must"
                " return one tensor, the logits."
            )
        if out.dim() < 2 or len(out) != len(x):
            raise Refusal(
                f"{self.name} returns the shape {[*out.shape]} for {len(x)} samples in {mode} mode:"
                " its first axis must be that of the samples, its last one that of the logits."
            )
        return out

    def _backward(self, out: Tensor, x: Tensor, y: Tensor, num_real: int | None) -> None:
        if not self._task_is_checked:  # once, because it may draw random numbers
            with torch.random.fork_rng(devices=()):
                self._check_task(out.detach(), y)
            self._task_is_checked = True
        count = len(x) if num_real is None else num_real
        loss = self.loss(out.unsqueeze(0), x, y.unsqueeze(0), [count])
        if loss.isnan() and x.isfinite().all():
            raise Refusal(
                f"{self.name} fails on {len(x)} samples in training mode: its loss is not a number"
                " before anything is trained."
            )
        if not loss.requires_grad:
            raise self._no_gradient(out)
        loss.backward()
        registered = {id(t) for t in self.lent_network.tensors.values()}
        self.unregistered = (leaves(loss) & self.fresh.ids) - registered

    def _no_gradient(self, out: Tensor) -> ValueError:
        if out.requires_grad:
            return ValueError(
                f"task={type(self.task).__name__}: its loss has no gradient: do not detach it, and"
                " compute it with torch's functions."
            )
        return ValueError(
            f"{self.name} returns outputs without gradients: forward must not detach them, and must"
            " use the parameters."
        )

    def loss(self, out_KB: Tensor, x: Tensor, y_KB: Tensor, counts: Sequence[int]) -> Tensor:
        """The sum of K clients' mean losses, as in training. The task begins with its first state.

        Args:
            counts: how many samples of each client are real. Its other rows are padding.
        """
        self._first_task.restore()
        return self.next_loss(out_KB, x, y_KB, counts)

    def next_loss(self, out_KB: Tensor, x: Tensor, y_KB: Tensor, counts: Sequence[int]) -> Tensor:
        """As :meth:`loss`, but the task keeps the state that earlier calls have left."""
        counts_K = torch.tensor(counts, dtype=torch.float32, device=x.device)
        batch = Batch.of(x, y_KB, counts_K, even=min(counts) == y_KB.shape[1])
        try:
            return self.task.mean_losses(out_KB, batch).sum()
        except Exception as error:
            raise self._failure("its loss fails", out_KB[0], y_KB[0], error) from error

    def _check_task(self, out: Tensor, y: Tensor) -> None:
        """Raises ValueError if losses or scores fail or have wrong shapes."""
        try:
            self.task.check(out, y)
        except Exception as error:
            if str(error).startswith("task="):
                raise
            raise self._failure("losses or scores fail", out, y, error) from error

    def _failure(self, what: str, out: Tensor, y: Tensor, error: Exception) -> ValueError:
        return ValueError(
            f"task={type(self.task).__name__}: {what} on outputs {[*out.shape]} and labels"
            f" {[*y.shape]}: {reason(error)}"
        )

    def _collect_effects(self, seen: Tensor, x: Tensor, generators: dict[str, object]) -> None:
        """Finds what a pass has done in addition to its result."""
        self.edits_input |= seen._version > 0 or not are_equal(seen, x)
        for name, generator in GLOBAL.items():
            if mark(generator) != generators[name]:
                self.draws.add(name)
        self.replaced |= self.lent_network.replaced()


def grads_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(t) if t.grad is None else t.grad for t in tensors]
