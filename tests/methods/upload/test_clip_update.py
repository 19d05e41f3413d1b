"""Clipped updates: bytes, stacks, processes and the order of methods; ``test_method_runs.py`` has
the exact rule.
"""

from functools import partial

import pytest
import torch
from harness import Sizes, assert_near, make_net, train_rounds, weights

from gcfed.methods.correction.fedgc import FedGC
from gcfed.methods.momentum.lookahead import LookAhead
from gcfed.methods.subspace.ssf import SSF
from gcfed.methods.upload.clip_update import ClipUpdate


def test_the_bound_is_sent_down_and_one_bit_up():
    sizes = Sizes()
    train_rounds(rounds=1, methods=[ClipUpdate(), sizes])
    model = weights(make_net()).numel() * 8
    assert sizes.down == [model + 8]
    assert set(sizes.up) == {model + 1}


def test_stacks_and_two_processes_agree_and_a_large_bound_equals_fedavg():
    def run(*methods, **kwargs):
        return train_rounds(rounds=2, cohort_of=4, methods=methods, **kwargs)

    one, *others = (
        run(ClipUpdate(0.34, quantile=0.3), **where) for where in ({}, {"k": 4}, {"world": 2})
    )
    for other in others:
        assert_near(other, one, 1e-9)
    assert torch.equal(run(ClipUpdate(1e6)), run())


@pytest.mark.parametrize(
    ("methods", "more"),
    [
        ((lambda: ClipUpdate(0.02), lambda: SSF(ratio=0.5)), {}),
        ((LookAhead, FedGC), {"server": partial(torch.optim.SGD, lr=1.0, momentum=0.85)}),
    ],
    ids=["clipped SSF", "FedGC ahead"],
)
def test_the_listed_order_of_methods_does_not_matter(methods, more):
    """A method that reads updates comes before clipping.

    A method that reads the model sees the clients' model.
    """
    one, other = (
        train_rounds(rounds=2, methods=[make() for make in listed], **more)
        for listed in (methods, methods[::-1])
    )
    assert torch.equal(one, other)
