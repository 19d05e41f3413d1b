"""K clients that train side by side.

The first axis of every client-side tensor is the client axis K.
"""

from collections.abc import Iterator, Mapping, Set
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from gcfed.federated.network.lent import Lent
from gcfed.federated.network.rows import broadcast_like
from gcfed.federated.network.tap import Output, Tap
from gcfed.federated.protocol.messages import Params
from gcfed.models.facts import is_recurrent
from gcfed.models.unchanged import evaluating, unedited
from gcfed.tasks import CLASSIFICATION, Batch, Task
from gcfed.utils.refusal import Refusal


class ClientStack:
    """K clients of one round, side by side on one device.

    A single client trains in the user's own network (:class:`Lent`). Several clients train by
    ``torch.func.vmap`` over it, with the same numbers. When some have finished, :meth:`shrink` goes
    on with the first n clients.

    Buffers start at the server's values, and each client's forward passes update its own. Those
    that travel are uploaded and averaged like parameters, integers as floats. The others start
    again in the next round.

    Args:
        net: the global network. It has the client's tensors while a single client trains, until
            :meth:`delta`.
        start: the broadcast model, name → ``[*shape]``, with the tensors that travel
            (:func:`travelling`).
        clients: ids, ``[K]``, like ``num_samples`` and ``num_steps`` sorted by the number of local
            steps, most first.
        reads: what the forward pass also returns: ``features``, ``stages`` (see ``Tap``).
        task: the meaning of the labels.
        lent: the network as :class:`Lent`; made here if not given.

    Attributes:
        full: each client's tensors, name → ``[K, *shape]``.
        leaves: the trained tensors of the n active clients, ``[n, *shape]``, in the memory of
            ``full``.
        is_lone: whether a single client is active, in the user's own network.
        prepared: what each client part returned from ``prepare``, by part.
        personal: tensors of each client's personal model that differ from ``full``, set after local
            training.
    """

    def __init__(
        self,
        net: nn.Module,
        start: Mapping[str, Tensor],
        clients: np.ndarray,
        num_samples: np.ndarray,
        num_steps: np.ndarray,
        *,
        reads: Set[str] = frozenset(),
        task: Task = CLASSIFICATION,
        lent: Lent | None = None,
    ) -> None:
        self.task = task
        self.net = net
        self.lent = lent or Lent(net)
        self._tap = Tap(net, "features" in reads, "stages" in reads)
        self.lent.end()
        # On a GPU cuDNN gives the weights of recurrent layers new memory, so their calls run on
        # views of ``full``.
        on_gpu = next(iter(start.values())).is_cuda
        self._can_lend = not (on_gpu and is_recurrent(net))
        self._allocate(start, len(clients))
        self.load(start, clients, num_samples, num_steps)

    def _allocate(self, start: Mapping[str, Tensor], k: int) -> None:
        """Makes the memory of K clients."""
        self.full: Params = {name: broadcast_like(t, k) for name, t in start.items()}
        network = self.lent.tensors
        self._network = network
        self._trained = [name for name, t in network.items() if t.requires_grad]
        # Each client's buffers: those that travel are in ``full``, the others have copies.
        self._buffers: Params = {}
        for name, t in self.full.items():
            if name not in self._trained:
                self._buffers[name] = t
        # Buffers that no checkpoint has begin each round with the network's values.
        self._unsaved: Params = {}
        for name, t in network.items():
            is_parameter = isinstance(t, nn.Parameter)
            if name not in start and name not in self.lent.saved and not is_parameter:
                self._unsaved[name] = t.data
                self._buffers[name] = broadcast_like(t, k)
        # Integers travel as floats, so each counter has a float in ``full``.
        self._counters: list[tuple[Tensor, Tensor]] = []
        for name in start:
            if not network[name].is_floating_point():
                self._buffers[name] = broadcast_like(network[name], k)
                self._counters.append((self._buffers[name], self.full[name]))

    def load(
        self,
        start: Mapping[str, Tensor],
        clients: np.ndarray,
        num_samples: np.ndarray,
        num_steps: np.ndarray,
    ) -> None:
        """K clients begin in this stack's memory; arguments as in the constructor."""
        self.clients = clients
        self.num_samples = num_samples
        self.num_steps = num_steps
        self.start = dict(start)
        self.prepared: dict[Any, Any] = {}
        self.personal: Params = {}
        torch._foreach_copy_([self.full[name] for name in start], list(start.values()))
        self.lent.end()  # buffers that do not travel begin with the network's own values
        for name, t in self._unsaved.items():
            self._buffers[name].copy_(t)
        self.count_from_full()
        self._activate(len(clients))

    def count_from_full(self) -> None:
        """Copies floats of ``full`` into the integer buffers that they stand for."""
        for counter, t in self._counters:
            counter.copy_(t)

    def _activate(self, n: int) -> None:
        """Makes the first n clients the active ones."""
        self.active = n
        self.is_lone = n == 1 and self._can_lend
        self._side_by_side: Params = {}  # what several networks run on, ``[n, *shape]``
        if self.is_lone:
            self.lent.begin(self._first_rows)
            self.leaves = self._lone_leaves
            return
        self.lent.begin({})  # the network must not change
        self.leaves = {}
        for name in self._trained:
            self.leaves[name] = self.full[name][:n].detach().requires_grad_()
        buffers = {name: t[:n] for name, t in self._buffers.items()}
        self._side_by_side = {**self.leaves, **buffers}

    @cached_property
    def _lone_leaves(self) -> Params:
        """The leaves of a lone client, ``[1, *shape]``. The network has its tensors.

        A leaf and its parameter share a version counter, so autograd notices an edit of a leaf that
        its graph still needs.
        """
        leaves = {}
        for name in self._trained:
            leaves[name] = self.lent.tensors[name].detach().unsqueeze(0).requires_grad_()
        return leaves

    @cached_property
    def _first_rows(self) -> Params:
        """The first client's tensors, ``[*shape]``, in the memory of this stack."""
        return {name: t[0] for name, t in {**self.full, **self._buffers}.items()}

    def tensors(self) -> list[Tensor]:
        """The clients' weights and buffers, ``[K, *shape]`` each."""
        return [*self.full.values(), *self._buffers.values()]

    def fits_network(self) -> bool:
        """Whether the network still has the tensors that it had when this stack was made.

        It ends the loan to the last client, because only then the network has its own tensors.
        """
        self.lent.end()
        return self.lent.tensors is self._network

    def __len__(self) -> int:
        return len(self.clients)

    def named_grads(self) -> Iterator[tuple[str, Tensor]]:
        """Gradients of the active clients, name → ``[n, *shape]``; hooks edit them in place."""
        return ((name, leaf.grad) for name, leaf in self.leaves.items() if leaf.grad is not None)

    def with_grads(self, *sets: Mapping[str, Tensor]) -> list[list[Tensor]]:
        """The active clients' gradients, and the tensors of these names from each set. Tensors of
        all clients, ``[K, *shape]``, are cut to the active ones, ``[n, *shape]``; tensors of the
        server, ``[*shape]``, are not.
        """
        grads = dict(self.named_grads())
        chosen = [list(grads.values())]
        for tensors in sets:
            chosen.append([self._active_rows(tensors[name], grads[name]) for name in grads])
        return chosen

    def _active_rows(self, t: Tensor, grad: Tensor) -> Tensor:
        """The active clients' rows of a tensor of all clients; a tensor of the server as it is."""
        return t[: self.active] if t.dim() == grad.dim() else t

    def __call__(self, x_KB: Tensor) -> Output:
        """Runs the n active clients on their own batches, ``[n, B, *input]`` → logits ``[n, B,
        C]``.
        """
        with unedited(x_KB):
            if self.is_lone:
                outputs = self._tap(x_KB.squeeze(0))
                return self._tap.output([t.unsqueeze(0) for t in outputs])
            out, assigned = self._run_side_by_side(self._tap, self._side_by_side, x_KB)
        # Copies first, because two tensors may have changed places.
        values = {name: t.detach().clone() for name, t in assigned.items()}
        for name, value in values.items():
            self._side_by_side[name].copy_(value)
        return out

    def mean_loss_of_one(self, batch: Batch) -> Tensor:
        """A lone client's mean loss, ``[]``, without a client axis in autograd's graph."""
        x = batch.x.squeeze(0)
        with unedited(x):
            logits, *_ = self._tap(x)
        return self.task.mean_loss_of_one(logits, batch)

    def _run_side_by_side(
        self, tap: Tap, state: Params, x_KB: Tensor, first: int = 0
    ) -> tuple[Output, Params]:
        """Runs each client's network on its own tensors and batch.

        Also returns the tensors that forward replaced.
        """
        if self.active > 1:
            run = vmap(tap.on, in_dims=(0, 0, None), randomness="different")
            outputs, assigned = run(state, x_KB, first)
            return tap.output(outputs), assigned
        # torch may be unable to batch the network
        own_state = {name: t.squeeze(0) for name, t in state.items()}
        outputs, assigned = tap.on(own_state, x_KB.squeeze(0), first)
        assigned = {name: t.unsqueeze(0) for name, t in assigned.items()}
        return tap.output([t.unsqueeze(0) for t in outputs]), assigned

    def drop_grads(self) -> None:
        """Drops the last step's gradients, so that the forward pass can use their memory."""
        for leaf in self.leaves.values():
            leaf.grad = None

    def backward(self, loss_K: Tensor) -> None:
        """Back-propagates the active clients' losses, ``[n]``, into the ``grad`` of the leaves,
        ``[n, *shape]``.
        """
        if self.active == 1:
            loss_K.backward()
        else:
            loss_K.backward(torch.ones_like(loss_K))
        if not self.is_lone:
            return
        for leaf, grad in zip(self.leaves.values(), self._taken_grads(), strict=True):
            if grad is None:
                continue
            if leaf.grad is None:
                leaf.grad = grad.unsqueeze(0)
            else:  # a method's term of the loss reads the leaf
                leaf.grad.add_(grad)

    def gradients_of_one(self, loss: Tensor) -> list[Tensor | None]:
        """Back-propagates a lone client's loss. Returns the gradients, ``[*shape]`` or in
        channels_last ``[1, *shape]``, in the order of the leaves, which do not get them.
        """
        loss.backward()
        grads: list[Tensor | None] = []
        for grad in self._taken_grads():
            # The optimizer's kernel compares the strides of images with those of the leaf.
            if grad is not None and not grad.is_contiguous():
                grad = grad.unsqueeze(0)
            grads.append(grad)
        return grads

    def _taken_grads(self) -> list[Tensor | None]:
        """The gradients of the network's parameters, which lose them."""
        grads = []
        for name in self._trained:
            parameter = self.lent.tensors[name]
            grads.append(parameter.grad)
            parameter.grad = None
        return grads

    def gradients(self, loss_K: Tensor) -> Params:
        """Gradients of losses ``[n]`` by the trained parameters, name → ``[n, *shape]``; zeros
        where unused.
        """
        self.backward(loss_K)
        grads = {}
        for name, leaf in self.leaves.items():
            grads[name] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        self.drop_grads()
        return grads

    def reference(
        self,
        x_KB: Tensor,
        *,
        params: Mapping[str, Tensor] | None = None,
        first: int = 0,
        features: bool = False,
        stages: bool = False,
    ) -> Output:
        """Runs a teacher, a fixed network in evaluation mode, on the n active clients' batches.

        Gradients flow to ``x_KB``, and to tensors of ``params`` that require them.

        Args:
            x_KB: inputs of stage number ``first``, ``[n, B, *input]``.
            params: each client's teacher, name → ``[n, *shape]``; tensors that it lacks, such as
                running statistics, are the client's present ones. None: the broadcast model, for
                all clients.
            features, stages: also return the features, or the outputs of the stages.

        Raises:
            ValueError: the network cannot run on other tensors than its own.
        """
        traits = self.lent.traits
        if traits.functional:
            raise Refusal(
                f"model: this method needs a teacher, and {type(self.net).__name__} has"
                f" {traits.functional}."
            )
        tap = Tap(self.net, features, stages or first > 0)
        with evaluating(self.net):
            if params is not None:
                teacher = {**self._present(), **params}
                return self._run_side_by_side(tap, teacher, x_KB, first)[0]
            outputs, _ = tap.on(self._unsaved | self.start, x_KB.flatten(0, 1), first)
            return tap.output([t.unflatten(0, x_KB.shape[:2]) for t in outputs])

    def _present(self) -> Params:
        """The active clients' present tensors, name → ``[n, *shape]``."""
        if self.is_lone:
            return {name: t.unsqueeze(0) for name, t in self.lent.present().items()}
        return {name: t.detach() for name, t in self._side_by_side.items()}

    def on(self, state: Mapping[str, Tensor], x_B: Tensor) -> Tensor:
        """The network's outputs with these tensors, name → ``[*shape]``, in its present mode,
        without gradients.
        """
        with self.lent.holding(state):
            outputs: Tensor = self.net(x_B)
            return outputs

    def shrink(self, n: int) -> None:
        """Goes on with the first n clients; tensors of the others do not change."""
        self.lent.settle()  # finds constants that forward has changed
        self._activate(n)

    def settle(self) -> None:
        """Copies integer buffers, and tensors that forward passes replaced, into ``full``."""
        self.lent.settle()
        trained = {name for name, t in self.lent.tensors.items() if t.requires_grad}
        changed = trained.symmetric_difference(self._trained)
        if changed:
            name = min(changed)
            raise Refusal(f"model: forward changes requires_grad of {name}: set it in __init__.")
        for counter, t in self._counters:
            t.copy_(counter)

    def delta(self) -> Params:
        """The clients' updates w_k − w, name → ``[K, *shape]``."""
        self.lent.end()
        self.personal = {}
        self.drop_grads()
        moved = torch._foreach_sub(
            list(self.full.values()), [self.start[name] for name in self.full]
        )
        return dict(zip(self.full, moved, strict=True))
