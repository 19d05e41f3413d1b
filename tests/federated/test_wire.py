"""Clients that receive messages as bytes send the same bits as clients in memory, so messages are
complete.

``tests/methods/test_contract_adapters.py`` does this for every algorithm.
"""

import pytest
import torch
from conftest import TWO
from harness import BesideSimulation, bytes_per_client, final_weights
from omegaconf import OmegaConf

from gcfed.federated.protocol.uploads import upload_content
from gcfed.methods.correction.scaffold import ControlVariates, MeanVariate, Scaffold
from gcfed.run import train
from gcfed.utils.resolvers import ROOT

TINY = (  # at least two clients take part twice
    "model.hidden=[12,8]",
    "rounds=2",
    "participation.num_clients=4",
    "participation.per_round=3",
    "client.epochs=1",
    "client.batch_size=8",
    "data.limit_train=90",
    "data.limit_test=40",
    "eval_every=3",
)
BITS = ("quantization=fedpaq", "quantization.bits=3")
FEDGC = ("algorithm=fedgc", *BITS, "participation.per_round=4")
NOBODY = (
    "participation.num_clients=2",
    "participation.per_round=2",
    "participation.faults.dropout=0.4",
    "rounds=5",
)
LATE = (
    "participation.faults.dropout=0.3",
    "participation.faults.stragglers=0.5",
    "client.epochs=2",
)
CLIP = tuple(
    f"+methods.clip_update.{key}"
    for key in ("_target_=gcfed.methods.upload.clip_update.ClipUpdate", "quantile=0.3")
)
EACH = tuple(f"metrics.{name}.every=1" for name in ("cka", "clients", "forgetting", "updates"))
CASES = {
    "nobody answers in round 4": ("algorithm=fedgc", *BITS, *NOBODY),
    "late and colluding clients": (
        "algorithm=scaffold",
        "attack=alie",
        "attack.clients=0.4",
        "client.stack=3",
        *LATE,
    ),
    "clipped, wrong labels, convolutions": (
        "algorithm=fedcm",
        "attack=label_flip",
        "model=cnn",
        *CLIP,
    ),
    "measured": (
        "algorithm=fedacg",
        "metrics=[drift,cka,clients,coherence,forgetting,updates,angle]",
        *EACH,
    ),
}


class Both(BesideSimulation):
    """Sends every message over the wire, and then to the simulation's clients."""

    def fit(self, download, clients, receive, expected):
        received = []
        super().fit(download, clients, received.append, expected)

        def compare(upload):
            assert bytes_per_client(upload) == expected.nbytes
            torch.testing.assert_close(
                *map(content, (upload, received.pop(0))),
                rtol=0,
                atol=0,
                equal_nan=True,
                check_stride=True,
            )
            receive(upload)

        outcome = self.simulation.fit(download, clients, compare, expected)
        assert not received
        return outcome


def content(upload):
    """The content of an upload without the seconds that measurements took."""
    for notes in upload.notes.values():
        notes.pop("seconds", None)
    return upload_content(upload) | {"delta": upload.delta}


def run(config, folder, *overrides, federation=None, **methods):
    words = [
        word
        for word in (*TINY, *overrides)
        if "model=cnn" not in overrides or not word.startswith("model.")
    ]
    cfg = config(*words, folder=folder)
    cfg.federation = federation
    cfg.logger = {}
    for name, target in methods.items():
        cfg.methods[name] = {"_target_": target}
    return train(cfg)


WIRE = OmegaConf.to_container(OmegaConf.load(ROOT / "configs/federation/wire.yaml"))
BOTH = WIRE | {"_target_": "test_wire.Both"}


@pytest.mark.parametrize("case", CASES)
def test_each_message_can_become_bytes(config, tmp_path, case):
    run(config, tmp_path / "run", *CASES[case], federation=BOTH)


def test_a_run_continues_over_the_wire_and_in_memory_bit_for_bit(config, tmp_path):
    """The second round has two processes. New clients of FedGC have not seen the earlier broadcast,
    so the server sends its last step.
    """
    last = f"ckpt_path={tmp_path}/run/checkpoints/last.ckpt"
    reference = run(config, tmp_path / "reference", *FEDGC, "rounds=3")
    for rounds, (federation, words) in enumerate(((None, ()), (WIRE, TWO), (None, ())), start=1):
        resume = [last] * (rounds > 1)
        result = run(
            config,
            tmp_path / "run",
            *FEDGC,
            *words,
            f"rounds={rounds}",
            *resume,
            federation=federation,
        )
    assert torch.equal(final_weights(reference), final_weights(result))
    assert result.metrics["test/loss"] == reference.metrics["test/loss"]


class Leak(ControlVariates):
    """A client part that reads the server's object instead of a message."""

    server: MeanVariate

    def prepare(self, stack, own, download):
        download.extra["scaffold"] = self.server.shared
        return super().prepare(stack, own, download)


class LeakyScaffold(Scaffold):
    def __init__(self):
        super().__init__()
        server = next(part for part in self.parts if isinstance(part, MeanVariate))
        client = Leak(momentum_correction=True)
        client.server = server
        self.parts = (client, server)


def test_a_client_part_that_reads_the_servers_object_fails(config, tmp_path):
    words = ("algorithm=scaffold", "gc=gcfed")
    leak = {"scaffold": "test_wire.LeakyScaffold"}
    run(config, tmp_path / "run", *words, **leak)  # in memory this works
    with pytest.raises(AttributeError, match="'shared'"):
        run(config, tmp_path / "wire", *words, federation=WIRE, **leak)


def test_metrics_that_a_wire_cannot_compute_are_refused(config, tmp_path):
    with pytest.raises(ValueError, match="rehearses, which works with federation=none only"):
        run(config, tmp_path / "run", "metrics=gap", "metrics.gap.every=1", federation=WIRE)
