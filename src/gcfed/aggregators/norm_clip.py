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
from gcfed.federated.parts import Params, Round, Setup, Upload, client_norms, per_client
from gcfed.utils.checked import Positive, checked


@checked
class NormClip:
    """``Δ = Σ_k Δ_k min(1, b / ‖Δ_k‖) / K``.

    Other messages and running statistics have the same bound separately.

    Args:
        max_norm: b. The server applies it, so it also holds for hostile clients.
            ``methods.clip_update`` is applied by honest clients only.
    """

    _no_steps: Set[str] = frozenset()
    limit = inf

    def __init__(self, max_norm: Positive = 1.0) -> None:
        self.max_norm = max_norm
        self._mean = MeanAggregator()

    def validate(self, setup: Setup) -> None:
        self._no_steps = setup.no_steps

    def for_extra(self) -> "NormClip":
        return NormClip(self.max_norm)

    def add(self, upload: Upload, round: Round) -> None:
        """Adds the updates of K clients, except those that are not finite."""
        clipped: Params = {}
        for separate in (False, True):
            part = {
                name: t for name, t in upload.delta.items() if (name in self._no_steps) == separate
            }
            if part:
                norms = client_norms(list(part.values())).clamp(min=1e-30)
                scale = (self.max_norm / norms).clamp(max=1.0)  # 0 if the norm overflows
                clipped |= {name: t * per_client(scale, t) for name, t in part.items()}
        self._mean.add(replace(upload, delta=clipped), round)

    def reduce(self, round: Round, like: Params) -> Params:
        return self._mean.reduce(round, like)


@checked
class MedianClip(CohortRule):
    """``Δ = Σ_k Δ_k min(1, c · median_j ‖Δ_j‖ / ‖Δ_k‖) / K``; ``factor`` is c."""

    def __init__(self, factor: Positive = 1.0) -> None:
        self.factor = factor

    def rule(self, updates_nD: Tensor) -> Tensor:
        norms = torch.linalg.vector_norm(updates_nD, dim=1, dtype=torch.float64).clamp(min=1e-30)
        scale = (self.factor * norms.quantile(0.5) / norms).clamp(max=1.0)
        return (scale.to(updates_nD.dtype) @ updates_nD) / len(updates_nD)
