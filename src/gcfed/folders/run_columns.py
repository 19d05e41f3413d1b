"""What a configured run writes. A measure that no run writes is refused before the first round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from gcfed.folders.columns import column_of, matches, numbers_of
from gcfed.folders.measures import parse
from gcfed.utils.near import near
from gcfed.utils.refusal import Refusal
from gcfed.utils.resolvers import CONFIGS

if TYPE_CHECKING:
    from gcfed.folders.folder import Run


@dataclass(frozen=True)
class RunColumns:
    """What a run writes."""

    columns: Sequence[str]
    """The columns of its rows; a pattern such as ``gc/rho/*`` stands for one per tensor."""

    is_open: bool = False
    """Whether a part of the run may write further columns, because its class does not declare
    them in ``writes``."""

    def has(self, column: str) -> bool:
        return self.is_open or matches(column, self.columns)

    def require(self, column: str, key: str) -> None:
        """Raises Refusal, with near names or what to set, for a column that the run never writes.

        Args:
            key: the setting that names it, such as ``search.metric=last:test/ac``.
        """
        if not self.has(column):
            self._refuse(column, key, self.columns)

    def require_measure(self, measure: str, key: str) -> None:
        """The same for a measure of :mod:`gcfed.folders.measures`."""
        asked = parse(measure, key)
        numbers = numbers_of(self.columns)
        has = self.has(asked.column) if asked.statistic else matches(asked.column, numbers)
        if not has:
            self._refuse(asked.column, key, [*self.columns, *numbers])

    def _refuse(self, name: str, key: str, known: Iterable[str]) -> NoReturn:
        remedy = self._remedy_of(name)
        hint = f": {remedy}." if remedy else near(name, known)
        raise Refusal(f"{key}: a run with these settings never writes {name}{hint}")

    def _remedy_of(self, column: str) -> str:
        """What to set, so that a run writes this column; "" if that is not known or already set."""
        if column.startswith("test/acc_") and "test/acc" not in self.columns:
            return ""
        remedy = _what_writes(column)
        is_set = any(_what_writes(written) == remedy for written in self.columns)
        return "" if is_set else remedy


def _what_writes(column: str) -> str:
    """What to set, so that a run writes this column; "" if that is not known."""
    known = column_of(column)
    if known is None:
        return ""
    if known.remedy:
        return known.remedy
    metric = column.partition("/")[0]
    is_metric = (CONFIGS / "metrics" / f"{metric}.yaml").is_file()
    return f"set metrics={metric}" if is_metric else ""


def require_measured(measures: Iterable[str], runs: Iterable[Run], key: str) -> None:
    """Raises Refusal, with near names, for a measure of :mod:`gcfed.folders.measures` whose column
    none of these runs has. Runs without rows have none to compare with.
    """
    columns = list(dict.fromkeys(column for run in runs for column in run.metrics))
    for measure in measures:
        asked = parse(measure, key)
        if asked.statistic and columns and asked.column not in columns:
            hint = near(asked.column, columns)
            raise Refusal(f"{key}={measure}: no run here has {asked.column}{hint}")
