"""K clones of one network, trained in lock-step: every client-side tensor leads with the client axis K."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.optim import Optimizer

from gcfed.federated.swap import Swap
from gcfed.tasks import CLASSIFICATION, Task

Params = dict[str, Tensor]


class Output(NamedTuple):
    """What the clients' networks return on one batch.

    Attributes:
        logits_KBC: ``[n, B, C]``, or ``[n, B, T, C]`` where every position of a sequence has a label.
        features_KBF: the network's ``features``, flattened, ``[n, B, F]``; None unless tapped.
        stages: the outputs of the network's ``stages`` in order, each ``[n, B, …]``, the last being the logits; empty
            unless tapped.
    """

    logits_KBC: Tensor
    features_KBF: Tensor | None = None
    stages: tuple[Tensor, ...] = ()


class Tap:
    """Calls a network for more than its logits."""

    def __init__(self, net: nn.Module, features: bool, stages: bool) -> None:
        self.net, self.tap_features, self.tap_stages = net, features, stages

    def __call__(self, x: Tensor, first: int = 0) -> tuple[Tensor, ...]:
        """(logits, features if tapped, *stages if tapped); ``first`` enters the network at that stage."""
        if self.tap_stages:
            outputs = [x]
            for stage in list(self.net.stages().values())[first:]:  # type: ignore[operator]
                outputs.append(stage(outputs[-1]))
            features = (self.net.features(x).flatten(1),) if self.tap_features else ()  # type: ignore[operator]
            return outputs[-1], *features, *outputs[1:]
        if self.tap_features:
            features = self.net.features(x)  # type: ignore[operator]
            return self.net.head(features), features.flatten(1)  # type: ignore[operator]
        return (self.net(x),)

    def output(self, tensors: Sequence[Tensor]) -> Output:
        features = tensors[1] if self.tap_features else None
        return Output(tensors[0], features, tuple(tensors[1 + self.tap_features :]))


def broadcast_like(tensor: Tensor, k: int) -> Tensor:
    """An uninitialised ``[k, *shape]`` tensor whose rows have the memory format of ``tensor``."""
    return torch.empty_strided(
        (k, *tensor.shape), (tensor.numel(), *tensor.stride()), dtype=tensor.dtype, device=tensor.device
    )


class ClientStack(nn.Module):
    """K clients of one round, side by side on one device.

    With K = 1 the plain module runs, with K > 1 ``torch.func.vmap`` over the module: the same numbers, and no
    method can tell. Clients come sorted by their number of local steps, longest first; when some have finished,
    :meth:`shrink` keeps the prefix that goes on, and what has finished stays exactly as it is.

    Buffers: floating-point buffers (running statistics) start from the global ones, are updated by each client's own
    forward passes and are uploaded and averaged like parameters; integer buffers (counters) keep the global value.

    Args:
        net: the global network; its modules are called, its tensors never touched.
        start: what the server broadcast, name → ``[*shape]``; parameters and floating-point buffers.
        clients: ids of the clients, ``[K]``, sorted by their number of steps, descending.
        num_samples: size of each client's data set, ``[K]``.
        num_steps: number of each client's local steps, ``[K]``.
        tap_features: also return ``net.features(x)``; asked for by methods that need it.
        tap_stages: also return the outputs of all ``net.stages()``.
        task: what the labels mean.

    Raises:
        ValueError: a network with batch statistics is stacked with K > 1 (padded rows would enter the statistics), or
            a recurrent one (``vmap`` knows no LSTM).
    """

    def __init__(
        self,
        net: nn.Module,
        start: Mapping[str, Tensor],
        clients: np.ndarray,
        num_samples: np.ndarray,
        num_steps: np.ndarray,
        *,
        tap_features: bool = False,
        tap_stages: bool = False,
        task: Task = CLASSIFICATION,
    ) -> None:
        super().__init__()
        k = len(clients)
        if k > 1 and (reason := cannot_stack(net)):
            raise ValueError(f"client.stack > 1 cannot train a network with {reason}.")
        self.clients, self.num_samples, self.num_steps = clients, num_samples, num_steps
        self.start, self.task = dict(start), task
        # In a tuple, so that the global network is no submodule of the stack.
        self._net, self._tap, self._swap = (net,), Tap(net, tap_features, tap_stages), Swap(net)
        dropout = any(isinstance(m, nn.modules.dropout._DropoutNd) for m in net.modules())
        self._has_modes = dropout or uses_batch_statistics(net)
        self._recurrent = is_recurrent(net)
        self.full: Params = {name: broadcast_like(t, k).copy_(t) for name, t in start.items()}
        self._trained = {name: p.requires_grad for name, p in net.named_parameters()}
        # Counters are this stack's own: a call would otherwise count up the global network's.
        own = {n: b for n, b in net.named_buffers() if n not in start}
        self._buffer_stack = {n: broadcast_like(b, k).copy_(b) for n, b in own.items()}
        self._buffer_stack |= {n: t for n, t in self.full.items() if n not in self._trained}
        self._activate(k)

    def _activate(self, n: int) -> None:
        """The first n clients train from here on; parameters that the network froze stay frozen."""
        self.active = n
        state = {name: self.full[name][:n].detach() for name in self._trained}
        self.leaves: Params = {name: t.requires_grad_(self._trained[name]) for name, t in state.items()}
        buffers = {name: buffer[:n] for name, buffer in self._buffer_stack.items()}
        # What enters the graph. The single client's has no client axis: taking it off inside the graph would cost two
        # nodes a tensor and step. But cuDNN gives the weights of a recurrent layer new memory at their first sight.
        self._inputs: Params = self.leaves
        if n == 1 and not self._recurrent:
            self._inputs = {name: t[0].detach().requires_grad_(t.requires_grad) for name, t in self.leaves.items()}
            buffers = {name: buffer[0] for name, buffer in buffers.items()}
        self._state = self._inputs | buffers
        self._entries = list(zip(self._inputs.values(), self.leaves.values(), strict=True))

    @property
    def net(self) -> nn.Module:
        return self._net[0]

    def __len__(self) -> int:
        return len(self.clients)

    def named_grads(self) -> Iterator[tuple[str, Tensor]]:
        """Gradients of the active clients, name → ``[n, *shape]``; hooks edit them in place."""
        for name, leaf in self.leaves.items():
            if leaf.grad is not None:
                yield name, leaf.grad

    def grads(self) -> list[Tensor]:
        return [grad for _, grad in self.named_grads()]

    def forward(self, x_KB: Tensor) -> Output:
        """Runs the n active clients on their own batches, ``[n, B, *input]`` → logits ``[n, B, C]``."""
        return self._call(self._tap, self._state, x_KB)

    def drop_grads(self) -> None:
        """Forgets the last step's gradients; before the forward pass, which can use their memory."""
        for leaf in self.leaves.values():
            leaf.grad = None

    def backward(self, loss_K: Tensor) -> None:
        """Back-propagates the active clients' losses, ``[n]``, into the ``grad`` of the leaves, ``[n, *shape]``."""
        loss_K.backward(None if len(loss_K) == 1 else torch.ones_like(loss_K))
        if self._inputs is not self.leaves:
            for entry, leaf in self._entries:
                if (grad := entry.grad) is not None:
                    # A term of a method may have been written on the leaves.
                    leaf.grad = grad.unsqueeze(0) if leaf.grad is None else leaf.grad.add_(grad)
                    entry.grad = None

    def gradients(self, loss_K: Tensor) -> Params:
        """Gradients of losses ``[n]`` by all trained parameters, name → ``[n, *shape]``; zeros where none arrives."""
        leaves = {name: t for name, t in self.leaves.items() if t.requires_grad}
        if self._inputs is self.leaves:
            grads = torch.autograd.grad(loss_K.sum(), list(leaves.values()), materialize_grads=True)
            return dict(zip(leaves, grads, strict=True))
        places = [*(self._inputs[name] for name in leaves), *leaves.values()]
        parts = torch.autograd.grad(loss_K.sum(), places, allow_unused=True)
        result = {}
        for (name, leaf), by_input, by_leaf in zip(leaves.items(), parts, parts[len(leaves) :], strict=False):
            grad = torch.zeros_like(leaf) if by_input is None else by_input.unsqueeze(0)
            result[name] = grad if by_leaf is None else grad + by_leaf
        return result

    def reference(
        self,
        x_KB: Tensor,
        *,
        params: Mapping[str, Tensor] | None = None,
        first: int = 0,
        features: bool = False,
        stages: bool = False,
    ) -> Output:
        """Runs a fixed network on the n active clients' batches, without dropout: a teacher.

        Args:
            x_KB: inputs, ``[n, B, *input]``; for ``first`` > 0 those of that stage.
            params: each client's own network, name → ``[n, *shape]`` (what it lacks is the broadcast one's); None: the
                broadcast model, which is one for all clients.
            first: number of the stage of the network at which ``x_KB`` enters.
            features, stages: what to return beside the logits.

        Gradients flow to ``x_KB`` and to those of ``params`` that want them; the network itself gets none.
        """
        tap = Tap(self.net, features, stages or first > 0)
        with self._without_dropout():
            if params is not None:
                bare = self._inputs is not self.leaves
                given = {name: t[0] for name, t in params.items()} if bare else dict(params)
                return self._call(tap, {name: t.detach() for name, t in self._state.items()} | given, x_KB, first)
            with self._swap.holding(self.start):
                out = tap(x_KB.flatten(0, 1), first)
        return tap.output([t.unflatten(0, x_KB.shape[:2]) for t in out])

    def _call(self, tap: Tap, state: Params, x_KB: Tensor, first: int = 0) -> Output:
        if self.active == 1:
            if self._inputs is self.leaves:
                state = {name: t.squeeze(0) for name, t in state.items()}
            with self._swap.holding(state):
                out = tap(x_KB.squeeze(0), first)
            return tap.output([t.unsqueeze(0) for t in out])

        def one_client(tensors: Params, x_B: Tensor) -> tuple[Tensor, ...]:
            with self._swap.holding(tensors):
                return tap(x_B, first)

        return tap.output(vmap(one_client, randomness="different")(state, x_KB))

    @contextmanager
    def _without_dropout(self) -> Iterator[None]:
        if not self._has_modes:
            yield
            return
        training = self.net.training
        self.net.eval()
        try:
            yield
        finally:
            self.net.train(training)

    def shrink(self, n: int, optimizer: Optimizer) -> None:
        """Goes on with the first n clients; parameters and optimizer state of the others stay where they are."""
        old = list(self.leaves.values())
        self._activate(n)
        for leaf, new in zip(old, self.leaves.values(), strict=True):
            state = optimizer.state.pop(leaf, {})
            optimizer.state[new] = {
                key: v[:n] if isinstance(v, Tensor) and v.shape == leaf.shape else v for key, v in state.items()
            }
        optimizer.param_groups[0]["params"] = list(self.leaves.values())

    def delta(self) -> Params:
        """The clients' updates ``w_k − w``, name → ``[K, *shape]``; takes over the stack's memory, which is spent."""
        self.leaves = self._inputs = self._state = {}  # and with them the gradients
        self._entries = []
        torch._foreach_sub_(list(self.full.values()), [self.start[name] for name in self.full])
        return self.full


def uses_batch_statistics(net: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in net.modules())


def is_recurrent(net: nn.Module) -> bool:
    return any(isinstance(m, nn.RNNBase) for m in net.modules())


def cannot_stack(net: nn.Module) -> str:
    """Why several clients of this network cannot train in one stack; empty where they can."""
    if uses_batch_statistics(net):
        return (
            "batch normalisation: its statistics would mix with the padding of shorter batches. Set client.stack=1, "
            "or use GroupNorm"
        )
    if is_recurrent(net):
        return "recurrent layers: torch.func.vmap cannot batch them. Set client.stack=1"
    return ""


def broadcast_state(net: nn.Module) -> Params:
    """What travels: a copy of the parameters and the floating-point buffers of a network, by name."""
    state = {name: p.detach().clone() for name, p in net.named_parameters()}
    return state | {name: b.clone() for name, b in net.named_buffers() if b.is_floating_point()}


def per_client(values_K: Tensor, like_K: Tensor) -> Tensor:
    """``[K]`` → ``[K, 1, …]``, to scale or select the rows of a tensor ``[K, *shape]``."""
    return values_K.view(-1, *[1] * (like_K.dim() - 1))


def client_norms(tensors_K: Sequence[Tensor]) -> Tensor:
    """Each client's Euclidean norm over all its tensors together, ``[n, *shape]`` each → ``[n]``."""
    squares = [t.square().sum(dim=tuple(range(1, t.dim()))) if t.dim() > 1 else t.square() for t in tensors_K]
    return torch.stack(squares).sum(0).sqrt()


def nbytes(tensors: Mapping[str, Tensor]) -> int:
    """Size of a set of tensors in bytes."""
    return sum(t.numel() * t.element_size() for t in tensors.values())
