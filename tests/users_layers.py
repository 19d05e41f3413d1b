"""More networks for ``test_users_networks.py``: parameters used outside of their modules, and
torch's layers.
"""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.checkpoint import checkpoint
from users_networks import Small


# --------------------------------------------------------------------------- parameters used
# outside of their modules
class WeightInList(Small):
    def build(self):
        self.ws = [self.fc1.weight]

    def features(self, x):
        return F.linear(x, self.ws[0], self.fc1.bias).tanh()


class Penalty(Small):
    """Large weights reduce its logits."""

    def __init__(self):
        super().__init__()
        self.all = list(self.parameters())

    def forward(self, x):
        return super().forward(x) / (1 + 0.1 * sum(p.square().sum() for p in self.all))


class ForwardHook(Small):
    def build(self):
        weight = self.fc1.weight
        self.fc1.register_forward_hook(lambda module, inputs, out: out + weight.square().sum(1))


class GradientHook(Small):
    def build(self):
        self.fc1.weight.register_hook(lambda grad: 0.5 * grad)


class AccumulatedHook(Small):
    def build(self):
        self.fc1.weight.register_post_accumulate_grad_hook(self.bound)

    def bound(self, weight):
        weight.grad.clamp_(-0.01, 0.01)


class Scripted(Small):
    def build(self):
        self.body = torch.jit.script(nn.Sequential(nn.Linear(36, 6), nn.Tanh()))

    def features(self, x):
        return super().features(x) + self.body(x)


class Checkpointed(Small):
    reentrant = False

    def build(self):
        self.fc2 = nn.Linear(6, 6)

    def features(self, x):
        return checkpoint(
            lambda h: self.fc2(h).tanh(), super().features(x), use_reentrant=self.reentrant
        )


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class Clamped(Small):
    def features(self, x):
        if self.training:
            with torch.no_grad():
                self.fc1.weight.clamp_(-0.1, 0.1)
        return super().features(x)


class Tied(Small):
    def build(self):
        self.fc2 = nn.Linear(6, 6)
        self.fc3 = nn.Linear(6, 6)
        self.tie()

    def tie(self):
        self.fc3.weight = self.fc2.weight

    def features(self, x):
        return self.fc3(self.fc2(super().features(x)).tanh()).tanh()


class SharedModule(Tied):
    """One module has two names. torch's functional_call does not restore its weights."""

    def tie(self):
        self.fc3 = self.fc2


class TiedInForward(Tied):
    def tie(self): ...

    def features(self, x):
        Tied.tie(self)
        return super().features(x)


class LayerDrop(Small):
    """Skips its second layer in some steps, also in the first one."""

    def build(self):
        self.fc2 = nn.Linear(6, 6)

    def features(self, x):
        h = super().features(x)
        return h if self.training and h.new_empty(1).bernoulli_(0.6) else h + self.fc2(h).tanh()


class EarlyExit(LayerDrop):
    """Uses its second layer only if the first one does not suffice."""

    def features(self, x):
        h = Small.features(self, x)
        return h if h.abs().mean() < 0.41 else h + self.fc2(h).tanh()


class Spare(Small):
    def build(self):
        self.spare = nn.Linear(6, 6)


# ----------------------------------------------------------------------------------- torch's layers
def layers(*inner, out=6):
    """A network of these layers and a last layer called ``head``."""
    named = [(f"layer{i}", layer) for i, layer in enumerate(inner)]
    return nn.Sequential(OrderedDict([*named, ("head", nn.Linear(out, 3))]))


def after_linear(make):
    return lambda: layers(nn.Linear(36, 6), make(), nn.Tanh())


def around_linear(make):
    return lambda: layers(make(nn.Linear(36, 6)), nn.Tanh())


def unflattened(shape, make, out=16):
    return lambda: layers(nn.Unflatten(1, shape), make(), nn.Tanh(), nn.Flatten(), out=out)


batch_norm = after_linear(lambda: nn.BatchNorm1d(6))
batch_norm_cumulative = after_linear(lambda: nn.BatchNorm1d(6, momentum=None))
group_norm = after_linear(lambda: nn.GroupNorm(2, 6))
dropout = after_linear(lambda: nn.Dropout(0.5))
weight_normalised = around_linear(parametrizations.weight_norm)
instance_norm = unflattened((6, 6), lambda: nn.InstanceNorm1d(6, affine=True), out=36)
spectrally_normalised = around_linear(parametrizations.spectral_norm)
spectrally_normalised_old = around_linear(spectral_norm)
transposed = unflattened((4, 3, 3), lambda: nn.ConvTranspose2d(4, 2, 2, groups=2), out=32)


sequence_first = unflattened(
    (6, 6), lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0), out=36
)


def lazy():
    return layers(nn.LazyLinear(6), nn.Tanh())


class OwnBatchNorm(Small):
    def features(self, x):
        h = self.fc1(x)
        return ((h - h.mean(0)) / (h.std(0) + 0.1)).tanh()


class TwoAndThreeAxes(nn.Module):
    """Processes each frame by itself, then all frames together."""

    images = True

    def __init__(self):
        super().__init__()
        self.conv2 = nn.Conv2d(1, 4, 3)
        self.conv3 = nn.Conv3d(1, 2, 3)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.conv3(self.conv2(x).tanh().unsqueeze(1)).tanh().flatten(1))


class VisionTransformer(nn.Module):
    images = True

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.position = nn.Parameter(torch.randn(1, 5, 8))
        self.patches = nn.Conv2d(1, 8, 3, stride=3)
        self.block = nn.TransformerEncoderLayer(
            8, 2, 12, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], 1)
        return self.head(self.block(tokens + self.position)[:, 0])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(6, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.rnn(x.view(-1, 6, 6))[0][:, -1])


class DoubleInside(Small):
    def build(self):
        self.fc2 = nn.Linear(6, 6).double()

    def features(self, x):
        h = super().features(x)
        return self.fc2(h.double()).tanh().to(h.dtype)
