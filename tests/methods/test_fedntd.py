"""FedNTD: the divergence as the paper has it, over the classes that a sample is not."""

import pytest
import torch
import torch.nn.functional as F
from harness import make_net, make_setup, random_federation, train_rounds
from plain_clients import ROUNDS, SOLVER, Bytes, Net, federation, layers, plain_rounds

from gcfed.methods.fedntd import FedNTD


def not_true_divergence(student, teacher, label, tau):
    """One sample: Σ_{c≠y} q_c log(q_c / p_c), with both softmaxes over the classes other than y."""
    others = [c for c in range(len(student)) if c != label]
    p, q = (torch.exp(z[others] / tau) for z in (student, teacher))
    p, q = p / p.sum(), q / q.sum()
    return (q * torch.log(q / p)).sum()


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("sequences", [False, True])
@pytest.mark.parametrize(("beta", "tau", "weight"), [(1.0, 1.0, 1.0), (0.3, 2.0, 0.7)])
def test_rounds_equal_an_independent_loop(k, sequences, beta, tau, weight):
    data = federation(sequences)

    def objective(w, start, client, x, y, previous):
        student, teacher = layers(w, x)[-1].flatten(0, -2), layers(start, x)[-1].flatten(0, -2)
        y = y.flatten()
        samples = zip(student, teacher, y.tolist(), strict=True)
        terms = [not_true_divergence(s, t, c, tau) for s, t, c in samples if c >= 0]
        return weight * F.cross_entropy(student, y) + beta * tau**2 * sum(terms) / len(terms)

    expected = plain_rounds(data, objective)
    got = train_rounds(Net(), data, SOLVER, rounds=ROUNDS, methods=[FedNTD(beta, tau, weight), Bytes()], k=k)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("classes", "said"), [(2, 1), (3, 0)])
def test_of_two_classes_nothing_is_to_distil_and_it_says_so(caplog, classes, said):
    data = random_federation(sizes=(1,) * 5)
    data.num_classes = classes
    FedNTD().validate(make_setup(make_net(), data=data))
    assert caplog.text.count("FedNTD adds nothing") == said
