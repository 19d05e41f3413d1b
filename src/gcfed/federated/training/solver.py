"""Local training of K clients, between the broadcast and their uploads."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import ceil
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer

from gcfed.data.datamodule import FederatedDataModule
from gcfed.federated.graphs.recorder import Recorder
from gcfed.federated.messages import Download
from gcfed.federated.training.batches import BatchPlan, Kind, Steps, split
from gcfed.federated.training.forward import Params
from gcfed.federated.training.lent import Traits
from gcfed.federated.training.stack import ClientStack, client_norms, per_client
from gcfed.models.facts import is_graphable, is_recurrent
from gcfed.optim.partial import (
    fused,
    is_elementwise,
    probe_optimizer,
    starts_at_zero,
    try_optimizer,
    unprofiled_step,
)
from gcfed.tasks import Batch
from gcfed.utils.checked import Count, Positive, PositiveShare, SettingError, checked
from gcfed.utils.device import on_device
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
        clip_norm: bound on the norm of each client's gradient after all hooks; None: no clipping.
        stack: K, the number of clients trained at once on a device. ``auto`` is 1 on a CPU, where
            grouped convolutions are slow, and on a GPU as many of the cohort as fit into its
            memory.
        graphs: on a GPU, record local steps as CUDA graphs if the methods and the network allow it.
        accumulate: number of parts in which a mini-batch passes through the network: less memory,
            the same gradient.

    Raises ValueError for a setting out of its range, or an optimizer that is not elementwise.
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
        clip_norm: Positive | None = None,
        stack: Count | Literal["auto"] = "auto",
        graphs: bool = True,
        accumulate: Count | None = None,
    ) -> None:
        self.optimizer = try_optimizer(fused(optimizer), "client.optimizer")
        if not is_elementwise(self.optimizer):
            why = (
                "is not elementwise, so it cannot train stacked clients: choose one such as"
                " torch.optim.SGD or Adam."
            )
            raise SettingError(
                "optimizer", f"={type(probe_optimizer(self.optimizer)).__name__} {why}"
            )
        if epochs is None and steps is None:
            raise SettingError(
                "epochs", "=None must be a whole number of at least 1, where client.steps is null."
            )
        self.epochs, self.steps, self.batch_size, self.last_batch = (
            epochs or 0,
            steps,
            batch_size,
            last_batch,
        )
        self.lr_decay, self.clip_norm, self.stack, self.graphs = lr_decay, clip_norm, stack, graphs
        self.accumulate = accumulate or 1
        if self.accumulate > batch_size:
            raise SettingError(
                "accumulate", f"={accumulate} must be at most client.batch_size={batch_size}."
            )
        self.recorders: dict[int, Recorder] = defaultdict(Recorder)  # by stream
        probed = probe_optimizer(self.optimizer)
        self._lr = float(probed.defaults["lr"])
        # Later stacks can replay a recording if its optimizer can start again, and reads a changing
        # η_l from a tensor.
        self._lasting = starts_at_zero(probed) and (lr_decay == 1 or bool(probed.defaults["fused"]))

    def check(self, traits: Traits, data: Any) -> None:
        """Raises ValueError if a network with these traits cannot train K clients at once, or a
        batch of one sample.
        """
        if traits.alone and self.stack != "auto" and int(self.stack) > 1:
            raise ValueError(
                f"client.stack={self.stack} cannot train a network with {traits.alone}."
            )
        passes = [
            self._pass(size)[: self.steps]
            for size in data.sizes(np.arange(data.num_clients)).tolist()
        ]
        single = [
            k
            for k, own in enumerate(passes)
            if any((b - 1) % -(-b // self.accumulate) == 0 for b in own)
        ]
        if traits.single and single:
            few = (
                f"{len(single)} of {len(passes)} clients have such a batch (the first is client"
                f" {single[0]})"
            )
            fix = (
                "set model.norm_policy=group or fixed, or client.last_batch=wrap without"
                " client.accumulate."
            )
            raise ValueError(f"{traits.single}, and {few}: {fix}")

    def recorder(self, net: nn.Module, device: torch.device) -> Recorder | None:
        """The recorder of the present stream; None if Python launches each step."""
        if not self.graphs or device.type != "cuda" or is_recurrent(net) or not is_graphable(net):
            return None
        stream = torch.cuda.current_stream(device)
        return (
            None
            if stream == torch.cuda.default_stream(device)
            else self.recorders[stream.cuda_stream]
        )

    def begin(
        self,
        make: Callable[..., ClientStack],
        download: Download,
        clients: np.ndarray,
        plan: BatchPlan,
        data: Any,
        recorder: Recorder | None = None,
        lasting: bool = False,
    ) -> Steps:
        """Prepares K clients, at the broadcast model, for training.

        Args:
            make: makes a stack from the start, the clients, their numbers of samples and of steps.
            lasting: whether later stacks may replay what the ``recorder`` records for this one.
        """
        sizes = data.sizes(clients)

        def fresh(start: Params) -> tuple[ClientStack, BatchPlan, Optimizer]:
            stack = make(start, clients, sizes, plan.steps)
            optimizer = self.optimizer(list(stack.leaves.values()))
            if len({float(group["lr"]) for group in optimizer.param_groups}) > 1:
                raise ValueError(
                    "client.optimizer: all its groups need one lr, the clients' learning rate η_l."
                )
            for group in optimizer.param_groups if room and self.lr_decay < 1 else ():
                # float32, as fused kernels on a GPU read it
                group["lr"] = torch.zeros((), device=plan.index.device)
            return stack, plan, optimizer

        room = 0
        if recorder is None:
            return Steps(*fresh(download.model))
        if lasting and self._lasting:
            (room,) = self.num_steps(
                data.sizes(np.arange(data.num_clients)).max(keepdims=True)
            ).tolist()
        return recorder.steps(fresh, download, clients, sizes, plan, room)

    def lr(self, round_index: int) -> float:
        """η_l, the clients' learning rate in a round."""
        return self._lr * self.lr_decay**round_index

    def num_steps(self, sizes: np.ndarray) -> np.ndarray:
        """Numbers of samples of clients, ``[K]`` → their numbers of local steps, ``[K]``."""
        steps = [self.steps or self.epochs * len(self._pass(size)) for size in sizes.tolist()]
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
        steps = self.num_steps(np.array([len(own) for own in samples])).tolist()
        # The plan is dense: a batch has room for a million samples at most, or for the largest
        # client's.
        width = min(self.batch_size, max(1_000_000, *map(len, samples)))
        index = np.empty((len(clients), max(steps), width), np.int64)
        counts, draws = np.zeros(index.shape[:2], np.int64), []
        for k, (client, own) in enumerate(zip(clients.tolist(), samples, strict=True)):
            shuffle, augment = (
                generator(download.seed, use, download.round, client)
                for use in ("shuffle", "augment")
            )
            sizes, index[k] = np.minimum(self._pass(len(own)), width), own[0]
            # the GC-Fed authors' code: whole batches, by repeating the first samples
            if self.last_batch == "wrap":
                own = np.resize(own, sum(sizes))
            orders = shuffle.permuted(
                np.broadcast_to(own, (ceil(steps[k] / len(sizes)), len(own))), axis=1
            )
            passes = np.full((len(orders), len(sizes) * width), own[0])
            passes[:, : sum(sizes)] = orders[:, : sum(sizes)]
            index[k, : steps[k]] = passes.reshape(-1, width)[: steps[k]]
            counts[k, : steps[k]] = np.tile(sizes, len(passes))[: steps[k]]
            draws.append(data.draw(augment, (steps[k], width)))
        table = (
            None
            if draws[0] is None
            else pad_sequence([*map(torch.from_numpy, draws)], batch_first=True)
        )
        return BatchPlan(
            on_device(index, device), None if table is None else on_device(table, device), counts
        )

    def _pass(self, size: int) -> list[int]:
        """The sizes of the mini-batches in a pass over ``size`` samples."""
        whole, rest = divmod(size, self.batch_size)
        if self.last_batch == "wrap":
            return [self.batch_size] * (whole + (rest > 0))
        dropped = self.last_batch == "drop" and whole > 0
        return [self.batch_size] * whole + [rest] * (rest > 0 and not dropped)

    def train(
        self,
        steps: Steps,
        data: FederatedDataModule,
        lr: float,
        parts: Sequence[Any],
        after_backward: Callable[[], object],
        autocast: Callable[[], AbstractContextManager] = nullcontext,
    ) -> Tensor:
        """Trains the clients of a stack on all batches of its plan; ``lr`` is η_l.

        Args:
            parts: the client parts of the run's methods, in order.
            after_backward: calls Lightning's hook of this name.

        Returns:
            Each client's mean task loss over all its samples in all steps, ``[K]`` on the device.
        """
        stack, plan, optimizer = steps.stack, steps.plan, steps.optimizer
        for group in optimizer.param_groups:
            group["lr"] = group["lr"].fill_(lr) if isinstance(group["lr"], Tensor) else lr
        update = unprofiled_step(optimizer)
        movers = [part for part in parts if part.overrides("before_step", "after_step")]

        def step(number: int | Tensor, kind: Kind) -> None:
            batch = plan.batch(data, number, kind)
            stack.drop_grads()
            for part in movers:
                # its own context, because autocast caches the weights that it has cast
                with autocast():
                    part.before_step(
                        stack,
                        batch,
                        lambda: local_objective(stack, batch, parts, self.accumulate)[1],
                    )
            with autocast():
                task, objective = local_objective(stack, batch, parts, self.accumulate)
            stack.backward(objective)
            after_backward()
            if self.clip_norm is not None:
                (grads,) = stack.with_grads()
                scale_K = (self.clip_norm / (client_norms(grads) + 1e-6)).clamp(max=1.0)
                for grad in grads:
                    grad.mul_(per_client(scale_K, grad))
            update()
            for part in movers:
                with autocast():
                    part.after_step(stack, batch)
            steps.note(number, task.detach(), batch.count)

        for t, kind in enumerate(plan.kinds):
            if kind.active < stack.active:
                stack.shrink(kind.active, optimizer)
            steps.run(step, t, kind)
            if t == 0:
                steps.first_done()
        stack.settle()
        return steps.mean_losses()


def local_objective(
    stack: ClientStack, batch: Batch, parts: Sequence[Any], n: int = 1
) -> tuple[Tensor, Tensor]:
    """Each active client's task loss, and its objective with the terms of the methods, both
    ``[n]``. Of ``n`` parts of the batch, it back-propagates all but the last.
    ``stack.backward(objective)`` then adds the last gradient.
    """
    if n > 1:
        task = objective = batch.count.new_zeros(())
        for part, share in split(
            batch, n, torch.promote_types(next(iter(stack.full.values())).dtype, torch.float32)
        ):
            if objective.requires_grad:
                stack.backward(objective)
            of_part = local_objective(stack, part, parts)
            task, objective = (
                task.detach() + share * of_part[0],
                objective.detach() + share * of_part[1],
            )
        return task, objective
    out = stack(batch.x)
    logits = out.logits_KBC
    for part in parts:
        logits = part.calibrate(stack, logits)
    task = stack.task.mean_losses(logits, batch)
    objective, terms = task, []
    for part in parts:
        if part.task_weight != 1:
            objective = objective * part.task_weight
        if (term := part.local_loss(stack, batch, out)) is not None:
            if term.shape != task.shape:
                shapes = f"{[*term.shape]}, not {[*task.shape]}: one number for each client"
                raise ValueError(
                    f"{type(part).__name__}.local_loss returns a tensor of shape {shapes}."
                )
            terms.append(term)
    return task, sum(terms, objective)
