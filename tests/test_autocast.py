"""Autocast keeps the weights that it has cast until the outermost context ends.

The engine's own contexts must not make it use weights of an earlier pass.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import assert_near, final_weights
from omegaconf import OmegaConf
from users_networks import load
from users_plain import fresh, plain, run

from gcfed.run import evaluate

# Several passes of a step, or passes between steps.
METHODS = ["fedavg", "fedsam", "fedspeed", "fedreg", "pfedme", "ditto", "moon", "fedcurv"]
FLOAT32 = ("gc=none", "precision=32-true")
PLAIN_STEPS = "client.optimizer.momentum=0"  # Ditto and pFedMe need them


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("algorithm", METHODS)
def test_a_networks_own_autocast_may_keep_its_casts(config, tmp_path, algorithm, clients):
    """Steps, second passes, the probe, tests and a later evaluation."""
    words = (f"algorithm={algorithm}", PLAIN_STEPS, *FLOAT32)
    with_cache, without = (
        run(config, tmp_path / name, name, *words, clients=clients)
        for name in ("Autocast", "AutocastWithoutCache")
    )
    assert torch.equal(final_weights(with_cache), final_weights(without))
    assert with_cache.frame.filter(like="loss").equals(without.frame.filter(like="loss"))


def test_a_network_with_autocast_trains_as_with_plain_pytorch(config, tmp_path):
    result = run(config, tmp_path / "run", "Autocast", *FLOAT32)
    data = load()
    x, y, x_test, y_test = (torch.from_numpy(data[key]) for key in ("x", "y", "x_test", "y_test"))
    net = plain(lambda: fresh("Autocast").float(), x, y, [np.arange(len(y))], x_test)
    ours = result.module.net.state_dict()
    for name, value in net.state_dict().items():  # a rounding of bfloat16 may turn
        assert_near(ours[name], value, 2e-3)
    loss = F.cross_entropy(net(x_test), y_test).item()
    assert result.metrics["test/loss"] == pytest.approx(loss, abs=5e-3)
    cfg = OmegaConf.load(result.folder / "config.yaml")
    cfg.ckpt_path = str(result.folder / "global_model.safetensors")
    assert evaluate(cfg)["test/loss"] == pytest.approx(result.metrics["test/loss"], rel=1e-7)


class WithCache(torch.autocast):
    """Lightning's contexts keep no casts, as of 2.6."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs | {"cache_enabled": True})


@pytest.mark.parametrize("algorithm", METHODS)
def test_mixed_precision_casts_the_present_weights_in_every_pass(
    config, tmp_path, monkeypatch, algorithm
):
    words = (f"algorithm={algorithm}", PLAIN_STEPS, "gc=none", "precision=bf16-mixed")
    usual = run(config, tmp_path / "usual", "Small", *words)
    monkeypatch.setattr(torch, "autocast", WithCache)
    with_cache = run(config, tmp_path / "with_cache", "Small", *words)
    assert torch.equal(final_weights(usual), final_weights(with_cache))
    assert usual.frame.filter(like="loss").equals(with_cache.frame.filter(like="loss"))
