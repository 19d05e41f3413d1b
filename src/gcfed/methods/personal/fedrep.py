"""A personal head and a shared body, trained in turn: FedRep (Collins et al., ICML 2021, Algorithm
1); FedBABU.

In each round a client first trains its head alone, then the body alone. In FedBABU (Oh et al., ICLR
2022, Algorithm 1) it trains the body alone (``head_share=0``), and the head has its initial values.
Frozen tensors do not move, but weight decay enters their momentum. In FedRep's code they have no
gradient at all.

Which model is tested: as in :mod:`~gcfed.methods.personal.tensors`. FedBABU's ``test/*`` is the
paper's global accuracy, and its personal models are fine-tuned from the last global model:
docs/methods.md has the command.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcfed.federated.parts import (
    Batch,
    ClientStack,
    ClientStates,
    Download,
    Method,
    Order,
    Params,
    per_client,
)
from gcfed.methods.personal.tensors import PrivateSide, WithheldSide
from gcfed.utils.checked import Share, checked
from gcfed.utils.device import device_of, on_device


@checked
class FedRep(Method):
    """Clients keep the head and send the body.

    Args:
        head_share: share of a client's local steps for the head, rounded down. The paper: 10 of 11
            epochs.
        head: as in :class:`~gcfed.methods.personal.tensors.Personal`.
    """

    def __init__(self, head_share: Share = 0.8, head: Sequence[str] | None = None) -> None:
        super().__init__(InTurn(head_share, head), WithheldSide("head", head))


class InTurn(PrivateSide):
    recordable = "run"
    order = Order.MOVES_WEIGHTS  # puts frozen tensors back

    def __init__(self, head_share: float, head: Sequence[str] | None) -> None:
        super().__init__("head", head)
        self.head_share = head_share
        if not head_share:  # FedBABU: the initial head belongs to the global model
            self.keeps = {}
            self.result = ""

    def prepare(self, stack: ClientStack, own: ClientStates, download: Download) -> Params:
        super().prepare(stack, own, download)
        # 0.29 · 100 is 28.999… in floating point
        steps = np.floor(self.head_share * stack.num_steps + 1e-9)
        return {"left": on_device(steps, device_of(stack.full))}

    def before_step(
        self, stack: ClientStack, batch: Batch, objective: Callable[[], Tensor]
    ) -> None:
        trains_head = stack.prepared[self]["left"][: stack.active] > 0
        self._frozen = {}
        for name, leaf in stack.leaves.items():
            is_head = name in self.kept
            self._frozen[name] = per_client(trains_head != is_head, leaf)
        self._before = {name: leaf.detach().clone() for name, leaf in stack.leaves.items()}

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for name, grad in pl_module.clients.named_grads():
            grad.masked_fill_(self._frozen[name], 0.0)

    @torch.no_grad()
    def after_step(self, stack: ClientStack, batch: Batch) -> None:
        for name, leaf in stack.leaves.items():
            leaf.copy_(torch.where(self._frozen[name], self._before[name], leaf))
        stack.prepared[self]["left"].sub_(1)
