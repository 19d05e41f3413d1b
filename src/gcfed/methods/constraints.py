"""The two quadratic programs of FedGC: the vector nearest to another whose inner products reach a margin.

Both are solved through their duals (A.1, A.2), of one multiplier and of one a client, however long a gradient is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import quadprog
import torch
from torch import Tensor

from gcfed.federated.exact import ExactSum, means
from gcfed.federated.round import Round
from gcfed.federated.stack import Params, per_client

RIDGE = 1e-10  # added to a unit diagonal: GGᵀ is singular where gradients depend on each other
COLUMNS = 2**20  # of G at a time: in float64, and in one message to the other processes


def constrain_(deltas_K: Sequence[Tensor], moves: Sequence[Tensor], margin: float, ridge: float = 0.0) -> Tensor:
    """CGC: moves each client's Δ_k in place to the nearest with ⟨Δ_k, move⟩ ≥ margin, over all these tensors together.

    Args:
        deltas_K: Δ_k, ``[K, *shape]`` each.
        moves: ``[*shape]`` each.
        ridge: added to ‖move‖²: Δ_k then stops short of the margin, and the more so the shorter ``move`` is.

    Returns:
        v ≥ 0 of ``Δ_k + v · move``, the multiplier of eq. 7, ``[K]``; 0 where Δ_k stays, bit for bit, as it does where
        ``move`` is zero.
    """
    pairs = list(zip(deltas_K, moves, strict=True))
    inner_K = torch.stack([(t * move).reshape(len(t), -1).sum(1, dtype=torch.float64) for t, move in pairs]).sum(0)
    square = torch.stack([move.square().sum(dtype=torch.float64) for move in moves]).sum()
    v_K = torch.where(square > 0, (margin - inner_K).clamp(min=0) / (square + ridge), 0.0)
    for t, move in pairs:
        t.addcmul_(per_client(v_K.to(t.dtype), t), move)
    return v_K


def multipliers(gram: np.ndarray, inner: np.ndarray, margin: float) -> np.ndarray | None:
    """SGC: λ ≥ 0, ``[K]``, of ``z = ḡ + Gᵀλ``, the nearest to ḡ with ``Gz ≥ margin``; None where there is no such z.

    Solves the dual, eq. 10, for λ_k ‖g_k‖, so that a short gradient weighs as much in the numerics as a long one.

    Args:
        gram: GGᵀ, ``[K, K]``.
        inner: Gḡ, ``[K]``.
    """
    if (inner >= margin).all():
        return np.zeros(len(inner))
    norms = np.sqrt(gram.diagonal())
    norms = np.where(norms > 0, norms, 1.0)
    cosines, lacking = gram / np.outer(norms, norms), (margin - inner) / norms
    identity = np.eye(len(inner))
    try:
        scaled, *_, zeros = quadprog.solve_qp(cosines + RIDGE * identity, lacking, identity, np.zeros(len(inner)))
    except ValueError:
        return None
    scaled[zeros - 1] = 0.0  # where λ_k ≥ 0 binds; quadprog counts from 1
    # Where no z exists, some α ≥ 0 with Σ α_k = 1 has Gᵀα = 0, so Σ α_k (margin − ⟨z, g_k⟩) = margin for every z: one
    # client lacks the whole margin. The ridge makes a solution lack but a trace of it.
    missing = lacking - cosines @ scaled
    solved = (missing <= margin / norms / 2 + 1e-9 * np.abs(lacking).max()).all()  # not so where it is NaN
    return scaled / norms if solved else None


@dataclass
class Part:
    """What one stack of clients sent.

    Attributes:
        rows: places of the clients in the cohort, ``[K]``.
        finite: which of them sent finite numbers, ``[K]``.
        delta: their updates, name → ``[K, *shape]``, zeros where not finite.
    """

    rows: Tensor
    finite: Tensor
    delta: Params


def products(parts: Sequence[Part], update: Params, round: Round) -> Tensor:
    """``[|S|, |S| + 2]`` in float64, alike on every process: ⟨Δ_k, Δ_j⟩, then ⟨Δ_k, Δ⟩, then 1 where k was finite.

    Args:
        parts: those of this process; the others' meet them some columns at a time.
        update: Δ, name → ``[*shape]``.
    """
    size, like = len(round.asked), next(iter(update.values()))
    table = torch.zeros(size, size + 2, dtype=torch.float64, device=like.device)
    for part in parts:
        table[part.rows, -1] = part.finite.double()
    (table,) = round.reduce([table])
    for name, mean in update.items():
        own = [(part.rows, part.delta[name].reshape(len(part.rows), -1).split(COLUMNS, dim=1)) for part in parts]
        for i, columns in enumerate(mean.reshape(-1).split(COLUMNS)):
            g = mean.new_zeros(size, len(columns))
            for rows, blocks in own:
                g[rows] = blocks[i]
            (g,) = round.reduce([g])
            both = torch.cat([g, columns.unsqueeze(0)]).double()
            table[:, :-1] += both[:-1] @ both.T
    return table


def add_weighted_(update: Params, parts: Sequence[Part], weights: Tensor, round: Round) -> None:
    """``Δ ← Δ + Σ_k weight_k Δ_k`` in place, over the clients of all processes; ``weights`` is ``[|S|]``."""
    sums = {name: ExactSum(mean) for name, mean in update.items()}
    for part in parts:
        weights_K = weights.to(part.rows.device)[part.rows]
        for name, total in sums.items():
            delta_K = part.delta[name]
            total.add(delta_K * per_client(weights_K.to(delta_K.dtype), delta_K), torch.ones_like(weights_K))
    torch._foreach_add_(list(update.values()), means(list(sums.values()), round))
