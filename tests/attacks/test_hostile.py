"""Which clients are hostile, and what they send."""

from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import refuses
from harness import make_download, make_upload

from gcfed.attacks.byzantine import Scale, hostile
from gcfed.attacks.colluding import ALIE, IPM, z_max
from gcfed.participation.sampling import PoissonSampler

N = 10


def attacked(attack, clients=range(N), seed=1):
    """The updates of these clients before the attack, their upload after it, and a mask of the
    hostile clients.
    """
    clients = np.array(clients)
    g = torch.Generator().manual_seed(3)
    delta = torch.randn(N, 4, 2, generator=g).double()[clients]
    upload = make_upload({"w": delta.clone()}, np.ones(len(clients)))
    upload.send("more", {"v": delta.clone() * 3})
    upload.clients = clients
    download = make_download({"w": torch.zeros(4, 2).double()}, cohort=range(N))
    download.seed = seed
    attack.num_clients = N
    attack.send(upload, {}, download)
    return delta, upload, np.isin(clients, hostile(attack.clients, N, seed))


@pytest.mark.parametrize("factor", [-4.0, 1e10])
def test_scaled_clients_multiply_all_that_they_send(factor):
    delta, upload, hostile = attacked(Scale(0.3, factor=factor))
    assert hostile.sum() == 3
    for sent, honest in ((upload.delta["w"], delta), (upload.extra["more"]["v"], delta * 3)):
        torch.testing.assert_close(sent[hostile], honest[hostile] * factor)
        assert torch.equal(sent[~hostile], honest[~hostile])


def test_colluding_clients_send_a_function_of_the_honest_updates():
    for z, expected_z in ((1.5, 1.5), (None, z_max(10, 3))):
        delta, upload, hostile = attacked(ALIE(0.3, z=z))
        honest = delta[~hostile].numpy()
        expected = torch.from_numpy(honest.mean(0) - expected_z * honest.std(0)).expand(3, 4, 2)
        torch.testing.assert_close(upload.delta["w"][hostile], expected)
        torch.testing.assert_close(upload.extra["more"]["v"][hostile], expected * 3)
        assert torch.equal(upload.delta["w"][~hostile], delta[~hostile])
    upload.finite[hostile] = False  # their training diverged, but what they send is finite
    attack = IPM(0.3)
    attack.num_clients = N
    attack.send(upload, {}, make_download({}, cohort=range(N)))
    torch.testing.assert_close(
        upload.delta["w"][hostile], (-0.5 * delta[~hostile].mean(0)).expand(3, 4, 2)
    )
    assert upload.finite.all()
    # the paper's setting: s = 14
    assert z_max(50, 12) == pytest.approx(NormalDist().inv_cdf(24 / 38))


def test_colluding_clients_need_the_whole_cohort_in_one_stack():
    with refuses(r"client\.stack=10 or more, trainer\.devices=1"):
        attacked(ALIE(), clients=[1, 2, 3])

    def validate(stack, sampler=None):
        solver = SimpleNamespace(stack=stack)
        data = SimpleNamespace(num_clients=9)
        ALIE().validate(SimpleNamespace(solver=solver, cohort_size=5, data=data, sampler=sampler))

    for stack in ("auto", 5, 1000):  # auto: as many as fit into the device's memory
        validate(stack)
    with refuses(r"client\.stack=5 or more"):
        validate(4)
    with refuses("attack=ALIE needs participation=uniform"):
        validate(1000, PoissonSampler(5))
