"""Runs with recorded local steps.

On a CPU, a tape replays a step's operations as a CUDA graph does on a GPU.
"""

from typing import ClassVar

import pytest
import torch
from harness import Spy
from omegaconf import open_dict

from benchmarks.tape import Tape
from gcfed.federated.parts import Order
from gcfed.federated.training.batches import BatchPlan
from gcfed.federated.training.memory import TrainingMemory
from gcfed.run import train


class Listing(Tape):
    """Lists the kinds of the replayed steps."""

    def __init__(self):
        super().__init__()
        self.played = []

    def record(self, step):
        replay = super().record(step)
        (kind,) = getattr(step, "args", [None])

        def counted():
            self.played.append(kind)
            replay()

        return counted


class Twice(Spy):
    """Rehearses each round without recordings, and compares these uploads with those of recorded
    steps.
    """

    order = Order.MEASURES
    recording = False
    tolerance = 0.0
    same: ClassVar[list[bool]] = []
    recorder = None  # one for the whole run, as each stream has one

    def bind(self, setup):
        self.transport = setup.transport

    def on_broadcast(self, download, round):
        Twice.recording = False
        rehearsed = self.transport.rehearse(download, round.cohort)
        self.rehearsed = {tuple(upload.clients): self.sent(upload) for upload in rehearsed}
        Twice.recording = True

    def on_receive(self, upload, round):
        pairs = zip(self.sent(upload), self.rehearsed.pop(tuple(upload.clients)), strict=True)
        self.same.append(all(self.alike(a, b) for a, b in pairs))

    def alike(self, a, b):
        return torch.equal(a, b) or (
            a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=self.tolerance)
        )

    def sent(self, upload):
        tensors = [
            upload.loss,
            *(t for part in (upload.delta, *upload.extra.values()) for t in part.values()),
        ]
        return [t.clone() for t in tensors]


def train_twice(cfg, tolerance=0.0):
    """Rehearses each round without recordings, then trains it with as many recorded steps as
    possible.

    Recorded batches are padded only with a ``tolerance``, because padding changes the last bits.

    Returns the run's result, whether each stack sent what it rehearsed, and the kinds of the
    replayed steps.
    """
    with open_dict(cfg):
        cfg.callbacks["twice"] = {"_target_": "tapes.Twice"}
    Twice.same = []
    Twice.recorder = Listing()
    Twice.tolerance = tolerance
    with pytest.MonkeyPatch.context() as patch:
        if not tolerance:
            patch.setattr(BatchPlan, "padded", lambda plan: plan)
        patch.setattr(
            TrainingMemory, "recorder", lambda memory: Twice.recorder if Twice.recording else None
        )
        result = train(cfg)
    assert Twice.same
    return result, all(Twice.same), Twice.recorder.played
