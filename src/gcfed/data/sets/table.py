"""The user's own tables: one CSV file, or a folder with one for each client."""

from collections.abc import Sequence
from logging import getLogger
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from pandas import DataFrame, Series

from gcfed.data.base import FederatedDataset
from gcfed.data.dealing import held_out
from gcfed.data.sets.files import TESTS
from gcfed.data.sets.own import from_arrays, require_columns
from gcfed.utils.checked import Inside, SettingError, checked

log = getLogger(__name__)
MANY = 100
"""Values of a column of text that data.categorical does not name. With more, a mistake is likely."""
FEW = 20
"""The same of a text that has fewer than four rows for each value, and of a target that is a number."""
ROW_NUMBERS = "Unnamed: 0"
"""The name given to a first column without one: pandas writes the row numbers there."""
SEPARATORS = {"semicolon": ";", "tab": "\t"}


@checked
def csv(
    path: str | None, *, target: str | None, categorical: Sequence[str] = (), ignore: Sequence[str] = (),
    missing: Literal["refuse", "mean"] = "refuse", regression: bool = False, groups: str | None = None,
    sep: str = ",", decimal: Literal[".", ","] = ".", encoding: str = "utf-8", test: Inside = 0.2,
) -> FederatedDataset:  # fmt: skip
    """The rows of a table, float64 [n, d]: first the columns of numbers, then, for each other column, one column of 0
    and 1 for each value that the training rows have. Whole numbers are text if one of them begins with 0.

    Args:
        path: a file, or a folder in which each file is a client. ``test.csv`` (or ``val.csv``) there is the test split.
        categorical: columns of numbers that are codes, and columns of text with many values. Other text always is.
        missing: what becomes of empty cells. ``mean``: a number is the mean of the training rows; the columns of a
            category are all 0.
        regression: the target is a number, not a class.
        groups: the column that says whose row it is, for ``partition=natural``.
        sep, decimal, encoding: how the files are written; ``sep`` is a character, ``semicolon`` or ``tab``.
        test: the share of the rows, of each class, to test on where no file has them; the same in every run.

    Raises FileNotFoundError for no CSV file; ValueError for one that cannot be read, a missing or repeated column,
    empty cells, or text that is no category.
    """
    rows, is_test, owners = _read(path, SEPARATORS.get(sep, sep), decimal, encoding)
    named = {"data.target": [target], "data.categorical": categorical, "data.ignore": ignore}
    require_columns(rows.columns, named | {"partition.by": [] if groups is None else [groups]})
    y = _target(rows[str(target)], regression, str(target) in categorical)
    whose = owners if groups is None else _full(rows[groups]).to_numpy()
    if not is_test.any():
        is_test = held_out(y[:, None] if regression else y, test, "test", whose, str(path))
    left_out = {target, groups, *ignore}
    if ROW_NUMBERS in rows and ROW_NUMBERS not in {*left_out, *categorical} and rows[ROW_NUMBERS].dtype.kind == "i":
        log.warning("%s: the first column has no name, so it is taken for the rows' numbers, and left out", path)
        left_out.add(ROW_NUMBERS)
    taken = rows[[name for name in rows if name not in left_out]]
    if taken.columns.empty:
        raise SettingError("ignore", f"={[*ignore]} leaves no column to learn from.")
    coded = [name for name in taken if name in categorical or taken[name].dtype.kind not in "iuf"]
    for name in taken:
        leave = f"leave it out, data.ignore=[{name}], or"
        if missing == "refuse":
            _full(taken[name], f"{leave} take the training rows' mean, data.missing=mean")
        if name in coded and name not in categorical:
            _refuse_texts(taken[name], MANY, f"{leave} name it in data.categorical=[{name}] if all are codes")
    numbers = taken.drop(columns=coded).apply(lambda column: column.fillna(column[~is_test].mean()))
    switches = [_one_hot(taken[name], is_test) for name in coded]
    x = np.concatenate([numbers.to_numpy(np.float64), *switches], axis=1)
    content = {"x": x[~is_test], "y": y[~is_test], "x_test": x[is_test], "y_test": y[is_test]}
    return from_arrays(content | ({} if whose is None else {"groups": whose[~is_test]}), str(path), test)


def _read(path: str | None, sep: str, decimal: str, encoding: str) -> tuple[DataFrame, np.ndarray, np.ndarray | None]:
    """All rows; which of them are to test on, bool [n]; and the file of each where each file is a client."""
    place = Path(path or "")
    files = sorted(place.glob("*.csv")) if place.is_dir() and path else [place] * place.is_file()
    tests = [place / f"{name}.csv" for name in TESTS if place / f"{name}.csv" in files]
    files = [file for file in files if file not in tests[1:]]
    if not files:
        example = "give yours, as in data.path=people.csv data.target=income"
        raise FileNotFoundError(f"data.path={path or 'null'} is no CSV file, nor a folder with some: {example}.")
    tables: list[DataFrame] = []
    for file in files:
        try:
            tables.append(_texts(file, sep, encoding))
            if not len(tables[-1]) or {*tables[-1]} != {*tables[0]}:
                raise ValueError(f"it has no row, or other columns than {files[0]}: {', '.join(tables[-1])}")
        except (ValueError, LookupError, OSError) as error:  # pandas' errors of parsing and decoding are ValueErrors
            remedy = "see data.sep=semicolon (or tab), data.encoding=latin-1 (or utf-16), and the first line"
            raise ValueError(
                f"{file} cannot be read as a CSV file: {' '.join(str(error).split())}: {remedy}."
            ) from error
    rows = pd.concat(tables, ignore_index=True)
    rows = rows.drop(columns=[name for name in rows if name.startswith("Unnamed: ") and rows[name].isna().all()])
    names = np.repeat([file.stem for file in files], [len(table) for table in tables])
    is_test = np.isin(names, [file.stem for file in tests[:1]])
    several = len(files) - len(tests[:1]) > 1
    return rows.apply(lambda column: _typed(column, decimal)), is_test, names if several else None


def _texts(file: Path, sep: str, encoding: str) -> DataFrame:
    """The cells of a CSV file as text, without space around them; NaN for empty ones.

    The header is read as a row of its own: pandas would rename repeated columns, and take a first column without a name
    for an index.
    """
    form = {"sep": sep, "encoding": encoding, "header": None, "dtype": str, "skipinitialspace": True}
    header = pd.read_csv(file, **form, nrows=1, keep_default_na=False).iloc[0].str.strip()
    if len(header) == 1 or header[header != ""].duplicated().any():
        raise ValueError(f"it has one column, or two of one name: {', '.join(header)}")
    names = [name or f"Unnamed: {i}" for i, name in enumerate(header)]
    return pd.read_csv(file, **form).iloc[1:].set_axis(names, axis=1).apply(lambda column: column.str.strip())


def _typed(column: Series, decimal: str) -> Series:
    """A column of text as numbers, if all cells are numbers and none is a code, such as 01234."""
    plain = column.str.translate(str.maketrans(",.", ".,")) if decimal == "," else column
    numbers = pd.to_numeric(plain, errors="coerce")
    is_whole = bool((numbers.dropna() % 1 == 0).all())
    has_codes = is_whole and bool(column.str.match(r"[+-]?0\d").any())
    return column if has_codes or (numbers.isna() & column.notna()).any() else numbers


def _refuse_texts(column: Series, most: int, advice: str) -> None:
    """Refuses text that is no category: numbers with other cells among them, such as "?" for unknown; too many values,
    as dates, names and numbers in another notation have.
    """
    known = column.dropna()
    kinds, odd = known.unique(), known[pd.to_numeric(known, errors="coerce").isna()]
    if 0 < len(odd) < len(known) / 2:
        cells = "empty such cells (data.missing=mean then fills them)"
        raise ValueError(f"column {column.name} holds numbers and {odd.iloc[0]!r}: {cells}, {advice}.")
    if len(kinds) > most or (len(kinds) > FEW and 4 * len(kinds) > len(known)):
        what = f"{len(kinds):,} texts in {len(known):,} rows, as {kinds[0]!r}"
        raise ValueError(f"column {column.name} has {what}: write numbers plainly (see data.decimal), {advice}.")


def _target(column: Series, regression: bool, is_categorical: bool) -> np.ndarray:
    name, kind = column.name, _full(column).dtype.kind
    if regression:
        if kind not in "iuf":
            what = f"holds {column.iloc[0]!r}, and data.regression=true needs plain numbers; see data.decimal"
            raise ValueError(f"data.target={name} {what}.")
        return column.to_numpy(np.float64)
    if kind not in "iuf":
        if not is_categorical:
            _refuse_texts(column, len(column), f"name it in data.categorical=[{name}] if all are classes")
        return column.to_numpy(np.str_)
    if (column % 1).any():
        raise ValueError(f"data.target={name} holds numbers with fractions: data.regression=true regresses on them.")
    if (n := column.nunique()) > FEW:
        words = "%s: %d different numbers are taken for %d classes; data.regression=true predicts the number"
        log.warning(words, name, n, n)
    return column.to_numpy(np.int64)  # 0.0 and 1.0 are classes, as pandas and R write them


def _full(column: Series, advice: str = "or drop the rows") -> Series:
    if empty := int(column.isna().sum()):
        cells = f"{empty} empty cells (or NA, None, null, …) of {len(column)}"
        raise ValueError(f"column {column.name} has {cells}: fill them, {advice}.")
    return column


def _one_hot(column: Series, is_test: np.ndarray) -> np.ndarray:
    kinds = np.sort(column[~is_test].dropna().astype(str).unique())
    return column.astype(str).to_numpy()[:, None] == kinds
