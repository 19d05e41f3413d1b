"""FedACG equals Algorithm 1 of its paper, and refuses servers with another step."""

from functools import partial

import pytest
import torch
from conftest import refuses
from harness import Sizes, assert_near, join_run, make_net, make_setup, sgd, train_rounds, weights
from plain_reference import batches, cohort, local_sgd
from torch.optim import SGD, Adam

from gcfed.federated.parts.refusals import validate_parts
from gcfed.methods.momentum.lookahead import LookAhead
from gcfed.methods.objective.proximal import Proximal
from gcfed.methods.upload.clip_update import ClipUpdate


def server(momentum, lr=1.0, **kwargs):
    return partial(SGD, lr=lr, momentum=momentum, **kwargs)


def test_fedacg_equals_algorithm_1(federation):
    net = make_net()
    solver = sgd(lr_decay=0.9)
    lam = 0.85
    beta = 0.3
    theta = weights(net)
    m = 0.0
    for t in range(3):
        ahead = theta + lam * m
        near = partial(lambda w, ahead: beta / 2 * (w - ahead).square().sum(), ahead=ahead)
        trained = [
            local_sgd(
                net, ahead, batches(federation, solver, client, t), lr=0.1 * 0.9**t, term=near
            )[0]
            for client in cohort(federation, t, 3)
        ]
        delta = torch.stack([w - ahead for w in trained]).mean(0)
        m = lam * m + delta
        theta = theta + m

    sizes = Sizes()
    trained = train_rounds(
        net,
        federation,
        solver,
        rounds=3,
        methods=[LookAhead(lam), Proximal(beta), sizes],
        server=server(lam),
        k=2,
    )
    assert_near(trained, theta, 1e-10)
    assert sizes.down == [8 * trained.numel()] * 3  # only the model is sent


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (server(0.5), r"methods\.lookahead .* needs server\.momentum=0\.85, not 0\.5"),
        (server(0.85, lr=0.5), r"server\.lr=1, not 0\.5"),
        (server(0.85, weight_decay=0.1), r"server\.weight_decay=0"),
        (partial(Adam, lr=1.0), r"needs server=momentum, not Adam"),
    ],
)
def test_servers_with_another_step_are_refused_by_name(make, words):
    with refuses(words):
        join_run(LookAhead(), make_setup(make_net(), server=make))


def test_a_method_that_is_listed_twice_is_refused_by_name():
    for cls in (LookAhead, ClipUpdate):
        words = rf"methods: {cls.__name__} and {cls.__name__} would keep their state in one place"
        with refuses(words):
            validate_parts(make_setup(make_net(), methods=[cls(), cls()], server=server(0.85)))
