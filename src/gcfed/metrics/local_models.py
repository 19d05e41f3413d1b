"""The clients' own models after local training, compared with the broadcast model.

Samples are not augmented, networks are in evaluation mode, and losses are without terms and
calibrations of methods.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcfed.data.datamodule import FederatedDataModule
from gcfed.federated.network.tap import Tap
from gcfed.federated.parts import ClientStack, Download, Fact, Params, Received, Setup
from gcfed.methods.requirements import class_logits, has_function
from gcfed.metrics.base import AT_ONCE, OwnNumbers, drawn, fetch_tests, floats
from gcfed.utils.checked import Count, checked
from gcfed.utils.device import device_of
from gcfed.utils.refusal import Refusal
from gcfed.utils.rng import generator


@checked
@dataclass(eq=False)
class Clients(OwnNumbers):
    """The broadcast model and each client's own model on its training data:
    ``clients/{acc,loss}_{before,after}``.

    Padding labels of sequences do not count. A client whose loss is not finite is left out of all
    four.
    """

    every: Count = 10

    needs = [class_logits]
    numbers = (
        "clients/acc_before",
        "clients/loss_before",
        "clients/acc_after",
        "clients/loss_after",
    )

    def samples(self, client: int) -> np.ndarray:
        """The indices of the samples on which a client is measured."""
        return self.data.client(client)

    def measure(self, stack: ClientStack, row: int, own: Params, download: Download) -> Tensor:
        index = torch.as_tensor(self.samples(int(stack.clients[row])), device=device_of(own))
        sums = torch.zeros(len(self.numbers), dtype=torch.float64, device=index.device)
        if not len(index):  # a network may not take an empty batch
            return sums / 0
        labels = torch.zeros_like(sums[0])
        for part in index.split(AT_ONCE):
            x, y = self.data.fetch(part, None)
            labels += (y >= 0).sum()
            numbers = []
            for state in (stack.broadcast_model, own):
                logits = stack.on(state, x)
                numbers.append((logits.argmax(-1) == y).sum())
                numbers.append(stack.task.real_losses(logits, y).sum())
            sums += torch.stack([number.double() for number in numbers])
        return torch.where(sums.isfinite().all(), sums / labels, torch.nan)


def _has_tests(data: FederatedDataModule) -> bool:
    """Whether any client has a sample in its test split."""
    tests = data.tests_of_clients
    if tests is None:
        return False
    return any(len(tests.client(client)) for client in range(data.num_clients))


class Personal(Clients):
    """Accuracy of the global model and of each client's own model on its own test split:
    ``personal/*``.

    A client's own model is its model after local training. If a method also trains a personal
    model, it is this one.

    ``{global,local}_{acc,worst10,std}`` are the mean, the mean of the worst tenth (at least one
    client) and the standard deviation of the accuracies on clients' test splits
    (``data.client_test``). They include the cohort's clients that have a test split and finite
    losses. They are the usual measures of fairness (Li et al., "Fair Resource Allocation in
    Federated Learning", ICLR 2020).

    Raises Refusal at ``validate`` for clients without a test split, or without a sample in it.
    """

    writes = (
        "personal/global_acc",
        "personal/global_worst10",
        "personal/global_std",
        "personal/local_acc",
        "personal/local_worst10",
        "personal/local_std",
    )

    def validate(self, setup: Setup) -> None:
        if getattr(setup.data, "client_test", None) is None:
            raise Refusal(
                "metrics=personal tests clients on their own test splits: set data.client_test=0.2."
            )
        if not setup.transport.remote and not _has_tests(setup.data):
            raise Refusal(
                f"metrics=personal: data.client_test={setup.data.client_test} leaves no client a"
                " test sample. Set a larger share, such as data.client_test=0.5."
            )

    def samples(self, client: int) -> np.ndarray:
        assert self.data.tests_of_clients is not None
        return self.data.tests_of_clients.client(client)

    def measure(self, stack: ClientStack, row: int, own: Params, download: Download) -> Tensor:
        own = own | {name: t[row] for name, t in stack.personal.items()}
        return super().measure(stack, row, own, download)

    def columns(self, round: Received) -> dict[str, float]:
        values_KV = self.values(round)
        finite_KV = values_KV[values_KV.isfinite().all(1)].sort(0).values
        if not len(finite_KV):
            return {}
        figures = {}
        for model, column in (("global", 0), ("local", 2)):
            acc_K = finite_KV[:, column]
            worst = acc_K[: math.ceil(len(acc_K) / 10)]
            figures[f"personal/{model}_acc"] = acc_K.mean()
            figures[f"personal/{model}_worst10"] = worst.mean()
            figures[f"personal/{model}_std"] = acc_K.std(correction=0)
        return floats(figures)


@checked
@dataclass(eq=False)
class Forgetting(OwnNumbers):
    """What clients forget about each other's data: ``forgetting/*``, FedGC's Figure 7 (gradient
    constraint, A.10).

    w is the broadcast model and w_k the model that client k of the cohort S trains from it. L(·,
    D_i) is the mean loss on the data of client i of the same cohort (in the paper, all clients take
    part):

    =====================  =========================================================  =============
    ``forgetting/before``  L(w, D), with D the data of all i together                 equation 34
    ``forgetting/after``   mean over k and i of L(w_k, D_i)                           equation 35
    ``forgetting/own``     mean over k of L(w_k, D_k): the loss on own data
    ``forgetting/others``  mean over k and i ≠ k: the loss on others' data
    =====================  =========================================================  =============

    A measured round costs |S| + 1 passes over the drawn samples. A client with a loss that is not
    finite is left out.
    """

    every: Count = 10
    samples: Count | None = 200

    facts = {Fact.SEES_COHORT}
    numbers = ("forgetting/before", "forgetting/after", "forgetting/own", "forgetting/others")

    def compare(self, stack: ClientStack, download: Download) -> None:
        cohort = download.cohort
        chosen = []
        for client in cohort.tolist():
            rng = generator(download.seed, "forgetting", download.round_index, client)
            chosen.append(drawn(self.data.client(client), self.samples, rng))
        sizes = [len(samples) for samples in chosen]
        owner = np.repeat(np.arange(len(chosen)), sizes)
        device = device_of(stack.full)
        self._index = torch.as_tensor(np.concatenate(chosen), device=device)
        self._owner = torch.as_tensor(owner, device=device)
        sums = self._sums_of(stack, stack.broadcast_model, len(cohort))
        weight = self.data.sizes(cohort) / sizes  # the drawn samples represent all
        loss, labels = (sums * torch.as_tensor(weight, device=sums.device)).sum(1)
        self._before = loss / labels

    def measure(self, stack: ClientStack, row: int, own: Params, download: Download) -> Tensor:
        sums, labels = self._sums_of(stack, own, len(download.cohort))
        losses = sums / labels
        home = np.searchsorted(download.cohort, stack.clients[row])
        # empty for a cohort of one: the mean is NaN
        others = torch.cat([losses[:home], losses[home + 1 :]])
        values = torch.stack([self._before, losses.mean(), losses[home], others.mean()])
        return torch.where(losses.isfinite().all(), values, torch.nan)

    def _sums_of(self, stack: ClientStack, state: Params, cohort: int) -> Tensor:
        """The sum of one network's losses on each client's drawn samples, and the number of labels,
        ``[2, |S|]``.
        """
        sums = torch.zeros(2, cohort, dtype=torch.float64, device=self._index.device)
        pieces = zip(self._index.split(AT_ONCE), self._owner.split(AT_ONCE), strict=True)
        for index, owner in pieces:
            x, y = self.data.fetch(index, None)
            losses = stack.task.real_losses(stack.on(state, x), y)
            numbers = torch.stack([losses.double(), stack.task.real(y).double()])
            per_sample = numbers.reshape(2, len(owner), -1).sum(2)
            sums.index_add_(1, owner, per_sample)
        return sums


def linear_cka(x: Tensor, y: Tensor) -> Tensor:
    """Linear CKA of two representations of the same samples, ``[n, …]`` each → a number in [0, 1].

    Kornblith et al., ICML 2019, eq. 3: for centred X and Y ``‖XᵀY‖² / (‖XᵀX‖ ‖YᵀY‖)`` (Frobenius
    norms). It is 1 if X and Y agree up to rotation and scale, and NaN if X or Y is the same for all
    samples.
    """
    x = x.flatten(1) - x.flatten(1).mean(0)
    y = y.flatten(1) - y.flatten(1).mean(0)
    if max(x.shape[1], y.shape[1]) > len(x):  # ‖XᵀY‖² = ⟨XXᵀ, YYᵀ⟩: the smaller matrices
        products_x = x @ x.T
        products_y = y @ y.T
        cross = (products_x * products_y).sum()
    else:
        products_x = x.T @ x
        products_y = y.T @ y
        cross = (x.T @ y).square().sum()
    return cross / (products_x.norm() * products_y.norm())


@checked
@dataclass(eq=False)
class CKA(OwnNumbers):
    """Similarity of client and broadcast model: ``cka/<stage>`` for each of the network's stages
    (GC-Fed, Figure 7).

    Raises Refusal at ``validate`` for a network without ``stages()``.
    """

    every: Count = 10
    samples: Count = 256
    writes = ("cka/*",)

    def validate(self, setup: Setup) -> None:
        net: Any = setup.module.net
        if not has_function(net, "stages"):
            raise Refusal(
                f"metrics=cka needs a network with stages(), and {type(net).__name__} has none."
            )

    def bind(self, setup: Setup) -> None:
        super().bind(setup)
        net: Any = setup.module.net
        self.numbers = tuple(f"cka/{stage}" for stage in net.stages())

    def compare(self, stack: ClientStack, download: Download) -> None:
        chosen = drawn(np.arange(self.data.num_test), self.samples, generator(download.seed, "cka"))
        self._probe, _ = fetch_tests(self.data, chosen)
        self._broadcast = self.stages(stack, stack.broadcast_model)

    def measure(self, stack: ClientStack, row: int, own: Params, download: Download) -> Tensor:
        pairs = zip(self._broadcast, self.stages(stack, own), strict=True)
        return torch.stack([linear_cka(theirs, ours).double() for theirs, ours in pairs])

    def stages(self, stack: ClientStack, state: Params) -> list[Tensor]:
        """The outputs of all stages on the probe, each ``[samples, …]``."""
        with stack.lent_network.holding(state):
            _, *stages = Tap(stack.net, features=False, stages=True)(self._probe)
        return stages
