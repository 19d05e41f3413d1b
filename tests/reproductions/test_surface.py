"""The plane through three local models, and the loss on it, equal NumPy."""

import matplotlib.image
import numpy as np
import pytest
import torch
from conftest import read_rows
from harness import ArrayData, make_setup, random_federation, sgd, train_rounds
from recording import NAN_CLIENT, Recorder
from torch import nn

from gcfed.data.faults import Faults
from gcfed.data.partition import Partition
from gcfed.run import train
from gcfed.tasks import CLASSIFICATION, SquaredError
from reproductions.surface import Plane, Surface, plot_surface, square

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


SMALL = (
    "algorithm=scaffold",
    "client.epochs=1",
    "data.limit_train=200",
    "data.limit_test=60",
    "rounds=2",
    "precision=64-true",
    "metrics=surface",
    "metrics.surface.every=1",
    "metrics.surface.grid=3",
)
VALUES = ("x", "y", "loss", "acc", "points", "point_loss", "point_acc", "distance")


def test_two_processes_write_the_same_files_and_the_global_model_has_the_losses_of_the_test(
    config, tmp_path
):
    settings = (*SMALL, "metrics.surface.samples=null", "metrics.surface.split=test")
    for devices in ("1", "2"):
        cfg = config(*settings, f"trainer.devices={devices}", folder=tmp_path / devices)
        train(cfg)
    rows = read_rows(tmp_path / "1" / "metrics.csv")
    for number, row in enumerate(rows, start=1):
        one, two = (np.load(tmp_path / i / f"surface_round_{number}.npz") for i in "12")
        for key in VALUES:
            np.testing.assert_allclose(one[key], two[key], rtol=1e-9, atol=1e-12, err_msg=key)
        assert one["point_loss"][5] == pytest.approx(row["test/loss"], rel=1e-9)
        assert one["point_acc"][5] == pytest.approx(row["test/acc"])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_loss_surface_on_a_gpu_equals_that_of_the_cpu(config, tmp_path):
    for trainer in ("gpu", "cpu"):
        train(config(*SMALL, f"trainer={trainer}", folder=tmp_path / trainer))
    gpu, cpu = (np.load(tmp_path / trainer / "surface_round_2.npz") for trainer in ("gpu", "cpu"))
    for key in ("x", "y", "loss", "points", "point_loss", "distance"):
        np.testing.assert_allclose(gpu[key], cpu[key], rtol=1e-6, atol=1e-9, err_msg=key)


NAMES = ["client 4", "client 7", "client 9", "mean", "broadcast", "global"]


def surface():
    x, y = np.linspace(-1, 2, 7), np.linspace(0, 3, 7)
    bowl = (x[None] - 0.5) ** 2 + 2 * (y[:, None] - 1.5) ** 2 + 1
    points = np.array([(0, 0.5), (1.5, 0.5), (0.4, 2.5), (0.63, 1.17), (0.5, 1), (0.8, 1.4)])
    return {
        "x": x,
        "y": y,
        "loss": bowl,
        "acc": bowl,
        "round": np.array(50),
        "split": np.array("test"),
        "names": np.array(NAMES),
        "points": points,
        "point_loss": np.arange(1.0, 7.0),
        "distance": np.array([0, 0, 0, 0, 0.25, np.nan]),
    }


def test_contours_and_points_have_the_right_positions(tmp_path):
    (axes,) = plot_surface(surface(), tmp_path / "new" / "surface.png").axes
    (contours,) = (one for one in axes.collections if hasattr(one, "levels"))
    np.testing.assert_allclose([line.get_xydata()[0] for line in axes.lines], surface()["points"])
    np.testing.assert_allclose(np.diff(np.log(contours.levels), 2), 0, atol=1e-9)
    for level, path in zip(contours.levels, contours.get_paths(), strict=True):
        for x, y in path.vertices:  # contours are straight between grid points
            assert (x - 0.5) ** 2 + 2 * (y - 1.5) ** 2 + 1 == pytest.approx(level, abs=0.2)
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels[0] == "w₁, client 4: 1"
    assert labels[3:] == [
        "their mean: 4",
        "broadcast model: 5,\n0.25 off the plane",
        "new global model: 6",
    ]
    assert [text.get_text() for text in axes.texts if text.get_text().startswith("w")] == [
        "w₁",
        "w₂",
        "w₃",
    ]
    assert axes.get_title() == "Test loss (nats) around three clients of round 50"
    assert matplotlib.image.imread(tmp_path / "new" / "surface.png").std() > 0.02
