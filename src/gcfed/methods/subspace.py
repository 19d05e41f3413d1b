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

from gcfed.federated.aggregate import Upload
from gcfed.federated.method import FederatedMethod, Setup
from gcfed.federated.round import Order, Round
from gcfed.federated.stack import ClientStack, Params, nbytes
from gcfed.methods.requirements import local_sgd, mean_aggregator, plain_server
from gcfed.optim.partial import probe_optimizer
from gcfed.utils.number import number
from gcfed.utils.rng import torch_seed


class Projector:
    """Coordinates of one tensor, or of a stack of such tensors with a leading client axis.

    Args:
        shape: of the tensor, in logical order whatever its memory format.
        basis: P, orthonormal, ``[d, r]``; None: the tensor is its own coordinates.
    """

    def __init__(self, shape: Sequence[int], basis: Tensor | None) -> None:
        self.shape, self.basis = tuple(shape), basis
        self.by_rows = basis is not None and is_wide(shape)

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


def is_wide(shape: Sequence[int]) -> bool:
    """Whether a weight has more inputs than outputs, or as many."""
    return prod(shape[1:]) >= shape[0]


def random_basis(seed: int, epoch: int, name: str, d: int, r: int, like: Tensor) -> Tensor:
    """A uniformly random orthonormal P, ``[d, r]``; its numbers come from the CPU, and so are the same everywhere."""
    random = torch.Generator().manual_seed(torch_seed(seed, f"projector of {name}", epoch))
    gaussian = torch.randn(d, r, generator=random, dtype=torch.float64)
    q, upper = torch.linalg.qr(gaussian.to(like.device, like.dtype))
    return q * upper.diagonal().sign()  # QR leaves the signs open


class SubspaceMethod(FederatedMethod):
    """Lets clients train in the subspace of an epoch; a subclass sets ``_correction`` for each stack.

    Args:
        ratio: r/d ∈ (0, 1], of each tensor; r is rounded, and at least 1.
        refresh: T_p, rounds from one draw of the projectors to the next.

    Raises:
        ValueError: an argument outside its range; at ``validate``, whatever would leave the subspace.
    """

    graphable = True
    order = Order.PROJECTS
    corrects_drift = True
    _key: str
    _title: str

    def __init__(self, *, ratio: float = 0.2, refresh: int = 1) -> None:
        self.ratio = number(f"{self._key}.ratio", ratio, 0, 1, above=True)
        self.refresh = number(f"{self._key}.refresh", refresh, 1, whole=True)
        self._epoch: tuple[Any, ...] | None = None
        self._correction: Params = {}

    def validate(self, setup: Setup) -> None:
        local_sgd(setup, self._title, "a local step is plain SGD on the coordinates", momentum=False)
        plain_server(setup, self._title, "what lies outside the subspace must stay as it is", any_lr=True)
        mean_aggregator(setup, self._title, "what is uploaded are coordinates")
        self.weight_decay = probe_optimizer(setup.solver.optimizer).defaults["weight_decay"]
        if self.weight_decay and setup.solver.clip_norm is not None:
            raise ValueError(
                f"client.clip_norm={setup.solver.clip_norm} would lead {self._title} out of its subspace, since weight "
                "decay comes after it: set client.optimizer.weight_decay=0, or client.clip_norm=null."
            )
        self.names = [name for name, p in setup.module.net.named_parameters() if p.requires_grad]
        self._epoch = None

    def projector(self, name: str, epoch: int, round: Round) -> Projector:
        """That of one tensor in any epoch, past ones too."""
        start = round.start[name]
        if start.dim() < 2:
            return Projector(start.shape, None)
        d = prod(start.shape[1:]) if is_wide(start.shape) else start.shape[0]
        r = max(1, int(d * self.ratio + 0.5))
        return Projector(start.shape, random_basis(round.seed, epoch, name, d, r, start))

    def on_broadcast(self, round: Round) -> None:
        epoch = (round.index // self.refresh, round.seed)
        if epoch != self._epoch:
            self._epoch, self.space = epoch, {}  # the old ones go before the new ones come
            self.space = {name: self.projector(name, epoch[0], round) for name in self.names}
        start = {name: round.start[name] for name in self.names}
        self.coordinates = {name: self.space[name].project(t) for name, t in start.items()}
        round.down_bytes += round.receivers * (nbytes(self.coordinates) - nbytes(start))

    def uploads(self, round: Round) -> dict[str, Params]:
        return {"delta": self.coordinates}

    def decode(self, name: str, sent: Tensor) -> Tensor:
        return self.space[name].lift(sent) if name in self.space else sent

    @torch.no_grad()
    def on_after_backward(self, trainer, pl_module) -> None:  # type: ignore[no-untyped-def]
        stack = pl_module.clients
        for name, grad in stack.named_grads():
            if self.weight_decay:  # SGD adds it after the hooks: in comes its projection, out what SGD will add
                grad.add_(stack.leaves[name], alpha=self.weight_decay)
            z = self.space[name].project(grad).add_(self._correction[name][: stack.active])
            grad.copy_(self.space[name].lift(z))
            if self.weight_decay:
                grad.sub_(stack.leaves[name], alpha=self.weight_decay)

    def on_clients_end(self, stack: ClientStack, round: Round) -> None:
        self._correction = {}

    def on_upload(self, upload: Upload, round: Round) -> None:
        for name in self.names:  # one at a time, so that a stack's updates are never there twice
            upload.delta[name] = self.space[name].project(upload.delta[name])
        upload.bytes_per_client += nbytes(self.coordinates) - nbytes({name: round.start[name] for name in self.names})

    def on_aggregate_end(self, update: Params, round: Round) -> None:
        for name in self.names:
            update[name] = torch.empty_like(round.start[name]).copy_(self.space[name].lift(update[name]))
