"""A user's own tables: one CSV file, or a folder with one for each client."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from gcfed.data.base import FederatedDataset
from gcfed.data.dealing import held_out, tell_absent
from gcfed.data.sets.files import TESTS
from gcfed.data.sets.own import from_arrays, require_columns
from gcfed.utils.checked import Inside, SettingError, checked
from gcfed.utils.rng import generator

if TYPE_CHECKING:
    from pandas import DataFrame, Series

log = logging.getLogger(__name__)
MOST = 1000
"""Categories of a column; what has more is a name, a number of a record or a free text."""
INDEX = "Unnamed: 0"
"""What pandas calls the column of row numbers that its own ``to_csv`` writes."""
FEW = 20
"""Classes that are numbers; what has more may be meant to be regressed on."""


@checked
def csv(
    path: str | None, *, target: str | None, categorical: Sequence[str] = (), ignore: Sequence[str] = (),
    missing: Literal["refuse", "mean"] = "refuse", regression: bool = False, groups: str | None = None,
    test: Inside = 0.2,
) -> FederatedDataset:  # fmt: skip
    """The rows of a table, float64 [n, d]: numbers as they are, then, for each other column, one of 0 and 1 for each of
    the values that the training rows have, in their order.

    Args:
        path: a file, or a folder: each file in it is a client, by its name, but for ``test.csv`` (or ``val.csv``), the
            test split, and a ``train.csv`` beside it.
        categorical: columns of numbers that are codes; those of text and of true and false always are.
        missing: what becomes of empty cells. ``mean``: a number is the mean of the training rows, and of a category
            all columns are 0.
        regression: the target is a number, and no class.
        groups: the column that says whose row it is, for ``partition=natural``.
        test: the share of the rows, of each class, to test on where there is no file for it; drawn once and for all.

    Raises FileNotFoundError for no CSV file; ValueError for one that cannot be read, a column that is not there, empty
    cells, or too many categories.
    """
    rows, is_test, owners = _read(path)
    named = {"data.target": [target], "data.categorical": categorical, "data.ignore": ignore}
    require_columns(rows.columns, named | {"partition.by": [] if groups is None else [groups]})
    y = _target(rows, str(target), regression)
    whose = owners if groups is None else _full(rows[groups]).to_numpy()
    if not is_test.any():
        is_test = held_out(y[:, None] if regression else y, test, generator(0, "test"))
        tell_absent(whose, is_test, str(path), "test")
    if INDEX in rows and INDEX not in {target, groups, *ignore, *categorical} and rows[INDEX].dtype.kind == "i":
        log.warning("%s: the first column has no name, so it is taken for the rows' numbers, and left out", path)
        ignore = [*ignore, INDEX]
    taken = rows[[name for name in rows if name not in {target, groups, *ignore}]]
    if taken.columns.empty:
        raise SettingError("ignore", f"={[*ignore]} leaves no column to learn from.")
    for name in taken if missing == "refuse" else ():
        _full(rows[name], f"leave it out, data.ignore=[{name}], or take the training rows' mean, data.missing=mean")
    coded = [name for name in taken if name in categorical or taken[name].dtype.kind not in "iuf"]
    for name in coded:
        if name not in categorical and taken[name].dtype.kind != "b":
            _text(taken[name])
    numbers = taken.drop(columns=coded).apply(lambda column: column.fillna(column[~is_test].mean()))
    if odd := [name for name in numbers if not np.isfinite(numbers[name]).all()]:
        what = "has no number in the training rows, or an infinite one"
        raise ValueError(f"column {odd[0]} {what}: leave it out, data.ignore=[{odd[0]}].")
    switches = [_one_hot(taken[name], is_test) for name in coded]
    x = np.concatenate([numbers.to_numpy(np.float64), *switches], axis=1)
    log.info("%s: %d columns make %d numbers of a row; categories: %s", path, taken.shape[1], x.shape[1], coded)
    content = {"x": x[~is_test], "y": y[~is_test], "x_test": x[is_test], "y_test": y[is_test]}
    if whose is not None:
        content["groups"] = whose[~is_test]
    return from_arrays(content, str(path), test)


def _text(column: Series) -> None:
    """Refuses numbers among which something else, such as the ? of an unknown one, made a text of each."""
    import pandas as pd

    odd = column[pd.to_numeric(column, errors="coerce").isna() & column.notna()]
    if 0 < len(odd) < column.notna().sum() / 2:
        raise ValueError(
            f"column {column.name} holds numbers and {odd.iloc[0]!r}: empty such cells (data.missing=mean then fills "
            f"them), leave it out, data.ignore=[{column.name}], or say that all are codes, "
            f"data.categorical=[{column.name}]."
        )


def _read(path: str | None) -> tuple[DataFrame, np.ndarray, np.ndarray | None]:
    """All rows, which of them are to test on, bool [n], and the file of each, where each is a client."""
    import pandas as pd  # not needed for other data

    place = Path(path or "")
    files = sorted(place.glob("*.csv")) if place.is_dir() and path else [place] * place.is_file()
    tests = [place / f"{name}.csv" for name in TESTS if place / f"{name}.csv" in files]
    files = [file for file in files if file not in tests[1:]]
    if not files:
        example = "give yours, as in data.path=people.csv data.target=income"
        raise FileNotFoundError(f"data.path={path or 'null'} is no CSV file, nor a folder with some: {example}.")
    tables: list[DataFrame] = []
    read = partial(pd.read_csv, skipinitialspace=True, low_memory=False)  # else a column may change its kind on the way
    for file in files:
        try:
            tables.append(read(file))
        except (ValueError, OSError) as error:  # ParserError, EmptyDataError, UnicodeDecodeError are the first
            raise ValueError(f"{file} cannot be read as a CSV file ({' '.join(str(error).split())}).") from error
        if tables[-1].shape[1] == 1:
            raise ValueError(f"{file} has one column, {tables[-1].columns[0]!r}: a comma must part its cells.")
        if not len(tables[-1]) or {*tables[-1]} != {*tables[0]}:
            raise ValueError(f"{file} has no row, or other columns than {files[0]}: {', '.join(map(str, tables[-1]))}.")
    kinds = {name: {table[name].dtype.kind for table in tables} for name in tables[0]}
    if mixed := {name: str for name, kind in kinds.items() if len(kind) > 1 and not kind <= set("iuf")}:
        tables = [read(file, dtype=mixed) for file in files]
    names = np.repeat([file.stem for file in files], [len(table) for table in tables])
    is_test = np.isin(names, [file.stem for file in tests[:1]])
    several = len(files) - len(tests[:1]) > 1
    return pd.concat(tables, ignore_index=True), is_test, names if several else None


def _target(rows: DataFrame, name: str, regression: bool) -> np.ndarray:
    column = _full(rows[name])
    kind = column.dtype.kind
    if not regression and kind == "f" and not (column % 1).any():  # 0.0 and 1.0, as pandas and R write them
        column, kind = column.astype(np.int64), "i"
    if regression and kind not in "iuf":
        raise ValueError(f"data.target={name} holds no numbers, which data.regression=true needs.")
    if not regression and kind == "f":
        raise ValueError(f"data.target={name} holds numbers with fractions: data.regression=true regresses on them.")
    if not regression and kind in "iu" and (n := column.nunique()) > FEW:
        words = "%s: %d different numbers are taken for %d classes; data.regression=true predicts the number"
        log.warning(words, name, n, n)
    return column.to_numpy(np.float64 if regression else np.int64 if kind in "iu" else np.str_)


def _full(column: Series, advice: str = "or drop the rows") -> Series:
    if empty := int(column.isna().sum()):
        cells = f"{empty} empty cells (or NA, None, null, …) of {len(column)}"
        raise ValueError(f"column {column.name} has {cells}: fill them, {advice}.")
    return column


def _one_hot(column: Series, is_test: np.ndarray) -> np.ndarray:
    kinds = np.sort(column[~is_test].dropna().astype(str).unique())
    if len(kinds) > MOST:
        raise ValueError(f"column {column.name} has {len(kinds):,} values: leave it out, data.ignore=[{column.name}].")
    return column.astype(str).to_numpy()[:, None] == kinds
