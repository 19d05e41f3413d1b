"""Logit calibration: rare classes get a margin inside the softmax. FedLC (Zhang et al., ICML 2022).

In the paper, the sum in the softmax is over c ≠ y, so the loss is unbounded below. The public
implementations (FedDecorr, FedACG, GC-Fed) and this one sum over all classes. A class without
samples at the client has an infinite margin, also in those implementations. It drops out of the
softmax, and its logit gets no gradient from the task.
"""

import torch
from torch import Tensor

from gcfed.federated.parts import ClientPart, ClientStack, ClientStates, Download, Params, Setup
from gcfed.methods.requirements import class_logits
from gcfed.utils.checked import Positive, Weight, checked
from gcfed.utils.device import on_device
from gcfed.utils.refusal import Refusal


@checked
class FedLC(ClientPart):
    """The task's loss is the cross-entropy of ``logits_c − τ n_{k,c}^(−exponent)``; ``train/loss``
    is that loss.

    Args:
        tau: τ; 0 is FedAvg. GC-Fed: 0.1.
        exponent: how fast the margin falls with n_{k,c}, the client's number of samples of class c.
    """

    recordable = "run"
    needs = [class_logits]

    def __init__(self, tau: Weight = 0.1, exponent: Positive = 0.25) -> None:
        self.tau = tau
        self.exponent = exponent

    def validate(self, setup: Setup) -> None:
        absent = torch.zeros(1, setup.data.num_classes).index_fill_(
            1, torch.tensor([1]), -torch.inf
        )
        if self.tau and not setup.module.task.losses(absent, torch.tensor([0])).isfinite().all():
            task = (
                f"task={type(setup.module.task).__name__} is then infinite (as with label"
                " smoothing)"
            )
            does = f"{self.title} removes classes that a client lacks from the softmax"
            raise Refusal(f"{does}, and the loss of {task}: use the cross-entropy.")

    def bind(self, setup: Setup) -> None:
        self._data = setup.data

    def prepare(self, stack: ClientStack, own: ClientStates, download: Download) -> Params:
        counts = torch.from_numpy(self._data.class_counts(stack.clients)).double()
        like = next(iter(stack.broadcast_model.values()))
        return {"margins": on_device(self.tau * counts**-self.exponent, like.device, like.dtype)}

    def calibrate(self, stack: ClientStack, logits_KBC: Tensor) -> Tensor:
        if not self.tau:  # avoids 0 · ∞ for a class that the client lacks
            return logits_KBC
        # [n, C]; the logits are [n, B, C] or [n, B, T, C]
        margins = stack.prepared[self]["margins"][: stack.active]
        return logits_KBC - margins.view(len(margins), *[1] * (logits_KBC.dim() - 2), -1)
