"""FedMuon equals a plain loop over matrices.

Its iteration approximates the product of singular vectors.
"""

import pytest
import torch
from harness import assert_near, make_net, sgd, train_rounds, weights
from plain_reference import batches, cohort, convolutional, gradient, tensors

from gcfed.methods.centralization import LocalGC
from gcfed.methods.momentum.fedmuon import FedMuon, orthogonal


def newton_schulz(m):
    """Keller Jordan's iteration for one matrix, written as its polynomial of singular values."""
    if m.dim() < 2:
        return m
    u, s, vt = torch.linalg.svd(m.flatten(1), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    return (u * s @ vt).view(m.shape)


def as_image():
    """Its convolution has a weight of four axes, which is a matrix of its three outputs."""
    return convolutional((1, 2, 3), 2)


@pytest.mark.parametrize(
    ("make_net", "gc"), [(make_net, False), (make_net, True), (as_image, False)]
)
def test_it_equals_the_plain_loop(federation, make_net, gc):
    """Local GC centralizes the gradients before they become orthogonal steps."""
    beta = 0.9
    alpha = 0.3
    lr = 0.1
    net = make_net()
    w = weights(net)
    direction = 0.0
    mean_momentum = torch.zeros_like(w)
    for t in range(2):
        ends = []
        momenta = []
        steps = []
        for k in cohort(federation, t, 3):
            v = w
            m = mean_momentum
            for x, y in batches(federation, sgd(), k, t):
                g = tensors(net, gradient(net, v, x, y)).values()
                g = [t - t.mean(1, keepdim=True) if gc and t.dim() > 1 else t for t in g]
                m = beta * m + torch.cat([t.flatten() for t in g])
                step = torch.cat([newton_schulz(one).flatten() for one in tensors(net, m).values()])
                steps.append((1 - alpha) * step + alpha * direction)
                v = v - lr * steps[-1]
            ends.append(v)
            momenta.append(m)
        w = sum(ends) / 3
        mean_momentum = sum(momenta) / 3
        direction = sum(steps) / len(steps)
    methods = [FedMuon(beta, alpha=alpha), *([LocalGC()] if gc else [])]
    found = train_rounds(make_net(), federation, sgd(lr), rounds=2, methods=methods, k=2)
    assert_near(found, w, 1e-9)


def test_the_iteration_is_near_the_product_of_singular_vectors():
    m = 1e-6 * torch.randn(
        3, 8, 4, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    s = torch.linalg.svdvals(orthogonal(m).flatten(2))
    assert ((s > 0.6) & (s < 1.3)).all()  # the iteration does not aim at 1 exactly
    tall = m.flatten(2).mT
    torch.testing.assert_close(orthogonal(tall), orthogonal(tall.mT).mT)
