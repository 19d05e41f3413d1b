"""What clients minimise in a local step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gcfed.federated.network.stack import ClientStack
from gcfed.federated.training.batches import split
from gcfed.federated.training.hooks import StepHooks
from gcfed.tasks import Batch
from gcfed.utils.refusal import Refusal


@dataclass(frozen=True, eq=False)
class LocalObjective:
    """The task's loss of each active client of a stack, with the terms of the methods.

    Attributes:
        hooks: those of the methods that change the objective.
        num_pieces: number of pieces in which a batch passes through the network
            (``client.accumulate``).
    """

    stack: ClientStack
    hooks: StepHooks
    num_pieces: int = 1

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Each active client's task loss, ``[n]``, and its objective, ``[n]``; the objective is
        ``[]`` for a lone client without terms of methods.
        """
        lone = self.stack.lone
        if self.hooks.changes_objective or self.num_pieces > 1 or lone is None:
            return self.losses_of_clients(batch)
        loss = lone.mean_loss(batch)
        return loss.detach().unsqueeze(0), loss

    def losses_of_clients(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Each active client's task loss and its objective, both ``[n]``.

        It back-propagates all pieces of the batch but the last. ``stack.backward(objective)`` then
        adds the last gradient.
        """
        if self.num_pieces == 1:
            return self._losses_of_piece(batch)
        stack = self.stack
        dtype = torch.promote_types(next(iter(stack.full.values())).dtype, torch.float32)
        task = objective = batch.count.new_zeros(())
        for piece, share in split(batch, self.num_pieces, dtype):
            if objective.requires_grad:
                stack.backward(objective)
            task_of_piece, objective_of_piece = self._losses_of_piece(piece)
            task = task.detach() + share * task_of_piece
            objective = objective.detach() + share * objective_of_piece
        return task, objective

    def _losses_of_piece(self, piece: Batch) -> tuple[Tensor, Tensor]:
        """The task loss and the objective, both ``[n]``, of a batch that is not split."""
        stack = self.stack
        hooks = self.hooks
        out = stack(piece.x)
        logits = out.logits_KBC
        for calibrate in hooks.calibrate:
            logits = calibrate(stack, logits)
        task = stack.task.mean_losses(logits, piece)
        objective = task if hooks.task_weight == 1 else task * hooks.task_weight
        for local_loss in hooks.local_loss:
            term = local_loss(stack, piece, out)
            if term is None:
                continue
            if term.shape != task.shape:
                raise Refusal(
                    f"{local_loss.__qualname__} returns a tensor of shape {[*term.shape]}, not"
                    f" {[*task.shape]}: one number for each client."
                )
            objective = objective + term
        return task, objective
