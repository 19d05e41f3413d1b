"""Training in a random subspace that the server and its clients draw alike: what SSF and FedSub share.

Every trained weight of two or more axes, as a matrix ``[out, in·kh·kw]``, has a P ``[d, r]`` with PᵀP = I on the larger
of its two axes, which has d numbers. Its coordinates are W P, ``[out, r]``, or PᵀW, ``[r, in·kh·kw]``. Tensors of one
axis travel whole, as do buffers. P is the Q of a Gaussian matrix drawn from (seed, layer, epoch), an epoch being
``refresh`` rounds, and is never sent. With Π = PPᵀ:

    local step   z ← z − η (Pᵀ∇F_k(w_k) + correction),   w_k = Pz + (I − Π)w
    up           z_τ − z₀                                down           z₀ = Pᵀw
    server       w ← w + γ P mean(z_τ − z₀), which leaves (I − Π)w as it is (backfill); γ is ``server.lr``

Clients step in the coordinates of the model: P lifts the projected gradient back, and torch's SGD makes of it the same
iteration. Weight decay is part of ∇F_k. Whatever other methods add to the gradient, and Local GC, come before and are
projected with it; Global GC and the like act on the lifted update.

The papers leave out how a client knows (I − Π)w. One that missed rounds must be brought up to date, by the r numbers of
each missed round; as in the papers, the bytes counted here are those of the rounds that a client takes part in.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from gcfed.federated.method import ClientPart, Download, Order, Own, Received, Round, ServerPart, Setup, Upload
from gcfed.federated.training.forward import Params
from gcfed.methods.requirements import local_sgd, mean_aggregator, plain_server
from gcfed.optim.partial import probe_optimizer
from gcfed.utils.rng import torch_seed


class Projector:
    """Coordinates of one tensor, or of a stack of such tensors with a leading client axis.

    Args:
        shape: of the tensor, in logical order whatever its memory format.
        basis: P, orthonormal, ``[d, r]``; None: the tensor is its own coordinates.
    """

    def __init__(self, shape: Sequence[int], basis: Tensor | None) -> None:
        self.shape, self.basis = tuple(shape), basis
        self.by_rows = basis is not None and prod(shape[1:]) >= shape[0]  # no fewer inputs than outputs

    def project(self, tensor: Tensor) -> Tensor:
        """``[…, *shape]`` → ``[…, out, r]`` or ``[…, r, in·kh·kw]``."""
        if self.basis is None:
            return tensor
        matrix = tensor.flatten(tensor.dim() - len(self.shape) + 1)
        return matrix @ self.basis if self.by_rows else self.basis.mT @ matrix

    def lift(self, z: Tensor) -> Tensor:
        """The tensor in the subspace that has these coordinates."""
        if self.basis is None:
            return z
        matrix = z @ self.basis.mT if self.by_rows else self.basis @ z
        return matrix.unflatten(-1, self.shape[1:])


def random_basis(seed: int, epoch: int, name: str, d: int, r: int, like: Tensor) -> Tensor:
    """A uniformly random orthonormal P, ``[d, r]``; its numbers come from the CPU, and so are the same everywhere."""
    random = torch.Generator().manual_seed(torch_seed(seed, f"projector of {name}", epoch))
    gaussian = torch.randn(d, r, generator=random, dtype=torch.float64)
    q, upper = torch.linalg.qr(gaussian.to(like.device, like.dtype))
    return q * upper.diagonal().sign()  # QR leaves the signs open


class Subspaces:
    """The projectors of a run, which the server and its clients draw alike.

    Args:
        ratio: r/d, of each tensor; r is rounded, and at least 1.
        refresh: T_p, rounds from one draw of the projectors to the next.
        turns_absent: whether what is kept of a client is turned at every draw, also while it is away (FedSub).
    """

    def __init__(self, ratio: float, refresh: int, turns_absent: bool = False) -> None:
        self.ratio, self.refresh, self.turns_absent = ratio, refresh, turns_absent
        self._drawn: tuple[int, int] | None = None
        self._space: dict[str, Projector] = {}

    def epoch(self, round: int) -> int:
        return round // self.refresh

    def projector(self, seed: int, epoch: int, name: str, like: Tensor) -> Projector:
        """That of one tensor in any epoch, past ones too."""
        if like.dim() < 2:
            return Projector(like.shape, None)
        d = max(prod(like.shape[1:]), like.shape[0])
        r = max(1, int(d * self.ratio + 0.5))
        return Projector(like.shape, random_basis(seed, epoch, name, d, r, like))

    def space(self, seed: int, round: int, model: Params, names: Sequence[str]) -> dict[str, Projector]:
        """Those of a round; drawn once an epoch, by whoever asks first."""
        if (wanted := (self.epoch(round), seed)) != self._drawn:
            self._drawn, self._space = wanted, {}  # the old ones go before the new ones come
            self._space = {name: self.projector(seed, wanted[0], name, model[name]) for name in names}
        return self._space


class SubspaceClient(ClientPart):
    """Trains and uploads in the subspace of an epoch; a subclass prepares the correction of each stack."""

    recordable = "stack"
    order = Order.PROJECTS
    facts = {"corrects drift"}
    needs = [local_sgd("a local step is plain SGD on the coordinates")]

    def __init__(self, spaces: Subspaces) -> None:
        self.spaces = spaces

    def validate(self, setup: Setup) -> None:
        self.weight_decay = probe_optimizer(setup.solver.optimizer).defaults["weight_decay"]
        if self.weight_decay and setup.solver.clip_norm is not None:
            raise ValueError(
                f"client.clip_norm={setup.solver.clip_norm} would lead {self.title} out of its subspace, since weight "
                "decay comes after it: set client.optimizer.weight_decay=0, or client.clip_norm=null."
            )

    def on_download(self, download: Download) -> None:
        self.space = self.spaces.space(download.seed, download.round, download.model, self.trained_names)

    @torch.no_grad()
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        stack = pl_module.clients
        for name, grad in stack.named_grads():
            if self.weight_decay:  # SGD adds it after the hooks: in comes its projection, out what SGD will add
                grad.add_(stack.leaves[name], alpha=self.weight_decay)
            z = self.space[name].project(grad).add_(stack.prepared[self][name][: stack.active])
            grad.copy_(self.space[name].lift(z))
            if self.weight_decay:
                grad.sub_(stack.leaves[name], alpha=self.weight_decay)

    def send(self, upload: Upload, own: Own, download: Download) -> None:
        for name in self.trained_names:  # one at a time, so that a stack's updates are never there twice
            upload.delta[name] = self.space[name].project(upload.delta[name])


class SubspaceServer(ServerPart):
    """Sends coordinates, and lifts their mean.

    The download has the model whole, for what lies outside the subspace; counted are the coordinates.
    """

    order = Order.PROJECTS
    facts = {"corrects drift"}
    needs = [
        plain_server("what lies outside the subspace must stay as it is", any_lr=True),
        mean_aggregator("what is uploaded are coordinates"),
    ]

    def __init__(self, spaces: Subspaces) -> None:
        self.spaces = spaces

    def on_broadcast(self, download: Download, round: Round) -> None:
        self.space = self.spaces.space(round.seed, round.index, download.model, self.trained_names)
        self.coordinates = {name: self.space[name].project(download.model[name]) for name in self.trained_names}
        download.packed |= {name: z.nbytes for name, z in self.coordinates.items()}

    def uploads(self, round: Round) -> dict[str, Params]:
        return {"delta": self.coordinates}

    def decode(self, name: str, sent: Tensor) -> Tensor:
        return self.space[name].lift(sent) if name in self.space else sent

    def on_aggregate_end(self, update: Params, round: Received) -> None:
        for name in self.trained_names:
            update[name] = torch.empty_like(round.start[name]).copy_(self.space[name].lift(update[name]))
