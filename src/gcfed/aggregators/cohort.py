"""What the rules share that need all updates of a cohort at once."""

import copy
from collections.abc import Callable, Iterable, Set
from math import ceil
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gcfed.federated.method import Params, Round, Setup, Upload
from gcfed.methods.local_norm import no_steps
from gcfed.utils.checked import checked
from gcfed.utils.device import on_device

COLUMNS = 1 << 20  # coordinates that a rule sorts at a time


class CohortRule:
    """Reduces the finite updates of a cohort by a rule on all of them; each client is one row.

    What is no step (:func:`~gcfed.methods.local_norm.no_steps`) goes through the same rule on its own: beside a batch
    norm's running statistics, distances and norms would hardly see the steps, and without the rule a hostile client
    could send any.

    Memory: the updates of the whole cohort on every process, and while they are gathered as much again.
    """

    _table: Tensor | None = None  # [|S|, D + 1], the last column 1 where a client is finite
    _apart: Set[str] = frozenset()
    narrow = None

    def rule(self, updates_nD: Tensor) -> Tensor:
        """Finite updates in the order of the cohort, ``[n, D]`` with n ≥ 1 → one, ``[D]``."""
        raise NotImplementedError

    def validate(self, setup: Setup) -> None:
        self._apart = no_steps(setup)

    def beside(self) -> "CohortRule":
        """The same rule, for what clients send beside Δ."""
        return copy.deepcopy(self)

    def add(self, upload: Upload, round: Round) -> None:
        """Keeps the updates of K clients, in the rows of their places in the cohort."""
        columns = [upload.delta[name].reshape(len(upload.clients), -1) for name in self._ordered(upload.delta)]
        updates = torch.cat([*columns, upload.finite.unsqueeze(1).to(columns[0].dtype)], 1)
        if self._table is None:
            self._table = updates.new_zeros(len(round.cohort), updates.shape[1])
        self._table[on_device(round.places(upload.clients), updates.device)] = updates

    def reduce(self, round: Round, like: Params) -> Params:
        """The rule's update, name → ``[*shape]`` of ``like``; zeros without a finite client."""
        sizes = {name: like[name].numel() for name in self._ordered(like)}
        table, self._table = self._table, None
        if table is None:  # this process trained none of the cohort
            table = next(iter(like.values())).new_zeros(len(round.cohort), sum(sizes.values()) + 1)
        (table,) = round.reduce([table])  # a row is zero on all processes but one
        table = table[table[:, -1] > 0, :-1]
        apart = sum(size for name, size in sizes.items() if name in self._apart)
        blocks = [block for block in table.split([table.shape[1] - apart, apart], 1) if block.shape[1]]
        update = torch.cat([self.rule(block) if len(table) else block.new_zeros(block.shape[1]) for block in blocks])
        parts = dict(zip(sizes, update.split(list(sizes.values())), strict=True))
        return {name: torch.empty_like(t).copy_(parts[name].view(t.shape)) for name, t in like.items()}

    def _ordered(self, names: Iterable[str]) -> list[str]:
        """As columns have them: what is no step last."""
        return sorted(names, key=lambda name: (name in self._apart, name))


@checked
class BoundedRule(CohortRule):
    """A rule that is told how many clients may be hostile and stands as many.

    Args:
        hostile: share of a cohort that may be hostile; f is that share of a round's finite clients, rounded up, or the
            largest number for which they suffice.
    """

    per_hostile, spare = 2, 1  # the rule needs a cohort of per_hostile · f + spare clients

    def __init__(self, hostile: Annotated[float, Field(ge=0, lt=0.5)] = 0.2) -> None:
        self.hostile = hostile

    def most(self, n: int) -> int:
        """f for n clients, as asked for."""
        return ceil(self.hostile * n - 1e-9)

    def f(self, n: int) -> int:
        """f for n clients, as far as they suffice."""
        return max(0, min(self.most(n), (n - self.spare) // self.per_hostile))

    def validate(self, setup: Setup) -> None:
        """Raises ValueError where a full cohort could not stand f hostile clients."""
        super().validate(setup)
        f, cohort = self.most(setup.cohort), setup.cohort
        if f > self.f(cohort):
            raise ValueError(
                f"aggregator.hostile={self.hostile} is {f} of participation.per_round={cohort} clients, and "
                f"{type(self).__name__} needs {self.per_hostile}·{f} + {self.spare} to stand them: raise the one or "
                "lower the other."
            )


def by_coordinates(rule: Callable[[Tensor], Tensor], updates_nD: Tensor) -> Tensor:
    """A rule ``[n, d] → [d]`` on a million coordinates at a time, since sorting takes several times their memory."""
    return torch.cat([rule(part) for part in updates_nD.split(COLUMNS, 1)])


def median(ordered_n: Tensor) -> Tensor:
    """Of sorted values, ``[n, …]`` → ``[…]``; of an even number the mean of the middle two."""
    n = len(ordered_n)
    return (ordered_n[(n - 1) // 2] + ordered_n[n // 2]) / 2
