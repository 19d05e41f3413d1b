"""FedNTD: the paper's divergence over the classes other than a sample's own."""

import pytest
import torch
import torch.nn.functional as F
from plain_clients import check, federation, layers

from gcfed.methods.objective.fedntd import FedNTD


def not_true_divergence(student, teacher, label, tau):
    """One sample: Σ_{c≠y} q_c log(q_c / p_c), with both softmaxes over the classes other than y."""
    others = [c for c in range(len(student)) if c != label]
    p, q = (torch.exp(z[others] / tau) for z in (student, teacher))
    p = p / p.sum()
    q = q / q.sum()
    return (q * torch.log(q / p)).sum()


@pytest.mark.parametrize("sequences", [False, True])
def test_rounds_equal_an_independent_loop(sequences):
    beta = 0.3
    tau = 2.0
    weight = 0.7

    def objective(w, start, client, x, y, previous):
        student = layers(w, x)[-1].flatten(0, -2)
        teacher = layers(start, x)[-1].flatten(0, -2)
        y = y.flatten()
        samples = zip(student, teacher, y.tolist(), strict=True)
        terms = [not_true_divergence(s, t, c, tau) for s, t, c in samples if c >= 0]
        return weight * F.cross_entropy(student, y) + beta * tau**2 * sum(terms) / len(terms)

    check(FedNTD(beta, tau, weight), federation(sequences), objective)
