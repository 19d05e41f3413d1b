"""The point with the least sum of distances to all updates: RFA (Pillutla et al., IEEE TSP 2022,
Algorithm 2).

The smoothed Weiszfeld algorithm, which starts at the coordinate-wise median: no single client can
move that far. There are two differences. The paper weights clients by their samples, about which a
hostile client could lie; here all clients have equal weights. The paper recommends about three
iterations; here there are ten.
"""

import torch
from torch import Tensor

from gcfed.aggregators.coordinates import Median
from gcfed.utils.checked import Count, Positive, checked


@checked
class GeometricMedian(Median):
    """``v ← Σ_k β_k Δ_k / Σ_k β_k`` with ``β_k = 1 / max(ν, ‖v − Δ_k‖)``."""

    def __init__(self, iterations: Count = 10, nu: Positive = 1e-6) -> None:
        self.iterations = iterations
        self.nu = nu

    def rule(self, updates_nD: Tensor) -> Tensor:
        point = super().rule(updates_nD)
        for _ in range(self.iterations):
            distances = torch.cdist(
                updates_nD, point[None], compute_mode="donot_use_mm_for_euclid_dist"
            )[:, 0]
            weights = 1 / distances.clamp(min=self.nu)
            point = (weights / weights.sum()) @ updates_nD
        return point
