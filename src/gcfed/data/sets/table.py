"""The user's own tables: one CSV file, or a folder with one file per client."""

import re
from collections.abc import Iterable, Sequence
from logging import getLogger
from typing import Literal

import numpy as np
import pandas as pd
from numpy import ndarray
from pandas import DataFrame, Series

from gcfed.data.base import FederatedDataset
from gcfed.data.dealing import held_out
from gcfed.data.sets.csv_files import Form, read_cells
from gcfed.data.sets.files import listing
from gcfed.data.sets.names import clean, number_names
from gcfed.data.sets.own import from_arrays, require_columns
from gcfed.utils.checked import Inside, SettingError, checked
from gcfed.utils.refusal import Refusal

log = getLogger(__name__)
MOST = 20  # the largest number of values of a column of text that data.categorical does not name
# numbers that pandas takes for text, as 1,000 or 45% or $5
OTHER_NOTATION = re.compile(r"[^\w\s]?\s*\d[\d.,'\s]*\s*[^\w\s]?")
WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")  # an int64 has one such text


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

    Classes, clients and categories are texts: two texts that differ are never merged. The log says
    which columns become several, and counts the entries of a folder that are not read.

    Args:
        path: a file, perhaps compressed (``.csv.gz``), or a folder with one file per client;
            ``test.csv`` (or ``val.csv``) in it is the test split.
        categorical: columns of numbers that are codes, and columns of text with more than 20
            values.
        regression: the target is a number, not a class.
        groups: the column with the client of each row, for ``partition=natural``.
        sep: separator of cells: a character, ``semicolon`` or ``tab``.
        test: share of the rows (of each class) that become the test split if there is no file for
            it.

    Raises FileNotFoundError if there is no CSV file; Refusal for a file that cannot be read, a
    missing or repeated column, empty cells, infinite numbers, or text that is no category.
    """
    form = Form({"semicolon": ";", "tab": "\t"}.get(sep, sep), decimal, encoding)
    if len(form.sep) != 1:
        raise SettingError("sep", f"={sep} must be one character, semicolon or tab.")
    table = read_cells(path, form)
    target = target and clean(target)
    groups = groups and clean(groups)
    categorical = [clean(name) for name in categorical]
    ignore = [clean(name) for name in ignore]
    cells, inputs = _chosen(table.rows, target, groups, categorical, ignore)
    is_test = table.is_test
    read = _targets if regression else _classes
    y = read(cells[target], form)
    if not is_test.any():
        is_test = held_out(y, test, "test", by_class=not regression)
    x = _inputs(inputs, categorical, is_test, form, table.files)
    content = {"x": x[~is_test], "y": y[~is_test], "x_test": x[is_test], "y_test": y[is_test]}
    owners = table.clients
    if groups is not None:
        owners = _codes(cells[groups])
    if owners is not None:
        content["groups"] = owners[~is_test]
    return from_arrays(content, str(path), test)


def _chosen(
    rows: DataFrame,
    target: str | None,
    groups: str | None,
    categorical: Sequence[str],
    ignore: Sequence[str],
) -> tuple[DataFrame, DataFrame]:
    """The columns that are read, and those of them that are the inputs.

    Raises SettingError for a missing column, for empty cells, and if there is no input.
    """
    named: dict[str, Sequence[str | None]] = {
        "data.target": [target],
        "data.categorical": categorical,
        "data.ignore": ignore,
    }
    no_inputs = {target}
    if groups is not None:
        named["partition.by"] = [groups]
        no_inputs.add(groups)
    require_columns(rows.columns, named)
    cells = rows.drop(columns=[name for name in ignore if name not in no_inputs])
    _require_full(cells)
    inputs = cells.drop(columns=[*no_inputs])
    if inputs.columns.empty:
        raise SettingError("ignore", f"={[*ignore]} leaves no column to learn from.")
    return cells, inputs


def _require_full(cells: DataFrame) -> None:
    """Raises Refusal for empty cells."""
    empty = cells.isna() | (cells == "")
    counts = empty.sum()
    for name in counts.index[counts > 0]:
        raise Refusal(
            f"column {name} has {counts[name]} empty cells (or NA, None, null, …) of {len(cells)}:"
            f" fill them, drop the rows, or set data.ignore=[{name}]."
        )


def _numbers(column: Series, form: Form) -> Series | None:
    """A column of text as numbers; None if a cell is no number, or one is a code such as 01234.

    Raises Refusal for an infinite number.
    """
    numbers = _parsed(column, form)
    if numbers.isna().any():
        return None
    infinite = np.isinf(numbers.to_numpy(np.float64))
    if infinite.any():
        raise Refusal(
            f"column {column.name} holds {column[infinite].iloc[0]!r}, which is no finite number:"
            f" correct it, or set data.ignore=[{column.name}]."
        )
    has_codes = (numbers % 1 == 0).all() and column.str.match(r"[+-]?0\d").any()
    return None if has_codes else numbers


def _parsed(column: Series, form: Form) -> Series:
    """The numbers in a column of text; NaN where a cell is none."""
    if form.decimal == ",":
        column = column.str.translate(str.maketrans(",.", ".,"))
    return pd.to_numeric(column, errors="coerce")


def _targets(column: Series, form: Form) -> ndarray:
    """The numbers to regress on, float64 [n]."""
    numbers = _numbers(column, form)
    if numbers is None:
        is_text = _parsed(column, form).isna()
        cell = (column[is_text] if is_text.any() else column).iloc[0]
        what = f"holds {cell!r}, and data.regression=true needs plain numbers; see data.decimal"
        raise Refusal(f"data.target={column.name} {what}.")
    return numbers.to_numpy(np.float64)


def _classes(column: Series, form: Form) -> ndarray:
    """The classes, integers or text [n]."""
    numbers = _numbers(column, form)
    if numbers is not None and (numbers % 1).any():
        raise Refusal(
            f"data.target={column.name} holds numbers with fractions: data.regression=true"
            " regresses on them."
        )
    count = column.nunique()
    if numbers is not None and count > MOST:
        log.warning(
            "%s: %d values are read as classes; data.regression=true predicts a number",
            column.name,
            count,
        )
    return _codes(column)


def _codes(column: Series) -> ndarray:
    """Texts [n]; or integers, if each text is the only one of its integer, so that 2 comes before
    10.
    """
    texts = _array(column)
    if all(map(WHOLE_NUMBER.fullmatch, column.unique())):
        return texts.astype(np.int64)
    return texts


def _array(column: Series) -> ndarray:
    """The texts [n]. Raises Refusal for a NUL character, which NumPy would drop."""
    if any("\0" in text for text in column.unique()):
        raise Refusal(
            f"column {column.name} holds a NUL character: write the file again, or set"
            f" data.ignore=[{column.name}]."
        )
    return column.to_numpy(np.str_)


def _inputs(
    inputs: DataFrame,
    categorical: Iterable[str],
    is_test: ndarray,
    form: Form,
    files: ndarray,
) -> ndarray:
    """The samples, float64 [n, d]: first the columns of numbers, then those of 0 and 1."""
    numbers = []
    switches = []
    for name in inputs:
        column = inputs[name]
        plain = None if name in categorical else _numbers(column, form)
        if plain is not None:
            _warn_of_ids(column, plain, files)
            numbers.append(plain.to_numpy(np.float64)[:, None])
            continue
        if name not in categorical:
            _require_categories(column, form)
        switches.append(_one_hot(column, is_test))
    return np.concatenate([*numbers, *switches], axis=1)


def _warn_of_ids(column: Series, numbers: Series, files: ndarray) -> None:
    """Warns of whole numbers that are all different in each file, as ids are."""
    if len(column) <= MOST or (numbers % 1).any():
        return
    if not DataFrame({"file": files, "text": column}).duplicated().any():
        log.warning(
            "column %s: all whole numbers are different, as in a column of ids, and the model gets"
            " them as an input; data.ignore=[%s] leaves it out",
            column.name,
            column.name,
        )


def _require_categories(column: Series, form: Form) -> None:
    """Raises Refusal for more texts than categories have; warns of texts among numbers."""
    name = column.name
    count = column.nunique()
    is_text = _parsed(column, form).isna()
    texts = column[is_text].unique().tolist()
    if count > MOST:
        what = f"has {count:,} texts in {len(column):,} rows, such as {column.iloc[0]!r}"
        remedy = "write numbers plainly (see data.decimal)"
        if 0 < len(texts) < count:
            what = f"holds text in {is_text.sum():,} of {len(column):,} cells ({listing(texts)})"
            remedy = "correct these cells, drop their rows"
        raise Refusal(
            f"column {name} {what}: {remedy}, name it in data.categorical=[{name}], or leave it"
            f" out, data.ignore=[{name}]."
        )
    in_other_notation = all(map(OTHER_NOTATION.fullmatch, texts))
    if texts and (len(texts) < count or in_other_notation):
        log.warning(
            "column %s: %d of its %d values are no numbers (%s), so that all are categories; "
            "write numbers plainly (see data.decimal), or drop these rows",
            name,
            len(texts),
            count,
            listing(texts),
        )


def _one_hot(column: Series, is_test: ndarray) -> ndarray:
    """A column of 0 and 1 for each text in the training rows, in their order, float64 [n, c]."""
    number_n, names = number_names(_array(column))
    trained = np.unique(number_n[~is_test])
    kept = [names[number] for number in trained]
    log.info("column %s becomes %d columns of 0 and 1: %s", column.name, len(kept), listing(kept))
    untrained = np.setdiff1d(number_n, trained)
    if len(untrained):
        log.warning(
            "column %s: %d texts, such as %r, are in test rows only, which get 0 in all columns",
            column.name,
            len(untrained),
            names[untrained[0]],
        )
    return (number_n[:, None] == trained).astype(np.float64)
