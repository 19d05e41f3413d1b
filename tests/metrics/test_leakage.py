"""The attack on uploads in real runs: what it sees, what it finds, and that the run does not notice."""

from types import SimpleNamespace

import matplotlib.image
import numpy as np
import pytest
import torch
from conftest import TWO, read_rows
from harness import final_weights, make_setup
from omegaconf import open_dict
from torch import nn

from gcfed.data.augment import ImageTransform, TextTransform, VectorTransform
from gcfed.federated.method import ClientPart
from gcfed.methods.ssf import ProjectedMean
from gcfed.metrics.leakage import Leakage, invert_gradient
from gcfed.run import train

TINY = (
    "model.hidden=[12]", "gc.boundary=fc2", "rounds=3", "participation.num_clients=5", "participation.per_round=3",
    "client.epochs=1", "client.batch_size=8", "data.limit_train=120", "data.limit_test=40", "precision=64-true",
    "client.stack=2",
)  # fmt: skip
LEAKAGE = (
    "metrics=leakage", "metrics.leakage.every=2", "metrics.leakage.iterations=2", "metrics.leakage.restarts=2",
)  # fmt: skip
COLUMNS = {"leakage/mse", "leakage/psnr", "leakage/labels", "leakage/mismatch"}


def run(config, folder, *overrides, model=None):
    cfg = config(*TINY, *overrides, folder=folder)
    if model is not None:
        with open_dict(cfg):
            cfg.model = {"_target_": f"{__name__}.{model}"}
    return train(cfg), read_rows(folder / "metrics.csv")


class Smooth(nn.Sequential):
    """A network without kinks, which the attack was made for."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 20), nn.Sigmoid(), nn.Linear(20, 10))


class Frozen(nn.Sequential):
    """With dropout and a bias that nobody trains."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 10))
        self[1].bias.requires_grad_(False)


def test_no_run_notices_the_attack_which_is_the_same_however_it_runs(config, tmp_path, monkeypatch):
    """With clients' states, dropout and frozen tensors, every second round and the last.

    Of two processes the first attacks and draws, whoever trains the client; each round is attacked from other starting
    points.
    """
    shown, seeds = [], []

    def listens(*args, random, **settings):
        seeds.append(random.initial_seed())
        assert settings == {"iterations": 2, "restarts": 2, "optimizer": "lbfgs"}
        return invert_gradient(*args, random=random, **settings)

    monkeypatch.setattr("gcfed.metrics.base.show", lambda loggers, *about: shown.append(about))
    monkeypatch.setattr("gcfed.metrics.leakage.invert_gradient", listens)
    settings = ("algorithm=scaffold", "gc=none", "client.stack=1")
    without, a = run(config, tmp_path / "without", *settings, model="Frozen")
    attack = (*LEAKAGE, "metrics.leakage.images=2", "metrics.leakage.figures=true")
    observed, b = run(config, tmp_path / "leakage", *settings, *attack, model="Frozen")
    assert torch.equal(final_weights(observed), final_weights(without))
    for t, (plain, row) in enumerate(zip(a, b, strict=True)):
        same = [k for k in plain if "time" not in k]
        assert [row[k] for k in same] == [plain[k] for k in same]
        assert row.keys() - plain.keys() == (COLUMNS if t else set())
        assert 0 < row["time/train_s"] < row["time/round_s"]
    pictures = [tmp_path / "leakage" / f"leakage_round_{number}.png" for number in (2, 3)]
    assert shown == [("leakage", picture, number) for picture, number in zip(pictures, (2, 3), strict=True)]
    assert matplotlib.image.imread(pictures[0]).std() > 0.02
    assert len({*seeds}) == 2

    _, two = run(config, tmp_path / "two", *settings, *attack, *TWO, model="Frozen")
    for one, other in zip(b[1:], two[1:], strict=True):
        assert {c: other[c] for c in COLUMNS} == pytest.approx({c: one[c] for c in COLUMNS}, rel=1e-6)
    for folder in ("leakage", "two"):
        found = sorted(path.name for path in (tmp_path / folder).glob("*.png"))
        assert found == [picture.name for picture in pictures]


@pytest.mark.parametrize(
    "settings",
    [("algorithm=fedprox",), ("algorithm=scaffold",), ("client=adam",), ("rounds=2", "client.lr_decay=0.5")],
    ids=" ".join,
)
def test_it_sees_the_gradient_of_the_images(config, tmp_path, monkeypatch, settings):
    """In the last round all of these send −η times autograd's gradient on the drawn client's images."""
    seen = []
    monkeypatch.setattr(Leakage, "attack", lambda self, *known: seen.append(known) or [0.0] * 4)
    more = ("gc=none", "metrics.leakage.images=3", "rounds=1")
    result, rows = run(config, tmp_path, *LEAKAGE, *more, *settings)
    ((client, x, y, gradient, round),) = seen
    assert client in round.cohort
    assert x.shape == (3, 1, 8, 8)
    net = result.module.net
    net.load_state_dict(round.start)
    net.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    for name, p in net.named_parameters():
        torch.testing.assert_close(gradient[name], p.grad, rtol=1e-9, atol=1e-12)
    owned = result.loop.data.fetch(torch.as_tensor(result.loop.data.client(client)), None)[0]
    assert all((owned == one).flatten(1).all(1).any() for one in x)
    assert rows[-1].keys() >= COLUMNS


def test_of_a_subspace_it_sees_what_is_uploaded(config, tmp_path, monkeypatch):
    """The projected gradient, which knows no weight decay, and quantized where its coordinates are."""
    seen = []
    monkeypatch.setattr(Leakage, "attack", lambda self, *known: seen.append(known[3]) or [0.0] * 4)
    settings = ("gc=none", "rounds=1", "algorithm=ssf", "methods.ssf.ratio=0.5", "client.optimizer.weight_decay=0.5")
    for more in ((), ("quantization=fedpaq", "quantization.bits=4")):
        result, _ = run(config, tmp_path / str(len(more)), *LEAKAGE, *settings, *more)
    (method,) = (m for m in result.loop.server.parts if isinstance(m, ProjectedMean))
    for gradient in seen:
        for name, projector in method.space.items():
            inside = projector.lift(projector.project(gradient[name]))
            torch.testing.assert_close(gradient[name], inside, rtol=0, atol=1e-12)
    exact, coarse = (method.space["fc1.weight"].project(gradient["fc1.weight"]) for gradient in seen)
    levels = coarse / exact.norm() * 7
    torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-5)


def test_it_recovers_an_image_from_fedavg_and_less_from_eight_levels(config, tmp_path):
    """Of a network without kinks; quantization to 4 bits is a method that stands between the image and the server."""
    attack = ("metrics=leakage", "metrics.leakage.iterations=40", "metrics.leakage.restarts=2", "rounds=1", "gc=none")
    (plain,), (coarse,) = (
        run(config, tmp_path / str(len(more)), *attack, *more, model="Smooth")[1]
        for more in ((), ("quantization=fedpaq", "quantization.bits=4"))
    )
    assert plain["leakage/psnr"] > 30
    assert plain["leakage/labels"] == 1
    assert plain["leakage/psnr"] == pytest.approx(-10 * np.log10(plain["leakage/mse"]))
    assert plain["leakage/mismatch"] < 1e-4 < coarse["leakage/mismatch"]
    assert coarse["leakage/psnr"] < plain["leakage/psnr"] - 10


class Broken(ClientPart):
    """Sends what is no number."""

    def send(self, upload, own, download):
        for t in upload.delta.values():
            t.fill_(float("inf"))


def test_a_round_without_a_finite_upload_has_nothing_to_invert(config, tmp_path):
    broken = f"+methods.broken._target_={__name__}.Broken"
    _, rows = run(config, tmp_path, *LEAKAGE, "rounds=1", broken, "gc=none")
    assert not COLUMNS & rows[0].keys()
    assert not list(tmp_path.glob("*.png"))


def test_the_pixels_of_coloured_images_are_those_before_the_transform(tmp_path):
    transform, attack = ImageTransform([0.5, 0.4, 0.3], [0.1, 0.2, 0.3]), Leakage(str(tmp_path))
    attack.data = SimpleNamespace(transform=transform)
    images = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).view(2, 3, 4, 5)
    torch.testing.assert_close(attack._pixels(transform(images, None)), images / 255)


@pytest.mark.parametrize("transform", [TextTransform(), VectorTransform()])
def test_data_that_are_no_images_are_refused(tmp_path, transform):
    setup = make_setup(torch.nn.Identity(), data=SimpleNamespace(transform=transform))
    with pytest.raises(ValueError, match="metrics=leakage recovers images"):
        Leakage(str(tmp_path)).validate(setup)
