"""FedDecorr: the Gram identity equals the correlation matrix, for the paper's loss and the authors'
loss.
"""

import pytest
import torch
import torch.nn.functional as F
from plain_clients import check, federation, layers

from gcfed.federated.network.tap import Output
from gcfed.methods.objective.feddecorr import FedDecorr
from gcfed.tasks import Batch


def decorrelation(features, scale):
    """The loss from the d × d matrix. The paper's diagonal is a constant, which is left out."""
    n, d = features.shape
    if n == 1:
        return features.sum() * 0
    z = (features - features.mean(0)) / torch.sqrt(features.var(0) + 1e-8)
    off_diagonal = 1 - torch.eye(d, dtype=z.dtype)
    if scale == "paper":
        return ((z.T @ z / (n - 1) * off_diagonal) ** 2).sum() / d**2
    return ((z.T @ z * off_diagonal) ** 2).sum() / (d * (d - 1)) / n


@pytest.mark.parametrize(("sequences", "scale"), [(False, "paper"), (True, "authors")])
def test_rounds_equal_an_independent_loop(sequences, scale):
    def objective(w, start, client, x, y, previous):
        _, features, logits = layers(w, x)
        return F.cross_entropy(logits.flatten(0, -2), y.flatten()) + 0.2 * decorrelation(
            features.flatten(1), scale
        )

    check(FedDecorr(0.2, scale), federation(sequences), objective)


def term(features_KBF, rows=None, scale="paper"):
    y = torch.zeros(features_KBF.shape[:2])
    batch = Batch(features_KBF, y, rows, y.sum(1), rows)
    learned = features_KBF.requires_grad_() if features_KBF.is_leaf else features_KBF
    return FedDecorr(1.0, scale).local_loss(None, batch, Output(learned, learned))


@pytest.mark.parametrize("scale", ["paper", "authors"])
def test_padding_constant_features_single_features_and_single_samples(scale):
    """Padding and single samples add nothing, a constant feature is uncorrelated, and all gradients
    are finite.
    """
    torch.manual_seed(0)
    x = torch.randn(3, 6, 5, dtype=torch.float64)
    x[..., 3] = 0.7
    rows = torch.arange(6) < torch.tensor([6, 4, 1])[:, None]
    x.requires_grad_()
    got = term(x, rows, scale)
    got.sum().backward()
    for k, n in enumerate((6, 4, 1)):
        torch.testing.assert_close(got[k], decorrelation(x[k, :n], scale))
        assert not x.grad[k, n:].any()
    assert got[2] == 0
    assert not x.grad[2].any()
    assert x.grad.isfinite().all()
    assert x.grad[:2].any()
    assert term(torch.randn(2, 6, 1, dtype=torch.float64), scale=scale).abs().max() < 1e-9


def test_mixed_precision_does_not_round_the_correlations():
    x = torch.randn(2, 30, 64)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = term(x)
    torch.testing.assert_close(mixed.double(), term(x.double()), rtol=1e-3, atol=0)
