"""More networks and losses as people write them, for ``test_users_more.py``.

The networks take 36 numbers and return three logits. Each has a feature of recent papers or of
common habits. The losses are written as on paper, for one batch: ``losses(outputs, y)``.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from users_networks import Small

from gcfed.tasks import Classification, SquaredError

SIZES = {1: [24], 3: [5, 8, 11]}  # samples of each client, by the number of clients


def load(clients=1, kind="classes"):
    """36 numbers for each sample: of a class, or with six labels or three numbers to regress on."""
    rng = np.random.default_rng(1)
    n = sum(SIZES[clients]) + 12
    x = rng.normal(size=(n, 36)).astype(np.float32)
    y = (x[:, :3] + 0.5 * rng.normal(size=(n, 3))).argmax(1)
    if kind == "numbers":
        y = x[:, :3] ** 2
    if kind == "sequences":
        x = rng.integers(0, 9, (n, 6)).astype(np.int32)
        y = (x // 3).astype(np.int64)
        y[np.arange(6) >= rng.integers(1, 7, n)[:, None]] = -100
    groups = np.repeat(np.arange(clients), SIZES[clients])
    return {"x": x[:-12], "y": y[:-12], "x_test": x[-12:], "y_test": y[-12:], "groups": groups}


def head(width=6):
    return nn.Linear(width, 3)


# ----------------------------------------------------------------------------------------- networks
class Experts(nn.Module):
    """A mixture of experts, each sample sent to its best one."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(36, 4)
        self.w = nn.Parameter(torch.randn(4, 36, 6) / 6)
        self.head = head()

    def forward(self, x):
        share, chosen = self.gate(x).softmax(-1).max(-1)
        out = x.new_zeros(len(x), 6)
        for expert in range(4):
            rows = (chosen == expert).nonzero().squeeze(-1)
            if len(rows):
                out = out.index_add(0, rows, (x[rows] @ self.w[expert]).tanh())
        return self.head(out * share.unsqueeze(-1))


class ComplexPairs(nn.Module):
    """A filter in the frequency domain, kept as pairs of real and imaginary parts."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(19, 2))
        self.head = head(36)

    def forward(self, x):
        turned = torch.fft.rfft(x) * torch.view_as_complex(self.filter)
        return self.head(torch.fft.irfft(turned, 36))


class Packed(nn.Module):
    """A GRU over sequences of different lengths."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(6, 6, batch_first=True)
        self.head = head()

    def forward(self, x):
        lengths = 1 + (x[:, 0] > 0).long().cpu() * 4
        packed = pack_padded_sequence(
            x.view(-1, 6, 6), lengths, batch_first=True, enforce_sorted=False
        )
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(out[torch.arange(len(x)), lengths - 1])


class CausalMask(nn.Module):
    """Makes its mask at the first call."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(6, 18)
        self.head = head()
        self.mask = None

    def forward(self, x):
        x = x.view(-1, 6, 6)
        if self.mask is None:
            self.mask = torch.ones(6, 6, dtype=torch.bool, device=x.device).tril()
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(q, k, v, self.mask).mean(1))


class MaxNormTable(nn.Module):
    """A table of levels whose rows are bounded, which edits the weight in forward."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 4, max_norm=0.5)
        self.head = head(144)

    def forward(self, x):
        levels = ((x.detach() + 1) * 2).long().clamp(0, 7)
        return self.head(self.table(levels).flatten(1))


class LowRank(Small):
    """A frozen layer and a trained product of two thin matrices."""

    def build(self):
        self.fc1.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, 36) / 6)
        self.up = nn.Parameter(torch.zeros(6, 2))

    def features(self, x):
        return (self.fc1(x) + x @ self.down.t() @ self.up.t()).tanh()


class CompiledPart(Small):
    def build(self):
        self.fc1 = torch.compile(self.fc1, backend="eager")


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return grad * (s + x * s * (1 - s))


class OwnFunction(Small):
    def features(self, x):
        return Swish.apply(self.fc1(x))


class InPlaceChain(Small):
    def build(self):
        self.mid = nn.Linear(6, 6)

    def forward(self, x):
        h = F.relu(self.fc1(x), inplace=True)
        h = F.leaky_relu(self.mid(h), 0.1, inplace=True)
        return self.head(h.mul(2).add_(0.5).clamp_(max=3))


class Reverse(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output): ...

    @staticmethod
    def backward(ctx, grad):
        return -0.3 * grad


class GradientReversal(Small):
    def build(self):
        self.adversary = head()

    def forward(self, x):
        h = self.features(x)
        return self.head(h) + 0.1 * self.adversary(Reverse.apply(h))


class MemoryBank(nn.Module):
    """A queue of past features, as in MoCo."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(36, 6)
        self.head = head(12)
        self.register_buffer("queue", torch.zeros(16, 6))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        h = self.fc(x).tanh()
        read = (h @ self.queue.clone().t()).softmax(-1) @ self.queue.clone()
        if self.training:
            rows = (self.place + torch.arange(len(x))) % 16
            self.queue[rows] = h.detach()
            self.place.add_(len(x)).remainder_(16)
        return self.head(torch.cat([h, read], 1))


class FourierFeatures(nn.Module):
    """The encoding of a radiance field."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bands", 2.0 ** torch.arange(3) * math.pi, persistent=False)
        self.fc = nn.Linear(36 * 6, 6)
        self.head = head()

    def forward(self, x):
        angles = x.unsqueeze(-1) * self.bands
        return self.head(self.fc(torch.cat([angles.sin(), angles.cos()], -1).flatten(1)).tanh())


class Mixed(Small):
    """Mixes hidden features within the batch while it trains, as manifold mixup does."""

    def features(self, x):
        h = super().features(x)
        return 0.8 * h + 0.2 * h.flip(0) if self.training else h


class NeedsInputGradient(Small):
    """Declares that its input requires a gradient, for a saliency map that nobody reads."""

    def features(self, x):
        return super().features(x.clone().requires_grad_())


# ------------------------------------------------------------------------------------------- losses
class Smoothed(Classification):
    def losses(self, outputs, y):
        return F.cross_entropy(outputs, y, reduction="none", label_smoothing=0.1)


class Balanced(Classification):
    """Weights each class by its count in the batch."""

    def losses(self, outputs, y):
        counts = torch.bincount(y, minlength=outputs.shape[-1]).clamp(min=1)
        weights = len(y) / (outputs.shape[-1] * counts)
        return F.cross_entropy(outputs, y, reduction="none") * weights[y]


class Margins(Classification):
    """LDAM: larger margins for rare classes; the counts are constants."""

    def __init__(self):
        self.margins = torch.tensor([30.0, 10.0, 3.0]) ** -0.25

    def losses(self, outputs, y):
        rows = torch.arange(len(y))
        lowered = outputs.clone()
        lowered[rows, y] -= self.margins[y]
        return F.cross_entropy(3 * lowered, y, reduction="none")


class Huber(SquaredError):
    def losses(self, outputs, y):
        return F.smooth_l1_loss(outputs, y, reduction="none", beta=0.5).sum(-1)


class MaskedSequence(Classification):
    """Ignores padding, and weighs later positions more."""

    def losses(self, outputs, y):
        losses = F.cross_entropy(outputs.transpose(1, 2), y, reduction="none", ignore_index=-100)
        return losses * torch.linspace(1, 2, y.shape[1], dtype=losses.dtype)


class MeanOfSequence(Classification):
    """Divides by the number of real positions of each text, and spreads it over them."""

    def losses(self, outputs, y):
        losses = F.cross_entropy(outputs.transpose(1, 2), y, reduction="none", ignore_index=-100)
        real = (y >= 0).sum(1, keepdim=True)
        return losses / real.clamp(min=1) * y.shape[1]


class Mixup(Classification):
    """The label of the next sample of the batch counts a fifth."""

    def losses(self, outputs, y):
        own = F.cross_entropy(outputs, y, reduction="none")
        return 0.8 * own + 0.2 * F.cross_entropy(outputs, y.roll(1), reduction="none")


class Normalised(Classification):
    """Divides by a moving average of itself."""

    def __init__(self):
        self.average = None

    def losses(self, outputs, y):
        losses = F.cross_entropy(outputs, y, reduction="none")
        mean = losses.detach().mean()
        self.average = mean if self.average is None else 0.9 * self.average + 0.1 * mean
        return losses / self.average


class WarmUp(Classification):
    """Its strength grows with the number of calls."""

    calls = 0

    def losses(self, outputs, y):
        self.calls += 1
        return F.cross_entropy(outputs, y, reduction="none") * min(1, self.calls / 5)


class Noisy(Classification):
    """Adds noise to its logits, also in tests."""

    def losses(self, outputs, y):
        noise = 0.1 * torch.randn_like(outputs)
        return F.cross_entropy(outputs + noise, y, reduction="none")


class EditsOutputs(Classification):
    """Centres the logits in place."""

    def losses(self, outputs, y):
        outputs -= outputs.mean(-1, keepdim=True)
        outputs.mul_(2)
        return F.cross_entropy(outputs, y, reduction="none")


class EditsLabels(Classification):
    def losses(self, outputs, y):
        y[y == 2] = 0
        return F.cross_entropy(outputs, y, reduction="none")


class HardOnly(Classification):
    """Only the harder half of the batch counts."""

    def losses(self, outputs, y):
        losses = F.cross_entropy(outputs, y, reduction="none")
        kept = losses >= losses.detach().median()
        return losses * kept * len(y) / kept.sum()


class HalfOutputs(Small):
    """Returns float16."""

    def forward(self, x):
        return super().forward(x).half()


class OfSequence(nn.Module):
    """Logits at six tokens."""

    last_only = False

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.head = head()

    def forward(self, x):
        return self.head(self.table(x).cumsum(1).tanh())
