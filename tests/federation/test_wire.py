"""A run whose clients live in another interpreter equals the one by reference, bit for bit: what was read was sent."""

import pytest
import torch
from harness import ALGORITHMS, final_weights

from gcfed.methods.scaffold import ControlVariates, MeanVariate, Scaffold
from gcfed.run import train

TINY = (
    "model.hidden=[12,8]", "rounds=3", "participation.num_clients=7", "participation.per_round=3", "client.epochs=1",
    "client.batch_size=8", "data.limit_train=150", "data.limit_test=40", "eval_every=3",
)  # fmt: skip
CLIP = tuple(f"+methods.clip_update.{key}" for key in ("_target_=gcfed.methods.clip_update.ClipUpdate", "quantile=0.3"))
BITS = ("quantization=fedpaq", "quantization.bits=3")
HOSTILE = ("attack.clients=0.4", "client.stack=3", "algorithm=scaffold", "gc=none")
FAULTS = ("participation.faults.dropout=0.3", "participation.faults.stragglers=0.5", "client.epochs=2")
NOTES = tuple(f"metrics.{name}.every=1" for name in ("cka", "clients", "forgetting", "updates", "surface"))
CASES = {
    **{name: (f"algorithm={name}", "gc=gcfed") for name in ALGORITHMS},
    **{f"{name}, no GC": (f"algorithm={name}", "gc=none") for name in ("feddc", "fedsub", "scaffold", "ssf")},
    **{f"{name} in few bits": (f"algorithm={name}", *BITS) for name in ("fedacg", "ssf")},
    "all take part": ("algorithm=fedgc", "participation.per_round=7"),
    "absent": ("algorithm=fedsub", "methods.fedsub.update_absent=true", "methods.fedsub.refresh=1"),
    "states in bfloat16": ("algorithm=scaffold", "client_store.dtype=bfloat16"),
    **{name: (f"attack={name}", *HOSTILE) for name in ("alie", "gaussian", "label_flip")},
    "faults": ("algorithm=scaffold", *FAULTS),
    "clipped": CLIP,
    "convolutions": ("model=cnn", "~model.hidden", "algorithm=fedcm", "rounds=2"),
    "measured": ("algorithm=fedacg", "metrics=[drift,cka,clients,coherence,forgetting,updates,surface,angle]", *NOTES),
}  # fmt: skip


def run(config, folder, *overrides):
    cfg = config(*overrides, folder=folder)
    cfg.callbacks, cfg.logger = {}, {}
    result = train(cfg)
    row = {key: value for key, value in result.loop.last_row.items() if not key.startswith("time/")}
    return final_weights(result), row


@pytest.mark.parametrize("case", CASES)
def test_every_message_may_become_bytes(config, tmp_path, case):
    overrides = [*TINY, *CASES[case]]
    if "model=cnn" in overrides:
        overrides = [word for word in overrides if "hidden" not in word]
    weights, row = run(config, tmp_path / "reference", *overrides)
    over_wire, same_row = run(config, tmp_path / "wire", *overrides, "federation=wire")
    assert torch.equal(weights, over_wire)
    assert same_row == pytest.approx(row, rel=0, abs=0, nan_ok=True)


class Leak(ControlVariates):
    """A client part that reads the server's object in the place of a message."""

    server: MeanVariate

    def on_clients_start(self, stack, download):
        download.extra["scaffold"] = self.server.control
        super().on_clients_start(stack, download)


class LeakyScaffold(Scaffold):
    def __init__(self, momentum_correction=True):
        super().__init__()
        server = next(part for part in self.parts if isinstance(part, MeanVariate))
        client = Leak(momentum_correction=True)
        client.server = server
        self.parts = (client, server)


def test_a_client_that_reads_the_servers_object_is_caught(config, tmp_path):
    """By reference nobody can tell it from SCAFFOLD."""
    leaky = (
        *TINY,
        "algorithm=scaffold",
        "~methods.scaffold.momentum_correction",
        "methods.scaffold._target_=test_wire.LeakyScaffold",
    )
    honest, _ = run(config, tmp_path / "honest", *TINY, "algorithm=scaffold")
    weights, _ = run(config, tmp_path / "leaky", *leaky)
    assert torch.equal(honest, weights)
    with pytest.raises(ValueError, match=r"federation=wire: .*'control'"):
        run(config, tmp_path / "wire", *leaky, "federation=wire")


def test_what_a_wire_cannot_do_is_refused(config, tmp_path):
    (tmp_path / "last.ckpt").touch()
    for words in (("metrics=gap", "metrics.gap.every=1"), (f"ckpt_path={tmp_path}/last.ckpt",)):
        with pytest.raises(ValueError, match=r"federation=wire"):
            run(config, tmp_path / "run", *TINY, *words, "federation=wire")
