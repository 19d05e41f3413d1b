"""Runs of users' networks: with two passes per step or a teacher, resumed, and with an error in
``forward``.
"""

import random

import numpy as np
import pytest
import torch
import users_networks
from harness import assert_near, final_weights
from lightning.pytorch import Callback
from plain import FirstWeights
from safetensors.torch import load_file, save_file
from torch import nn
from users_networks import Small, load
from users_plain import PLAIN, find, run

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecated and slow operations


def figures(result):
    """The rows of a run without its times."""
    return result.frame.drop(
        columns=[column for column in result.frame if column.startswith("time/")]
    )


def test_a_network_that_works_in_place_does_not_change_the_data(config, tmp_path):
    words = (
        "gc=none",
        "data.validation=0.25",
        "metrics=[clients,forgetting]",
        "metrics.clients.every=1",
        "metrics.forgetting.every=1",
        "rounds=2",
    )
    splits = []
    frames = []
    for net in ("InPlace", "OutOfPlace"):
        result = run(config, tmp_path / net, net, *words, clients=3)
        data = result.trainer.datamodule
        tests = [data.fetch_test((0, 99), i)[0] for i in (0, 1)]
        splits.append([data.fetch(torch.arange(len(data.labels)), None)[0], *tests])
        frames.append(figures(result))
    assert torch.equal(splits[0][1], torch.from_numpy(load(3)["x_test"]))
    assert all(map(torch.equal, *splits))
    assert frames[0].equals(frames[1])


@pytest.mark.parametrize(
    ("name", "twin", "algorithm"),
    [
        ("InPlace", "OutOfPlace", "moon"),
        ("WeightInList", "Small", "fedsam"),
        ("WeightInList", "Small", "moon"),
    ],
)
def test_equivalent_networks_train_equally(config, tmp_path, name, twin, algorithm):
    """Methods use two passes per step, or a teacher. A refusal must name the network."""
    words = (f"algorithm={algorithm}", *PLAIN)
    expected = final_weights(run(config, tmp_path / "twin", twin, *words, clients=3, whole=False))
    try:
        result = run(config, tmp_path / "run", name, *words, clients=3, whole=False)
    except ValueError as error:
        if name not in str(error):
            raise
    else:
        assert_near(final_weights(result), expected, 1e-12)


@pytest.mark.parametrize("name", ["RandomTeacher", "ExtraState"])
def test_a_resumed_run_has_the_same_bits(config, tmp_path, name):
    """The earlier state of the global generators does not matter."""
    words = ("gc=none", "rounds=2")
    straight = run(config, tmp_path / "straight", name, *words, clients=3)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(99)
    run(config, tmp_path / "stopped", name, "gc=none", "rounds=1", clients=3)
    resumed = run(config, tmp_path / "stopped", name, *words, "ckpt_path=last", clients=3)
    assert torch.equal(final_weights(straight), final_weights(resumed))
    assert figures(straight).equals(figures(resumed))


def test_a_warm_start_in_float64_keeps_all_digits(config, tmp_path):
    net = Small().double()
    for p in net.parameters():
        nn.init.normal_(p)
    save_file(net.state_dict(), tmp_path / "start.safetensors")
    words = (*PLAIN, f"model.start={tmp_path}/start.safetensors", "rounds=1")
    result = run(config, tmp_path / "run", "Small", *words, callback="plain.FirstWeights")
    (first,) = (c.net for c in result.trainer.callbacks if isinstance(c, FirstWeights))
    assert all(map(torch.equal, first.parameters(), net.parameters()))


@pytest.mark.parametrize("name", ["spectrally_normalised", "spectrally_normalised_old"])
def test_the_spectral_norm_of_the_global_network_is_one(config, tmp_path, name):
    """This holds in tests and after loading the file. The 20 clients have one or two classes."""
    result = run(config, tmp_path, name, "gc=none", clients=20)
    loaded = find(name)()
    loaded.load_state_dict(load_file(tmp_path / "global_model.safetensors"))
    for net in (result.module.net.eval(), loaded.eval()):
        net(torch.zeros(1, 36))
        assert torch.linalg.matrix_norm(net.layer0.weight, 2).item() == pytest.approx(1, abs=0.01)


class Arms(Callback):
    """Copies the global network after the first round, and makes the second one fail."""

    def on_train_batch_end(self, trainer, pl_module, *_):
        Arms.net = pl_module.net
        Arms.weights = {n: t.clone() for n, t in pl_module.net.state_dict().items()}
        users_networks.Fails.steps = 0
        users_networks.Fails.error = RuntimeError("in forward")


def test_a_client_that_fails_does_not_change_the_global_network(config, tmp_path, monkeypatch):
    monkeypatch.setattr(users_networks.Fails, "error", None)
    with pytest.raises(RuntimeError, match="in forward"):
        run(config, tmp_path, "Fails", "gc=none", callback=f"{__name__}.Arms")
    assert users_networks.Fails.steps == 2
    state = Arms.net.state_dict()
    assert all(torch.equal(state[n], t) for n, t in Arms.weights.items())
