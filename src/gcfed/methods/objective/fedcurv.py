"""Curvature penalties against forgetting: FedCurv (Shoham et al., NeurIPS 2019 workshop, arXiv
1910.07796).

    local objective    L_k(w) + λ Σ_{j≠k} (w − ŵ_j)ᵀ F_j (w − ŵ_j)
    up                 Δ_k, F_k and F_k ŵ_k
    down               w, Σ_j F_j and Σ_j F_j ŵ_j

F_k is the diagonal of the Fisher information at client k's own ŵ_k. The sums are over the clients j
of the last cohort with a finite upload; 8 more bytes give its round. Client k subtracts its own
part from the sums if it is included. So the penalty's gradient is 2λ (A w − B), with A and B the
sums over the others. ``train/loss`` contains the task's loss only. FedReg and FedGC report 2.5 |w|
in each direction: their server may compute F_k ŵ_k from F_k and Δ_k, (3 + 2)/2. Memory: two more
models per client in training, and ``chunk`` models for F_k.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap

from gcfed.federated.network.tap import Tap
from gcfed.federated.parts import (
    ClientPart,
    ClientStack,
    ClientStates,
    Download,
    Fact,
    KeptState,
    Method,
    Params,
    Prepared,
    Received,
    Round,
    ServerPart,
    Setup,
    Upload,
    like_trained,
    per_client,
)
from gcfed.methods.requirements import full_uploads, functional_network, mean_aggregator
from gcfed.models.facts import is_recurrent
from gcfed.models.unchanged import evaluating
from gcfed.utils.checked import Count, Weight, checked
from gcfed.utils.device import device_of, on_device
from gcfed.utils.refusal import Refusal

MESSAGES = ("fedcurv_fisher", "fedcurv_center")  # F_k and F_k ŵ_k


@checked
class FedCurv(Method):
    """Adds 2λ (A w − B) to each client's gradients.

    F_k is the empirical Fisher information, as in FedReg's code: the samples' mean squared gradient
    with true labels, in evaluation mode, without augmentation. A sequence is one sample; its loss
    is the mean over its labels.

    Args:
        lam: λ, of a sum over the cohort. FedReg's code, for its FedCurv: 1e-4 (MNIST, 10 clients a
            round), 1e-5 (CIFAR-10, 100), 1e-3 (CIFAR-100, 100).
        chunk: samples whose gradients are computed at once; changes only memory and speed.
    """

    def __init__(self, lam: Weight = 1e-4, *, chunk: Count = 32) -> None:
        super().__init__(CurvaturePenalty(lam, chunk), CurvatureSums())


class CurvaturePenalty(ClientPart):
    recordable = "stack"
    # a client finds its own part in the sums by the index of their round
    facts = {Fact.ANCHORS, Fact.ONE_ROUND}
    needs = [
        full_uploads("its Fisher information would still be sent in full"),
        functional_network("it computes its Fisher information with torch.func"),
    ]

    keeps = dict.fromkeys(MESSAGES, KeptState(like_trained))

    def __init__(self, lam: float, chunk: int) -> None:
        self.lam = lam
        self.chunk = chunk

    def validate(self, setup: Setup) -> None:
        if is_recurrent(setup.module.net):
            raise Refusal(
                "methods.fedcurv takes gradients by sample, which recurrent layers lack: use"
                " another net."
            )

    def bind(self, setup: Setup) -> None:
        self.data = setup.data

    def prepare(self, stack: ClientStack, own: ClientStates, download: Download) -> Prepared:
        last = int(download.extra["fedcurv_round"]["index"])  # lies on the host
        device = device_of(stack.full)
        is_included = on_device(own.version == last, device)
        for message, kept in own.items():  # zeros where the client has none
            for name, t in kept.items():
                t.mul_(per_client(is_included, t))
                torch.sub(download.extra[message][name], t, out=t)
        return own

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        stack = pl_module.clients
        grads, weights, curvature, center = stack.with_grads(
            stack.full, *stack.prepared[self].values()
        )
        pull = torch._foreach_mul(weights, curvature)
        torch._foreach_sub_(pull, center)
        torch._foreach_add_(grads, pull, alpha=2 * self.lam)

    def on_clients_end(self, stack: ClientStack, download: Download) -> None:
        each = []
        with evaluating(stack.net):
            for row, client in enumerate(stack.clients.tolist()):
                each.append(self._fisher(stack, row, self.data.client(client)))
        fisher = {name: torch.stack([one[name] for one in each]) for name in self.trained_names}
        center = {name: t * stack.full[name] for name, t in fisher.items()}
        self._own = dict(zip(MESSAGES, (fisher, center), strict=True))

    def _fisher(self, stack: ClientStack, row: int, samples: np.ndarray) -> Params:
        """The diagonal of one client's Fisher information, name → ``[*shape]``."""
        state = {name: t[row] for name, t in stack.full.items()}
        params = {name: state.pop(name) for name in self.trained_names}

        def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
            outputs, _ = Tap(stack.net).on(params | state, x)
            losses = stack.task.real_losses(outputs[0], y)
            return losses.sum() / stack.task.real(y).sum().clamp(min=1)

        gradients = vmap(grad(loss), in_dims=(None, 0, 0))
        total = {name: torch.zeros_like(t) for name, t in params.items()}
        device = device_of(params)
        for chunk in on_device(samples, device).split(self.chunk):
            x, y = self.data.fetch(chunk, None)
            each = gradients(params, x.unsqueeze(1), y.unsqueeze(1))  # [samples, *shape]
            squares = [gradient.square().sum(0) for gradient in each.values()]
            torch._foreach_add_(list(total.values()), squares)
        torch._foreach_div_(list(total.values()), len(samples))
        return total

    def send(self, upload: Upload, own: ClientStates, download: Download) -> None:
        upload.extra |= self._own
        self._own = {}

    def keep(self, upload: Upload, own: ClientStates, download: Download) -> Mapping[str, Params]:
        """If its upload does not count, a client keeps its old part; the server's sums may contain
        it.
        """
        return {message: upload.extra[message] for message in MESSAGES}


class CurvatureSums(ServerPart):
    needs = [mean_aggregator("a client subtracts its own part from the sum over all")]

    def on_broadcast(self, download: Download, round: Round) -> None:
        like = self.trained(round.broadcast_model)
        self._sums = {message: self.server_state(message, like) for message in MESSAGES}
        self._last = self.server_state("round", {"index": torch.zeros((), dtype=torch.int64)})
        download.extra |= self._sums | {"fedcurv_round": self._last}

    def uploads(self, round: Round) -> dict[str, Params]:
        return self._sums

    def on_aggregate_end(self, update: Params, round: Received) -> None:
        for message, sums in self._sums.items():
            for name, mean in round.extra_means[message].items():
                torch.mul(mean, round.num_finite, out=sums[name])
        self._last["index"].fill_(round.index)
