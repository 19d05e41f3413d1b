"""What a curious server reads out of an upload: FedGC's attack (gradient constraint, A.5, Figure 5).

In the rounds that are measured one client of the cohort, drawn by the seed, rehearses one step of plain SGD on a few of
its images, and uploads through all methods as it would in earnest. The server takes Δ/(−η) for the gradient of those
images and inverts it (deep leakage from gradients, :mod:`gcfed.metrics.dlg`). It knows the broadcast weights, η and
the network, and takes no account of what methods made of the gradient. Of several images the order is unknown: each
original is paired with the nearest that was recovered.

=====================  ======================================================================================
``leakage/mse``        of the pixels, in 0…1, mean over the images
``leakage/psnr``       −10 log₁₀ of an image's MSE, in dB, mean over the images
``leakage/labels``     share of the images whose label is the likeliest of the recovered one
``leakage/mismatch``   ‖∇ − g‖² / ‖g‖²: near 0, the search has succeeded, whether or not the image is the client's
=====================  ======================================================================================

``leakage_round_<t>.png`` in the run's folder shows the originals above what was recovered. A search that failed
(``mismatch`` not near 0) proves no privacy: ReLU and max-pooling resist this attack by their kinks alone, and under
Fixup initialization nothing but the last layer has a gradient in the first round. The network is attacked in evaluation
mode; with dropout or batch statistics, clients have other gradients in training.
"""

import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from gcfed.federated.forward import Params
from gcfed.federated.messages import Download
from gcfed.federated.method import Setup
from gcfed.federated.round import Round
from gcfed.metrics.base import ServerMetric, evaluating, zeros
from gcfed.metrics.dlg import invert_gradient
from gcfed.utils.checked import Count, Positive, checked
from gcfed.utils.rng import generator, torch_seed


@dataclass
class Observed:
    """An upload, and what it was made of."""

    client: int
    x: Tensor  # [B, *input]
    y: Tensor  # [B]
    gradient: Params


@checked
@dataclass(eq=False)
class Leakage(ServerMetric):
    """Adds ``leakage/*`` to the rows of metrics and saves a picture; for images only.

    Args:
        folder: where pictures go.
        every: rounds between two measurements.
        images: batch of the attacked step.
        iterations: of the attack; one of ``lbfgs`` is up to 20 passes, one of ``adam`` a single one.
        restarts: starting points of the attack, of which the best match counts.
        optimizer: of the attack.
        lr: of that optimizer; null: 1 for ``lbfgs``, 0.1 for ``adam``.

    Raises:
        ValueError: at ``validate``, data that are no images.
    """

    folder: str
    every: Count = 50
    images: Count = 1
    iterations: Count = 300
    restarts: Count = 4
    optimizer: Literal["lbfgs", "adam"] = "lbfgs"
    lr: Positive | None = None

    name = "leakage"
    rehearses = True
    needs_classes = True

    def validate(self, setup: Setup) -> None:
        super().validate(setup)
        if not hasattr(setup.data.transform, "std"):
            raise ValueError("metrics=leakage recovers images, and these data are none: leave it out of metrics.")
        self.solver = solver = copy.copy(setup.solver)
        solver.steps, solver.batch_size, solver.optimizer = 1, self.images, partial(torch.optim.SGD, lr=1.0)

    def begin(self, download: Download, round: Round) -> None:
        self._observed = self._observe(download, round) if self.module.trainer.is_global_zero else None

    def _observe(self, download: Download, round: Round) -> Observed | None:
        """One client's upload after one step; None where it is not finite."""
        device = self.module.device
        clients = generator(round.seed, "leakage", round.index).choice(round.cohort, 1)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            (upload,) = self.transport.rehearse(download, clients, self.solver, here=True)
        plan = self.solver.plan(self.data, clients, download, device)
        batch = plan.batch(self.data, 0, plan.kinds[0])
        delta = self.as_sent(upload, self.names)
        gradient = {name: t[0] / -round.lr for name, t in delta.items()}
        return Observed(int(clients[0]), batch.x[0], batch.y[0], gradient) if bool(upload.finite[0]) else None

    def columns(self, round: Round) -> dict[str, float]:
        sums = zeros(round, 5)
        if self._observed is not None:  # on the first process, in whose folder the picture goes
            sums[:] = torch.tensor([*self._invert(self._observed, round), 1.0])
            self._observed = None
        (sums,) = round.reduce([sums])
        *values, measured = sums.tolist()
        names = ("mse", "psnr", "labels", "mismatch")
        return {f"leakage/{name}": value for name, value in zip(names, values, strict=True) if measured}

    def _invert(self, seen: Observed, round: Round) -> tuple[float, ...]:
        """Attacks, draws, and returns the values of the columns."""
        from gcfed.plots.pictures import plot_recovered  # matplotlib: only in the rounds that draw

        net, shape, classes = self.module.net, tuple(seen.x.shape), self.data.num_classes
        # A round may end inside Lightning's test.
        with evaluating(net), torch.inference_mode(False), torch.enable_grad():
            found = invert_gradient(
                net, round.start, seen.gradient, shape, classes, iterations=self.iterations, restarts=self.restarts,
                optimizer=self.optimizer, lr=self.lr or {"lbfgs": 1.0, "adam": 0.1}[self.optimizer],
                random=torch.Generator().manual_seed(torch_seed(round.seed, "leakage", round.index)),
            )  # fmt: skip
        original, recovered = self._pixels(seen.x), self._pixels(found.x)
        order = nearest(original, recovered)
        recovered, labels = recovered[order], found.labels[order].argmax(-1)
        mse_B = (original - recovered).square().flatten(1).mean(1)
        psnr_B = -10 * mse_B.log10()
        above = [f"client {seen.client}, class {y}" for y in seen.y.tolist()]
        below = [f"MSE {m:.4f}, {p:.1f} dB" for m, p in zip(mse_B.tolist(), psnr_B.tolist(), strict=True)]
        path = Path(self.folder) / f"leakage_round_{round.index + 1}.png"
        plot_recovered(original.float().cpu().numpy(), recovered.float().cpu().numpy(), above, below, path)
        self.show(path, round)
        means = [mse_B.mean(), psnr_B.mean(), (labels == seen.y).double().mean()]
        return *torch.stack([mean.double() for mean in means]).tolist(), found.mismatch

    def _pixels(self, x: Tensor) -> Tensor:
        """What the transform made of images, undone, ``[B, C, H, W]`` in 0…1."""
        mean, std = (x.new_tensor(v).view(-1, 1, 1) for v in (self.data.transform.mean, self.data.transform.std))
        return (x.detach() * std + mean).clamp(0, 1)


def nearest(original: Tensor, recovered: Tensor) -> Tensor:
    """Which recovered image goes with each original, ``[B]``: the nearest pair first, each image once."""
    distance = torch.cdist(original.flatten(1), recovered.flatten(1))
    order = torch.empty(len(original), dtype=torch.long, device=original.device)
    for _ in range(len(original)):
        i, j = divmod(int(distance.argmin()), len(recovered))
        order[i] = j
        distance[i], distance[:, j] = torch.inf, torch.inf
    return order
