"""Small networks for ``test_users_networks.py`` and their data.

Each network has one feature that people write.

The data are grey images of 6×6 pixels in three classes. They are vectors of 36 floats unless the
network has the attribute ``images``. Layers are declared in the order in which they run. Local GC
ends before ``head``, the last layer. This file has inputs, buffers, and state that is no tensor of
the network. ``users_layers.py`` has the other features.
"""

import random
import threading
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

# training samples of each client, by the number of clients
SIZES = {1: [24], 3: [5, 8, 11], 20: [6] * 20}


@cache
def pixels(n, seed):
    """uint8 images [n, 1, 6, 6] and their classes. In each class, different pixels are brighter."""
    rng = np.random.default_rng(seed)
    y = np.sort(rng.integers(0, 3, n))
    bright = 80 * (np.arange(36).reshape(1, 6, 6) % 3 == y[:, None, None, None])
    return (rng.integers(0, 170, (n, 1, 6, 6)) + bright).astype(np.uint8), y


def normalised(x):
    return (x / 255 - 0.3) / 0.4


def load(clients=1, images=False, unit=1.0):
    """A user's function for ``data.dataset._target_``. Inputs have this unit."""
    x, y = pixels(sum(SIZES[clients]), 0)
    x_test, y_test = pixels(12, 1)
    if not images:
        x, x_test = (normalised(a).reshape(-1, 36) / unit for a in (x, x_test))
        x = x.astype(np.float32)
        x_test = x_test.astype(np.float32)
    groups = np.repeat(np.arange(clients), SIZES[clients])
    return {"x": x.copy(), "y": y, "x_test": x_test.copy(), "y_test": y_test, "groups": groups}


class Small(nn.Module):
    """A hidden layer and a head. The networks below change one or two lines of it."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(36, 6)
        self.build()
        self.head = nn.Linear(6, 3)

    def build(self): ...

    def features(self, x):
        return self.fc1(x).tanh()

    def forward(self, x):
        return self.head(self.features(x))


# ------------------------------------------------------------------------------- inputs and outputs
class InPlace(Small):
    def features(self, x):
        return self.fc1(x.sub_(0.5).div_(2)).tanh()


class OutOfPlace(Small):
    def features(self, x):
        return self.fc1((x - 0.5) / 2).tanh()


class ViewAfterConv(nn.Module):
    images = True

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        x = self.conv(x).relu()
        return self.head(x.view(x.size(0), -1))


class GradientByInput(Small):
    """Reads the gradient of an energy, also in tests."""

    @torch.enable_grad()
    def features(self, x):
        x = x.detach().requires_grad_()
        h = super().features(x)
        return (
            h
            + self.fc1(*torch.autograd.grad(h.square().sum(), x, create_graph=self.training)).tanh()
        )


class TwoInputs(Small):
    def forward(self, a, b):
        return super().forward(torch.cat([a, b], 1))


class TupleOutput(Small):
    def forward(self, x):
        hidden = self.features(x)
        return self.head(hidden), hidden


# ------------------------------------------------------------------------------------------ buffers
class RunningMean(Small):
    """Subtracts a running mean, which ``follow`` updates."""

    persistent = True

    def build(self):
        self.register_buffer("average", torch.zeros(36), persistent=self.persistent)

    def follow(self, x):
        self.average.mul_(0.9).add_(0.1 * x.mean(0))

    def features(self, x):
        if self.training:
            self.follow(x.detach())
        return self.fc1(x - self.average).tanh()


class AssignedBuffer(RunningMean):
    def follow(self, x):
        self.average = 0.9 * self.average + 0.1 * x.mean(0)


class ChangesPlaces(Small):
    """Two buffers take turns: one is read, the other follows the input."""

    def build(self):
        self.register_buffer("read", torch.zeros(36))
        self.register_buffer("other", torch.ones(36))

    def features(self, x):
        if self.training:
            self.read, self.other = self.other, self.read
            self.other.add_(0.1 * x.mean(0))
        return self.fc1(x - self.read).tanh()


class KeepsPrevious(RunningMean):
    """Keeps the mean before the last step."""

    def build(self):
        super().build()
        self.register_buffer("previous", torch.zeros(36))

    def follow(self, x):
        self.previous = self.average
        self.average = 0.9 * self.average + 0.1 * x.mean(0)

    def features(self, x):
        return super().features(x) + self.fc1(self.previous)


class UnsavedBuffer(AssignedBuffer):
    persistent = False


class BufferInList(RunningMean):
    def build(self):
        super().build()
        self.kept = [self.average]

    def follow(self, x):
        self.kept[0].mul_(0.9).add_(0.1 * x.mean(0))


class MeanForTests(RunningMean):
    """The mean changes outputs only in tests, like the statistics of a batch normalisation."""

    def features(self, x):
        if self.training:
            self.follow(x.detach())
            return self.fc1(x).tanh()
        return self.fc1(x - self.average).tanh()


class StepCounter(Small):
    def build(self):
        self.register_buffer("warmup", torch.zeros((), dtype=torch.long))

    def features(self, x):
        if self.training:
            self.warmup += 1
        return self.fc1(10 * x / (10 + self.warmup)).tanh()


class SeldomChanged(Small):
    """Its flag changes only after the second step."""

    def build(self):
        self.register_buffer("flag", torch.zeros(6, dtype=torch.bool))
        self.register_buffer("steps", torch.zeros(()))

    def features(self, x):
        hidden = self.fc1(x)
        if self.training:
            self.steps += 1
            self.flag |= self.steps > 2
        return (hidden + self.flag).tanh()


class WritesAnew(Small):
    """Writes a mask and the scores of a mask in each step, with the values that they have."""

    def build(self):
        self.register_buffer("mask", torch.arange(6) < 5)
        self.register_buffer("scores", torch.tensor([0.0, -torch.inf]))

    def features(self, x):
        self.mask.logical_and_(torch.arange(6) < 5)
        self.scores.clamp_(max=0.0)
        return self.fc1(x).where(self.mask, 0.0).tanh() * self.scores.softmax(0)[0]


class Grows(Small):
    """Keeps a row of each batch."""

    def build(self):
        self.register_buffer("rows", torch.zeros(1, 6))

    def features(self, x):
        hidden = self.fc1(x).tanh()
        self.rows = torch.cat([self.rows, hidden.detach()[:1]])
        return hidden - self.rows.mean(0)


class TurningComplex(Small):
    def build(self):
        self.register_buffer("phase", torch.ones(6, dtype=torch.cfloat))

    def features(self, x):
        if self.training:
            self.phase.mul_(1j)
        return (self.fc1(x) * (1 + self.phase.imag)).tanh()


class IndexFirst(Small):
    """Its first parameter is an integer tensor."""

    def build(self):
        self.order = nn.Parameter(torch.arange(6).flip(0), requires_grad=False)

    def features(self, x):
        return super().features(x)[:, self.order]


class SparseTable(Small):
    def build(self):
        self.table = nn.Embedding(3, 6, sparse=True)

    def features(self, x):
        return super().features(x) + self.table((x[:, 0] > 0).long())


class OwnParameters(Small):
    """``parameters()`` returns only a part of its parameters."""

    def parameters(self, recurse=True):
        return self.head.parameters(recurse)


# ------------------------------------------------------------------------------ state in attributes
class CountsInList(Small):
    def build(self):
        self.means = []

    def features(self, x):
        if self.training:
            self.means.append(float(x.mean()))
        return self.fc1(x - sum(self.means) / max(1, len(self.means))).tanh()


class LastOutputs(Small):
    """Keeps its last outputs. Outputs that torch.func wraps cannot be read after its pass."""

    def build(self):
        self.outputs = []

    def features(self, x):
        hidden = self.fc1(x)
        if self.training:
            self.outputs = [*self.outputs[-1:], hidden.detach().mean(0)]
        return (hidden + sum(self.outputs)).tanh()


class LastOutputsInPlace(LastOutputs):
    def features(self, x):
        hidden = self.fc1(x)
        if self.training:
            self.outputs.append(hidden.detach().mean(0))
        return (hidden + sum(self.outputs)).tanh()


class ExtraState(Small):
    def get_extra_state(self):
        return {"version": 2}

    def set_extra_state(self, state): ...


class Counter(Small):
    def build(self):
        self.calls = 0

    def features(self, x):
        if self.training:
            self.calls += 1
        return self.fc1(x / (1 + 0.1 * self.calls)).tanh()


class Lock(Small):
    def build(self):
        self.lock = threading.Lock()

    def features(self, x):
        with self.lock:
            return super().features(x)


class KeepsHidden(Small):
    def features(self, x):
        self.hidden = super().features(x)
        return self.hidden


class Teacher(Small):
    """A frozen copy that follows the trained layer, as mean teachers do."""

    def build(self):
        self.teacher = nn.Linear(36, 6).requires_grad_(False)

    @torch.no_grad()
    def follow(self):
        self.teacher.weight.lerp_(self.fc1.weight, 0.1)

    def features(self, x):
        if self.training:
            self.follow()
        return super().features(x) + self.teacher(x).tanh()


class TeacherByData(Teacher):
    """Updates the teacher with the same line as MoCo."""

    def follow(self):
        self.teacher.weight.data = self.teacher.weight.data * 0.9 + self.fc1.weight.data * 0.1


class RandomTeacher(Teacher):
    """Draws from all global generators."""

    def features(self, x):
        if self.training:
            drawn = torch.from_numpy(np.random.uniform(0.5, 1.5, x.shape)).to(x)  # noqa: NPY002
            x = x * drawn * F.dropout(torch.rand_like(x), 0.3) * random.uniform(0.5, 1.5)
        return super().features(x)


class TorchRandom(Small):
    def noise(self, x):
        return F.dropout(torch.rand_like(x), 0.3)

    def features(self, x):
        return super().features(x * self.noise(x) if self.training else x)


class OwnGenerator(TorchRandom):
    def build(self):
        self.generator = torch.Generator().manual_seed(7)

    def noise(self, x):
        return torch.rand(x.shape, generator=self.generator, dtype=x.dtype)


# ------------------------------------------------------------------------------------------ failure
class Fails(Small):
    """Raises ``error`` in the second training step after it was set."""

    error = None
    steps = 0

    def features(self, x):
        if self.training and Fails.error:
            Fails.steps += 1
            if Fails.steps == 2:
                raise Fails.error
        return super().features(x)
