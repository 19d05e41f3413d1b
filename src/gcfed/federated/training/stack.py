"""K clients that train side by side.

The first axis of every client-side tensor is the client axis K.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.optim import Optimizer

from gcfed.federated.training.forward import Output, Params, Tap
from gcfed.federated.training.lent import Lent
from gcfed.models.facts import is_recurrent
from gcfed.models.unchanged import evaluating, unedited
from gcfed.tasks import CLASSIFICATION, Task


def broadcast_like(tensor: Tensor, k: int) -> Tensor:
    """An uninitialised ``[k, *shape]`` tensor whose rows have the memory format of ``tensor``."""
    return torch.empty_strided(
        (k, *tensor.shape),
        (tensor.numel(), *tensor.stride()),
        dtype=tensor.dtype,
        device=tensor.device,
    )


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
        k = len(clients)
        self.task, self.net, self.lent = task, net, lent or Lent(net)
        self._tap = Tap(net, "features" in reads, "stages" in reads)
        self.lent.end()
        # On a GPU cuDNN gives the weights of recurrent layers new memory, so their calls run on
        # views of ``full``.
        self._lends = not (next(iter(start.values())).is_cuda and is_recurrent(net))
        self.full: Params = {name: broadcast_like(t, k) for name, t in start.items()}
        own = self.lent.tensors
        self._trained = [name for name, t in own.items() if t.requires_grad]
        # Buffers that no checkpoint has, and integers, which travel as floats: each client has
        # copies of the network's.
        unsaved = [name for name in own if name not in start and name not in self.lent.saved]
        self._own = {
            name: own[name].data for name in unsaved if not isinstance(own[name], nn.Parameter)
        }
        integers = [name for name in start if not own[name].is_floating_point()]
        copies = {name: broadcast_like(own[name], k) for name in (*self._own, *integers)}
        self._buffers = {
            name: t for name, t in self.full.items() if name not in self._trained
        } | copies
        self._counters = [(copies[name], self.full[name]) for name in integers]
        self.load(start, clients, num_samples, num_steps)

    def load(
        self,
        start: Mapping[str, Tensor],
        clients: np.ndarray,
        num_samples: np.ndarray,
        num_steps: np.ndarray,
    ) -> None:
        """K clients begin in this stack's memory; arguments as in the constructor."""
        self.clients, self.num_samples, self.num_steps = clients, num_samples, num_steps
        self.start = dict(start)
        self.prepared: dict[Any, Any] = {}
        self.personal: Params = {}
        torch._foreach_copy_([self.full[name] for name in start], list(start.values()))
        self.lent.end()  # buffers that do not travel begin with the network's own values
        for name, t in self._own.items():
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
        self._state: Params = {}  # of several clients: the tensors that their networks run on
        # of a single client: parameters of the network, their leaves
        self._lent: list[tuple[Tensor, Tensor]] = []
        if n == 1 and self._lends:
            self.lent.begin({name: t[0] for name, t in (self.full | self._buffers).items()})
            own = {name: self.lent.tensors[name] for name in self._trained}
            # They share a version counter, so autograd notices an edit of a leaf that its graph
            # still needs.
            self.leaves: Params = {
                name: t.detach().unsqueeze(0).requires_grad_() for name, t in own.items()
            }
            self._lent = [(t, self.leaves[name]) for name, t in own.items()]
        else:
            self.leaves = {
                name: self.full[name][:n].detach().requires_grad_() for name in self._trained
            }
            self._state = self.leaves | {name: t[:n] for name, t in self._buffers.items()}
            self.lent.begin({})  # the network must not change

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
        return [
            [*grads.values()],
            *(
                [
                    t[: self.active] if (t := tensors[name]).dim() == grad.dim() else t
                    for name, grad in grads.items()
                ]
                for tensors in sets
            ),
        ]

    def __call__(self, x_KB: Tensor) -> Output:
        """Runs the n active clients on their own batches, ``[n, B, *input]`` → logits ``[n, B,
        C]``.
        """
        with unedited(x_KB):
            if self._lent:
                return self._tap.output([t.unsqueeze(0) for t in self._tap(x_KB.squeeze(0))])
            out, assigned = self._side_by_side(self._tap, self._state, x_KB)
        # two may change places
        for name, value in {name: t.detach().clone() for name, t in assigned.items()}.items():
            self._state[name].copy_(value)
        return out

    def _side_by_side(
        self, tap: Tap, state: Params, x_KB: Tensor, first: int = 0
    ) -> tuple[Output, Params]:
        """Runs each client's network on its own tensors and batch.

        Also returns the tensors that forward replaced.
        """
        if self.active == 1:  # also where torch cannot batch the network
            out, assigned = tap.on(
                {name: t.squeeze(0) for name, t in state.items()}, x_KB.squeeze(0), first
            )
            return tap.output([t.unsqueeze(0) for t in out]), {
                name: t.unsqueeze(0) for name, t in assigned.items()
            }
        out, assigned = vmap(tap.on, in_dims=(0, 0, None), randomness="different")(
            state, x_KB, first
        )
        return tap.output(out), assigned

    def drop_grads(self) -> None:
        """Drops the last step's gradients, so that the forward pass can use their memory."""
        for leaf in self.leaves.values():
            leaf.grad = None

    def backward(self, loss_K: Tensor) -> None:
        """Back-propagates the active clients' losses, ``[n]``, into the ``grad`` of the leaves,
        ``[n, *shape]``.
        """
        loss_K.backward(None if self.active == 1 else torch.ones_like(loss_K))
        for own, leaf in self._lent:
            if (grad := own.grad) is not None:
                # The leaf has a gradient if a method's term of the loss reads it.
                leaf.grad = grad.unsqueeze(0) if leaf.grad is None else leaf.grad.add_(grad)
                own.grad = None

    def gradients(self, loss_K: Tensor) -> Params:
        """Gradients of losses ``[n]`` by the trained parameters, name → ``[n, *shape]``; zeros
        where unused.
        """
        self.backward(loss_K)
        grads = {
            name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for name, leaf in self.leaves.items()
        }
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
        if reason := self.lent.traits.functional:
            raise ValueError(
                f"model: this method needs a teacher, and {type(self.net).__name__} has {reason}."
            )
        tap = Tap(self.net, features, stages or first > 0)
        with evaluating(self.net):
            if params is None:
                out, _ = tap.on(self._own | self.start, x_KB.flatten(0, 1), first)
                return tap.output([t.unflatten(0, x_KB.shape[:2]) for t in out])
            present = {name: t.detach() for name, t in self._state.items()}
            if self._lent:
                present = {name: t.unsqueeze(0) for name, t in self.lent.present().items()}
            return self._side_by_side(tap, present | dict(params), x_KB, first)[0]

    def on(self, state: Mapping[str, Tensor], x_B: Tensor) -> Tensor:
        """The network's outputs with these tensors, name → ``[*shape]``, in its present mode,
        without gradients.
        """
        with self.lent.holding(state):
            return self.net(x_B)

    def shrink(self, n: int, optimizer: Optimizer) -> None:
        """Goes on with the first n clients; tensors and optimizer states of the others do not
        change.
        """
        old = list(self.leaves.values())
        self.lent.settle()  # finds constants that forward has changed
        self._activate(n)
        for leaf, new in zip(old, self.leaves.values(), strict=True):
            state = optimizer.state.pop(leaf, {})
            optimizer.state[new] = {
                key: v[:n] if isinstance(v, Tensor) and v.shape == leaf.shape else v
                for key, v in state.items()
            }
        self.regroup(optimizer, old)

    def regroup(self, optimizer: Optimizer, old: Sequence[Tensor]) -> None:
        """Puts the present leaves in place of the old ones into the optimizer's groups."""
        now = dict(zip(old, self.leaves.values(), strict=True))
        for group in optimizer.param_groups:
            group["params"] = [now[leaf] for leaf in group["params"]]

    def settle(self) -> None:
        """Copies integer buffers, and tensors that forward passes replaced, into ``full``."""
        self.lent.settle()
        if odd := {n for n, t in self.lent.tensors.items() if t.requires_grad} ^ {*self._trained}:
            raise ValueError(
                f"model: forward changes requires_grad of {min(odd)}: set it in __init__."
            )
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


def per_client(values_K: Tensor, like_K: Tensor) -> Tensor:
    """``[K]`` → ``[K, 1, …]``, to scale or select the rows of a tensor ``[K, *shape]``."""
    return values_K.view(-1, *[1] * (like_K.dim() - 1))


def client_norms(tensors_K: Sequence[Tensor]) -> Tensor:
    """Each client's Euclidean norm over all its tensors, ``[n, *shape]`` → ``[n]``."""
    squares = [
        t.square().sum(dim=tuple(range(1, t.dim()))) if t.dim() > 1 else t.square()
        for t in tensors_K
    ]
    return torch.stack(squares).sum(0).sqrt()
