"""Pseudo data of FedReg: a client's own samples, moved along the gradients of the broadcast model's loss."""

from copy import copy
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gcfed.federated.batches import ClientData
from gcfed.federated.method import ClientStack, Download, LocalSolver
from gcfed.federated.stack import per_client
from gcfed.utils.rng import torch_seed


def climb(stack: ClientStack, x: Tensor, y: Tensor, eta: float, iterations: int) -> Tensor:
    """Inputs ``[n, B, *input]`` after so many steps ``x + η sign(∇_x L(w₀; x, y))`` up the broadcast model's loss."""
    for _ in range(iterations):
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(stack.task.losses(stack.reference(x).logits_KBC, y).sum(), x)
        x = x.detach() + eta * grad.sign()
    return x


class PseudoPass:
    """One pass over each client's samples, made into pseudo and perturbed ones; clients go round and round in it.

    The pass has an order and an augmentation of its own, drawn from (seed, ``pseudo``, round, client).

    Args:
        etas: step sizes η of pseudo and of perturbed samples.
        iterations: steps of both.
    """

    def __init__(
        self,
        stack: ClientStack,
        data: ClientData,
        solver: LocalSolver,
        download: Download,
        etas: tuple[float, float],
        iterations: int,
    ) -> None:
        device = next(iter(stack.full.values())).device
        once = copy(solver)
        once.epochs, once.steps = 1, None
        plan = once.plan(data, stack.clients, replace(download, seed=torch_seed(download.seed, "pseudo")), device)
        self._next = torch.zeros(len(stack), dtype=torch.int64, device=device)
        self._turns = torch.from_numpy(plan.steps).to(device)
        self._made: list[Tensor] = []
        counts = torch.from_numpy(plan.counts).to(device)
        used, width = min(plan.counts.shape[1], int(stack.num_steps.max())), int(plan.counts.max())
        for t in range(used):
            n = 1 + int(np.flatnonzero(plan.counts[:, t]).max())  # the others have a shorter pass
            draws = None if plan.augment is None else plan.augment[:n, t, :width]
            x, y = data.fetch(plan.index[:n, t, :width], draws)
            pseudo, perturbed = (climb(stack, x, y, eta, iterations) for eta in etas)
            with torch.no_grad():
                labels = stack.reference(pseudo).logits_KBC.softmax(-1)
            rows = torch.arange(width, device=device) < counts[:n, t, None]
            real = (stack.task.real(y) & rows.view(*rows.shape, *[1] * (y.dim() - 2))).to(labels.dtype)
            weight = real / per_client(real.flatten(1).sum(1).clamp(min=1), real)
            made = (pseudo, labels, perturbed, y, weight)
            if not self._made:
                self._made = [part.new_zeros(n, used, *part.shape[1:]) for part in made]
            for kept, part in zip(self._made, made, strict=True):
                kept[:n, t] = part

    def next(self, n: int) -> tuple[Tensor, ...]:
        """The next batch of each of the first n clients.

        Returns:
            Pseudo inputs ``[n, B, *input]`` and the broadcast model's probabilities for them, ``[n, B, C]``; perturbed
            inputs and labels; weights of the labels, which average over a client's real ones.
        """
        turn = self._next[:n]
        rows = torch.arange(n, device=turn.device)
        batch = tuple(part[rows, turn] for part in self._made)
        self._next[:n] = (turn + 1) % self._turns[:n]
        return batch
