"""Logit calibration, by which rare classes pay a margin inside the softmax: FedLC (Zhang et al., ICML 2022).

The paper prints the sum in the softmax over c ≠ y, which is unbounded below; the public implementations
(FedDecorr, FedACG, GC-Fed) take the ordinary softmax over all classes, and so does this one. A class that the client
lacks has an infinite margin by the formula and in those implementations: it leaves the softmax, and its logit gets no
gradient from the task.
"""

import torch
from torch import Tensor

from gcfed.federated.method import ClientPart, ClientStack, Download, Own, Params, Setup
from gcfed.methods.requirements import class_logits
from gcfed.utils.checked import Positive, Weight, checked
from gcfed.utils.device import on_device


@checked
class FedLC(ClientPart):
    """The task's loss is the cross-entropy of ``logits_c − τ n_{k,c}^(−exponent)``; ``train/loss`` is that loss.

    Args:
        tau: τ; 0 is FedAvg. GC-Fed: 0.1.
        exponent: how fast the margin falls with n_{k,c}, the client's number of samples of class c.
    """

    recordable = "run"
    needs = [class_logits]

    def __init__(self, tau: Weight = 0.1, exponent: Positive = 0.25) -> None:
        self.tau, self.exponent = tau, exponent

    def validate(self, setup: Setup) -> None:
        self._data = setup.data
        absent = torch.zeros(1, setup.data.num_classes).index_fill_(1, torch.tensor([1]), -torch.inf)
        if self.tau and not setup.module.task.losses(absent, torch.tensor([0])).isfinite().all():
            raise ValueError(
                f"{self.title} takes the classes that a client lacks out of the softmax, and there the loss of task="
                f"{type(setup.module.task).__name__} is infinite (as label smoothing's is): take the cross-entropy."
            )

    def prepare(self, stack: ClientStack, own: Own, download: Download) -> Params:
        counts = torch.from_numpy(self._data.class_counts(stack.clients)).double()
        like = next(iter(stack.start.values()))
        return {"margins": on_device(self.tau * counts**-self.exponent, like.device, like.dtype)}

    def calibrate(self, stack: ClientStack, logits_KBC: Tensor) -> Tensor:
        if not self.tau:  # 0 · ∞, of a class that the client lacks
            return logits_KBC
        margins = stack.prepared[self]["margins"][: stack.active]  # [n, C] beside [n, B, C] or [n, B, T, C]
        return logits_KBC - margins.view(len(margins), *[1] * (logits_KBC.dim() - 2), -1)
