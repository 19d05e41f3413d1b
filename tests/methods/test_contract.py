"""What every algorithm of ``configs/algorithm`` owes: it is found here by its YAML alone, without another line."""

import subprocess
import sys
import weakref
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from conftest import read_rows
from harness import make_net, sgd, train_rounds
from omegaconf import open_dict
from safetensors.torch import load_file
from two_processes import TINY, overrides_of

from gcfed.federated.method import FederatedMethod
from gcfed.federated.store import ClientStores
from gcfed.methods.fedvarp import FedVARP
from gcfed.methods.scaffold import Scaffold
from gcfed.run import train
from gcfed.utils.resolvers import ROOT

ALGORITHMS = sorted(path.stem for path in (ROOT / "configs/algorithm").glob("*.yaml"))
KEYS = ("round", "train/loss", "test/acc", "comm/up_bytes", "comm/down_bytes", "train/nonfinite_clients")


def tiny(config, folder, algorithm, *overrides, gc="gcfed"):
    return config(f"algorithm={algorithm}", f"gc={gc}", *TINY, *overrides, folder=folder)


def weights(result):
    return torch.cat([p.detach().flatten() for p in result.module.net.parameters()])


def rows(folder):
    return [{key: row.get(key) for key in KEYS} for row in read_rows(folder / "metrics.csv")]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_trains_without_gc(config, tmp_path, algorithm):
    """Local and Global GC together are what the tests below run."""
    result = train(tiny(config, tmp_path, algorithm, "rounds=2", gc="none"))
    assert result.metrics["round"] == 2
    assert result.metrics["train/nonfinite_clients"] == 0
    assert np.isfinite([result.metrics[key] for key in ("train/loss", "test/loss")]).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_stacks_of_one_and_of_two_clients_agree(config, tmp_path, algorithm):
    """Of a cohort of three, so that the second stack has one client."""
    one, two = (train(tiny(config, tmp_path / f"{k}", algorithm, f"client.stack={k}")) for k in (1, 2))
    torch.testing.assert_close(weights(two), weights(one), rtol=0, atol=1e-9)
    for a, b in zip(rows(tmp_path / "2"), rows(tmp_path / "1"), strict=True):
        assert a == pytest.approx(b, abs=1e-6, nan_ok=True)


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


class KillInRound(FederatedMethod):
    """Kills the process in the middle of a round: one stack has written its clients' state, two have not."""

    def __init__(self, round_number):
        self.index, self.stacks = round_number - 1, 0

    def on_receive(self, upload, round):
        self.stacks += round.index == self.index
        if self.stacks == 2:
            raise Killed


STATEFUL = ("fedcurv", "feddc", "feddyn", "fedsub", "fedvarp", "moon", "scaffold", "ssf")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_killed_run_continues_bit_for_bit(config, tmp_path, algorithm):
    """Every client takes part several times, so that state from before the kill is used after it."""
    more = ("rounds=5", "callbacks.checkpoint.every=2", "participation.num_clients=4", "client.epochs=1")
    straight = train(tiny(config, tmp_path / "straight", algorithm, *more))
    cfg = tiny(config, tmp_path / "killed", algorithm, *more)
    with open_dict(cfg):
        cfg.callbacks["kill"] = {"_target_": f"{__name__}.KillInRound", "round_number": 4}
    with pytest.raises(Killed):
        train(cfg)
    cfg.callbacks.kill.round_number = 99
    cfg.ckpt_path = "last"
    resumed = train(cfg)
    assert torch.equal(weights(resumed), weights(straight))
    a, b = rows(tmp_path / "straight"), rows(tmp_path / "killed")
    assert repr(a) == repr(b)
    kept = [sorted(p.name for p in (tmp_path / run).glob("clients/*/*")) for run in ("straight", "killed")]
    assert kept[0] == kept[1]  # a version a client, and none that the kill left
    assert bool(kept[0]) == (algorithm in STATEFUL)


# The others share nothing over processes but the sum of updates.
CASES = ["fedpaq", "fedadam", "fedacg", "fedcm", "fedgc", *STATEFUL, *(f"{algorithm}+alone" for algorithm in STATEFUL)]


@pytest.mark.slow
def test_two_processes_agree_with_one(config, tmp_path):
    """In one pair of processes, since starting it is what takes the time."""
    script = Path(__file__).with_name("two_processes.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    done = subprocess.run([*command, tmp_path / "two", *CASES], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for case in CASES:
        one = train(tiny(config, tmp_path / "one" / case, *overrides_of(case)))
        theirs = load_file(tmp_path / "two" / case / "global_model.safetensors")
        for name, tensor in one.module.net.state_dict().items():
            torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=1e-9, msg=f"{case}: {name}")
        for a, b in zip(rows(tmp_path / "one" / case), rows(tmp_path / "two" / case), strict=True):
            assert a == pytest.approx(b, abs=1e-6, nan_ok=True), case


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("algorithm=fedacg", "server.momentum=0"), "lookahead"),
        (("algorithm=fedcm", "client.optimizer.momentum=0.9"), r"client\.optimizer\.momentum=0"),
        (("algorithm=feddyn", "aggregator.weighting=samples"), r"aggregator\.weighting=uniform"),
        (("algorithm=feddyn", "server=fedadam"), "server=sgd"),
        (("algorithm=fedvarp", "aggregator.weighting=samples"), r"aggregator\.weighting=uniform"),
        (("algorithm=scaffold", "quantization=fedpaq"), "quantization=none"),
        (("algorithm=feddc", "quantization=fedpaq"), "quantization=none"),
        (("algorithm=scaffold", "client=adam"), "client=sgd"),
        (("algorithm=feddyn", "client_store.dtype=bfloat16"), r"client_store\.dtype=null"),
        (("algorithm=feddc", "client_store.dtype=bfloat16"), r"client_store\.dtype=null"),
        (
            ("algorithm=scaffold", "+methods.varp._target_=gcfed.methods.fedvarp.FedVARP"),
            "Scaffold and FedVARP each correct",
        ),
        (("algorithm=fedsam", "+methods.sol._target_=gcfed.methods.fedsol.FedSol"), "both move the weights"),
    ],
)
def test_what_cannot_work_together_is_refused_by_name(config, tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        train(config(*overrides, folder=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("algorithm", ["scaffold", "fedvarp"])
def test_states_in_bfloat16_keep_the_servers_mean(federation, algorithm):
    """The server adds up what is kept, rounded: so its mean is that of the clients' states, however many rounds."""
    method, stores = {"scaffold": Scaffold, "fedvarp": FedVARP}[algorithm](), ClientStores(dtype="bfloat16")
    train_rounds(make_net(), federation, sgd(), rounds=20, methods=[method], stores=stores)
    server = method.server_state({"scaffold": "c", "fedvarp": "y"}[algorithm], {})
    states = stores.open(algorithm).read(np.arange(5), server)
    for name, mean in server.items():
        torch.testing.assert_close(states[name].mean(0), mean, rtol=0, atol=1e-12)


class WatchUploads(FederatedMethod):
    """Counts the tensors of earlier uploads that are alive when a stack starts."""

    alive: ClassVar[list[int]] = []
    received: ClassVar[list] = []

    def on_clients_start(self, stack, round):
        self.alive.append(sum(tensor() is not None for tensor in self.received))

    def on_receive(self, upload, round):
        self.received += [weakref.ref(t) for t in (*upload.delta.values(), *upload.extra["scaffold"].values())]


def test_nothing_holds_an_upload_while_the_next_client_trains(config, tmp_path):
    """Each would be a model's size, which VGG11 would feel."""
    cfg = tiny(config, tmp_path, "scaffold", "client.stack=1", "rounds=1")
    with open_dict(cfg):
        cfg.callbacks["watch"] = {"_target_": f"{__name__}.WatchUploads"}
    train(cfg)
    assert WatchUploads.alive == [0, 0, 0]
    assert WatchUploads.received
