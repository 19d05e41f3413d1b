"""What labels mean: the loss of an output, and what a test reports.

``task`` in the config; the data set chooses.

Your own loss is a class that inherits from :class:`Classification`, :class:`SquaredError` or
:class:`Task` (docs/bring-your-own.md). ``columns`` and ``scores`` add columns to a test.
"""

from dataclasses import dataclass
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from gcfed.utils.refusal import Refusal

IGNORE = -100  # the label of padding
LOSSES = ("losses", "client_losses", "mean_losses")  # the methods that a user's task may replace


@dataclass
class Batch:
    """One local step's samples of the n active clients.

    x: inputs, ``[n, B, *input]``.
    y: labels, ``[n, B]``, of sequences ``[n, B, T]``, where a negative one is padding, or to
        regress on ``[n, B, C]``.
    mask: 1 where a label is real and 0 where it is padding, in the shape of the labels; None where
        all are real.
    count: real labels of each client, ``[n]``.
    rows: 1 where a sample is real and 0 where it is padding, ``[n, B]``; None where all are real.
    """

    x: Tensor
    y: Tensor
    mask: Tensor | None
    count: Tensor
    rows: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor, y: Tensor, counts: Tensor, even: bool) -> "Batch":
        """The batch of n clients. Rows after a client's last sample are padding.

        Args:
            counts: the clients' numbers of samples, ``[n]``.
            even: whether no client has padding.
        """
        rows = None  # which samples are no padding
        if not even:
            rows = torch.arange(y.shape[1], device=counts.device) < counts[:, None]
        if y.dim() == 2 or y.is_floating_point():
            return cls(x, y, rows, counts, rows)
        mask = y >= 0
        if rows is not None:
            mask = mask & rows.unsqueeze(-1)
        return cls(x, y, mask, mask.flatten(1).sum(1), rows)

    def mean(self, values_KB: Tensor) -> Tensor:
        """Each client's mean of a value for each label, over its real labels, ``[n]``; 0 without a
        real label.
        """
        if self.mask is None:
            return values_KB.flatten(1).mean(1)
        return (values_KB * self.mask).flatten(1).sum(1) / self.count.where(self.count > 0, 1.0)


class Task:
    """The interface that the solver and the test use; ``[…]`` are the axes of samples and of a
    sequence.
    """

    columns: tuple[str, ...] = ("test/loss",)  # the keys of scores()
    roots: tuple[str, ...] = ()  # columns for which a test reports the root of the mean
    exponentials: tuple[str, ...] = ()  # columns for which it reports e to the mean
    shares: tuple[str, ...] = ()  # columns whose scores are from 0 to 1
    has_classes = False  # whether labels are classes and outputs their logits
    # whether a CUDA graph can record the losses of a user's class: the same operations every time
    recordable = False

    @property
    def is_recordable(self) -> bool:
        """Whether a CUDA graph can record the losses."""
        return self.recordable or type(self).__module__ == __name__

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The loss of every label of one client, ``[B]``; 0 where the label is padding.

        Outputs are ``[B, C]``. For sequences they are ``[B, T, C]``, and the losses ``[B, T]``. The
        engine calls the method of a user's class for one client at a time. The losses of this
        module take any number of leading axes.
        """
        raise NotImplementedError

    def mean_losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Each client's mean loss over the real labels of its batch, outputs ``[n, B, …, C]`` →
        ``[n]``.

        With ``client.accumulate`` each part of a batch has a mean, and a step uses the mean of
        these, weighted by the samples.
        """
        return batch.mean(self.client_losses(outputs, batch.y))

    def mean_loss_of_one(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The mean loss of a single client, outputs ``[B, …, C]`` → ``[]``: :meth:`mean_losses`
        without the client axis, which takes a few nodes of the graph.
        """
        return self.mean_losses(outputs.unsqueeze(0), batch)[0]

    def client_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The losses of n clients' labels, outputs ``[n, B, …, C]`` → ``[n, B, …]``."""
        if self.losses.__module__ == __name__:
            return self.losses(outputs, y)
        # copies, because a loss may edit its outputs in place, and terms of methods read them, too
        values = torch.stack([self.losses(outputs[k].clone(), y[k]) for k in range(len(y))])
        if values.shape[:2] != y.shape[:2]:
            raise Refusal(
                f"task={type(self).__name__}: losses has the shape {[*values.shape[1:]]} for labels"
                f" {[*y.shape[1:]]}: it must be one number for each label."
            )
        return values

    def real_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """:meth:`losses`, with 0 for padding, whatever a user's class has there."""
        return self.losses(outputs, y).where(self.real(y), 0.0)

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Moves tensors in attributes, such as weights of classes, to the run's device and type."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                own_type = dtype if value.is_floating_point() else value.dtype
                setattr(self, name, value.to(device, own_type))

    def least_loss(self) -> float:
        """The smallest loss that is possible; −∞ if there is none."""
        return -inf

    def scores(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The scores that a test averages over the real labels, name → ``[…]``."""
        return {"test/loss": self.losses(at_least_float32(outputs), y)}

    def real(self, y: Tensor) -> Tensor:
        """True for labels that are not padding, bool ``[…]``."""
        return torch.ones(y.shape[:-1], dtype=torch.bool, device=y.device)

    def check(self, outputs: Tensor, y: Tensor) -> None:
        """Raises Refusal if a loss or a score is not one number for each label, which sums would
        broadcast, if a column has no score, or if the labels change.
        """
        name = type(self).__name__
        labels = y.clone()
        losses = self.losses(outputs.clone(), labels)
        scores = self.scores(outputs.clone(), labels)
        if not torch.equal(labels.nan_to_num(), y.nan_to_num()):
            raise Refusal(f"task={name} changes its labels: begin with y = y.clone().")
        wanted = self.real(y).shape
        for kind, values in ({"losses": losses} | scores).items():
            if values.shape != wanted:
                shapes = f"{[*values.shape]} for outputs {[*outputs.shape]} and labels {[*y.shape]}"
                raise Refusal(
                    f"task={name}: {kind} has the shape {shapes}: it must be {[*wanted]}."
                )
        missing = [column for column in self.columns if column not in scores]
        if missing:
            raise Refusal(f"task={name}: scores() lacks its columns {', '.join(missing)}.")


class Classification(Task):
    """Cross-entropy of classes: logits ``[…, C]``, labels int64 ``[…]``; a negative label is
    padding.
    """

    columns: tuple[str, ...] = ("test/acc", "test/loss")
    shares = ("test/acc",)
    has_classes = True

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(
            outputs.flatten(0, -2), y.flatten(), reduction="none", ignore_index=IGNORE
        ).view(y.shape)

    def mean_losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        is_alone = len(outputs) == 1 and batch.mask is None
        if not (is_alone and has_methods_of(self, Classification, "losses", "client_losses")):
            return super().mean_losses(outputs, batch)
        # One client with whole batches: torch's own mean saves four nodes of the graph, 0.1 ms of a
        # step.
        return F.cross_entropy(outputs.squeeze(0), batch.y.squeeze(0)).unsqueeze(0)

    def mean_loss_of_one(self, outputs: Tensor, batch: Batch) -> Tensor:
        if batch.mask is not None or not has_methods_of(self, Classification, *LOSSES):
            return super().mean_loss_of_one(outputs, batch)
        return F.cross_entropy(outputs, batch.y.squeeze(0))

    def least_loss(self) -> float:
        return 0.0 if has_methods_of(self, Classification, *LOSSES) else -inf

    def scores(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        is_right = outputs.argmax(-1) == y
        return {"test/acc": is_right.float()} | super().scores(outputs, y)

    def real(self, y: Tensor) -> Tensor:
        return y >= 0


class LanguageModel(Classification):
    """The next token. A test also reports ``test/perplexity``, e to its mean loss."""

    columns = (*Classification.columns, "test/perplexity")
    exponentials = ("test/perplexity",)

    def scores(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        scores = super().scores(outputs, y)
        scores["test/perplexity"] = scores["test/loss"]
        return scores


class SquaredError(Task):
    """Regression: outputs and labels ``[…, C]``, the loss ½‖output − label‖² (SSF, equation 130,
    without its ridge).

    A test also reports ``test/rmse``, the root of the mean squared error of a component, in the
    user's units.
    """

    columns = ("test/loss", "test/rmse")
    roots = ("test/rmse",)
    # what the data module divided each target by, ``[C]``; set before each fit and test
    target_std: Tensor | float = 1.0

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs - y).square().sum(-1) / 2

    def least_loss(self) -> float:
        return 0.0 if has_methods_of(self, SquaredError, *LOSSES) else -inf

    def scores(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        errors = (at_least_float32(outputs) - y) * self.target_std
        return super().scores(outputs, y) | {"test/rmse": errors.square().mean(-1)}


def has_methods_of(task: Task, kind: type[Task], *names: str) -> bool:
    """Whether these methods of a task are those of this class, and not those of a user's subclass
    or of the object itself.
    """
    for name in names:
        if getattr(getattr(task, name), "__func__", None) is not getattr(kind, name):
            return False
    return True


def at_least_float32(values: Tensor) -> Tensor:
    """The values in float32, or in float64 as they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


CLASSIFICATION = Classification()
