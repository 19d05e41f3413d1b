"""Base classes of the rules that need all updates of a cohort at once."""

from collections.abc import Callable, Iterable, Set
from math import ceil, inf
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gcfed.federated.parts import Accumulator, Aggregator, Params, Round, Setup, Upload
from gcfed.utils.checked import checked
from gcfed.utils.device import on_device
from gcfed.utils.refusal import Refusal

COLUMNS = 1 << 20  # coordinates that a rule sorts at a time


class CohortRule(Aggregator):
    """Reduces the finite updates of a cohort by a rule; each client is one row.

    The same rule reduces entries that are no optimizer steps (``Setup.no_steps``) separately: the
    large running statistics of batch norms would dominate distances and norms.

    Memory: each process holds the updates of the whole cohort, and twice as much while it gathers
        them.
    """

    limit = inf
    no_steps: Set[str] = frozenset()

    def rule(self, updates_nD: Tensor) -> Tensor:
        """Finite updates in the order of the cohort, ``[n, D]`` with n ≥ 1 → the aggregate,
        ``[D]``.
        """
        raise NotImplementedError

    def bind(self, setup: Setup) -> None:
        self.no_steps = setup.no_steps

    def new_sum(self, round: Round) -> "CohortTable":
        return CohortTable(self.rule, self.no_steps, round)


class CohortTable(Accumulator):
    """The updates of a round's cohort, a row for each client.

    Args:
        rule: as :meth:`CohortRule.rule`.
        no_steps: names of the entries that the rule reduces separately.
    """

    def __init__(self, rule: Callable[[Tensor], Tensor], no_steps: Set[str], round: Round) -> None:
        self.rule = rule
        self.no_steps = no_steps
        self.round = round
        # [|S|, D + 1]; the last column is 1 for finite clients
        self._table: Tensor | None = None  # made with the first upload, because it takes memory

    def add(self, upload: Upload) -> None:
        """Keeps the updates of K clients, in the rows of their positions in the cohort."""
        columns = []
        for name in self._ordered(upload.delta):
            columns.append(upload.delta[name].reshape(len(upload.clients), -1))
        updates = torch.cat([*columns, upload.finite.unsqueeze(1).to(columns[0].dtype)], 1)
        if self._table is None:
            self._table = updates.new_zeros(len(self.round.cohort), updates.shape[1])
        rows_K = self.round.rows(upload.clients)
        self._table[on_device(rows_K, updates.device)] = updates

    def reduce(self, like: Params) -> Params:
        sizes = {name: like[name].numel() for name in self._ordered(like)}
        updates_nD = self._finite_updates(like, sum(sizes.values()))
        separate = sum(size for name, size in sizes.items() if name in self.no_steps)
        aggregates = []
        for block in updates_nD.split([updates_nD.shape[1] - separate, separate], 1):
            if block.shape[1]:
                aggregates.append(self._reduce_block(block))
        update = torch.cat(aggregates)
        parts = dict(zip(sizes, update.split(list(sizes.values())), strict=True))
        return {
            name: torch.empty_like(t).copy_(parts[name].view(t.shape)) for name, t in like.items()
        }

    def _finite_updates(self, like: Params, size: int) -> Tensor:
        """The finite updates of all processes, ``[n, D]`` with D = ``size``."""
        table = self._table
        self._table = None
        if table is None:  # this process trained no client of the cohort
            table = next(iter(like.values())).new_zeros(len(self.round.cohort), size + 1)
        (table,) = self.round.reduce([table])  # each row is zero on all processes except one
        return table[table[:, -1] > 0, :-1]

    def _reduce_block(self, block_nD: Tensor) -> Tensor:
        """The aggregate of some columns, ``[D]``; zeros without a finite client."""
        if not len(block_nD):
            return block_nD.new_zeros(block_nD.shape[1])
        return self.rule(block_nD)

    def _ordered(self, names: Iterable[str]) -> list[str]:
        """In the order of the columns: entries that are no steps come last."""
        return sorted(names, key=lambda name: (name in self.no_steps, name))


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
