"""``client.accumulate``: the parts of a batch give the step of the whole batch."""

import pytest
import torch
from conftest import refuses
from harness import assert_near, random_federation, sgd, train_rounds, with_batch_norm

from gcfed.federated.training.batches import split
from gcfed.methods.centralization import GradientCentralization
from gcfed.methods.correction.scaffold import Scaffold
from gcfed.methods.objective.moon import Moon
from gcfed.methods.sharpness.sam import Sam
from gcfed.models.mlp import MLP
from gcfed.run import train
from gcfed.tasks import Batch


def make_net():
    torch.manual_seed(0)
    return MLP(input_shape=(6,), num_classes=4, hidden=(5,)).double()


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("methods", [[], [Moon], [Scaffold, Sam]])
def test_parts_of_a_batch_give_the_step_of_the_whole_batch(methods, k):
    """Clients of 7, 12, 5, 9 and 1 samples in batches of 5.

    In a stack, a part may have no sample of a client.
    """
    ends = []
    for n in (None, 3):
        parts = [*[method() for method in methods], GradientCentralization(boundary="fc2")]
        solver = sgd(batch_size=5, accumulate=n, clip_norm=0.5)
        ends.append(
            train_rounds(make_net(), random_federation(), solver, rounds=2, methods=parts, k=k)
        )
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("methods", "passes"), [([], 1), ([Sam()], 2)])
def test_each_pass_takes_a_part_of_a_batch(methods, passes):
    net = make_net()
    sizes = []
    net.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    solver = sgd(batch_size=5, accumulate=3)
    step = [2, 2, 1] * passes + [1, 1] * passes
    train_rounds(net, random_federation((7,)), solver, rounds=1, methods=methods, cohort_of=1)
    assert sizes[-2 * len(step) :] == 2 * step  # two epochs


def test_shares_times_means_add_up_for_padded_sequences():
    rows = torch.arange(7) < torch.tensor([[7], [1], [4]])
    values = torch.rand(3, 7, 5, dtype=torch.float64)
    mask = (torch.rand(3, 7, 5) < 0.5) & rows.unsqueeze(-1)
    mask[:, 0, 0] = True
    batch = Batch(values, values, mask, mask.flatten(1).sum(1), rows)
    for n in (2, 3, 7):
        mean = sum(share * part.mean(part.x) for part, share in split(batch, n, torch.float64))
        assert_near(mean, batch.mean(values), 1e-14)


RUN = (
    "rounds=2",
    "client.epochs=1",
    "client.batch_size=8",
    "participation.per_round=2",
    "data.limit_train=300",
)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *[([f"client.accumulate={n}"], rf"client\.accumulate={n}") for n in ("0", "1.5", "9")],
        *[
            (
                [f"algorithm={name}", "client.accumulate=2"],
                rf"(?i){name} needs client\.accumulate=null",
            )
            for name in ("feddecorr", "fedreg", "fedsol")
        ],
    ],
)
def test_impossible_settings_are_refused_with_their_key(config, words, message):
    with refuses(message):
        train(config(*RUN, *words))


def test_batch_statistics_are_those_of_a_part(caplog):
    train_rounds(
        with_batch_norm(), random_federation((8, 8)), sgd(accumulate=2), rounds=1, cohort_of=2
    )
    assert "client.accumulate changes the results" in caplog.text
    with refuses(r"single sample .* without client\.accumulate"):
        train_rounds(
            with_batch_norm(), random_federation((8, 7)), sgd(accumulate=2), rounds=1, cohort_of=2
        )
