"""K clients that train side by side.

The first axis of every client-side tensor is the client axis K.
"""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gcfed.federated.network.lent_network import LentNetwork
from gcfed.federated.network.running import LoneClient, SideBySide, run_side_by_side
from gcfed.federated.network.tap import Output, Tap
from gcfed.federated.network.tensors import ClientTensors
from gcfed.federated.protocol.messages import Params
from gcfed.models.facts import is_recurrent
from gcfed.models.unchanged import Unedited, evaluating
from gcfed.tasks import CLASSIFICATION, Task
from gcfed.utils.device import device_of
from gcfed.utils.refusal import Refusal


@dataclass(frozen=True)
class StackStart:
    """K clients that begin to train.

    Attributes:
        broadcast_model: the tensors that travel (:func:`travelling`), name → ``[*shape]``.
        clients: their ids, ``[K]``, sorted by the number of local steps, most first.
        num_samples, num_steps: of each client, ``[K]``.
    """

    broadcast_model: Params
    clients: np.ndarray
    num_samples: np.ndarray
    num_steps: np.ndarray


class ClientStack:
    """K clients of one round, side by side on one device.

    A single client trains in the user's own network (:class:`LoneClient`). Several clients train
    by ``torch.func.vmap`` over it (:class:`SideBySide`), with the same numbers. When some have
    finished, :meth:`shrink` goes on with the first n clients.

    Buffers start at the server's values, and each client's forward passes update its own. Those
    that travel are uploaded and averaged like parameters, integers as floats. The others start
    again in the next round.

    Args:
        net: the global network. It has the client's tensors while a single client trains, until
            :meth:`end`.
        start: the clients, and the model from which they train.
        reads: what the forward pass also returns: ``features``, ``stages`` (see ``Tap``).
        task: the meaning of the labels.
        lent_network: the network as :class:`LentNetwork`; made here if not given.

    Attributes:
        broadcast_model: the model from which the clients train, name → ``[*shape]``.
        full: each client's tensors, name → ``[K, *shape]``.
        leaves: the trained tensors of the n active clients, ``[n, *shape]``, in the memory of
            ``full``.
        lone: the single active client, in the user's own network; None if there are several, or
            the network cannot be lent.
        prepared: what each client part returned from ``prepare``, by part.
        personal: tensors of each client's personal model that differ from ``full``, set after local
            training.
    """

    def __init__(
        self,
        net: nn.Module,
        start: StackStart,
        *,
        reads: Set[str] = frozenset(),
        task: Task = CLASSIFICATION,
        lent_network: LentNetwork | None = None,
    ) -> None:
        self.task = task
        self.net = net
        self.lent_network = lent_network or LentNetwork(net)
        self._tap = Tap(net, "features" in reads, "stages" in reads)
        # On a GPU cuDNN gives the weights of recurrent layers new memory, so their calls run on
        # views of ``full``.
        on_gpu = device_of(start.broadcast_model).type == "cuda"
        self._can_lend = not (on_gpu and is_recurrent(net))
        self._tensors = ClientTensors(self.lent_network, start.broadcast_model, len(start.clients))
        self.full = self._tensors.full
        self.load(start)

    def load(self, start: StackStart) -> None:
        """K clients begin in this stack's memory, after the end of the last ones (:meth:`end`)."""
        self.clients = start.clients
        self.num_samples = start.num_samples
        self.num_steps = start.num_steps
        self.broadcast_model = dict(start.broadcast_model)
        self.prepared: dict[Any, Any] = {}
        self.personal: Params = {}
        self._tensors.load(start.broadcast_model)
        self._activate(len(start.clients))

    def load_counters(self) -> None:
        """Copies floats of ``full`` into the integer buffers that they stand for."""
        self._tensors.load_counters()

    def _activate(self, n: int) -> None:
        """Makes the first n clients the active ones."""
        self.active = n
        self.lone: LoneClient | None = None
        self._running: LoneClient | SideBySide
        if n == 1 and self._can_lend:
            self.lone = self._in_own_network
            self.lone.take_network()
            self._running = self.lone
        else:
            self._running = SideBySide(self.lent_network, self._tensors, self._tap, n)
        self.leaves = self._running.leaves

    @cached_property
    def _in_own_network(self) -> LoneClient:
        return LoneClient(self.lent_network, self._tensors, self._tap, self.task)

    def tensors(self) -> list[Tensor]:
        """The clients' weights and buffers, ``[K, *shape]`` each."""
        return [*self.full.values(), *self._tensors.buffers.values()]

    def fits_network(self) -> bool:
        """Whether the network, which no client has now, still has the tensors that it had when this
        stack was made.
        """
        return self.lent_network.tensors is self._tensors.network

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
        with Unedited(x_KB):
            return self._running.run(x_KB)

    def drop_grads(self) -> None:
        """Drops the last step's gradients, so that the forward pass can use their memory."""
        for leaf in self.leaves.values():
            leaf.grad = None

    def backward(self, loss_K: Tensor) -> None:
        """Back-propagates the active clients' losses, ``[n]``, into the ``grad`` of the leaves,
        ``[n, *shape]``.
        """
        self._running.backward(loss_K)

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
            Refusal: the network cannot run on other tensors than its own.
        """
        traits = self.lent_network.traits
        if traits.why_not_functional:
            raise Refusal(
                f"model: this method needs a teacher, and {type(self.net).__name__} has"
                f" {traits.why_not_functional}."
            )
        tap = Tap(self.net, features, stages or first > 0)
        with evaluating(self.net):
            if params is not None:
                teacher = {**self._running.present(), **params}
                return run_side_by_side(tap, teacher, x_KB, first)[0]
            teacher = self._tensors.teacher(self.broadcast_model)
            outputs, _ = tap.on(teacher, x_KB.flatten(0, 1), first)
            return tap.output([t.unflatten(0, x_KB.shape[:2]) for t in outputs])

    def on(self, state: Mapping[str, Tensor], x_B: Tensor) -> Tensor:
        """The network's outputs with these tensors, name → ``[*shape]``, in its present mode,
        without gradients.
        """
        with self.lent_network.holding(state):
            outputs: Tensor = self.net(x_B)
            return outputs

    def shrink(self, n: int) -> None:
        """Goes on with the first n clients; tensors of the others do not change."""
        self.lent_network.settle()  # finds constants that forward has changed
        self._activate(n)

    def settle(self) -> None:
        """Copies integer buffers, and tensors that forward passes replaced, into ``full``."""
        self.lent_network.settle()
        trained = {name for name, t in self.lent_network.tensors.items() if t.requires_grad}
        changed = trained.symmetric_difference(self._tensors.trained)
        if changed:
            name = min(changed)
            raise Refusal(f"model: forward changes requires_grad of {name}: set it in __init__.")
        self._tensors.save_counters()

    def end(self) -> None:
        """Ends local training: the network gets its own tensors back, and of the clients only
        ``full`` remains.
        """
        self.lent_network.take_back()
        self.prepared.clear()
        self.personal = {}
        self.drop_grads()

    def delta(self) -> Params:
        """The clients' updates w_k − w, name → ``[K, *shape]``."""
        moved = torch._foreach_sub(
            list(self.full.values()), [self.broadcast_model[name] for name in self.full]
        )
        return dict(zip(self.full, moved, strict=True))
