"""The plane through three local models, and the loss on it, equal NumPy."""

import numpy as np
import pytest
import torch
from harness import ArrayData, make_setup, random_federation, sgd, train_rounds
from recording import NAN_CLIENT, Recorder
from torch import nn

from gcfed.data.faults import Faults
from gcfed.data.partition import Partition
from gcfed.metrics.surface import Plane, Surface, square
from gcfed.tasks import CLASSIFICATION, SquaredError

GRID = 5


class WithTest(ArrayData):
    """Data with a test split. Labels are classes or vectors."""

    num_test = 30

    def __init__(self, data, vectors=False):
        g = torch.Generator().manual_seed(3)
        y = torch.randn(len(data.y), 4, generator=g, dtype=torch.float64) if vectors else data.y
        super().__init__(data.x, y, data.clients)
        self.test_x = torch.randn(self.num_test, 6, generator=g, dtype=torch.float64)
        self.test_y = y[: self.num_test]

    def fetch_test(self, bounds):
        return self.test_x[slice(*bounds)], self.test_y[slice(*bounds)]


def linear():
    torch.manual_seed(0)
    return nn.Linear(6, 4).double()


def metric(folder, **settings):
    usual = {"every": 2, "grid": GRID, "samples": None, "split": "test", "figures": False}
    return Surface(str(folder), **usual | settings)


def measured(folder, *, vectors=False, poisoned=False, rounds=2, every=2, lr=0.1, **loop):
    """The files of a run, each round's (broadcast, local models, new global), and the data."""
    data, net = WithTest(random_federation(), vectors), linear()
    recorder, looking, seen = Recorder(poisoned), metric(folder, every=every), []

    def finish(round, row):
        seen.append(
            (
                *recorder.rounds[-1],
                {name: p.detach().numpy().copy() for name, p in net.named_parameters()},
            )
        )

    train_rounds(
        net,
        data,
        sgd(lr=lr),
        rounds=rounds,
        methods=[recorder, looking],
        on_round=finish,
        task=SquaredError() if vectors else CLASSIFICATION,
        **{"cohort_of": 4} | loop,
    )
    files = {
        int(path.stem.split("_")[-1]): dict(np.load(path)) for path in sorted(folder.glob("*.npz"))
    }
    return files, seen, data


def flat(state):
    return np.concatenate([state[name].ravel() for name in ("weight", "bias")])


def outputs(x, w):
    """The linear network with flattened weights."""
    return x @ w[:24].reshape(4, 6).T + w[24:]


def axes_of(w):
    """Origin and orthonormal axes, by QR."""
    q, r = np.linalg.qr(np.stack([w[1] - w[0], w[2] - w[0]], axis=1))
    return w[0], *(q * np.sign(np.diag(r))).T


@pytest.mark.parametrize(
    "loop", [{"vectors": True}, {"k": 3, "poisoned": True}, {"order": -1, "k": 4}]
)
def test_the_plane_of_the_first_three_clients_equals_numpy(tmp_path, loop):
    """The loss, and for classes the accuracy, at all nodes of the grid and of the six models."""
    files, seen, data = measured(tmp_path, cohort_of=5, **loop)
    (broadcast, clients, new), found = seen[1], files[2]
    w = [flat(clients[k]) for k in (0, 1, 2)]
    origin, across, up = axes_of(w)
    models = np.array([*w, np.mean(w, axis=0), flat(broadcast), flat(new)])
    x, y = data.test_x.numpy(), data.test_y.numpy()

    def scores(weights):
        logits = outputs(x, weights)
        if "vectors" in loop:
            return (np.square(logits - y).sum(1).mean() / 2,)
        log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        return -log_p[np.arange(len(y)), y].mean(), (logits.argmax(1) == y).mean()

    np.testing.assert_allclose(
        found["points"], (models - origin) @ np.stack([across, up], 1), atol=1e-12
    )
    apart = models - origin - found["points"] @ np.stack([across, up])
    np.testing.assert_allclose(found["distance"], np.linalg.norm(apart, axis=1), atol=1e-12)
    np.testing.assert_allclose(found["points"][3], found["points"][:3].mean(0), atol=1e-12)
    assert found["distance"][4:].min() > 1e-3
    columns = [name for name in ("loss", "acc") if name in found]
    direct = np.array([scores(weights) for weights in models])
    np.testing.assert_allclose(
        np.stack([found[f"point_{name}"] for name in columns], 1), direct, rtol=1e-9
    )
    nodes = np.array(
        [[scores(origin + a * across + b * up) for a in found["x"]] for b in found["y"]]
    )
    np.testing.assert_allclose(np.stack([found[name] for name in columns], 2), nodes, rtol=1e-9)
    assert list(files) == [int(found["round"])] == [2]
    assert found["names"].tolist() == [
        "client 0",
        "client 1",
        "client 2",
        "mean",
        "broadcast",
        "global",
    ]


@pytest.mark.parametrize(
    "case", [{"poisoned": True, "cohort_of": 3}, {"lr": 0.0}, {"faults": Faults(dropout=0.5)}]
)
def test_without_a_plane_there_is_no_file(tmp_path, caplog, case):
    """One of three models is not finite, or all three are equal, or fewer than three clients
    remain.
    """
    files, seen, _ = measured(tmp_path, rounds=6, every=1, **case)
    for number in range(1, 7):
        clients = sorted(seen[number - 1][1])[:3]
        spanned = (
            len(clients) == 3
            and not ("poisoned" in case and NAN_CLIENT in clients)
            and "lr" not in case
        )
        assert (number in files) is spanned
        assert (
            f"round {number}: no three finite local models that span a plane" in caplog.text
        ) is not spanned
    assert len(files) < 6


def test_a_cohort_of_two_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"metrics=surface .* participation\.per_round=2"):
        metric(tmp_path).validate(make_setup(linear(), cohort_of=2))


def test_training_samples_are_those_that_clients_hold(tmp_path):
    looking = metric(tmp_path, samples=None, split="train")
    looking.data = WithTest(random_federation())
    looking.data.partition = Partition(np.array([5, 0, 3]), np.array([0, 1, 3]))
    ((x, y),) = looking._samples(1, torch.device("cpu"))
    expected = looking.data.fetch(torch.tensor([0, 3, 5]), None)
    assert torch.equal(x, expected[0])
    assert torch.equal(y, expected[1])


# ---------------------------------------------------------------------------------------- the plane
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_three_models_on_a_line_span_no_plane(dtype):
    """Two equal models, or two that differ by rounding, also lie on a line."""
    g = torch.Generator().manual_seed(0)
    origin, step, other = torch.randn(3, 50, generator=g, dtype=dtype)
    assert Plane([{"w": origin + s * step} for s in (0.0, 1.0, 0.3)], ["w"]).is_flat
    for noise in (0.0, torch.finfo(dtype).eps / 100):
        twins = [origin, origin * (1 + noise), other]
        for order in ((0, 1, 2), (0, 2, 1), (2, 0, 1)):
            assert Plane([{"w": twins[i].clone()} for i in order], ["w"]).is_flat


def test_a_running_variance_is_never_negative():
    """Outside the triangle some weights of a combination are negative.

    A running mean may become negative.
    """
    models = [
        {
            "w": torch.eye(3)[i],
            "bn.running_var": torch.tensor([1.0 + i]),
            "bn.running_mean": torch.ones(1) * i,
        }
        for i in range(3)
    ]
    beyond = Plane(models, ["w"]).at(-3.0, -3.0)
    assert beyond["bn.running_var"].item() == 0
    assert beyond["bn.running_mean"].item() < -1


def test_the_square_contains_all_finite_points():
    x, y = square(np.array([(0.0, 0.0), (4.0, 0.0), (1.0, 2.0), (np.nan, np.nan)]), 3, 0.25)
    assert x.tolist() == [-1, 2, 5]
    assert y.tolist() == [-2, 1, 4]
