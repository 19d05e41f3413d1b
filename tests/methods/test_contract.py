"""Tests that every algorithm of ``configs/algorithm`` must pass.

A new YAML file is tested without a change here. Algorithms with late clients have
``server/test_late.py``.
"""

import copy
import re
import shutil
import weakref
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from conftest import TWO, composed_once, config_of, read_rows
from harness import (
    ALGORITHMS,
    FEW_INNER_STEPS,
    LATE,
    Spy,
    assert_near,
    final_weights,
    make_net,
    make_setup,
    train_rounds,
)
from omegaconf import DictConfig, OmegaConf, open_dict
from tapes import train_twice
from torch import nn

from gcfed.assemble import build_methods
from gcfed.attacks.byzantine import Scale
from gcfed.checkpoints.reading import load_checkpoint
from gcfed.federated.parts import ClientPart, KeptState, Order, ServerPart, like_trained
from gcfed.federated.parts.refusals import validate_parts
from gcfed.federated.state.store import ClientStores
from gcfed.federated.training.batches import Kind
from gcfed.folders.folder import CHECKPOINT
from gcfed.methods.centralization import GlobalGC, LocalGC
from gcfed.methods.correction.feddc import FedDC
from gcfed.methods.correction.feddyn import FedDyn
from gcfed.methods.correction.scaffold import Scaffold
from gcfed.methods.momentum.fedcm import FedCM
from gcfed.methods.momentum.lookahead import LookAhead
from gcfed.methods.objective.fedreg import FedReg
from gcfed.methods.server.fedexp import FedExP
from gcfed.methods.server.fednova import FedNova
from gcfed.methods.server.fedvarp import FedVARP
from gcfed.methods.subspace.ssf import SSF
from gcfed.methods.upload.clip_update import ClipUpdate
from gcfed.methods.upload.quantization import Quantization
from gcfed.run import RunResult, train
from gcfed.utils.resolvers import ROOT

# Of four clients, 1, 2 and 3 train in the first round, only 2 in the second, and 0, 1 and 2 in the
# third. With two processes, one has no client in the second round, and client 2 changes its
# process. Each stack has at least three steps of one kind.
TINY = (
    "model.hidden=[12,8]",
    "rounds=3",
    "participation.num_clients=4",
    "participation.per_round=3",
    "client.epochs=1",
    "client.batch_size=8",
    "data.limit_train=92",
    "data.limit_test=40",
    "eval_every=3",
    "callbacks.checkpoint.every=1",
    "client.steps=null",
    "precision=64-true",
    "participation.faults.dropout=0.3",
    "seed=595",
    "data.transform.crop_padding=1",
)
COMM = ("comm/down_bytes", "comm/up_bytes")
KEYS = ("round", "train/loss", "test/acc", *COMM, "train/clients", "train/nonfinite_clients")
# All clients train for the metric of the gap. The others are measured in the last round.
MEASURED = (
    "metrics=all",
    "metrics.gap.every=1",
    "metrics.cka.samples=20",
    "metrics.forgetting.samples=9",
)


def rows(folder):
    return [{key: row.get(key) for key in KEYS} for row in read_rows(folder / "metrics.csv")]


def bytes_in_the_table(byte, head):
    """Algorithm → (down, up) of ``docs/methods.md``, in sizes of the model. ¼ is one byte per
    weight, ⅕ a weight and an index for every tenth weight. ``byte`` is one byte's share of a
    weight, and ``head`` the head's share of the model.
    """
    table = {}
    words = {"¼": byte, "⅕": 0.1 * (1 + 4 * byte), "head": head, "body": 1 - head}
    for line in (ROOT / "docs/methods.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and re.match("`(?!gc=|algorithm=)", cells[0]):
            down, up = (float(words.get(c, c)) for c in cells[4:])
            table |= dict.fromkeys(re.findall(r"`(\w+)`", cells[0]), (down, up))
    return table


class Copy(ServerPart):
    """Copies the run's folder in the second round, after its only client has trained, as a kill
    would leave it.
    """

    def setup(self, trainer, pl_module, stage):
        self.folder = Path(trainer.default_root_dir)
        self.strategy = trainer.strategy

    def on_receive(self, upload, round):
        if round.index == 1:
            self.strategy.checkpoint_io.wait()
            shutil.copytree(self.folder, self.folder.with_name("two"))


def changed(cfg, folder, **changes):
    """A copy of a config with another folder and other settings."""
    cfg = copy.deepcopy(cfg)
    cfg.paths.output_dir = str(folder)
    with open_dict(cfg):
        cfg.merge_with(changes)
    return cfg


@dataclass(frozen=True)
class Case:
    """An algorithm with a kind of GC, and the folder of its runs."""

    algorithm: str
    cfg: DictConfig
    folder: Path


@pytest.fixture(
    scope="module",
    params=[
        *((name, "gcfed") for name in ALGORITHMS if name not in LATE),
        ("fedavg", "warmup"),
    ],
    ids="-".join,
)
def case(request, tmp_path_factory):
    algorithm, gc = request.param
    words = (f"algorithm={algorithm}", f"gc={gc}", *TINY, *FEW_INNER_STEPS.get(algorithm, []))
    folder = tmp_path_factory.mktemp(algorithm)
    yield Case(algorithm, config_of(*words, folder=folder), folder)
    shutil.rmtree(folder)


@dataclass(frozen=True)
class Stacks:
    """A run that trained stacks of two clients."""

    result: RunResult
    rows: list[dict]
    states: list[tuple[str, ...]]
    uploads_agree: bool  # those of recorded steps with those of other steps, bit for bit
    recorded: list[Kind]


@pytest.fixture(scope="module")
def stacks(case):
    """Leaves a copy of its folder, ``two``, as a kill in the second round would leave it."""
    folder = case.folder / "reference"
    copied = {"copy": {"_target_": f"{__name__}.Copy"}}
    result, agree, recorded = train_twice(
        changed(case.cfg, folder, client={"stack": 2}, callbacks=copied)
    )
    return Stacks(result, rows(folder), kept_states(folder), agree, recorded)


def kept_states(folder):
    """(store, folder, file) of each client's state."""
    return sorted(path.parts[-3:] for path in folder.glob("clients/*/*/*"))


def test_gc_comes_after_what_corrects(case):
    """GC can be added to every algorithm (Table 7): it projects the corrected gradients."""
    methods = build_methods(case.cfg)
    places = [i for i, part in enumerate(methods) if isinstance(part, LocalGC | GlobalGC)]
    assert [type(methods[i]) for i in places] == [LocalGC, GlobalGC]
    assert all(part.order > Order.CORRECTS for part in methods[places[-1] + 1 :])
    rest = [type(part) for i, part in enumerate(methods) if i not in places]
    without_gc = OmegaConf.merge(case.cfg, {"gc": None})
    assert [type(part) for part in build_methods(without_gc)] == rest


def test_recorded_steps_send_the_bits_of_other_steps(stacks):
    assert stacks.uploads_agree
    assert {kind.active for kind in stacks.recorded} == {1, 2}
    assert [row["train/clients"] for row in stacks.rows] == [3, 1, 3]
    assert [row["train/nonfinite_clients"] for row in stacks.rows] == [0, 0, 0]


def test_the_last_checkpoint_is_that_of_the_last_round(case, stacks):
    assert load_checkpoint(case.folder / "reference" / CHECKPOINT)["global_step"] == 3


def test_two_processes_continue_a_killed_run_of_one_with_equal_numbers(case, stacks):
    """The two train one client at a time and measure all metrics, so only the order of sums
    differs.
    """
    folder = case.folder / "two"
    setting = changed(
        case.cfg,
        folder,
        client={"stack": 1},
        metrics=composed_once(MEASURED).metrics,
        trainer=composed_once(TWO).trainer,
    )
    setting.ckpt_path = "last"
    result = train(setting)
    assert result.trainer.world_size == 2
    last = read_rows(folder / "metrics.csv")[1:]
    assert ["gap/l2" in row for row in last] == [True, True]
    assert {"cka/fc1", "forgetting/own", "clients/acc_after"} <= last[-1].keys()
    assert_near(final_weights(result), final_weights(stacks.result), 1e-9)
    for found, row in zip(rows(folder), stacks.rows, strict=True):
        assert found == pytest.approx(row, abs=1e-6, nan_ok=True)
    assert kept_states(folder) == stacks.states


def test_a_run_keeps_one_state_of_each_client(case, stacks):
    clients = {(store, file.partition("-")[0]) for store, _, file in stacks.states}
    assert len(clients) == len(stacks.states)
    assert stacks.states or case.algorithm != "scaffold"


def test_bytes_are_those_of_the_table(case, stacks):
    if "sub" in case.algorithm or case.algorithm == "ssf":
        pytest.skip("the subspace methods have their own tests of bytes")
    parameters = [*stacks.result.module.net.parameters()]
    model = sum(p.nbytes for p in parameters)
    head = sum(p.nbytes for p in parameters[-2:]) / model
    table = bytes_in_the_table(1 / parameters[0].itemsize, head)
    if case.algorithm not in table:
        pytest.skip("a user's own method; docs/build.py wants a row for each of ours")
    for row in stacks.rows[1:]:  # a client that drops out has received the model
        clients = (3, row["train/clients"])
        sent = [row[way] / (model * n) for way, n in zip(COMM, clients, strict=True)]
        assert sent == pytest.approx(table[case.algorithm], rel=0.03)


class StepsByItself(Spy):
    """Has no order for which this hook is called."""

    def after_step(self, stack, batch): ...


class Misspelt(ClientPart):
    def on_cleints_end(self, stack, download): ...


class MisspeltTerm(ClientPart):
    def local_los(self, stack, batch, out): ...


class Keeps(ClientPart):
    keeps: ClassVar = {"c": KeptState(like_trained)}


class KeepsToo(Keeps): ...


class OtherSide(ServerPart):
    def local_loss(self, stack, batch, out): ...


class HearsOfSteps(ServerPart):
    def on_after_backward(self, trainer, pl_module): ...


class Steps(ClientPart):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer): ...


class InWords(ClientPart):
    """Declares its fact without ``Fact``, as a user's method may."""

    facts = {"corrects drift"}


class MisspeltFact(ClientPart):
    facts = {"correct drift"}


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ([Scaffold(), InWords()], "each of Scaffold and InWords corrects drift"),
        (
            [MisspeltFact()],
            r"MisspeltFact\.facts: 'correct drift' is unknown\. Choose from moves the start, corr",
        ),
        ([Scaffold(), FedVARP()], "each of Scaffold and FedVARP corrects drift"),
        ([FedExP(), LookAhead(0.0)], "each of FedExP and LookAhead moves the start"),
        ([FedCM(), FedNova()], "each of FedCM and FedNova edits the mean"),
        (
            [Scaffold(), FedReg()],
            "Scaffold does not combine with FedReg, which also moves the weights",
        ),
        (
            [FedDyn(), LookAhead(0.0)],
            "FedDyn does not combine with LookAhead, whose clients do not start at",
        ),
        (
            [StepsByItself()],
            r"StepsByItself\.after_step is called only with order = Order\.MOVES_WEIGHTS",
        ),
        ([nn.ReLU()], "ReLU is no method: make it a ClientPart, a ServerPart, or"),
        (
            [Misspelt()],
            (
                r"Misspelt\.on_cleints_end .*a ClientPart has no such hook: did you mean"
                r" on_clients_end\?"
            ),
        ),
        ([MisspeltTerm()], r"MisspeltTerm\.local_los: did you mean local_loss\?"),
        ([Keeps(), KeepsToo()], r"methods: Keeps and KeepsToo both keep 'c': rename it"),
        (
            [OtherSide()],
            r"OtherSide\.local_loss .*a ServerPart has no such hook; it is a hook of ClientPart\.",
        ),
        (
            [HearsOfSteps()],
            (
                r"HearsOfSteps\.on_after_backward .*a ServerPart has no such hook; it is a hook"
                r" of ClientPart\."
            ),
        ),
        (
            [Steps()],
            (
                r"Steps\.on_before_optimizer_step .*a ClientPart has no such hook; it is a hook"
                r" of ServerPart\."
            ),
        ),
    ],
)
def test_what_cannot_work_together_is_refused_by_name(methods, message):
    with pytest.raises(ValueError, match=message):
        validate_parts(make_setup(make_net(), methods=methods))


MEANS = {  # method → (the clients' states, the server's mean of them)
    Scaffold: [("scaffold", "c")],
    SSF: [("ssf", "c")],
    FedVARP: [("fedvarp", "y")],
    FedDyn: [("feddyn", "u")],
    FedDC: [("feddc_control", "c"), ("feddc_drift", "u")],
}
CUT = partial(ClipUpdate, 0.02)
HOSTILE = partial(Scale, 0.4, factor=-1.5)
IN_BITS = Quantization


@pytest.mark.parametrize(
    ("cls", "change"),
    [
        *((cls, change) for cls in MEANS for change in (CUT, HOSTILE)),
        (SSF, IN_BITS),
        (FedVARP, IN_BITS),
        (FedDyn, IN_BITS),
    ],
)
def test_the_server_has_the_mean_of_the_states_if_uploads_are_changed(cls, change):
    """Client and server both add the changed upload."""
    method = cls()
    stores = ClientStores()
    train_rounds(rounds=3, methods=[method, change()], stores=stores)
    servers = [part for part in method.parts if isinstance(part, ServerPart)]
    for (store, name), server in zip(MEANS[cls], servers, strict=True):
        means = server.server_state(name, {})
        states = stores.read(store, np.arange(5), means)
        for tensor, mean in means.items():
            torch.testing.assert_close(states[tensor].mean(0), mean, rtol=1e-12, atol=1e-12)


class WatchUploads(Spy):
    """Counts the tensors of earlier uploads that still exist when a stack starts and when the round
    ends.
    """

    alive: ClassVar[list[int]] = []
    received: ClassVar[list] = []

    def prepare(self, stack, own, download):
        self.alive.append(sum(tensor() is not None for tensor in self.received))

    def on_receive(self, upload, round):
        self.received += [
            weakref.ref(t) for t in (*upload.delta.values(), *upload.extra["scaffold"].values())
        ]

    def on_round_end(self, row, round):
        self.prepare(None, None, None)


def test_uploads_are_freed_before_the_next_client_trains_and_before_the_test(config, tmp_path):
    """Each upload is as large as the model."""
    watch = f"+callbacks.watch._target_={__name__}.WatchUploads"
    train(config("algorithm=scaffold", *TINY, "rounds=1", watch, folder=tmp_path))
    assert WatchUploads.alive == [0, 0, 0, 0]
    assert WatchUploads.received
