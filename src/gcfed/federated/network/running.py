"""The two ways in which clients run: one in the user's own network, or several side by side."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor
from torch.func import vmap

from gcfed.federated.network.lent_network import LentNetwork
from gcfed.federated.network.tap import Output, Tap
from gcfed.federated.network.tensors import ClientTensors
from gcfed.federated.protocol.messages import Params
from gcfed.models.unchanged import Unedited
from gcfed.tasks import Batch, Task


class LoneClient:
    """Runs a single client in the user's own network, which has the client's tensors.

    Where no method needs more than the mean loss, :meth:`mean_loss` and :meth:`gradients` leave the
    client axis out.
    """

    def __init__(
        self, lent_network: LentNetwork, tensors: ClientTensors, tap: Tap, task: Task
    ) -> None:
        self.lent_network = lent_network
        self.tensors = tensors
        self.tap = tap
        self.task = task

    def take_network(self) -> None:
        """Gives the network the client's tensors."""
        self.lent_network.lend(self.tensors.first)

    @cached_property
    def leaves(self) -> Params:
        """The trained tensors, ``[1, *shape]``, while the network has the client's tensors.

        A leaf and its parameter share memory and a version counter, so autograd notices an edit of
        a leaf that its graph still needs.
        """
        leaves = {}
        for name in self.tensors.trained:
            leaves[name] = self.lent_network.tensors[name].detach().unsqueeze(0).requires_grad_()
        return leaves

    def run(self, x_KB: Tensor) -> Output:
        outputs = self.tap(x_KB.squeeze(0))
        return self.tap.output([t.unsqueeze(0) for t in outputs])

    def present(self) -> Params:
        """The client's present tensors, name → ``[1, *shape]``."""
        return {name: t.unsqueeze(0) for name, t in self.lent_network.present().items()}

    def backward(self, loss_K: Tensor) -> None:
        """Back-propagates the loss into the ``grad`` of the leaves."""
        loss_K.backward()
        for leaf, grad in zip(self.leaves.values(), self.taken_grads(), strict=True):
            if grad is None:
                continue
            if leaf.grad is None:
                leaf.grad = grad.unsqueeze(0)
            else:  # a method's term of the loss reads the leaf
                leaf.grad.add_(grad)

    def taken_grads(self) -> list[Tensor | None]:
        """Takes the gradients from the network's parameters."""
        grads = []
        for name in self.leaves:
            parameter = self.lent_network.tensors[name]
            grads.append(parameter.grad)
            parameter.grad = None
        return grads

    def mean_loss(self, batch: Batch) -> Tensor:
        """The client's mean loss, ``[]``, without a client axis in autograd's graph."""
        x = batch.x.squeeze(0)
        with Unedited(x):
            logits, *_ = self.tap(x)
        return self.task.mean_loss_of_one(logits, batch)

    def gradients(self, loss: Tensor) -> list[Tensor | None]:
        """Back-propagates the client's loss, ``[]``. Returns the gradients, ``[*shape]`` or in
        channels_last ``[1, *shape]``, in the order of the leaves, which do not get them.
        """
        loss.backward()
        grads: list[Tensor | None] = []
        for grad in self.taken_grads():
            # The optimizer's kernel compares the strides of images with those of the leaf.
            if grad is not None and not grad.is_contiguous():
                grad = grad.unsqueeze(0)
            grads.append(grad)
        return grads


class SideBySide:
    """Runs the first n clients by ``torch.func.vmap``. The network keeps its own tensors.

    Attributes:
        leaves: the trained tensors, ``[n, *shape]``, in the clients' memory.
    """

    def __init__(self, lent_network: LentNetwork, tensors: ClientTensors, tap: Tap, n: int) -> None:
        self.tap = tap
        lent_network.lend({})  # the network must not change
        self.leaves: Params = {}
        for name in tensors.trained:
            self.leaves[name] = tensors.full[name][:n].detach().requires_grad_()
        self._state = {**self.leaves, **{name: t[:n] for name, t in tensors.buffers.items()}}

    def run(self, x_KB: Tensor) -> Output:
        out, assigned = run_side_by_side(self.tap, self._state, x_KB)
        # Copies first, because two tensors may have changed places.
        values = {name: t.detach().clone() for name, t in assigned.items()}
        for name, value in values.items():
            self._state[name].copy_(value)
        return out

    def present(self) -> Params:
        """The clients' present tensors, name → ``[n, *shape]``."""
        return {name: t.detach() for name, t in self._state.items()}

    def backward(self, loss_K: Tensor) -> None:
        """Back-propagates the losses, ``[n]``, into the ``grad`` of the leaves."""
        if loss_K.shape[0] == 1:
            loss_K.backward()
        else:
            loss_K.backward(torch.ones_like(loss_K))


def run_side_by_side(
    tap: Tap, state: Params, x_KB: Tensor, first: int = 0
) -> tuple[Output, Params]:
    """Runs each client's network on its own tensors and batch.

    Also returns the tensors that forward replaced.
    """
    if x_KB.shape[0] > 1:
        run = vmap(tap.on, in_dims=(0, 0, None), randomness="different")
        outputs, assigned = run(state, x_KB, first)
        return tap.output(outputs), assigned
    # A single client needs no vmap, and torch may be unable to batch the network.
    own_state = {name: t.squeeze(0) for name, t in state.items()}
    outputs, assigned = tap.on(own_state, x_KB.squeeze(0), first)
    assigned = {name: t.unsqueeze(0) for name, t in assigned.items()}
    return tap.output([t.unsqueeze(0) for t in outputs]), assigned
