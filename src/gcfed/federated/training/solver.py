"""The settings of local training: batches, learning rates and the clients' optimizer."""

from collections.abc import Callable
from math import cos, pi
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer

from gcfed.data.datamodule import FederatedDataModule
from gcfed.federated.network.lent_network import Traits
from gcfed.federated.network.stack import ClientStack
from gcfed.federated.protocol.messages import Download
from gcfed.federated.training.batches import Batching, BatchPlan, last_piece
from gcfed.federated.training.hooks import StepHooks
from gcfed.federated.training.local_step import LocalStep
from gcfed.federated.training.local_training import LocalTraining
from gcfed.federated.training.objective import LocalObjective
from gcfed.optim.partial import (
    fused,
    is_elementwise,
    probe_optimizer,
    try_optimizer,
)
from gcfed.utils.checked import Count, Positive, PositiveShare, SettingError, checked
from gcfed.utils.device import on_device
from gcfed.utils.refusal import Refusal
from gcfed.utils.rng import generator


@checked
class LocalSolver:
    """Trains every client of a stack for some epochs or steps, with any elementwise optimizer of
    ``torch.optim``.

    Args:
        optimizer: partial of a ``torch.optim`` class; a client starts every round with a new one.
        epochs: passes over the client's data; ignored if ``steps`` is given.
        steps: number of mini-batches, the same for all clients; each pass over the data has a new
            order.
        batch_size: samples of a mini-batch; a client with fewer samples has smaller batches.
        last_batch: what to do with a shorter batch at the end of a pass: ``keep`` it, ``drop`` it
            (unless it is the only one), or ``wrap``: fill it with the first samples again (as the
            authors' code does).
        lr_decay: the learning rate of round t is ``lr · lr_decay^t``.
        lr_cosine: T, the number of rounds in which the learning rate falls to 0: a further factor
            ``½ (1 + cos(π t / T))`` (Loshchilov and Hutter, ICLR 2017, equation 5). None: no
            factor.
        clip_norm: bound on the norm of each client's gradient after all hooks; None: no clipping.
        stack: K, the number of clients trained at once on a device. ``auto`` is 1 on a CPU, where
            grouped convolutions are slow, and on a GPU as many of the cohort as fit into its
            memory.
        graphs: on a GPU, record local steps as CUDA graphs if the methods and the network allow it.
        accumulate: number of parts in which a mini-batch passes through the network: less memory,
            the same gradient, except for batch statistics and dropout.

    Raises SettingError for a setting out of its range, or an optimizer that is not elementwise.
    """

    def __init__(
        self,
        optimizer: Callable[..., Optimizer],
        *,
        epochs: Count | None = 5,
        steps: Count | None = None,
        batch_size: Count = 50,
        last_batch: Literal["keep", "drop", "wrap"] = "keep",
        lr_decay: PositiveShare = 1.0,
        lr_cosine: Count | None = None,
        clip_norm: Positive | None = None,
        stack: Count | Literal["auto"] = "auto",
        graphs: bool = True,
        accumulate: Count | None = None,
    ) -> None:
        self.optimizer = try_optimizer(fused(optimizer), "client.optimizer")
        probed = probe_optimizer(self.optimizer)
        if "lr" not in probed.defaults:
            raise SettingError(
                "optimizer",
                f"={type(probed).__name__} has no lr, the clients' learning rate η_l: give its"
                " groups one, Optimizer.__init__(self, params, {'lr': lr}).",
            )
        if not is_elementwise(self.optimizer):
            raise SettingError(
                "optimizer",
                f"={type(probed).__name__} is not elementwise, so it cannot train stacked clients:"
                " choose one such as torch.optim.SGD or Adam.",
            )
        if epochs is None and steps is None:
            raise SettingError(
                "epochs", "=None must be a whole number of at least 1, where client.steps is null."
            )
        self.epochs = epochs or 0
        self.steps = steps
        self.batch_size = batch_size
        self.batching = Batching(batch_size, last_batch)
        self.lr_decay = lr_decay
        self.lr_cosine = lr_cosine
        self.clip_norm = clip_norm
        self.stack = stack
        self.graphs = graphs
        self.accumulate = accumulate or 1
        if self.accumulate > batch_size:
            raise SettingError(
                "accumulate", f"={accumulate} must be at most client.batch_size={batch_size}."
            )
        self._lr = float(probed.defaults["lr"])

    @property
    def rate_changes(self) -> bool:
        """Whether η_l differs between rounds."""
        return self.lr_decay < 1 or self.lr_cosine is not None

    def check(self, traits: Traits, data: FederatedDataModule) -> None:
        """Raises Refusal if a network with these traits cannot train as the settings ask."""
        if traits.why_alone and self.stack != "auto" and int(self.stack) > 1:
            raise Refusal(
                f"client.stack={self.stack} cannot train a network with {traits.why_alone}."
            )
        if not traits.why_single_fails:
            return
        lonely = []  # clients with a batch, or a piece of one, of a single sample
        for client, size in enumerate(data.sizes().tolist()):
            batches = self.batching.sizes(size)[: self.steps]
            if any(last_piece(batch, self.accumulate) == 1 for batch in batches):
                lonely.append(client)
        if lonely:
            raise Refusal(
                f"{traits.why_single_fails}, and {len(lonely)} of {data.num_clients} clients have"
                f" such a batch (the first is client {lonely[0]}): set model.norm_policy=group or"
                " fixed, or client.last_batch=wrap without client.accumulate."
            )

    def make_optimizer(self, stack: ClientStack) -> Optimizer:
        """The optimizer of a stack's clients in one round."""
        optimizer = self.optimizer(list(stack.leaves.values()))
        if len({float(group["lr"]) for group in optimizer.param_groups}) > 1:
            raise Refusal(
                "client.optimizer: all its groups need one lr, the clients' learning rate η_l."
            )
        return optimizer

    def lr(self, round_index: int) -> float:
        """η_l, the clients' learning rate in a round."""
        rate = self._lr * self.lr_decay**round_index
        if self.lr_cosine is None:
            return rate
        progress = min(1.0, round_index / self.lr_cosine)
        return rate * 0.5 * (1 + cos(pi * progress))

    def num_steps(self, sizes: np.ndarray) -> np.ndarray:
        """Numbers of samples of clients, ``[K]`` → their numbers of local steps, ``[K]``."""
        steps = [self.steps or self.epochs * self.batching.count(size) for size in sizes.tolist()]
        return np.array(steps, dtype=np.int64)

    def plan(
        self,
        data: FederatedDataModule,
        clients: np.ndarray,
        download: Download,
        device: torch.device,
    ) -> BatchPlan:
        """Draws all mini-batches of K clients in this round.

        A client's draws depend on (seed, round, client) alone.
        """
        samples = [data.client(client) for client in clients.tolist()]
        steps = self.num_steps(data.sizes(clients)).tolist()
        # The plan is a dense array. Places beyond a million and beyond the largest client would
        # only be empty.
        width = min(self.batch_size, max(1_000_000, *map(len, samples)))
        index = np.empty((len(clients), max(steps), width), np.int64)
        counts = np.zeros(index.shape[:2], np.int64)
        draws = []
        for k, client in enumerate(clients.tolist()):
            shuffle = generator(download.seed, "shuffle", download.round_index, client)
            batches, sizes = self.batching.draw(shuffle, samples[k], steps[k], width)
            index[k] = samples[k][0]  # padding
            index[k, : steps[k]] = batches
            counts[k, : steps[k]] = sizes
            augment = generator(download.seed, "augment", download.round_index, client)
            draws.append(data.draw(augment, (steps[k], width)))
        table = None
        if draws[0] is not None:
            padded = pad_sequence([torch.from_numpy(draw) for draw in draws], batch_first=True)
            table = on_device(padded, device)
        return BatchPlan(on_device(index, device), table, counts)

    def train(
        self, training: LocalTraining, data: FederatedDataModule, lr: float, hooks: StepHooks
    ) -> Tensor:
        """Trains the clients of a stack on all batches of its plan; ``lr`` is η_l.

        Returns:
            Each client's mean task loss over its real labels in all steps, ``[K]`` on the device.
        """
        set_lr(training.optimizer, lr)
        step = LocalStep(
            training=training,
            data=data,
            hooks=hooks,
            objective=LocalObjective(training.stack, hooks, self.accumulate),
            clip_norm=self.clip_norm,
        )
        # a step's kind: the number of clients that still train, and the size of their batches
        for number, kind in enumerate(training.plan.kinds):
            training.run(step, number, kind)
        training.stack.settle()
        return training.mean_losses()


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Sets the learning rate of all groups. A recorded step reads it from a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
