"""K clones of one network, trained in lock-step: every client-side tensor leads with the client axis K."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gcfed.federated.forward import Output, Params, Single, SqueezedSingle, Stacked, Swap, Tap, evaluating
from gcfed.tasks import CLASSIFICATION, Task


def broadcast_like(tensor: Tensor, k: int) -> Tensor:
    """An uninitialised ``[k, *shape]`` tensor whose rows have the memory format of ``tensor``."""
    return torch.empty_strided(
        (k, *tensor.shape), (tensor.numel(), *tensor.stride()), dtype=tensor.dtype, device=tensor.device
    )


class ClientStack:
    """K clients of one round, side by side on one device; in a place, one K after another.

    With K = 1 the plain module runs, with K > 1 ``torch.func.vmap`` over the module: the same numbers, and no
    method can tell. Clients come sorted by their number of local steps, longest first; when some have finished,
    :meth:`shrink` keeps the prefix that goes on, and what has finished stays exactly as it is.

    Buffers: floating-point buffers (running statistics) start from the global ones, are updated by each client's own
    forward passes and are uploaded and averaged like parameters; integer buffers (counters) keep the global value.

    Args:
        net: the global network; its modules are called, its tensors never touched. What is frozen is read there.
        start: what the server broadcast, name → ``[*shape]``, of the tensors that travel (:func:`travelling`).
        clients: ids, ``[K]``; as ``num_samples`` and ``num_steps``, longest first.
        tap_features, tap_stages: also return the features, the outputs of all ``net.stages()`` (see ``Tap``).
        task: what the labels mean.

    Attributes:
        full: each client's tensors, name → ``[K, *shape]``; ``leaves``: the trained ones of the active clients,
            ``[n, *shape]``, which share their memory.
        notes: what measurements send beside the uploads.
        stays: whether the clients that come train in its memory (:mod:`gcfed.federated.place`).

    Raises:
        ValueError: K > 1 of a network that :func:`cannot_stack`.
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
        k = len(clients)
        if k > 1 and (reason := cannot_stack(net)):
            raise ValueError(f"client.stack > 1 cannot train a network with {reason}.")
        self.clients, self.num_samples, self.num_steps = clients, num_samples, num_steps
        self.start, self.task = dict(start), task
        self.notes: dict[str, Params] = {}
        self.stays = False
        self.net, self._tap, self._swap = net, Tap(net, tap_features, tap_stages), Swap(net)
        foreign = not type(net).__module__.startswith("gcfed.")  # what its modules do in training, it alone knows
        self._has_modes = has_dropout(net) or foreign or uses_batch_statistics(net)
        self._single = SqueezedSingle if is_recurrent(net) else Single
        self.full: Params = {name: broadcast_like(t, k).copy_(t) for name, t in start.items()}
        self._trained = [name for name, p in net.named_parameters() if p.requires_grad]
        self._buffers = {n: t for n, t in self.full.items() if n not in self._trained}
        # Copies of the counters too: a call would otherwise count up the global network's.
        self._buffers |= {n: broadcast_like(b, k).copy_(b) for n, b in net.named_buffers() if n not in start}
        self._activate(k)

    def _activate(self, n: int) -> None:
        """The first n clients train from here on."""
        self.active = n
        self.leaves: Params = {name: self.full[name][:n].detach().requires_grad_() for name in self._trained}
        buffers = {name: buffer[:n] for name, buffer in self._buffers.items()}
        self._graph = (self._single if n == 1 else Stacked)(self._swap, self.leaves, buffers)

    def reload(
        self, start: Mapping[str, Tensor], clients: np.ndarray, num_samples: np.ndarray, num_steps: np.ndarray
    ) -> None:
        """The next K clients, in the same memory."""
        self.clients, self.num_samples, self.num_steps, self.notes = clients, num_samples, num_steps, {}
        sent = [start[name] for name in self.start]
        torch._foreach_copy_(list(self.start.values()), sent)
        torch._foreach_copy_([self.full[name] for name in self.start], sent)
        for name, buffer in self.net.named_buffers():
            if name not in self.full:
                self._buffers[name].copy_(buffer)
        self._activate(len(clients))

    def __len__(self) -> int:
        return len(self.clients)

    def named_grads(self) -> Iterator[tuple[str, Tensor]]:
        """Gradients of the active clients, name → ``[n, *shape]``; hooks edit them in place."""
        return ((name, leaf.grad) for name, leaf in self.leaves.items() if leaf.grad is not None)

    def grads(self) -> list[Tensor]:
        return [grad for _, grad in self.named_grads()]

    def with_grads(self, *sets: Mapping[str, Tensor]) -> list[list[Tensor]]:
        """:meth:`grads`, and of each set the tensors of the same names: each client's, ``[K, *shape]``, cut to the
        active ones, ``[n, *shape]``; the server's, ``[*shape]``, as they are. ``full`` are the weights.
        """
        grads, lists = dict(self.named_grads()), []
        for tensors in sets:
            pairs = [(tensors[name], grad.dim()) for name, grad in grads.items()]
            lists.append([t[: self.active] if t.dim() == axes else t for t, axes in pairs])
        return [list(grads.values()), *lists]

    def __call__(self, x_KB: Tensor) -> Output:
        """Runs the n active clients on their own batches, ``[n, B, *input]`` → logits ``[n, B, C]``."""
        return self._graph.call(self._tap, self._graph.state, x_KB)

    def drop_grads(self) -> None:
        """Forgets the last step's gradients; before the forward pass, which can use their memory."""
        for leaf in self.leaves.values():
            leaf.grad = None

    def backward(self, loss_K: Tensor) -> None:
        """Back-propagates the active clients' losses, ``[n]``, into the ``grad`` of the leaves, ``[n, *shape]``."""
        loss_K.backward(None if len(loss_K) == 1 else torch.ones_like(loss_K))
        self._graph.collect()

    def gradients(self, loss_K: Tensor) -> Params:
        """Gradients of losses ``[n]`` by all trained parameters, name → ``[n, *shape]``; zeros where none arrives."""
        return self._graph.gradients(loss_K.sum())

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

        Gradients flow to ``x_KB`` and to those of ``params`` that want them; the network itself gets none.

        Args:
            x_KB: inputs, ``[n, B, *input]``, of the stage of the network with number ``first``.
            params: each client's own network, name → ``[n, *shape]`` (what it lacks, such as running statistics, is the
                client's present one); None: the broadcast model, which is one for all clients.
            features, stages: what to return beside the logits.
        """
        tap = Tap(self.net, features, stages or first > 0)
        with evaluating(self.net) if self._has_modes else nullcontext():
            if params is not None:
                state = {name: t.detach() for name, t in self._graph.state.items()} | self._graph.enter(params)
                return self._graph.call(tap, state, x_KB, first)
            with self._swap.holding(self.start):
                out = tap(x_KB.flatten(0, 1), first)
        return tap.output([t.unflatten(0, x_KB.shape[:2]) for t in out])

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
        """The clients' updates ``w_k − w``, name → ``[K, *shape]``; they take the stack's memory, unless it stays."""
        if self.stays:
            moved = torch._foreach_sub(list(self.full.values()), [self.start[name] for name in self.full])
            return dict(zip(self.full, moved, strict=True))
        self.leaves = {}
        self._graph = Stacked(self._swap, {}, {})  # and with the old one its gradients
        full, self.full, self._buffers = self.full, {}, {}  # parts keep the stack until the next one, and not these
        torch._foreach_sub_(list(full.values()), [self.start[name] for name in full])
        return full


def has_layers(net: nn.Module, kind: type[nn.Module]) -> bool:
    return any(isinstance(m, kind) for m in net.modules())


uses_batch_statistics = partial(has_layers, kind=nn.modules.batchnorm._BatchNorm)
has_dropout = partial(has_layers, kind=nn.modules.dropout._DropoutNd)
is_recurrent = partial(has_layers, kind=nn.RNNBase)
has_convolutions = partial(has_layers, kind=nn.modules.conv._ConvNd)


def is_graphable(net: nn.Module) -> bool:
    """Whether a forward pass does the same every time; a user's module must say so: ``graphable = True``."""
    known = ("gcfed", "torch", "torchvision", "timm")
    return all(type(m).__module__.split(".")[0] in known or getattr(m, "graphable", False) for m in net.modules())


def cannot_stack(net: nn.Module) -> str:
    """Why several clients of this network cannot train in one stack; empty where they can."""
    if uses_batch_statistics(net):
        return (
            "batch normalisation: its statistics would mix with the padding of shorter batches. Set client.stack=1, "
            "or use GroupNorm"
        )
    if any(isinstance(m, nn.modules.instancenorm._InstanceNorm) and m.track_running_stats for m in net.modules()):
        return "running statistics, which would mix with the padding of shorter batches. Set client.stack=1"
    if is_recurrent(net):
        return "recurrent layers: torch.func.vmap cannot batch them. Set client.stack=1"
    return ""


def travelling(net: nn.Module) -> tuple[str, ...]:
    """Names of what of a model travels: parameters that are trained, and floating-point buffers that are finite.

    What is frozen is the same everywhere, and so is a constant such as a mask of −∞, of which no difference can be
    sent, and a buffer that no checkpoint has (``persistent=False``).
    """
    kept = net.state_dict(keep_vars=True)
    params = [name for name, p in net.named_parameters() if p.requires_grad]
    floats = [name for name, b in net.named_buffers() if name in kept and b.is_floating_point()]
    buffers = [name for name in floats if bool(kept[name].isfinite().all())]
    return (*params, *buffers)


def broadcast_state(net: nn.Module, names: Sequence[str] | None = None) -> Params:
    """A copy of these tensors of a network, by default of all that travel, name → ``[*shape]``."""
    tensors = dict(net.named_parameters()) | dict(net.named_buffers())
    return {name: tensors[name].detach().clone() for name in names or travelling(net)}


def per_client(values_K: Tensor, like_K: Tensor) -> Tensor:
    """``[K]`` → ``[K, 1, …]``, to scale or select the rows of a tensor ``[K, *shape]``."""
    return values_K.view(-1, *[1] * (like_K.dim() - 1))


def client_norms(tensors_K: Sequence[Tensor]) -> Tensor:
    """Each client's Euclidean norm over all its tensors together, ``[n, *shape]`` each → ``[n]``."""
    squares = [t.square().sum(dim=tuple(range(1, t.dim()))) if t.dim() > 1 else t.square() for t in tensors_K]
    return torch.stack(squares).sum(0).sqrt()
