"""The moves of FedLESAM's and FedWMSAM's published code equal plain loops over flat vectors."""

import pytest
import torch
from harness import assert_near, make_net, sgd, train_rounds, weights
from plain_reference import batches, broken, cohort, fedwmsam, gradient

from gcfed.methods.sharpness.fedwmsam import FedWMSAM
from gcfed.methods.sharpness.sam import Sam
from reproductions.constant_moves import ConstantLESAM, ConstantWMSAM

RHO = 0.3
LR = 0.1
ROUNDS = 4


def constant(net, direction):
    """Fills tensor i with entry i of the flat direction, scaled to a sum of ρ."""
    sizes = [p.numel() for p in net.parameters()]
    first = direction[: len(sizes)]
    total = first.abs().sum()
    if total == 0:
        return torch.zeros_like(direction)
    return torch.cat([(RHO * x / total).expand(n) for x, n in zip(first, sizes, strict=True)])


def lesam_by_hand(net, data):
    w = weights(net)
    last_step = torch.zeros_like(w)
    for t in range(ROUNDS):
        ends = []
        for k in cohort(data, t, 3):
            v = w
            shift = constant(net, -last_step)
            for x, y in batches(data, sgd(), k, t):
                v = v - LR * gradient(net, v + shift, x, y)
            ends.append(v)
        new = torch.stack(ends).mean(0)
        last_step = new - w
        w = new
    return w


@pytest.mark.parametrize("k", [1, 2])
def test_fedlesams_code_moves_along_the_servers_last_step(federation, k):
    found = train_rounds(
        make_net(), federation, sgd(lr=LR), rounds=ROUNDS, methods=[ConstantLESAM(RHO)], k=k
    )
    assert_near(found, lesam_by_hand(make_net(), federation), 1e-10)
    run = {"rounds": ROUNDS, "k": k}
    paper = Sam(RHO, direction="last_update")
    other = train_rounds(make_net(), federation, sgd(lr=LR), methods=[paper], **run)
    assert not torch.allclose(found, other, rtol=0, atol=1e-4)


def test_fedwmsams_code_moves_against_the_papers_direction(federation):
    method = ConstantWMSAM(RHO, alpha=0.3)
    data = broken(federation, 3)
    alpha = 0.3
    net = make_net()
    expected, last, _ = fedwmsam(
        net, data, alpha, LR, 3, ROUNDS, lambda ahead: constant(net, -ahead)
    )
    run = {"rounds": ROUNDS, "k": 2}
    found = train_rounds(make_net(), data, sgd(lr=LR), methods=[method], **run)
    assert_near(found, expected, 1e-10)
    change = method.parts[-1].server_state("alpha", {})["change"]
    assert alpha + change.item() == pytest.approx(last, abs=1e-12)
    paper = FedWMSAM(RHO, alpha=alpha)
    other = train_rounds(make_net(), data, sgd(lr=LR), methods=[paper], **run)
    assert not torch.allclose(found, other, rtol=0, atol=1e-4)
