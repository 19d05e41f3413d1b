"""Own parts and settings that go wrong later end in a sentence before the first round."""

import math

import pytest
from conftest import refuses
from harness import sgd
from test_api import SMALL

import gcfed
from gcfed.assemble import assemble, build_loop
from gcfed.check import check
from gcfed.utils.instantiate import BuildError


class NoRule:
    def add(self, upload, round): ...

    def reduce(self, round, like): ...


class ByParity:
    """A partition whose constructor takes no argument."""

    def __call__(self, labels, num_clients, *, seed, groups=None): ...


def test_an_aggregator_without_what_the_server_calls_is_refused():
    cfg = gcfed.configure(SMALL, f"aggregator._target_={__name__}.NoRule", "~aggregator.weighting")
    with refuses(r"NoRule has no validate and no beside: derive it from"):
        build_loop(cfg, 20)


def test_a_partition_that_takes_no_arguments_is_refused_with_the_keys_to_leave_out():
    cfg = gcfed.configure(SMALL, "partition=dirichlet", f"partition._target_={__name__}.ByParity")
    with pytest.raises(
        BuildError, match=r"ByParity takes no arguments, not alpha.*: add '~.*alpha"
    ):
        assemble(cfg)


@pytest.mark.parametrize(
    ("optimizer", "lr", "warns"),
    [("Adam", 1, True), ("Adagrad", 1, True), ("Adam", 0.01, False), ("SGD", 1, False)],
)
def test_a_server_optimizer_with_steps_of_one_length_is_warned_of(optimizer, lr, warns, caplog):
    server = [f"server._target_=torch.optim.{optimizer}", f"server.lr={lr}"]
    assemble(gcfed.configure(SMALL, "gc=none", server))
    assert ("lower server.lr" in caplog.text) == warns


def test_a_cosine_falls_from_the_rate_to_zero():
    rates = [sgd(lr=0.4, lr_decay=0.9, lr_cosine=8).lr(t) for t in range(10)]
    expected = [0.4 * 0.9**t * math.cos(math.pi * t / 16) ** 2 for t in range(8)]
    assert rates == pytest.approx([*expected, 0, 0])
    assert [sgd(lr=0.4, lr_decay=0.9).lr(t) for t in range(3)] == [0.4, 0.4 * 0.9, 0.4 * 0.9**2]


def test_a_cosine_that_ends_before_the_run_is_refused():
    with refuses(r"client.lr_cosine=5 is below rounds=9: .* from round 6"):
        check(gcfed.configure("rounds=9", "client.lr_cosine=5"))
    check(gcfed.configure("rounds=9", "client.lr_cosine=9"))
