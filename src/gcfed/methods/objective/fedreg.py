"""Local steps that keep the broadcast model's loss on pseudo data: FedReg (Xu et al., ICLR 2022).

    pseudo data       x_s: ``iterations`` times x ← x + η_s sign(∇_x L(w₀; x, y)),
                      labelled p_s, the softmax of w₀ at x_s
    perturbed data    x_p: the same with η_p ≪ η_s, labelled y
    local step        w⁺ = w − η ∇L(γ w + (1 − γ) w₀; x, y)
    regularization    d = w⁺ − w₀;   g_s, g_p = ∇L_s, ∇L_p at w₀ + β d
                      w ← w⁺ − v g_s − v' g_p
                      v = max(0, d·g_s/‖g_s‖²),   v' = max(0, (d − v g_s)·g_p/‖g_p‖²)

d·g is the growth of a loss from w₀ to w⁺. To first order, neither loss exceeds its value at w₀. The
paper's text was not available. This is the rule of its authors' code (Zoesgithub/FedReg, last
version), where clamping x to its range has no effect; a first version clamps. Clients create these
data at the start of a round, in one pass over their samples, and use one batch per step, again and
again, in evaluation mode. Memory: the inputs of one epoch per client, twice. Local GC projects the
step's ∇L, not the regularization after it.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gcfed.federated.parts import (
    Batch,
    ClientPart,
    ClientStack,
    ClientStates,
    Download,
    Fact,
    Order,
    Prepared,
    Setup,
    client_norms,
    inner_products,
    per_client,
)
from gcfed.federated.training.batches import BatchPlan, Kind
from gcfed.methods.requirements import class_logits, teacher, whole_batches
from gcfed.utils.checked import Count, Positive, PositiveShare, Share, checked
from gcfed.utils.device import device_of, on_device
from gcfed.utils.refusal import Refusal
from gcfed.utils.rng import torch_seed


@checked
@dataclass(eq=False)
class FedReg(ClientPart):
    """After each local step, moves a client back so that its losses on pseudo and perturbed data do
    not grow.

    The defaults are the authors' values for CIFAR-10 (ResNet-9, η = 0.1, batches of 5, 30 epochs).

    Args:
        gamma: γ, the point of the step's gradient; 1 is w. CIFAR-100: 0.25, MNIST and EMNIST: 0.4.
        beta: β, the point of the regularizing gradients.
        eta_s: η_s, in units of the network's input. MNIST: 0.2, EMNIST: 0.05.
        eta_p: η_p. The authors take η_s/100.
        iterations: sign steps per sample.
        pseudo, perturbed: whether to keep the loss on these data. With both false and γ = 1 this is
            FedAvg.
    """

    recordable = "stack"
    facts = {Fact.ANCHORS, Fact.TEACHES}
    order = Order.MOVES_WEIGHTS
    needs = [class_logits, teacher, whole_batches("its pseudo data pass as whole batches")]

    gamma: Share = 0.5
    _: KW_ONLY
    beta: PositiveShare = 0.5
    eta_s: Positive = 0.1
    eta_p: Positive = 0.001
    iterations: Count = 10
    pseudo: bool = True
    perturbed: bool = True

    def validate(self, setup: Setup) -> None:
        if any(isinstance(m, nn.Embedding) for m in setup.module.net.modules()):
            raise Refusal(
                "methods.fedreg needs gradients of the inputs, and tokens have none: use image"
                " data."
            )

    def bind(self, setup: Setup) -> None:
        self.data = setup.data
        self.solver = setup.solver

    def prepare(self, stack: ClientStack, own: ClientStates, download: Download) -> Prepared:
        if not (self.pseudo or self.perturbed):
            return {}
        return {"pass": PseudoPass(self, stack, download)}

    def before_step(
        self, stack: ClientStack, batch: Batch, objective: Callable[[], Tensor]
    ) -> None:
        self._unmoved: list[Tensor] = []
        if self.gamma < 1:
            weights = _weights(stack)
            start = [stack.broadcast_model[name] for name in stack.leaves]
            self._unmoved = [t.clone() for t in weights]
            torch._foreach_lerp_(weights, start, 1 - self.gamma)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Puts the weights back, bit for bit, before any other method sees them."""
        if self._unmoved:
            torch._foreach_copy_(_weights(pl_module.clients), self._unmoved)
        self._unmoved = []

    def pseudo_batch(self, stack: ClientStack, batch: Batch) -> tuple[Tensor, ...]:
        """What :meth:`PseudoPass.next` returns of a batch."""
        pseudo = climb(stack, batch.x, batch.y, self.eta_s, self.iterations)
        perturbed = climb(stack, batch.x, batch.y, self.eta_p, self.iterations)
        with torch.no_grad():
            probabilities = stack.reference(pseudo).logits_KBC.softmax(-1)
        assert batch.mask is not None
        real = batch.mask.to(probabilities.dtype)
        weight = real / per_client(batch.count.clamp(min=1).to(real.dtype), real)
        return pseudo, probabilities, perturbed, batch.y, weight

    def after_step(self, stack: ClientStack, batch: Batch) -> None:
        if not stack.prepared[self]:
            return
        pseudo, labels, perturbed, y, weight = stack.prepared[self]["pass"].next(stack.active)
        weights = _weights(stack)
        start = [stack.broadcast_model[name] for name in stack.leaves]
        drift = list(torch._foreach_sub(weights, start))
        middle = torch._foreach_lerp(weights, start, 1 - self.beta)
        params = {name: t.requires_grad_() for name, t in zip(stack.leaves, middle, strict=True)}
        terms = []
        if self.pseudo:
            logits = stack.reference(pseudo, params=params).logits_KBC
            terms.append(-(labels * logits.log_softmax(-1)).sum(-1))
        if self.perturbed:
            logits = stack.reference(perturbed, params=params).logits_KBC
            terms.append(stack.task.client_losses(logits, y))
        leaves = list(params.values())
        for term in terms:
            loss = (term * weight).sum()
            grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
            with torch.no_grad():
                growth = inner_products(drift, list(grads))
                squares = client_norms(grads).square()
                share = growth / squares.clamp(min=torch.finfo(growth.dtype).tiny)
                back = [grad * per_client(share.clamp(min=0.0), grad) for grad in grads]
                torch._foreach_sub_(drift, back)
                torch._foreach_sub_(weights, back)


class PseudoPass:
    """Pseudo and perturbed samples of one pass over each client's samples, which the client uses
    cyclically.

    The pass has its own order and augmentation, drawn from (seed, ``pseudo``, round, client).
    """

    def __init__(self, method: FedReg, stack: ClientStack, download: Download) -> None:
        device = device_of(stack.full)
        plan = _one_pass(method, stack, download, device)
        self._next = torch.zeros(len(stack), dtype=torch.int64, device=device)
        self._turns = on_device(plan.steps, device)
        self._tables: list[Tensor] = []  # [K, T, …], with a row of batches for each client
        used = min(plan.counts.shape[1], int(stack.num_steps.max()))
        width = int(plan.counts.max())
        for t in range(used):
            # the other clients have fewer batches
            n = 1 + int(np.flatnonzero(plan.counts[:, t]).max())
            batch = plan.batch(method.data, t, Kind(n, width, even=False))
            made = method.pseudo_batch(stack, batch)
            if not self._tables:
                self._tables = [values.new_zeros(n, used, *values.shape[1:]) for values in made]
            for table, values in zip(self._tables, made, strict=True):
                table[:n, t] = values

    def next(self, n: int) -> tuple[Tensor, ...]:
        """The next batch of each of the first n clients: pseudo inputs ``[n, B, *input]``, the
        broadcast model's probabilities for them, ``[n, B, C]``, perturbed inputs, labels, and
        weights for the mean over real labels.
        """
        turn = self._next[:n]
        rows = torch.arange(n, device=turn.device)
        batch = tuple(table[rows, turn] for table in self._tables)
        self._next[:n] = (turn + 1) % self._turns[:n]
        return batch


def _one_pass(
    method: FedReg, stack: ClientStack, download: Download, device: torch.device
) -> BatchPlan:
    """The batches of one pass over each client's samples."""
    once = copy(method.solver)
    once.epochs = 1
    once.steps = None
    seeded = replace(download, seed=torch_seed(download.seed, "pseudo"))
    return once.plan(method.data, stack.clients, seeded, device)


def climb(stack: ClientStack, x: Tensor, y: Tensor, eta: float, iterations: int) -> Tensor:
    """Inputs ``[n, B, *input]`` after so many steps ``x + η sign(∇_x L(w₀; x, y))`` up the
    broadcast model's loss.
    """
    for _ in range(iterations):
        x = x.detach().requires_grad_()
        losses = stack.task.client_losses(stack.reference(x).logits_KBC, y)
        (grad,) = torch.autograd.grad(losses.sum(), x)
        x = x.detach() + eta * grad.sign()
    return x


def _weights(stack: ClientStack) -> list[Tensor]:
    """The trained parameters of the active clients, ``[n, *shape]`` each; to be edited in place."""
    return [leaf.detach() for leaf in stack.leaves.values()]
