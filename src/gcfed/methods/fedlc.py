"""Logit calibration: each class pays a margin inside the softmax, the larger the rarer it is at the client.

FedLC (Zhang et al., ICML 2022). State: none; a client knows how many samples of each class it has. Bytes:
those of the model.

Two readings. The paper prints the sum in the softmax over c ≠ y, which is unbounded below; the public implementations
(FedDecorr, FedACG, GC-Fed) take the ordinary softmax over all classes, and so does this one. A class that the client
lacks has an infinite margin by the formula and in those implementations: it leaves the softmax, and its logit gets no
gradient from the task.
"""

from typing import Any

import torch
from torch import Tensor

from gcfed.federated.messages import Download
from gcfed.federated.method import ClientPart, Setup
from gcfed.federated.stack import ClientStack
from gcfed.utils.number import number


class FedLC(ClientPart):
    """The task's loss is the cross-entropy of ``logits_c − τ n_{k,c}^(−exponent)``; ``train/loss`` is that loss.

    Args:
        tau: τ ≥ 0; 0 is FedAvg. GC-Fed: 0.1.
        exponent: > 0, how fast the margin falls with n_{k,c}, the client's number of samples of class c.

    Raises:
        ValueError: an argument outside its range.
    """

    graphable = True
    needs_classes = True

    def __init__(self, tau: float = 0.1, exponent: float = 0.25) -> None:
        self.tau = number("methods.fedlc.tau", tau, 0)
        self.exponent = number("methods.fedlc.exponent", exponent, 0, above=True)
        self._data: Any = None
        self._margins: Tensor | None = None

    def validate(self, setup: Setup) -> None:
        self._data = setup.data

    def on_clients_start(self, stack: ClientStack, download: Download) -> None:
        counts = torch.from_numpy(self._data.class_counts(stack.clients))
        like = next(iter(stack.start.values()))
        self._margins = (self.tau * counts.double() ** -self.exponent).to(like.device, like.dtype) if self.tau else None

    def calibrate(self, stack: ClientStack, logits_KBC: Tensor) -> Tensor:
        if self._margins is None:
            return logits_KBC
        margins = self._margins[: stack.active]  # [n, C] beside [n, B, C] or [n, B, T, C]
        return logits_KBC - margins.view(len(margins), *[1] * (logits_KBC.dim() - 2), -1)
