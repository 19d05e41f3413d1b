"""What a curious server learns from an upload: FedGC's attack (gradient constraint, A.5, Figure 5).

It is deep leakage from gradients (Zhu et al., NeurIPS 2019, Algorithm 1). It knows a network, its
weights w and the gradient g of the loss on one batch. It starts at x, y ~ N(0, 1) and searches by
L-BFGS for inputs x and soft labels y with the same gradient: ``min ‖∇_w ℓ(f(x; w), softmax(y)) −
g‖² / ‖g‖²``, summed over all tensors. This code adds a line search (strong Wolfe), restarts and
Adam, and returns the best point found.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gcfed.federated.parts import Download, Fact, Params, Received, Round, Setup
from gcfed.methods.requirements import class_logits, functional_network
from gcfed.metrics.base import ServerMetric, evaluating
from gcfed.utils.checked import Count, checked
from gcfed.utils.refusal import Refusal
from gcfed.utils.rng import generator, torch_seed
from reproductions.recovered import plot_recovered

LBFGS, ADAM = (
    partial(torch.optim.LBFGS, lr=1.0, line_search_fn="strong_wolfe"),
    partial(torch.optim.Adam, lr=0.1),
)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"lbfgs": LBFGS, "adam": ADAM}


@checked
@dataclass(eq=False)
class Leakage(ServerMetric):
    """What DLG recovers from a client's upload after one step: ``leakage/*`` and a picture; for
    images only.

    In measured rounds, a client of the cohort, drawn by the seed, rehearses one step of plain SGD
    on a few of its images and uploads through all methods. The server uses Δ/(−η) as the gradient
    of these images and inverts it. It knows the broadcast weights, η and the network. The order of
    several images is unknown: each original is paired with the nearest recovered image.

    - ``leakage/mse``: of pixels in 0…1, mean over the images
    - ``leakage/psnr``: −10 log₁₀ of an image's MSE, in dB, mean over the images
    - ``leakage/labels``: share of images whose label is the most probable of the recovered image
    - ``leakage/mismatch``: ‖∇ − g‖² / ‖g‖²; near 0: the search succeeded (the image may still be
      another)

    ``leakage_round_<t>.png`` shows the originals above the recovered images. A failed search proves
    no privacy. The attack uses evaluation mode; with dropout or batch statistics, clients train
    with other gradients.

    Raises:
        ValueError: at ``validate``, the data are not images of one or three channels.
    """

    folder: str
    every: Count = 50
    images: Count = 1
    iterations: Count = 300
    restarts: Count = 4
    optimizer: Literal["lbfgs", "adam"] = "lbfgs"
    facts = {Fact.REHEARSES}
    writes = ("leakage/mse", "leakage/psnr", "leakage/labels", "leakage/mismatch")
    needs = [class_logits]

    def validate(self, setup: Setup) -> None:
        functional_network("it computes gradients with torch.func")(setup, "metrics=leakage")
        if not hasattr(setup.data.transform, "std") or setup.data.input_shape[0] not in (1, 3):
            raise Refusal(
                "metrics=leakage recovers images of one or three channels, and the data are not"
                " images."
            )

    def bind(self, setup: Setup) -> None:
        super().bind(setup)
        self.solver = solver = copy.copy(setup.solver)
        solver.steps, solver.batch_size, solver.optimizer = (
            1,
            self.images,
            partial(torch.optim.SGD, lr=1.0),
        )

    def begin(self, download: Download, round: Round) -> None:
        """Runs the attack on the first process, if the upload is finite."""
        self._values = round.zeros(5)  # of the columns, and the number of attacks
        if not self.module.trainer.is_global_zero:
            return
        device = self.module.device
        clients = generator(round.seed, "leakage", round.index).choice(round.cohort, 1)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            (upload,) = self.transport.rehearse(download, clients, self.solver, here=True)
        if upload.finite[0]:
            plan = self.solver.plan(self.data, clients, download, device)
            batch = plan.batch(self.data, 0, plan.kinds[0])
            gradient = {
                name: t[0] / -round.lr for name, t in self.as_sent(upload, self.names).items()
            }
            values = self.attack(int(clients[0]), batch.x[0], batch.y[0], gradient, round)
            self._values[:] = torch.tensor([*values, 1.0])

    def zeros(self, round: Round) -> Params:
        return {"values": self._values}  # zeros on other processes than the first

    def columns(self, round: Received) -> dict[str, float]:
        *values, measured = round.sums[self]["values"].tolist()
        names = ("mse", "psnr", "labels", "mismatch")
        return {
            f"leakage/{name}": value for name, value in zip(names, values, strict=True) if measured
        }

    def attack(
        self, client: int, x: Tensor, y: Tensor, gradient: Params, round: Round
    ) -> tuple[float, ...]:
        """The values of the columns, for a client's images ``[B, *input]``, labels ``[B]`` and
        uploaded gradient.
        """
        with evaluating(self.module.net):
            found = invert_gradient(
                self.module.net,
                round.broadcast_model,
                gradient,
                tuple(x.shape),
                self.data.num_classes,
                iterations=self.iterations,
                restarts=self.restarts,
                optimizer=self.optimizer,
                random=torch.Generator().manual_seed(
                    torch_seed(round.seed, "leakage", round.index)
                ),
            )
        original, recovered = self._pixels(x), self._pixels(found.x)
        recovered = recovered[order := nearest(original, recovered)]
        mse_B = (original - recovered).square().flatten(1).mean(1)
        psnr_B = -10 * mse_B.log10()
        above = [f"client {client}, class {label}" for label in y.tolist()]
        below = [
            f"MSE {m:.4f}, {p:.1f} dB" for m, p in zip(mse_B.tolist(), psnr_B.tolist(), strict=True)
        ]
        path = Path(self.folder) / f"leakage_round_{round.index + 1}.png"
        plot_recovered(
            original.float().cpu().numpy(), recovered.float().cpu().numpy(), above, below, path
        )
        self.show(path, round)
        right_B = (found.labels[order].argmax(1) == y).double()
        return *(float(values_B.mean()) for values_B in (mse_B, psnr_B, right_B)), found.mismatch

    def _pixels(self, x: Tensor) -> Tensor:
        """Images before the transform, ``[B, C, H, W]`` in 0…1."""
        mean, std = (
            x.new_tensor(v).view(-1, 1, 1)
            for v in (self.data.transform.mean, self.data.transform.std)
        )
        return (x.detach() * std + mean).clamp(0, 1)


def nearest(original: Tensor, recovered: Tensor) -> Tensor:
    """The recovered image of each original, ``[B]``: the nearest pair first, each image once."""
    distance = torch.cdist(original.flatten(1), recovered.flatten(1))
    order = torch.empty(len(original), dtype=torch.long, device=original.device)
    for _ in range(len(original)):
        i, j = divmod(int(distance.argmin()), len(recovered))
        order[i] = j
        distance[i], distance[:, j] = torch.inf, torch.inf
    return order


class Recovered(NamedTuple):
    """Inputs ``[B, *input]`` as the network takes them, probabilities of the classes ``[B, C]``,
    and the mismatch.
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
) -> Recovered:
    """The inputs and labels with the gradient nearest to ``gradient``, the best of all restarts.

    Calls the network in its present mode; changes neither the network nor its gradients.

    Args:
        weights: the network's parameters and buffers at which the gradient was taken, name →
            ``[*shape]``.
        gradient: of the mean loss over the batch, for the parameters that were trained.
        shape: of the batch, ``(B, *input)``.
        random: draws the starting points; on the CPU, so that they do not depend on the device.
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
        return (
            torch.stack([(a - b).square().sum() for a, b in zip(grads, target, strict=True)]).sum()
            / scale
        )

    best, kept = math.inf, None
    for _ in range(restarts):
        sizes = (shape, (shape[0], num_classes))
        dummies = [
            torch.randn(size, generator=random).to(target[0]).requires_grad_() for size in sizes
        ]
        minimizer = OPTIMIZERS[optimizer](dummies)

        def closure(dummies: list[Tensor] = dummies) -> Tensor:
            value = mismatch(*dummies)
            for dummy, grad in zip(dummies, torch.autograd.grad(value, dummies), strict=True):
                dummy.grad = grad
            return value.detach()

        for step in range(iterations + 1):
            here = [dummy.detach().clone() for dummy in dummies]
            value = float(minimizer.step(closure) if step < iterations else mismatch(*dummies))  # type: ignore[arg-type]
            if kept is None or value < best:  # the value at the start of the step
                best, kept = (value if math.isfinite(value) else math.inf), here
            if not math.isfinite(value):
                break
    assert kept is not None
    return Recovered(kept[0], kept[1].softmax(-1), best)
