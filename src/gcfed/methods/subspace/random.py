"""Training in a random subspace, which server and clients draw from the same seed.

Used by SSF and FedSub.

Every trained weight of two or more axes, as a matrix ``[out, in·kh·kw]``, has a P ``[d, r]`` with
PᵀP = I for the larger of its two axes, of length d. Its coordinates are W P, ``[out, r]``, or PᵀW,
``[r, in·kh·kw]``. Vectors and buffers are sent whole. P is the Q of a Gaussian matrix drawn from
(seed, layer, epoch) and is never sent; an epoch is ``refresh`` rounds. With Π = PPᵀ:

    down         z₀ = Pᵀw
    local step   z ← z − η (Pᵀ∇F_k(w_k) + correction),   w_k = Pz + (I − Π)w
    up           z_τ − z₀
    server       w ← w + γ P mean(z_τ − z₀), which leaves (I − Π)w as it is (backfill)

γ is ``server.lr``.

Clients make steps on the model's weights: P lifts the projected gradient back, and torch's SGD then
does the same iteration. Weight decay is part of ∇F_k. Terms of other methods and Local GC are
projected too. Global GC acts on the lifted update.

The papers do not say how a client that missed rounds gets (I − Π)w: it needs the coordinates of
each missed round. As in the papers, bytes are counted only for rounds in which a client takes part.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from gcfed.federated.parts import (
    ClientPart,
    ClientStates,
    Download,
    Fact,
    Order,
    Params,
    Received,
    Round,
    ServerPart,
    Setup,
    Upload,
)
from gcfed.methods.requirements import local_sgd, mean_aggregator, plain_server
from gcfed.utils.refusal import Refusal
from gcfed.utils.rng import torch_seed


class Projector:
    """Coordinates of one tensor ``[*shape]``, or of a stack of such tensors with a leading client
    axis.

    ``basis`` is P, orthonormal, ``[d, r]``; None: the tensor is its own coordinates.
    """

    def __init__(self, shape: Sequence[int], basis: Tensor | None) -> None:
        self.shape = tuple(shape)
        self.basis = basis
        # at least as many inputs as outputs
        self.by_rows = basis is not None and prod(shape[1:]) >= shape[0]

    def project(self, tensor: Tensor) -> Tensor:
        """``[…, *shape]`` → ``[…, out, r]`` or ``[…, r, in·kh·kw]``."""
        if self.basis is None:
            return tensor
        matrix = tensor.flatten(tensor.dim() - len(self.shape) + 1)
        if self.by_rows:
            return matrix @ self.basis
        return self.basis.mT @ matrix

    def lift(self, z: Tensor) -> Tensor:
        """The tensor in the subspace that has these coordinates."""
        if self.basis is None:
            return z
        matrix = z @ self.basis.mT if self.by_rows else self.basis @ z
        return matrix.unflatten(-1, self.shape[1:])


def random_basis(seed: int, epoch: int, name: str, d: int, r: int, like: Tensor) -> Tensor:
    """A uniformly random orthonormal P, ``[d, r]``; drawn on the CPU, so it is the same on every
    device.
    """
    random = torch.Generator().manual_seed(torch_seed(seed, f"projector of {name}", epoch))
    gaussian = torch.randn(d, r, generator=random, dtype=torch.float64)
    orthonormal, upper = torch.linalg.qr(gaussian.to(like.device, like.dtype))
    return orthonormal * upper.diagonal().sign()  # QR does not fix the signs


class Subspaces:
    """The projectors of a run, which server and clients draw identically.

    Args:
        ratio: r/d, of each tensor; r is rounded, and at least 1.
        refresh: T_p, rounds from one draw of the projectors to the next.
    """

    def __init__(self, ratio: float, refresh: int) -> None:
        self.ratio = ratio
        self.refresh = refresh
        self._drawn: object = None  # for what ``_space`` was drawn
        self._space: dict[str, Projector] = {}

    def projector(self, seed: int, epoch: int, name: str, like: Tensor) -> Projector:
        """The projector of one tensor in any epoch, also a past one."""
        if like.dim() < 2:
            return Projector(like.shape, None)
        d = max(prod(like.shape[1:]), like.shape[0])
        r = max(1, int(d * self.ratio + 0.5))
        return Projector(like.shape, random_basis(seed, epoch, name, d, r, like))

    def space(
        self, seed: int, round_index: int, model: Params, names: Sequence[str]
    ) -> dict[str, Projector]:
        """The projectors of a round, drawn once per epoch at the first call."""
        epoch = round_index // self.refresh
        drawn = epoch, seed, {name: model[name].shape for name in names}
        if self._drawn != drawn:
            self._drawn = drawn
            self._space = {}  # frees the old projectors first
            self._space = {name: self.projector(seed, epoch, name, model[name]) for name in names}
        return self._space


class SubspaceClient(ClientPart):
    """Trains and uploads in the subspace of an epoch; a subclass prepares the correction of each
    stack.
    """

    recordable = "stack"
    order = Order.PROJECTS
    facts = {Fact.CORRECTS_DRIFT, Fact.ONE_ROUND}
    needs = [local_sgd("a local step is plain SGD on the coordinates")]

    def __init__(self, spaces: Subspaces) -> None:
        self.spaces = spaces

    def validate(self, setup: Setup) -> None:
        weight_decay = setup.local_optimizer_probe.defaults["weight_decay"]
        if weight_decay and setup.solver.clip_norm is not None:
            raise Refusal(
                f"client.clip_norm={setup.solver.clip_norm} would move {self.title} out of its"
                " subspace: weight decay is added after clipping. Set"
                " client.optimizer.weight_decay=0."
            )

    def bind(self, setup: Setup) -> None:
        self.weight_decay = setup.local_optimizer_probe.defaults["weight_decay"]

    def on_download(self, download: Download) -> None:
        self.space = self.spaces.space(
            download.seed, download.round_index, download.broadcast_model, self.trained_names
        )

    @torch.no_grad()
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        stack = pl_module.clients
        for name, grad in stack.named_grads():
            # SGD adds it after the hooks: add its projection, subtract what SGD will add
            if self.weight_decay:
                grad.add_(stack.leaves[name], alpha=self.weight_decay)
            correction = stack.prepared[self][name][: stack.active]
            step = self.space[name].project(grad).add_(correction)
            grad.copy_(self.space[name].lift(step))
            if self.weight_decay:
                grad.sub_(stack.leaves[name], alpha=self.weight_decay)

    def send(self, upload: Upload, own: ClientStates, download: Download) -> None:
        # one at a time, to avoid a second copy of a stack's updates
        for name in self.trained_names:
            upload.delta[name] = self.space[name].project(upload.delta[name])


class SubspaceServer(ServerPart):
    """Sends coordinates, and lifts their mean.

    The download has the whole model, for the part outside the subspace. Only the coordinates are
    counted.
    """

    order = Order.PROJECTS
    facts = {Fact.CORRECTS_DRIFT, Fact.EDITS_MEAN}
    needs = [
        plain_server("the part outside the subspace must not change", any_lr=True),
        mean_aggregator("clients upload coordinates"),
    ]

    def __init__(self, spaces: Subspaces) -> None:
        self.spaces = spaces

    def on_broadcast(self, download: Download, round: Round) -> None:
        self.space = self.spaces.space(
            round.seed, round.index, download.broadcast_model, self.trained_names
        )
        self.coordinates = {
            name: self.space[name].project(download.broadcast_model[name])
            for name in self.trained_names
        }
        download.sent_bytes |= {name: z.nbytes for name, z in self.coordinates.items()}

    def uploads(self, round: Round) -> dict[str, Params]:
        return {"delta": self.coordinates}

    def decode(self, name: str, sent: Tensor) -> Tensor:
        return self.space[name].lift(sent) if name in self.space else sent

    def on_aggregate_end(self, update: Params, round: Received) -> None:
        for name in self.trained_names:
            lifted = self.space[name].lift(update[name])
            update[name] = torch.empty_like(round.broadcast_model[name]).copy_(lifted)
