"""The mean of updates of bounded norm (Sun et al. 2019, "Can you really backdoor federated
learning?", Section 5).

With a fixed bound it streams. A bound in units of the cohort's median norm (ours) needs the whole
cohort.
"""

from collections.abc import Set
from dataclasses import replace
from math import inf

import torch
from torch import Tensor

from gcfed.aggregators.cohort import CohortRule
from gcfed.aggregators.mean import MeanAggregator
from gcfed.federated.parts import (
    Accumulator,
    Aggregator,
    Params,
    Round,
    Setup,
    Upload,
    client_norms,
    per_client,
)
from gcfed.utils.checked import Positive, checked


@checked
class NormClip(Aggregator):
    """``Δ = Σ_k Δ_k min(1, b / ‖Δ_k‖) / K``.

    Other messages and running statistics have the same bound separately.

    Args:
        max_norm: b. The server applies it, so it also holds for hostile clients.
            ``methods.clip_update`` is applied by honest clients only.
    """

    limit = inf

    def __init__(self, max_norm: Positive = 1.0) -> None:
        self.max_norm = max_norm
        self.no_steps: Set[str] = frozenset()

    def bind(self, setup: Setup) -> None:
        self.no_steps = setup.no_steps

    def new_sum(self, round: Round) -> "ClippedSum":
        return ClippedSum(self.max_norm, self.no_steps, round)

    def new_extra_sum(self, round: Round) -> "ClippedSum":
        return ClippedSum(self.max_norm, frozenset(), round)


class ClippedSum(Accumulator):
    """A round's mean of clipped updates.

    Args:
        separate: names of the entries that have the bound separately.
    """

    def __init__(self, max_norm: float, separate: Set[str], round: Round) -> None:
        self.max_norm = max_norm
        self.separate = separate
        self._mean = MeanAggregator().new_sum(round)

    def add(self, upload: Upload) -> None:
        steps: Params = {}
        others: Params = {}
        for name, t in upload.delta.items():
            group = others if name in self.separate else steps
            group[name] = t
        clipped = self._clipped(steps) | self._clipped(others)
        self._mean.add(replace(upload, delta=clipped))

    def _clipped(self, tensors: Params) -> Params:
        """Tensors of K clients, name → ``[K, *shape]``, each client's with a norm of at most b."""
        if not tensors:
            return {}
        norms_K = client_norms(list(tensors.values())).clamp(min=1e-30)
        scale_K = (self.max_norm / norms_K).clamp(max=1.0)  # 0 if the norm overflows
        return {name: t * per_client(scale_K, t) for name, t in tensors.items()}

    def reduce(self, like: Params) -> Params:
        return self._mean.reduce(like)


@checked
class MedianClip(CohortRule):
    """``Δ = Σ_k Δ_k min(1, c · median_j ‖Δ_j‖ / ‖Δ_k‖) / K``; ``factor`` is c."""

    def __init__(self, factor: Positive = 1.0) -> None:
        self.factor = factor

    def rule(self, updates_nD: Tensor) -> Tensor:
        norms = torch.linalg.vector_norm(updates_nD, dim=1, dtype=torch.float64).clamp(min=1e-30)
        scale = (self.factor * norms.quantile(0.5) / norms).clamp(max=1.0)
        return (scale.to(updates_nD.dtype) @ updates_nD) / len(updates_nD)
