"""Images out of a gradient: deep leakage from gradients (Zhu et al., NeurIPS 2019, Algorithm 1).

Who knows a network, its weights w and the gradient g of the loss on one batch looks for inputs x and soft labels y with
the same gradient: ``min ‖∇_w ℓ(f(x; w), softmax(y)) − g‖² / ‖g‖²`` from x, y ~ N(0, 1), by L-BFGS. Squares are summed
over all tensors, and the gradient of that sum takes a second pass through the network. The authors' networks have
sigmoids, and strides in place of pooling, for that reason: the gradients of ReLU and max-pooling jump, and the search
ends in a local minimum. Added to theirs, for what it recovers: a line search (strong Wolfe), the best point met,
restarts, and Adam, which gets further with ReLU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gcfed.federated.forward import Params


@dataclass
class Recovered:
    """What the attack found.

    Attributes:
        x: inputs, ``[B, *input]``, as the network takes them.
        labels: probabilities of the classes, ``[B, C]``.
        mismatch: ``‖∇ − g‖² / ‖g‖²``, 0 for a perfect match.
    """

    x: Tensor
    labels: Tensor
    mismatch: float


def invert_gradient(
    net: nn.Module,
    weights: Params,
    gradient: Params,
    shape: tuple[int, ...],
    num_classes: int,
    *,
    random: torch.Generator,
    iterations: int = 300,
    restarts: int = 1,
    optimizer: str = "lbfgs",
    lr: float = 1.0,
) -> Recovered:
    """The inputs and labels whose gradient comes nearest to ``gradient``, the best of all restarts.

    The network is called as it is, in its present mode; neither it nor its gradients are touched.

    Args:
        net: the network, for its architecture.
        weights: its parameters and buffers at which the gradient was taken, name → ``[*shape]``.
        gradient: of the mean loss over the batch, for the parameters that were trained.
        shape: of the batch, ``(B, *input)``.
        num_classes: C.
        random: draws the starting points; on the CPU, so that they do not depend on the device.
        iterations: steps of the optimizer; one of L-BFGS is up to 20 of its inner iterations, as in the authors' code.
        restarts: starting points.
        optimizer: ``lbfgs`` or ``adam``.
        lr: its learning rate; the authors' 1 for L-BFGS, 0.1 is usual for Adam.
    """
    names, target = list(gradient), [g.detach() for g in gradient.values()]
    fixed = {name: t.detach() for name, t in weights.items()}
    leaves = [fixed[name].clone().requires_grad_() for name in names]
    state = fixed | dict(zip(names, leaves, strict=True))
    scale = torch.stack([g.square().sum() for g in target]).sum()

    def mismatch(x: Tensor, labels: Tensor) -> Tensor:
        log_p = functional_call(net, state, (x,)).log_softmax(-1)
        loss = -(labels.softmax(-1) * log_p).sum(-1).mean()
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.stack([(a - b).square().sum() for a, b in zip(grads, target, strict=True)]).sum() / scale

    attempts = []
    for _ in range(restarts):
        dummies = [_normal(size, target[0], random) for size in (shape, (shape[0], num_classes))]
        attempts.append(_descend(mismatch, dummies, iterations, optimizer, lr))
    value, x, labels = min(attempts, key=lambda attempt: attempt[0])
    return Recovered(x, labels.softmax(-1), value)


def _descend(
    mismatch: Callable[[Tensor, Tensor], Tensor], dummies: list[Tensor], iterations: int, optimizer: str, lr: float
) -> tuple[float, Tensor, Tensor]:
    """The smallest mismatch on the way from one starting point, with its inputs and labels."""
    leaves = [dummy.requires_grad_() for dummy in dummies]
    minimizer: torch.optim.Optimizer = (
        torch.optim.LBFGS(leaves, lr=lr, line_search_fn="strong_wolfe")
        if optimizer == "lbfgs"
        else torch.optim.Adam(leaves, lr=lr)
    )

    def closure() -> Tensor:
        value = mismatch(*leaves)
        for leaf, grad in zip(leaves, torch.autograd.grad(value, leaves), strict=True):
            leaf.grad = grad
        return value.detach()

    best, kept = math.inf, [leaf.detach().clone() for leaf in leaves]
    for _ in range(iterations):
        here = [leaf.detach().clone() for leaf in leaves]
        value = float(minimizer.step(closure))  # type: ignore[arg-type]  # of where the step began
        if not math.isfinite(value):
            break
        if value < best:
            best, kept = value, here
    value = float(mismatch(*leaves).detach())
    if value < best:
        best, kept = value, [leaf.detach() for leaf in leaves]
    return best, kept[0], kept[1]


def _normal(size: tuple[int, ...], like: Tensor, random: torch.Generator) -> Tensor:
    return torch.randn(size, generator=random).to(like.device, like.dtype)
