"""Networks for ``test_users_networks.py`` that initialise themselves, and networks with state in
places where a restore may forget it.
"""

import functools
import random
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.nn.utils import weight_norm
from users_networks import Small


# --------------------------------------------------------------- initialised by their first batch
class ActNorm(Small):
    """Shifts and scales its inputs so that the first batch has mean 0 and standard deviation 1."""

    def build(self):
        self.shift = nn.Parameter(torch.zeros(36))
        self.log_scale = nn.Parameter(torch.zeros(36))
        self.register_buffer("is_ready", torch.tensor(False))

    def begin(self, x):
        self.shift.data.copy_(-x.mean(0))
        self.log_scale.data.copy_(-(x.std(0) + 1e-6).log())
        self.is_ready.fill_(True)

    def features(self, x):
        if not self.is_ready:
            self.begin(x.detach())
        return super().features((x + self.shift) * self.log_scale.exp())


class CodeBook(Small):
    """Subtracts the nearer of two codes. The codes begin at two samples."""

    def build(self):
        self.register_buffer("codes", torch.zeros(2, 36))
        self.register_buffer("is_ready", torch.zeros(1))

    def features(self, x):
        if not self.is_ready:
            self.codes.data.copy_(x[:2])
            self.is_ready.fill_(1.0)
        nearest = torch.cdist(x, self.codes).argmin(1)
        return super().features(x - self.codes[nearest])


class MeanOfFirst(Small):
    """Centres its inputs by the first batch that it sees."""

    mean = None

    def features(self, x):
        if self.mean is None:
            self.mean = x.detach().mean(0)
        return super().features(x - self.mean)


class LayerOfForward(Small):
    def build(self):
        self.late = None

    def features(self, x):
        if self.late is None:
            self.late = nn.Linear(36, 36, dtype=x.dtype)
        return super().features(self.late(x))


# ------------------------------------------------------------- state in attributes and elsewhere
class NestedContainers(Small):
    def build(self):
        self.seen = {"sizes": [[]], "means": {"last": None}}

    def features(self, x):
        self.seen["sizes"][0].append(len(x))
        self.seen["means"]["last"] = x.detach().mean()
        return super().features(x)


class CountsInClosure(Small):
    def build(self):
        calls = []
        steps = 0

        def count():
            nonlocal steps
            steps += 1
            calls.append(steps)

        self.count = functools.partial(count)

    def features(self, x):
        self.count()
        return super().features(x)


class CountsInClass(Small):
    calls = 0
    sizes = []

    def features(self, x):
        type(self).calls += 1
        self.sizes.append(len(x))
        return super().features(x)


class OwnObject(Small):
    def build(self):
        self.record = SimpleNamespace(calls=0, largest=np.zeros(2))

    def features(self, x):
        self.record.calls += 1
        self.record.largest[0] = max(self.record.largest[0], float(x.max()))
        return super().features(x)


class AddsHooks(Small):
    """Registers hooks in forward, on a layer and on a weight."""

    def features(self, x):
        self.head.register_forward_hook(lambda net, inputs, outputs: None)
        if self.head.weight.requires_grad:
            self.head.weight.register_hook(lambda grad: None)
        return super().features(x)


class ThreeGenerators(Small):
    def build(self):
        self.noise = [torch.Generator().manual_seed(1), np.random.default_rng(2), random.Random(3)]

    def features(self, x):
        scale = 1 + 0.1 * torch.rand(1, generator=self.noise[0])
        shift = self.noise[1].random() * self.noise[2].random()
        return super().features(x * scale.to(x.dtype) + shift)


class Freezes(Small):
    """Freezes a bias and leaves evaluation mode, in forward."""

    def features(self, x):
        self.head.bias.requires_grad_(False)
        self.fc1.eval()
        return super().features(x)


class WritesData(Small):
    """``.data`` counts no version."""

    def build(self):
        self.register_buffer("last", torch.zeros(36))
        self.scale = torch.zeros(1)

    def features(self, x):
        self.last.data.copy_(x.detach()[0])
        self.scale.data.add_(1)
        return super().features(x)


class OldWeightNorm(Small):
    """Makes its weight anew in each call."""

    def build(self):
        self.fc1 = weight_norm(self.fc1)


class Lazy(Small):
    def build(self):
        self.fc1 = nn.LazyLinear(6)
        self.norm = nn.LazyBatchNorm1d()

    def features(self, x):
        return self.norm(self.fc1(x)).tanh()


class AnyUnit(Small):
    """Its outputs do not depend on the unit of the inputs."""

    def build(self):
        self.norm = nn.BatchNorm1d(36)

    def features(self, x):
        return super().features(self.norm(x))


# ------------------------------------------------------------------------- autocast in forward
class Autocast(Small):
    keeps_casts = True

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=self.keeps_casts):
            logits = super().forward(x)
        return logits.float()


class AutocastWithoutCache(Autocast):
    keeps_casts = False
