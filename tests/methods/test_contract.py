"""What every algorithm of ``configs/algorithm`` owes: it is found here by its YAML alone, without another line."""

import re
import weakref
from typing import ClassVar

import numpy as np
import pytest
import torch
from conftest import TWO, read_rows
from harness import ALGORITHMS, Spy, final_weights, make_net, sgd, train_rounds
from omegaconf import open_dict
from tapes import train_twice

from gcfed.checkpoints.reading import load_checkpoint
from gcfed.federated.store import ClientStores
from gcfed.methods.fedvarp import FedVARP
from gcfed.methods.scaffold import Scaffold
from gcfed.run import train
from gcfed.runs.folder import CHECKPOINT
from gcfed.utils.resolvers import ROOT

TINY = (
    "model.hidden=[12,8]", "rounds=3", "participation.num_clients=7", "participation.per_round=3", "client.epochs=2",
    "client.batch_size=8", "data.limit_train=150", "data.limit_test=40", "eval_every=3", "callbacks.checkpoint.every=9",
    "precision=64-true", "data.transform.crop_padding=1",
)  # fmt: skip
KEYS = ("round", "train/loss", "test/acc", "comm/up_bytes", "comm/down_bytes", "train/nonfinite_clients")


def tiny(config, folder, algorithm, *overrides, gc="gcfed"):
    return config(f"algorithm={algorithm}", f"gc={gc}", *TINY, *overrides, folder=folder)


def rows(folder):
    return [{key: row.get(key) for key in KEYS} for row in read_rows(folder / "metrics.csv")]


def assert_equal(folder, results, one, other):
    """Two of the runs, up to the order of sums."""
    torch.testing.assert_close(final_weights(results[other]), final_weights(results[one]), rtol=0, atol=1e-9, msg=other)
    for a, b in zip(rows(folder / other), rows(folder / one), strict=True):
        assert a == pytest.approx(b, abs=1e-6, nan_ok=True), other


def bytes_in_the_table(byte):
    """algorithm → (down, up) in models, as ``docs/methods.md`` says, where ¼ is a byte a weight (of float32)."""
    table = {}
    for line in (ROOT / "docs/methods.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and re.match("`(?!gc=|algorithm=)", cells[0]):
            down, up = (float({"¼": byte}.get(c, c)) for c in cells[4:])
            table |= dict.fromkeys(re.findall(r"`(\w+)`", cells[0]), (down, up))
    return table


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_stacks_recorded_steps_and_processes_agree(config, tmp_path, monkeypatch, algorithm):
    """Of a cohort of three, so that the second stack has one client, and the second process fewer than the first."""
    cases = {"one": ("client.stack=1",), "processes": TWO}
    runs = {name: train(tiny(config, tmp_path / name, algorithm, *more)) for name, more in cases.items()}
    cfg = tiny(config, tmp_path / "stacks", algorithm, "client.stack=2")
    runs["stacks"], same, played = train_twice(monkeypatch, cfg)
    assert same
    assert {kind.active for kind in played} == {1, 2}
    assert_equal(tmp_path, runs, "one", "stacks")
    assert_equal(tmp_path, runs, "one", "processes")
    assert [row["train/nonfinite_clients"] for row in rows(tmp_path / "one")] == [0, 0, 0]
    if "sub" not in algorithm and algorithm != "ssf":  # a quarter of a larger model: that is counted in their own tests
        parameters = [*runs["one"].module.net.parameters()]
        model = 3 * sum(p.nbytes for p in parameters)
        sent = [row[f"comm/{way}_bytes"] / model for row in rows(tmp_path / "one")[1:] for way in ("down", "up")]
        assert sent == pytest.approx(2 * bytes_in_the_table(1 / parameters[0].itemsize)[algorithm], rel=0.03)
    if any((tmp_path / "one").glob("clients/*/*")):  # states change processes, one of which has no client in a round
        alone = ("participation.per_round=1", "participation.num_clients=2", "rounds=6", "callbacks.checkpoint.every=2")
        for name, more in {"alone": (), "alone of two": TWO}.items():
            runs[name] = train(tiny(config, tmp_path / name, algorithm, *alone, *more))
        assert_equal(tmp_path, runs, "alone", "alone of two")


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


class KillInRound(Spy):
    """Kills the process in the middle of a round: one stack has written its clients' state, two have not."""

    def __init__(self, round_number):
        self.index, self.stacks = round_number - 1, 0

    def on_receive(self, upload, round):
        self.stacks += round.index == self.index
        if self.stacks == 2:
            raise Killed


# Every client rehearses in every round, and every metric of the clients' models is measured.
MEASURED = (
    "metrics=all", "metrics.cka.every=1", "metrics.gap.every=1", "metrics.clients.every=1",
    "metrics.forgetting.every=1", "metrics.cka.samples=20", "metrics.forgetting.samples=9",
)  # fmt: skip


@pytest.mark.parametrize(("algorithm", "gc"), [*((name, "gcfed") for name in ALGORITHMS), ("fedavg", "warmup")])
def test_a_killed_run_continues_bit_for_bit_and_no_metric_changes_it(config, tmp_path, algorithm, gc):
    """Every client takes part several times, so that state from before the kill is used after it."""
    more = ("rounds=5", "callbacks.checkpoint.every=2", "participation.num_clients=4", "client.epochs=1")
    straight = train(tiny(config, tmp_path / "straight", algorithm, *more, gc=gc))
    cfg = tiny(config, tmp_path / "killed", algorithm, *more, *MEASURED, gc=gc)
    with open_dict(cfg):
        cfg.callbacks["kill"] = {"_target_": f"{__name__}.KillInRound", "round_number": 4}
    with pytest.raises(Killed):
        train(cfg)
    cfg.callbacks.kill.round_number = 99
    cfg.ckpt_path = "last"
    resumed = train(cfg)
    assert torch.equal(final_weights(resumed), final_weights(straight))
    # every second round writes one, and the last
    assert load_checkpoint(tmp_path / "straight" / CHECKPOINT)["global_step"] == 5
    a, b = rows(tmp_path / "straight"), rows(tmp_path / "killed")
    assert repr(a) == repr(b)
    kept = [sorted(p.name for p in (tmp_path / run).glob("clients/*/*")) for run in ("straight", "killed")]
    assert kept[0] == kept[1]  # a version a client, and none that the kill left
    assert kept[0] or algorithm != "scaffold"


class StepsByItself(Spy):
    """Lacks the order of methods whose hook is called."""

    def after_step(self, stack, batch): ...


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("algorithm=feddyn", "client_store.dtype=bfloat16"), r"client_store\.dtype=null"),
        (
            ("algorithm=scaffold", "+methods.varp._target_=gcfed.methods.fedvarp.FedVARP"),
            "Scaffold and FedVARP each correct",
        ),
        (
            ("algorithm=scaffold", "+methods.fedreg._target_=gcfed.methods.fedreg.FedReg"),
            "Scaffold does not go with FedReg, which moves the weights too",
        ),
        (
            (
                "algorithm=feddyn",
                "+methods.ahead._target_=gcfed.methods.lookahead.LookAhead",
                "+methods.ahead.update=delta",
            ),
            "FedDyn does not go with LookAhead, whose clients start elsewhere",
        ),
        (
            (f"+methods.mine._target_={__name__}.StepsByItself",),
            r"StepsByItself\.after_step is called only with order = Order\.MOVES_WEIGHTS",
        ),
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
    server = method.parts[-1].server_state({"scaffold": "c", "fedvarp": "y"}[algorithm], {})
    states = stores.open(algorithm).read(np.arange(5), server)
    for name, mean in server.items():
        torch.testing.assert_close(states[name].mean(0), mean, rtol=0, atol=1e-12)


class WatchUploads(Spy):
    """Counts the tensors of earlier uploads that are alive when a stack starts."""

    alive: ClassVar[list[int]] = []
    received: ClassVar[list] = []

    def on_clients_start(self, stack, download):
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
