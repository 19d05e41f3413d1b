"""The four other means of Table 8 equal a loop over entries."""

import numpy as np
import pytest
import torch
from harness import assert_near, random_federation, sgd, train_rounds, weights
from plain_reference import batches, cohort, convolutional, gradient, tensors

from gcfed.methods.projection import centralize_, input_axes
from reproductions.mean_shapes import MEAN_AXES, ShapedCentralization


def by_hand(grad, mean):
    """Each choice selects the entries whose mean is subtracted from an entry."""
    g = grad.numpy()
    if g.ndim == 1:
        return grad
    out = np.empty_like(g)
    for index in np.ndindex(*g.shape):
        keep = {
            "out_in": index[:2],
            "out_kernel": (index[0], slice(None), *index[2:]),
            "out_in_height": (*index[:2], slice(None), index[-1]),
            "in_kernel": (slice(None), *index[1:]),
        }[mean]
        out[index] = g[index] - g[keep if g.ndim == 4 else index[:1]].mean()
    return torch.from_numpy(out)


@pytest.mark.parametrize("mean", MEAN_AXES)
@pytest.mark.parametrize("groups", [0, 1, 2])
def test_the_projection_equals_the_loop_over_entries(mean, groups):
    """A transposed convolution is, group by group, a convolution with its first axes swapped."""
    stacked = torch.randn(3, 4, 6, 2, 3, dtype=torch.float64)
    expected = stacked.clone()
    for client in expected:
        for part in client.unflatten(0, (max(groups, 1), -1)):
            own = part.transpose(0, 1) if groups else part
            own.copy_(by_hand(own.clone(), mean))
    centralize_(stacked, 4, groups, MEAN_AXES[mean])
    assert_near(stacked, expected, 1e-14)


@pytest.mark.parametrize(
    ("shape", "mean"), [((4, 3, 1, 1), "out_in"), ((4, 1, 5, 5), "out_kernel")]
)
def test_a_mean_over_a_single_number_is_not_subtracted(shape, mean):
    grad = torch.randn(3, *shape)
    projected = grad.clone()
    centralize_(projected, 4, axes=MEAN_AXES[mean])
    assert torch.equal(projected, grad)


@pytest.mark.parametrize("mean", ["out_kernel", "in_kernel"])
def test_a_run_equals_the_plain_loop(mean):
    """Local GC before the last layer, Global GC in all layers."""
    data = random_federation()
    net = convolutional((2, 1, 3), (1, 2))
    lr = 0.1
    w = weights(net)

    def project(flat, local):
        parts = tensors(net, flat)
        kept = [
            t if local and name.startswith("4") else by_hand(t, mean) for name, t in parts.items()
        ]
        return torch.cat([t.flatten() for t in kept])

    for t in range(2):
        ends = []
        for k in cohort(data, t, 3):
            v = w
            for x, y in batches(data, sgd(), k, t):
                v = v - lr * project(gradient(net, v, x, y), True)
            ends.append(v)
        w = w + project(torch.stack(ends).mean(0) - w, False)
    method = ShapedCentralization(mean=mean, boundary="4")
    found = train_rounds(net, data, sgd(lr), rounds=2, methods=[method], k=2)
    assert_near(found, w, 1e-10)


def test_other_tensors_keep_the_papers_mean():
    method = ShapedCentralization(mean="in_kernel", boundary="fc2")
    for part in (method.local_gc, method.global_gc):
        assert [part.mean_axes(n) for n in (1, 2, 3)] == [input_axes(n) for n in (1, 2, 3)]
        assert part.mean_axes(4) == (-4,)
