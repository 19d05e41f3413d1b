"""Base classes of the rules that need all updates of a cohort at once."""

import copy
from collections.abc import Callable, Iterable, Set
from math import ceil, inf
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gcfed.federated.parts import Params, Round, Setup, Upload
from gcfed.utils.checked import checked
from gcfed.utils.device import on_device
from gcfed.utils.refusal import Refusal

COLUMNS = 1 << 20  # coordinates that a rule sorts at a time


class CohortRule:
    """Reduces the finite updates of a cohort by a rule; each client is one row.

    The same rule reduces entries that are no optimizer steps (``Setup.no_steps``) separately: the
    large running statistics of batch norms would dominate distances and norms.

    Memory: each process holds the updates of the whole cohort, and twice as much while it gathers
        them.
    """

    _table: Tensor | None = None  # [|S|, D + 1]; the last column is 1 for finite clients
    _no_steps: Set[str] = frozenset()
    limit = inf

    def rule(self, updates_nD: Tensor) -> Tensor:
        """Finite updates in the order of the cohort, ``[n, D]`` with n ≥ 1 → the aggregate,
        ``[D]``.
        """
        raise NotImplementedError

    def validate(self, setup: Setup) -> None:
        self._no_steps = setup.no_steps

    def for_extra(self) -> "CohortRule":
        return copy.deepcopy(self)

    def add(self, upload: Upload, round: Round) -> None:
        """Keeps the updates of K clients, in the rows of their positions in the cohort."""
        columns = []
        for name in self._ordered(upload.delta):
            columns.append(upload.delta[name].reshape(len(upload.clients), -1))
        updates = torch.cat([*columns, upload.finite.unsqueeze(1).to(columns[0].dtype)], 1)
        if self._table is None:
            self._table = updates.new_zeros(len(round.cohort), updates.shape[1])
        self._table[on_device(round.rows(upload.clients), updates.device)] = updates

    def reduce(self, round: Round, like: Params) -> Params:
        """The aggregate, name → ``[*shape]`` of ``like``; zeros without a finite client."""
        sizes = {name: like[name].numel() for name in self._ordered(like)}
        table = self._table
        self._table = None
        if table is None:  # this process trained no client of the cohort
            table = next(iter(like.values())).new_zeros(len(round.cohort), sum(sizes.values()) + 1)
        (table,) = round.reduce([table])  # each row is zero on all processes except one
        table = table[table[:, -1] > 0, :-1]
        separate = sum(size for name, size in sizes.items() if name in self._no_steps)
        updates = []
        for block in table.split([table.shape[1] - separate, separate], 1):
            if not block.shape[1]:
                continue
            updates.append(self.rule(block) if len(table) else block.new_zeros(block.shape[1]))
        update = torch.cat(updates)
        parts = dict(zip(sizes, update.split(list(sizes.values())), strict=True))
        return {
            name: torch.empty_like(t).copy_(parts[name].view(t.shape)) for name, t in like.items()
        }

    def _ordered(self, names: Iterable[str]) -> list[str]:
        """In the order of the columns: entries that are no steps come last."""
        return sorted(names, key=lambda name: (name in self._no_steps, name))


@checked
class BoundedRule(CohortRule):
    """A rule that tolerates a known number f of hostile clients.

    Args:
        hostile: share of a cohort that may be hostile. f is this share of a round's finite clients,
            rounded up, but at most the number that so many clients can tolerate.
    """

    # the rule needs a cohort of per_hostile · f + spare clients
    per_hostile = 2
    spare = 1

    def __init__(self, hostile: Annotated[float, Field(ge=0, lt=0.5)] = 0.2) -> None:
        self.hostile = hostile

    def wanted(self, n: int) -> int:
        """The configured share of n clients."""
        return ceil(self.hostile * n - 1e-9)

    def f(self, n: int) -> int:
        """f for n finite clients."""
        return max(0, min(self.wanted(n), (n - self.spare) // self.per_hostile))

    def validate(self, setup: Setup) -> None:
        """Raises Refusal if a full cohort could not tolerate f hostile clients."""
        super().validate(setup)
        f = self.wanted(setup.cohort_size)
        cohort = setup.cohort_size
        name = type(self).__name__
        if f > self.f(cohort):
            raise Refusal(
                f"aggregator.hostile={self.hostile} is {f} of participation.per_round={cohort}"
                f" clients, and {name} needs {self.per_hostile}·{f} + {self.spare} to tolerate"
                " them: raise per_round or lower hostile."
            )


def by_coordinates(rule: Callable[[Tensor], Tensor], updates_nD: Tensor) -> Tensor:
    """Applies a rule ``[n, d] → [d]`` to a million coordinates at a time: sorting takes several
    times their memory.
    """
    return torch.cat([rule(part) for part in updates_nD.split(COLUMNS, 1)])


def median(ordered_n: Tensor) -> Tensor:
    """The median of sorted values, ``[n, …]`` → ``[…]``; for even n, the mean of the middle two."""
    n = len(ordered_n)
    return (ordered_n[(n - 1) // 2] + ordered_n[n // 2]) / 2
