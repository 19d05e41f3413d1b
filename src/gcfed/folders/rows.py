"""A CSV file with rows for each round, which a resumed run continues."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gcfed.utils.files import replacing, whole_lines


class RoundRows:
    """A CSV file with a column ``round``. Rows may bring new columns.

    Args:
        path: the file. If it exists, it keeps its rows up to a round.
        last: that round.
        columns: further columns of all rows.
    """

    def __init__(self, path: Path, last: int, columns: Iterable[str] = ()) -> None:
        self.path = path
        self.columns: list[str] = []
        kept = [row for row in self._read() if int(row["round"]) <= last]
        self._write(kept, ["round", *columns])

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        new = dict.fromkeys(name for row in rows for name in row)
        if not new.keys() <= {*self.columns}:
            self._write(self._read(), new)
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writerows(rows)

    def _read(self) -> list[dict[str, str]]:
        return list(csv.DictReader(whole_lines(self.path)))

    def _write(self, rows: Sequence[Mapping[str, str]], new: Iterable[str]) -> None:
        before = rows[0] if rows else ()
        self.columns = list(dict.fromkeys([*before, *self.columns, *new]))
        with replacing(self.path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
