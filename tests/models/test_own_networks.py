"""Users' networks: whether they match the data, and the effect of each policy on batch
normalisation.
"""

import re
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
import torchvision
from conftest import read_rows, refuses
from harness import (
    PLAIN_SERVER,
    make_net,
    plan_of,
    random_federation,
    sgd,
    train_rounds,
    with_batch_norm,
)
from lightning.pytorch import Trainer
from omegaconf import OmegaConf
from torch import nn

from gcfed.assemble import assemble
from gcfed.federated.engine.client import ClientProgram
from gcfed.federated.network.lent_network import Traits
from gcfed.federated.network.module import FederatedModule
from gcfed.federated.training.recorder import can_record
from gcfed.methods.centralization import GradientCentralization
from gcfed.methods.correction.scaffold import Scaffold
from gcfed.methods.personal.local_norm import LocalNorm
from gcfed.models.build import build_net
from gcfed.models.facts import is_recordable_network
from gcfed.models.own import apply_policy, batch_norms, fitted, timm_net, torchvision_net
from gcfed.run import train
from gcfed.tasks import Classification
from gcfed.utils.compose import shorthand
from gcfed.utils.instantiate import BuildError

SMALL = ("rounds=1", "client.epochs=1", "data.limit_train=120", "data.limit_test=40")


class Net(nn.Module):
    """By default, for colour images of 8×8 pixels in eight classes."""

    def __init__(self, width=4, input_shape=(3, 8, 8), num_classes=8):
        super().__init__()
        self.conv = nn.Conv2d(input_shape[0], width, 3, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width * 9, num_classes)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).relu().flatten(1))


def test_pretrained_weights_are_used_except_for_a_new_head(monkeypatch, caplog):
    kind = torchvision.models.get_model_weights("squeezenet1_1")
    theirs = {
        name: torch.full_like(t, 0.5)
        for name, t in torchvision.models.squeezenet1_1().state_dict().items()
    }
    monkeypatch.setattr(kind, "get_state_dict", lambda *args, **kwargs: theirs)
    with caplog.at_level("INFO"):
        net = of_torchvision("squeezenet1_1", 32, weights="DEFAULT")
    fresh = {"classifier.1.weight", "classifier.1.bias"}
    assert {name for name, t in net.state_dict().items() if not (t == 0.5).all()} == fresh
    assert "classifier.1.weight, classifier.1.bias start at random" in caplog.text


def test_timms_layers_keep_their_activation_under_a_policy():
    pytest.importorskip("timm")
    net = timm_net(name="test_efficientnet", input_shape=(1, 32, 32), num_classes=7)
    activations = sum(isinstance(m, nn.SiLU) for m in net.modules())
    assert apply_policy(net, "fixed")(torch.zeros(1, 1, 32, 32)).shape == (1, 7)
    assert sum(isinstance(m, nn.SiLU) for m in net.modules()) == activations
    assert not batch_norms(net)


def of_torchvision(name, side, **settings):
    return torchvision_net(name=name, input_shape=(3, side, side), num_classes=7, **settings)


class Pooled(Net):
    """Its batch normalisation has one value per sample and channel."""

    def forward(self, x):
        h = self.norm(self.conv(x).mean((2, 3), keepdim=True))
        return self.head(h.expand(-1, -1, 3, 3).flatten(1))


class Squeezed(Net):
    """Its ``forward`` fails with one sample."""

    def forward(self, x):
        h = self.norm(self.conv(x)).squeeze().mean((2, 3))
        return self.head(h[:, :, None, None].expand(-1, -1, 3, 3).flatten(1))


class Pair(Net):
    def forward(self, x):
        return super().forward(x), x


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: of_torchvision("resnet81", 32), r"name=resnet81: .*list_models"),
        (
            lambda: of_torchvision("squeezenet1_1", 64, weights="X"),
            r"weights=X is unknown: choose null or one of IMA",
        ),
        (
            lambda: fitted(Net(), (1, 8, 8), 8),
            r"Net cannot read samples of data\.input_shape=\[1, 8, 8\]: .*channels",
        ),
        (
            lambda: fitted(Net(), (3, 8, 8), 3),
            r"Net returns the shape \[2, 8\] .*an argument num_classes",
        ),
        (
            lambda: fitted(Pair(), (3, 8, 8), 8),
            r"model: Pair returns a tuple: its forward must return one tensor",
        ),
        (
            lambda: build_net(OmegaConf.create({"model": {"_target_": None}})),
            r"model=own: name your network, .*mynet",
        ),
        (
            lambda: build_net(OmegaConf.create({"model": {"_target_": "nonet.Net"}})),
            r"^model\._target_=nonet.Net: there is no module",
        ),
        (
            lambda: apply_policy(make_net(), "local"),
            r"norm_policy=local: Sequential has no batch norm",
        ),
        (
            lambda: apply_policy(with_batch_norm(), "fixed"),
            r"needs nn\.BatchNorm2d, and 1 is a BatchNorm1d",
        ),
    ],
)
def test_networks_that_do_not_fit_are_refused_in_one_sentence(make, message):
    with refuses(message):
        make()


def test_fixed_always_evaluates_and_group_needs_no_statistics():
    net = Net()
    x = torch.randn(5, 3, 8, 8)
    net(x)  # changes its statistics
    nn.init.uniform_(net.norm.weight)
    expected = net.eval()(x)
    fixed = apply_policy(net, "fixed").train()
    torch.testing.assert_close(fixed(x), expected)
    assert "norm.weight" not in dict(fixed.named_parameters())

    vectors = apply_policy(nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32)), "group")
    assert vectors(torch.randn(2, 4)).std(1).min() > 0.5  # groups of one channel would give zeros
    group = apply_policy(Net(width=96), "group")
    assert group.norm.num_groups == 32
    assert group.norm.num_channels == 96
    torch.testing.assert_close(group(x)[:1], group(x[:1]))
    for channels, groups in ((1, 1), (2, 1), (16, 8), (24, 8), (32, 16), (64, 32)):
        layer = apply_policy(nn.Sequential(nn.BatchNorm2d(channels)), "group")[0]
        assert layer.num_groups == groups
        # one pixel, several channels
        assert channels == 1 or layer(torch.randn(2, channels, 1, 1)).std() > 0.1


def test_global_gc_does_not_change_the_mean_of_the_clients_batch_norms():
    plain = with_batch_norm()
    centralized = with_batch_norm()
    for net, gc in (
        (plain, []),
        (centralized, [GradientCentralization(local=False, tensors="all")]),
    ):
        train_rounds(
            net,
            random_federation(sizes=(8, 12)),
            sgd(),
            rounds=1,
            methods=[LocalNorm(), *gc],
            cohort_of=2,
        )
    same = {
        name
        for name, t in plain.state_dict().items()
        if torch.equal(centralized.state_dict()[name], t)
    }
    assert {name for name in plain.state_dict() if name.startswith("1.")} <= same
    assert "0.weight" not in same


def test_a_client_keeps_only_the_tensors_of_its_batch_norms_that_travel():
    """A frozen scale is equal on all clients: it is neither sent nor stored."""
    net = with_batch_norm()
    data = random_federation(sizes=(8, 12))
    net[1].weight.requires_grad_(False)
    scale = net[1].weight.clone()
    method = LocalNorm()
    train_rounds(net, data, sgd(), rounds=2, methods=[method], cohort_of=2)
    expected = {"1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert {*method.kept} == expected
    assert torch.equal(net[1].weight, scale)


def test_a_users_module_is_recorded_only_if_it_declares_recordable():
    net = nn.Sequential(nn.Flatten(), Net())
    assert not can_record(net, torch.device("cuda"))
    net[1].recordable = True
    assert is_recordable_network(net)
    assert is_recordable_network(of_torchvision("squeezenet1_1", 32))


def test_a_users_loss_is_recorded_only_if_it_declares_recordable():
    """A recording would repeat a loss that counts its calls or draws from NumPy."""

    class Own(Classification):
        pass

    for task in (Classification(), Own()):
        module = FederatedModule(make_net(), PLAIN_SERVER, task=task)
        module.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        program = ClientProgram(module, random_federation(), sgd(), [])
        assert program.recordable == ("" if isinstance(task, Own) else "run")
        task.recordable = True
        assert replace(program).recordable == "run"


def test_local_statistics_refuse_methods_that_compare_with_the_broadcast_model():
    federation = random_federation(sizes=(8, 8, 8))
    with refuses(r"model\.norm_policy=local does not combine with Scaffold"):
        train_rounds(
            with_batch_norm(), federation, sgd(), rounds=1, methods=[LocalNorm(), Scaffold()]
        )


@pytest.mark.parametrize("last_batch", ["keep", "drop", "wrap"])
@pytest.mark.parametrize("steps", [2, None])
def test_batches_of_one_sample_are_foreseen(last_batch, steps):
    """The forecast equals the batches that are drawn."""
    data = random_federation(sizes=(1, 2, 4, 5, 9, 13))
    settings = {"steps": steps, "last_batch": last_batch}
    single = np.flatnonzero((plan_of(data, range(6), **settings).counts == 1).any(1)).tolist()
    words = (
        f"{len(single)} of 6 clients have such a batch .the first is client {single[0]}"
        if single
        else ""
    )
    with refuses(words) if single else nullcontext():
        sgd(**settings).check(Traits(why_single_fails="it fails"), data)


# --------------------------------------------------------------------------------------- whole runs
def own(config, folder, *overrides, net="Net"):
    return config(
        *shorthand([f"model._target_={__name__}.{net}"]), *SMALL, *overrides, folder=folder
    )


def test_a_run_has_its_networks_name_and_boundary(config, tmp_path, caplog):
    with caplog.at_level("INFO"):
        cfg = own(config, tmp_path, "+model.width=5", "client.last_batch=wrap")
        result = train(cfg)
    assert cfg.name == "digits_Net_gcfed"
    assert result.module.net.conv.out_channels == 5
    assert caplog.text.count("gc.boundary=head, the last module with a weight") == 1
    assert result.loop.run.simulation.program.parts[0].axes_of == {"conv.weight": 4}


def test_local_statistics_survive_a_kill(config, tmp_path):
    more = ("model.norm_policy=local", "participation.num_clients=4", "participation.per_round=3")
    straight = train(own(config, tmp_path / "straight", *more, "rounds=2"))
    train(own(config, tmp_path / "stopped", *more))
    resumed = train(own(config, tmp_path / "stopped", *more, "rounds=2", "ckpt_path=last"))
    for name, t in straight.module.net.state_dict().items():
        assert torch.equal(resumed.module.net.state_dict()[name], t), name
    a, b = (read_rows(tmp_path / run / "metrics.csv")[-1] for run in ("straight", "stopped"))
    assert a["test/loss"] == b["test/loss"]


@pytest.mark.parametrize(
    ("net", "remedy"),
    [("Pooled", "model.norm_policy=group"), ("Squeezed", "client.last_batch=wrap")],
)
def test_the_error_of_clients_with_one_sample_names_the_remedy(config, tmp_path, net, remedy):
    """Some of 40 clients have one sample, and batch normalisation cannot train on it."""
    with refuses(rf"{net} cannot train .*, and \d+ of 40 clients .*{re.escape(remedy)}"):
        assemble(own(config, tmp_path, "participation.num_clients=40", net=net))
    assemble(own(config, tmp_path, "participation.num_clients=40", remedy, net=net))


class AnyKey(nn.Module):
    """Reads the number of classes from its ``**kwargs``."""

    def __init__(self, **kwargs):
        super().__init__()
        self.head = nn.Linear(64, kwargs["num_classes"])


def test_a_network_that_expects_the_number_of_classes_in_its_kwargs_gets_a_remedy():
    shape = {"input_shape": [1, 8, 8], "num_classes": 10}
    model = {"_target_": f"{__name__}.AnyKey", **shape}
    remedy = "num_classes.*AnyKey has .*kwargs, which do not get input_shape and num_classes"
    with pytest.raises(BuildError, match=remedy):
        build_net(OmegaConf.create({"model": model}))
