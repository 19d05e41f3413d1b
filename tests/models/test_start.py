"""``model.start``: a run starts with the weights of another run, and refuses other files."""

import json
from copy import deepcopy

import pytest
import torch
from conftest import read_rows, refuses
from harness import final_weights
from safetensors.torch import save_file
from torch import nn

from gcfed.assemble import assemble
from gcfed.folders.identity import identity
from gcfed.models.mlp import MLP
from gcfed.models.own import apply_policy, begin_at
from gcfed.run import evaluate, train
from gcfed.utils.compose import shorthand

SMALL = (
    "model.hidden=[8]",
    "client.epochs=1",
    "data.limit_train=100",
    "data.limit_test=40",
    "rounds=1",
)


def network(hidden=(5,), seed=0):
    torch.manual_seed(seed)
    return MLP(input_shape=(6,), num_classes=4, hidden=hidden)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())


class Tied(nn.Module):
    """Two layers share a weight, as the first and the last layer of a language model."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(64, 64)
        self.two = nn.Linear(64, 64)
        self.head = nn.Linear(64, 10)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.head(self.two(self.one(x.flatten(1)).relu()).relu())


def test_a_run_starts_at_the_end_of_another_and_has_another_identity(config, tmp_path):
    """Both files of a run work, bit for bit.

    With η = 0, the first test equals the last test of the other run.
    """
    small = (*shorthand([f"model._target_={__name__}.Tied"]), *SMALL[1:])
    first = train(config(*small, folder=tmp_path / "first"))
    files = [
        tmp_path / "first" / name for name in ("checkpoints/last.ckpt", "global_model.safetensors")
    ]
    for file in files:
        cfg = config(*small, "seed=2", f"model.start={file}", folder=tmp_path / "second")
        assert same(assemble(cfg).module.net.state_dict(), first.module.net.state_dict())
        assert identity(cfg) != identity(config(*small, "seed=2"))
    still = train(
        config(
            *small, f"model.start={files[1]}", "client.optimizer.lr=0.0", folder=tmp_path / "still"
        )
    )
    old, new = (read_rows(tmp_path / name / "metrics.csv") for name in ("first", "still"))
    assert new[0]["test/loss"] == old[-1]["test/loss"]
    assert torch.equal(final_weights(still), final_weights(first))


def test_a_run_knows_the_content_of_the_file(config, tmp_path):
    """The path alone would make runs from two contents repetitions of one run."""
    file = tmp_path / "start.pt"
    words = (*SMALL, f"model.start={file}", "rounds=2")

    def go(name, seed, *overrides):
        state = assemble(config(*SMALL, f"seed={seed}")).module.net.state_dict()
        torch.save(state, file)
        train(config(*words, *overrides, folder=tmp_path / name))
        return json.loads((tmp_path / name / "summary.json").read_text())["data"]

    first = go("first", 7)
    assert go("same", 7) == first
    assert go("other", 8) != first
    go("first", 7, "ckpt_path=last", "rounds=3")
    with refuses("the data have changed since: model.start. Put the old files back"):
        go("first", 8, "ckpt_path=last", "rounds=4")


def test_a_run_needs_the_file_only_at_its_start(config, tmp_path):
    save_file(
        assemble(config(*SMALL, "seed=7")).module.net.state_dict(), tmp_path / "start.safetensors"
    )
    start = f"model.start={tmp_path}/start.safetensors"
    begun = train(config(*SMALL, start, folder=tmp_path / "run"))
    (tmp_path / "start.safetensors").unlink()
    tested = evaluate(config(*SMALL, start, f"ckpt_path={tmp_path / 'run/checkpoints/last.ckpt'}"))
    assert tested["test/acc"] == pytest.approx(begun.metrics["test/acc"])


def test_tensors_of_another_network_are_refused_by_name(tmp_path):
    file = str(tmp_path / "net.pt")
    torch.save(network(seed=1).state_dict(), file)
    assert same(begin_at(network(), file).state_dict(), network(seed=1).state_dict())
    assert same(
        begin_at(network().double(), file).float().state_dict(), network(seed=1).state_dict()
    )
    with refuses(rf"start={file} is of another network: .*size mismatch for fc1\.weight"):
        begin_at(network((9,)), file)
    with refuses(r"start=nowhere\.pt: there is no such file$"):
        begin_at(network(), "nowhere.pt")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "net."])
@pytest.mark.parametrize("body", ["", "body."])
def test_the_prefix_of_a_wrapper_is_left_out(tmp_path, prefix, body):
    file = str(tmp_path / "net.pt")

    def make(seed):
        net = network(seed=seed)
        return nn.ModuleDict({"body": net}) if body else net

    state = make(1).state_dict()
    torch.save({prefix + name: t for name, t in state.items()}, file)
    assert same(begin_at(make(2), file).state_dict(), state)


def test_the_state_dict_of_a_file_is_read_and_other_contents_are_refused(tmp_path):
    file = str(tmp_path / "net.pt")
    state = network(seed=1).state_dict()
    torch.save({"state_dict": state, "epoch": 3}, file)
    assert same(begin_at(network(), file).state_dict(), state)
    torch.save({"epoch": 3, "model": state}, file)
    with refuses("is of another network: "):
        begin_at(network(), file)
    for content in (5, [1], torch.zeros(3), {1: torch.zeros(3)}):
        torch.save(content, file)
        with refuses(rf"start={file} holds a \w+: save net"):
            begin_at(network(), file)


@pytest.mark.parametrize("policy", ["fixed", "group"])
def test_tensors_from_before_and_after_a_policy_are_accepted(tmp_path, policy):
    def make():
        return nn.Sequential(nn.Conv2d(1, 64, 3), nn.BatchNorm2d(64))

    net = make()
    x = torch.randn(5, 1, 6, 6)
    file = str(tmp_path / "net.pt")
    net(x)  # changes its statistics
    torch.save(net.state_dict(), file)
    under = apply_policy(deepcopy(net), policy)
    assert torch.equal(begin_at(make(), file, policy)(x), under(x))
    torch.save(under.state_dict(), file)
    assert torch.equal(begin_at(make(), file, policy)(x), under(x))


class Code:
    """Unpickling an object of this class would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_code_in_a_file_is_not_executed(tmp_path):
    ran = tmp_path / "ran"
    file = tmp_path / "net.pt"
    torch.save(network().state_dict() | {"code": Code(str(ran))}, file)
    with refuses(r"net\.pt holds no tensors that can be read: Weights only load failed"):
        begin_at(network(), str(file))
    assert not ran.exists()
