"""Which entries of an operation's result depend on which entries of an input.

The operation runs once more with NaN in some entries. All results that depend on these entries are
NaN, whatever the other values are. This takes one or two more operations of the kind, and memory
for a copy of the input and of the results. So it serves operations on parameters alone, which
networks without parametrizations hardly have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@dataclass
class Change:
    """What an operation does to one of its inputs.

    Attributes:
        func: the operation, such as ``aten.mul.Tensor``.
        t: the input.
        results: what the operation returned.
    """

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    t: Tensor
    results: Sequence[Tensor]

    def repeats(self) -> bool:
        """Whether it repeats the entries of the input, as it repeats ``[1, in]`` for each row of a
        weight ``[out, in]``. An operation that only adds a border does not.
        """
        entries = 1
        for size, stride in zip(self.t.shape, self.t.stride(), strict=True):
            if stride:  # not expanded
                entries *= int(size)
        if not self._is_new() or self.results[0].numel() <= entries:
            return False
        if not self._can_run_again():
            return True
        first_entry = (0,) * self.t.dim()
        num_dependent = int(self._dependent(first_entry, 0).sum())
        return num_dependent * self.t.numel() >= self.results[0].numel()

    def mixes(self) -> bool:
        """Whether it mixes the rows and the columns of a matrix ``[n, m, …]``, as the exponential
        of a matrix does. Then no row of the result belongs to a row of the input.
        """
        if not self._is_new() or not self._can_run_again():
            return False
        if self.t.dim() < 2:
            return False
        matrices = [i for i, t in enumerate(self.results) if t.shape == self.t.shape]
        return any(self._mixes_in(place) for place in matrices)

    def _mixes_in(self, place: int) -> bool:
        """Whether the result at this place mixes the rows and the columns of the input."""
        of_last_row = self._dependent((-1,), place).flatten(1)
        if of_last_row.any(1).sum() < 2:
            return False
        of_first_column = self._dependent((slice(None), 0), place).transpose(0, 1).flatten(1)
        return bool(of_first_column.any(1).sum() > 1)

    def _is_new(self) -> bool:
        """Whether there is a result that is no view of the input."""
        if not self.results:
            return False
        return self.results[0].untyped_storage()._cdata != self.t.untyped_storage()._cdata

    def _can_run_again(self) -> bool:
        if self.func._schema.is_mutable or torch.Tag.nondeterministic_seeded in self.func.tags:
            return False
        return not self.t.is_meta and (self.t.is_floating_point() or self.t.is_complex())

    def _dependent(self, entries: Any, place: int) -> Tensor:
        """Which entries of the result at this place depend on these entries of the input, as a
        mask.
        """
        changed = self.t.clone(memory_format=torch.contiguous_format)
        changed[entries] = torch.nan

        def replaced(leaf: Any) -> Any:
            return changed if leaf is self.t else leaf

        args, kwargs = tree_map(replaced, (tuple(self.args), dict(self.kwargs)))
        try:
            return tensors_in(self.func(*args, **kwargs))[place].isnan()
        except RuntimeError:  # some decompositions refuse NaN
            return torch.ones_like(self.results[place], dtype=torch.bool)
