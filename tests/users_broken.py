"""Networks and losses that fail: for ``test_users_errors.py``.

``Late…`` fail in the second round only, for which :class:`Arm` sets ``LATE``.
"""

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import nn
from users_networks import Small

from gcfed.tasks import Classification, Task

LATE = {"fails": False}


class Arm(Callback):
    """Makes late failures happen after the first round."""

    def on_train_batch_end(self, *_):
        LATE["fails"] = True


# ----------------------------------------------------------------------------------------- networks
class Changes(Small):
    """Changes its logits while it trains, or in tests, or only when ``LATE`` is set."""

    late = False
    in_tests = False

    def changed(self, logits): ...

    def forward(self, x):
        logits = super().forward(x)
        begins = LATE["fails"] or not self.late
        return self.changed(logits) if begins and self.training != self.in_tests else logits


class TupleInTraining(Changes):
    def changed(self, logits):
        return logits, logits


class DictInTraining(Changes):
    def changed(self, logits):
        return {"logits": logits}


class NoneInTraining(Changes):
    def changed(self, logits):
        return None


class OtherShapeInTraining(Changes):
    def changed(self, logits):
        return logits.mean(0)


class KeyErrorInForward(Changes):
    def changed(self, logits):
        return {}["missing"]


class EmptyMessage(Changes):
    def changed(self, logits):
        assert not self.training


class StopsIteration(Changes):
    def changed(self, logits):
        return next(iter([]))


class Endless(Small):
    def forward(self, x):
        return self.forward(x) if self.training else super().forward(x)


class Detached(Small):
    def forward(self, x):
        return super().forward(x).detach()


class EditsActivations(Small):
    def features(self, x):
        h = self.fc1(x).tanh()
        h.mul_(h)  # tanh needs its output for the gradient
        return h


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError("no\ngradient")


class FunctionWithoutBackward(Small):
    def features(self, x):
        return NoBackward.apply(self.fc1(x))


class NotANumber(Small):
    def features(self, x):
        return (self.fc1(x) * 0).sqrt() / 0


class Half(Small):
    def features(self, x):
        return self.fc1(x.half())


class LateError(Changes):
    late = True

    def changed(self, logits):
        raise RuntimeError("")


class LateInTest(Changes):
    late = in_tests = True

    def changed(self, logits):
        raise LookupError("a test")


class LateTuple(Changes):
    late = True

    def changed(self, logits):
        return (logits,)


class LateTupleInTest(LateTuple):
    in_tests = True


class LateShape(Changes):
    late = True

    def changed(self, logits):
        return logits[:-1]


class LateFlat(Small):
    def forward(self, x):
        logits = super().forward(x)
        return logits.flatten() if LATE["fails"] else logits


class LateEdit(Small):
    def features(self, x):
        h = self.fc1(x).tanh()
        if LATE["fails"] and self.training:
            h.mul_(h)
        return h


class LateBackward(Small):
    def features(self, x):
        h = self.fc1(x)
        return NoBackward.apply(h) if LATE["fails"] and self.training else h


class LateDetached(Changes):
    late = True

    def changed(self, logits):
        return logits.detach()


def late_hook(module, inputs):
    if LATE["fails"]:
        raise TypeError("a hook")


def late_function():
    """A function that makes a network of torch's layers only."""
    net = nn.Sequential(nn.Linear(36, 6), nn.Tanh(), nn.Linear(6, 3))
    net[1].register_forward_pre_hook(late_hook)
    return net


class Positions(nn.Module):
    """Has four positions."""

    last_only = False
    tokens = 9
    positions = 4

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(self.tokens, 6)
        self.places = nn.Embedding(self.positions, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.table(x) + self.places(torch.arange(x.shape[1])))


class Tokens(Positions):
    tokens = 5
    positions = 6


# ------------------------------------------------------------------------------------------- losses
class RaisesLoss(Classification):
    def losses(self, outputs, y):
        raise RuntimeError("mine")


class ScalarLoss(Classification):
    def losses(self, outputs, y):
        return F.cross_entropy(outputs, y)


class NoTensorLoss(Classification):
    def losses(self, outputs, y):
        return None


class DetachedLoss(Classification):
    def losses(self, outputs, y):
        return super().losses(outputs, y).detach()


class MissingScore(Classification):
    columns = ("test/loss", "test/top5")


class RaisesScores(Classification):
    def scores(self, outputs, y):
        return {"test/acc": outputs.topk(5).indices.float(), "test/loss": self.losses(outputs, y)}


class NoLosses(Task):
    has_classes = True


class LateLoss(Classification):
    def losses(self, outputs, y):
        if LATE["fails"]:
            raise RuntimeError("late")
        return super().losses(outputs, y)


class LateLossShape(Classification):
    def losses(self, outputs, y):
        values = super().losses(outputs, y)
        return values[..., :1] if LATE["fails"] and outputs.requires_grad else values


class LateScores(Classification):
    def scores(self, outputs, y):
        found = super().scores(outputs, y)
        if LATE["fails"]:
            del found["test/acc"]
        return found


class LateMeanLoss(Classification):
    def mean_losses(self, outputs, batch):
        values = super().mean_losses(outputs, batch)
        return values.sum() if LATE["fails"] else values
