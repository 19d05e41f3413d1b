"""The user's own tables: one CSV file, or a folder with one file per client."""

from collections.abc import Sequence
from logging import getLogger
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from pandas import DataFrame, Series

from gcfed.data.base import FederatedDataset
from gcfed.data.dealing import held_out
from gcfed.data.sets.files import TESTS
from gcfed.data.sets.own import from_arrays, require_columns
from gcfed.utils.checked import Inside, SettingError, checked

log = getLogger(__name__)
MOST = 20  # the largest number of values of a column of text that data.categorical does not name


@checked
def csv(
    path: str | None,
    *,
    target: str | None,
    categorical: Sequence[str] = (),
    ignore: Sequence[str] = (),
    regression: bool = False,
    groups: str | None = None,
    sep: str = ",",
    decimal: Literal[".", ","] = ".",
    encoding: str = "utf-8",
    test: Inside = 0.2,
) -> FederatedDataset:
    """The rows of a table, float64 [n, d]. Columns of numbers come first. Each other column becomes
    one column of 0 and 1 for each value in the training rows. Whole numbers are text if one of them
    begins with 0, as post codes do. Columns without a name are left out, such as the row numbers in
    files that pandas wrote.

    Args:
        path: a file, or a folder with one file per client; ``test.csv`` (or ``val.csv``) in it is
            the test split.
        categorical: columns of numbers that are codes, and columns of text with more than 20
            values.
        regression: the target is a number, not a class.
        groups: the column with the client of each row, for ``partition=natural``.
        sep: separator of cells: a character, ``semicolon`` or ``tab``.
        test: share of the rows (of each class) that become the test split if there is no file for
            it.

    Raises FileNotFoundError if there is no CSV file; ValueError for a file that cannot be read, a
    missing or repeated column, empty cells, or text that is no category.
    """
    rows, is_test, files = _read(
        path, {"semicolon": ";", "tab": "\t"}.get(sep, sep), decimal, encoding
    )
    named = {"data.target": [target], "data.categorical": categorical, "data.ignore": ignore}
    require_columns(rows.columns, named | {"partition.by": [] if groups is None else [groups]})
    rows = rows.drop(columns=[name for name in ignore if name not in (target, groups)])
    if len(empty := rows.columns[rows.isna().any()]):
        cells = (
            f"has {rows[empty[0]].isna().sum()} empty cells (or NA, None, null, …) of {len(rows)}"
        )
        raise ValueError(
            f"column {empty[0]} {cells}: fill them, drop the rows, or set data.ignore=[{empty[0]}]."
        )
    inputs = rows.drop(columns=[name for name in (target, groups) if name is not None])
    if inputs.columns.empty:
        raise SettingError("ignore", f"={[*ignore]} leaves no column to learn from.")
    y = _target(rows[str(target)], regression)
    owners = files if groups is None else rows[groups].to_numpy()
    if not is_test.any():
        is_test = held_out(y[:, None] if regression else y, test, "test")
    coded = [name for name in inputs if name in categorical or inputs[name].dtype.kind not in "iuf"]
    for name in coded:
        if name not in categorical and (count := inputs[name].nunique()) > MOST:
            what = f"has {count:,} texts in {len(rows):,} rows, such as {inputs[name].iloc[0]!r}"
            remedy = f"name it in data.categorical=[{name}], or leave it out, data.ignore=[{name}]"
            raise ValueError(
                f"column {name} {what}: write numbers plainly (see data.decimal), {remedy}."
            )
    numbers = inputs.drop(columns=coded).to_numpy(np.float64)
    texts = inputs[coded].astype(str)
    one_hot = [
        texts[[name]].to_numpy() == np.sort(texts.loc[~is_test, name].unique()) for name in coded
    ]
    x = np.concatenate([numbers, *one_hot], axis=1)
    content = {"x": x[~is_test], "y": y[~is_test], "x_test": x[is_test], "y_test": y[is_test]}
    return from_arrays(
        content | ({} if owners is None else {"groups": owners[~is_test]}), str(path), test
    )


def _read(
    path: str | None, sep: str, decimal: str, encoding: str
) -> tuple[DataFrame, np.ndarray, np.ndarray | None]:
    """All rows; which of them are the test split, bool [n]; and the file of each row if each file
    is a client.
    """
    place = Path(path or "")
    files = sorted(place.glob("*.csv")) if place.is_dir() and path else [place] * place.is_file()
    tests = [
        file for name in TESTS for file in files if place.is_dir() and file.stem.lower() == name
    ]
    files = [file for file in files if file not in tests[1:]]
    if not files:
        what = (
            "is no CSV file, nor a folder with some: give yours, as in data.path=people.csv"
            " data.target=income"
        )
        raise FileNotFoundError(f"data.path={path or 'null'} {what}.")
    tables: list[DataFrame] = []
    for file in files:
        try:
            tables.append(_texts(file, sep, encoding))
            if not len(tables[-1]) or {*tables[-1]} != {*tables[0]}:
                raise ValueError(
                    f"it has no row, or other columns than {files[0]}: {', '.join(tables[-1])}"
                )
        except (
            ValueError,
            LookupError,
            OSError,
        ) as error:  # pandas' errors of parsing and decoding are ValueErrors
            remedy = (
                "see data.sep=semicolon (or tab), data.encoding=latin-1 (or utf-16), and the first"
                " line"
            )
            raise ValueError(f"{file} cannot be read as a CSV file: {error}: {remedy}.") from error
    rows = pd.concat(tables, ignore_index=True)
    names = np.repeat([file.stem for file in files], [len(table) for table in tables])
    is_test = np.isin(names, [file.stem for file in tests[:1]])
    several = len(files) - len(tests[:1]) > 1
    return rows.apply(lambda column: _typed(column, decimal)), is_test, names if several else None


def _texts(file: Path, sep: str, encoding: str) -> DataFrame:
    """The cells of the columns with a name as text, without spaces around them; NaN for empty
    cells.

    The header is read as a row. Otherwise pandas would rename repeated columns.
    """
    form: Any = {
        "sep": sep,
        "encoding": encoding,
        "header": None,
        "dtype": str,
        "skipinitialspace": True,
    }
    # a column may be called NA
    header = pd.read_csv(file, **form, nrows=1, keep_default_na=False).iloc[0].str.strip()
    named = header[header != ""]
    if len(header) == 1 or named.duplicated().any():
        raise ValueError(f"it has one column, or two of one name: {', '.join(named)}")
    if len(named) < len(header):
        log.warning("%s: columns without a name are left out", file)
    cells = pd.read_csv(file, **form).iloc[1:].apply(lambda column: column.str.strip())
    return cells.set_axis(header, axis=1).loc[:, (header != "").to_numpy()]


def _typed(column: Series, decimal: str) -> Series:
    """A column of text as numbers, if all cells are numbers and none is a code such as 01234."""
    plain = column.str.translate(str.maketrans(",.", ".,")) if decimal == "," else column
    numbers = pd.to_numeric(plain, errors="coerce")
    has_codes = bool((numbers.dropna() % 1 == 0).all() and column.str.match(r"[+-]?0\d").any())
    return column if has_codes or (numbers.isna() & column.notna()).any() else numbers


def _target(column: Series, regression: bool) -> np.ndarray:
    """The classes, integers or text [n], or the numbers to regress on, float64 [n]."""
    name, is_number = column.name, column.dtype.kind in "iuf"
    if regression and not is_number:
        what = (
            f"holds {column.iloc[0]!r}, and data.regression=true needs plain numbers; see"
            " data.decimal"
        )
        raise ValueError(f"data.target={name} {what}.")
    if not regression and is_number and (column % 1).any():
        raise ValueError(
            f"data.target={name} holds numbers with fractions: data.regression=true regresses on"
            " them."
        )
    if is_number and not regression and (count := column.nunique()) > MOST:
        log.warning(
            "%s: %d values are read as classes; data.regression=true predicts a number", name, count
        )
    # 0.0 and 1.0 are classes
    return column.to_numpy(np.float64 if regression else np.int64 if is_number else np.str_)
