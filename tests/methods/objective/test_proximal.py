"""FedProx: autograd computes the gradient of μ/2 ‖w − w₀‖²."""

import torch.nn.functional as F
from plain_clients import check, federation, layers

from gcfed.methods.objective.proximal import Proximal


def test_rounds_equal_an_independent_loop():
    def objective(w, start, client, x, y, previous):
        distance = sum((p - p0).square().sum() for p, p0 in zip(w, start, strict=True))
        return F.cross_entropy(layers(w, x)[-1], y) + 0.7 / 2 * distance

    check(Proximal(0.7), federation(), objective)
