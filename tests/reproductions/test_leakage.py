"""DLG: the search recovers a sample from its gradient.

In real runs it gets the right gradient and images.
"""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import read_rows
from harness import assert_near, final_weights, make_setup
from omegaconf import open_dict
from torch import nn

from gcfed.data.augment import ImageTransform, PlainTransform
from gcfed.methods.subspace.ssf import ProjectedMean
from gcfed.run import train
from reproductions.leakage import OPTIMIZERS, Leakage, invert_gradient
from reproductions.recovered import plot_recovered

TINY = (
    "model.hidden=[12]",
    "rounds=1",
    "participation.num_clients=5",
    "participation.per_round=3",
    "client.epochs=1",
    "client.batch_size=8",
    "data.limit_train=120",
    "data.limit_test=40",
    "precision=64-true",
    "client.stack=2",
)
COLUMNS = {"leakage/mse", "leakage/psnr", "leakage/labels", "leakage/mismatch"}


def run(config, folder, *overrides, model=None):
    cfg = config(*TINY, *overrides, folder=folder)
    if model is not None:
        with open_dict(cfg):
            cfg.model = {"_target_": f"{__name__}.{model}"}
    return train(cfg), read_rows(folder / "metrics.csv")


class Smooth(nn.Sequential):
    """A smooth network, as the attack assumes."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 20), nn.Sigmoid(), nn.Linear(20, 10))


@pytest.mark.parametrize(
    "settings",
    [("algorithm=scaffold",), ("client=adam", "rounds=2", "client.lr_decay=0.5")],
    ids=" ".join,
)
def test_the_attack_sees_the_gradient_of_the_images(config, tmp_path, monkeypatch, settings):
    """In the last round, these clients send −η times the gradient that autograd computes on the
    drawn images.
    """
    seen = []
    monkeypatch.setattr(Leakage, "attack", lambda self, *known: seen.append(known) or [0.0] * 4)
    more = ("gc=none", "metrics.leakage.images=3")
    result, rows = run(config, tmp_path, "metrics=leakage", *more, *settings)
    ((client, x, y, gradient, round),) = seen
    assert client in round.cohort
    assert x.shape == (3, 1, 8, 8)
    net = result.module.net
    net.load_state_dict(round.broadcast_model)
    net.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    for name, p in net.named_parameters():
        torch.testing.assert_close(gradient[name], p.grad, rtol=1e-9, atol=1e-12)
    owned = result.trainer.datamodule.fetch(
        torch.as_tensor(result.trainer.datamodule.client(client)), None
    )[0]
    assert all((owned == one).flatten(1).all(1).any() for one in x)
    assert rows[-1].keys() >= COLUMNS


def test_in_a_subspace_the_attack_sees_the_uploaded_gradient(config, tmp_path, monkeypatch):
    """It sees the projected gradient, without weight decay.

    With quantization, the coordinates lie on a grid.
    """
    seen = []
    monkeypatch.setattr(Leakage, "attack", lambda self, *known: seen.append(known[3]) or [0.0] * 4)
    settings = (
        "gc=none",
        "algorithm=ssf",
        "methods.ssf.ratio=0.5",
        "client.optimizer.weight_decay=0.5",
    )
    for more in ((), ("quantization=fedpaq", "quantization.bits=4")):
        result, _ = run(config, tmp_path / str(len(more)), "metrics=leakage", *settings, *more)
    (method,) = (m for m in result.loop.run.server.parts if isinstance(m, ProjectedMean))
    for gradient in seen:
        for name, projector in method.space.items():
            inside = projector.lift(projector.project(gradient[name]))
            assert_near(gradient[name], inside, 1e-12)
    exact, coarse = (
        method.space["fc1.weight"].project(gradient["fc1.weight"]) for gradient in seen
    )
    levels = coarse / exact.norm() * 7
    assert_near(levels, levels.round(), 1e-5)


def test_the_attack_recovers_an_image_from_fedavg_and_changes_no_bit_of_the_run(config, tmp_path):
    attack = (
        "metrics=leakage",
        "metrics.leakage.iterations=40",
        "metrics.leakage.restarts=2",
        "gc=none",
    )
    attacked, (row,) = run(config, tmp_path / "attacked", *attack, model="Smooth")
    without, _ = run(config, tmp_path / "without", "gc=none", model="Smooth")
    assert torch.equal(final_weights(attacked), final_weights(without))
    assert row["leakage/psnr"] > 30
    assert row["leakage/labels"] == 1
    assert row["leakage/psnr"] == pytest.approx(-10 * np.log10(row["leakage/mse"]))
    assert row["leakage/mismatch"] < 1e-4


def test_the_pixels_of_coloured_images_are_those_before_the_transform(tmp_path):
    transform = ImageTransform([0.5, 0.4, 0.3], [0.1, 0.2, 0.3])
    attack = Leakage(str(tmp_path))
    attack.data = SimpleNamespace(transform=transform)
    images = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).view(2, 3, 4, 5)
    torch.testing.assert_close(attack._pixels(transform(images, None)), images / 255)


def test_data_that_are_no_images_are_refused(tmp_path):
    setup = make_setup(torch.nn.Identity(), data=SimpleNamespace(transform=PlainTransform()))
    with pytest.raises(ValueError, match="metrics=leakage recovers images"):
        Leakage(str(tmp_path)).validate(setup)


# --------------------------------------------------------------------------------------- the search
def smooth_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, stride=2),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(4 * 9, 12),
        nn.Tanh(),
        nn.Linear(12, 5),
    ).double()


def gradient_of(net, x, y):
    """The gradient of the mean cross-entropy by autograd, by name."""
    names, params = zip(*net.named_parameters(), strict=True)
    grads = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), params)
    return dict(zip(names, grads, strict=True))


def start(seed=0):
    return torch.Generator().manual_seed(seed)


def weights_of(net):
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def sample(batch=1):
    x = torch.randn(batch, 1, 6, 6, generator=start(3), dtype=torch.float64)
    return x, torch.arange(batch) + 2


@pytest.mark.parametrize("settings", [{"iterations": 30}, {"optimizer": "adam", "iterations": 200}])
def test_the_search_recovers_the_sample_and_its_label(settings):
    """It uses the given weights, and changes neither the network nor the global generator."""
    net = smooth_net()
    x, y = sample()
    given = weights_of(net)
    target = gradient_of(net, x, y)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(2)
    moved = weights_of(net)
    before = torch.get_rng_state()
    found = invert_gradient(net, given, target, x.shape, 5, random=start(), **settings)
    assert found.mismatch < 1e-3
    assert (found.x - x).square().mean() < 0.05  # random images have 2
    assert found.labels.argmax(-1).tolist() == y.tolist()
    torch.testing.assert_close(found.labels.sum(-1), torch.ones(1, dtype=torch.float64))
    assert all(torch.equal(p, moved[n]) and p.grad is None for n, p in net.named_parameters())
    assert torch.equal(before, torch.get_rng_state())


def test_the_mismatch_belongs_to_the_returned_sample():
    """The test computes it from the recovered inputs and soft labels with ``cross_entropy``."""
    net = smooth_net()
    x, y = sample(2)
    target = gradient_of(net, x, y)
    found = invert_gradient(net, weights_of(net), target, x.shape, 5, random=start(), iterations=3)
    own = gradient_of(net, found.x, found.labels)
    apart = sum((own[n] - target[n]).square().sum() for n in target)
    assert found.mismatch == pytest.approx(
        float(apart / sum(t.square().sum() for t in target.values())), rel=1e-9
    )


def test_a_search_that_diverges_returns_its_best_sample(monkeypatch):
    """An infinite step makes the second point NaN, so the first one is returned."""
    monkeypatch.setitem(OPTIMIZERS, "adam", partial(torch.optim.Adam, lr=float("inf")))
    net = smooth_net()
    x, y = sample()
    arguments = (net, weights_of(net), gradient_of(net, x, y), x.shape, 5)
    found = invert_gradient(*arguments, random=start(), iterations=9, optimizer="adam")
    assert 0 < found.mismatch < float("inf")
    torch.testing.assert_close(found.x, torch.randn(1, 1, 6, 6, generator=start()).double())


def test_originals_are_drawn_above_recovered_images(tmp_path, unrendered):
    original, recovered = np.random.default_rng(0).random((2, 4, 3, 8, 8))
    figure = plot_recovered(original, recovered, [*"abcd"], [*"efgh"], tmp_path / "leakage.png")
    assert "".join(ax.get_title() for ax in figure.axes) == "abcdefgh"
    for ax, image in zip(figure.axes, [*original, *recovered], strict=True):
        np.testing.assert_array_equal(ax.images[0].get_array(), image.transpose(1, 2, 0))
