"""A user's own tables: one CSV file, or a folder with one for each client."""

from __future__ import annotations

import codecs
import io
import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
"""Categories of a column that data.categorical names; each becomes a column of 0 and 1."""
MANY = 100
"""Categories of a column of text that data.categorical does not name."""
FEW = 20
"""Classes that are numbers, or texts of which each stands in fewer than four rows; more may not be meant as classes."""
NAMELESS = "Unnamed: "
"""With its place, the name of a column that has none in the header: the first one, in what pandas writes."""
SEPARATORS = {"semicolon": ";", "tab": "\t", "\\t": "\t"}
SEP = "set data.sep=semicolon or data.sep=tab"
NOTATION = r"[\s.,'%$€£]"
"""What stands in numbers that are not written plainly."""


@checked
def csv(
    path: str | None, *, target: str | None, categorical: Sequence[str] = (), ignore: Sequence[str] = (),
    missing: Literal["refuse", "mean"] = "refuse", regression: bool = False, groups: str | None = None,
    sep: str = ",", decimal: Literal[".", ","] = ".", encoding: str = "utf-8", test: Inside = 0.2,
) -> FederatedDataset:  # fmt: skip
    """The rows of a table, float64 [n, d]: numbers as they are, then, for each other column, one of 0 and 1 for each of
    the values that the training rows have, in their order. Whole numbers of which one begins with 0 are texts.

    Args:
        path: a file, or a folder: each file in it is a client, by its name, but for ``test.csv`` (or ``val.csv``), the
            test split, and a ``train.csv`` beside it.
        categorical: columns of numbers that are codes, and of texts with many values; other texts, and true and false,
            always are.
        missing: what becomes of empty cells. ``mean``: a number is the mean of the training rows, and of a category
            all columns are 0.
        regression: the target is a number, and no class.
        groups: the column that says whose row it is, for ``partition=natural``.
        sep, decimal, encoding: what separates cells, what stands before decimals, and the encoding of the files.
        test: the share of the rows, of each class, to test on where there is no file for it; drawn once and for all.

    Raises FileNotFoundError for no CSV file; ValueError for one that cannot be read, a column that is not there or is
    twice, empty cells, or texts that are no categories.
    """
    sep = SEPARATORS.get(sep, sep)
    if len(sep) != 1 or sep == decimal:
        raise SettingError("sep", f"={sep} must be one character, and not data.decimal: {SEP}.")
    try:
        codecs.lookup(encoding)
    except LookupError:
        raise SettingError("encoding", f"={encoding} is unknown: utf-8, latin-1, cp1252, utf-16, …") from None
    rows, is_test, owners = _read(path, encoding, sep=sep, decimal=decimal)
    named = {"data.target": [target], "data.categorical": categorical, "data.ignore": ignore}
    require_columns(rows.columns, named | {"partition.by": [] if groups is None else [groups]})
    if target not in categorical and not regression:
        _refuse_texts(rows[target], decimal, len(rows), f"name it in data.categorical=[{target}] if all are classes")
    y = _target(rows, str(target), regression)
    whose = owners if groups is None else _full(rows[groups]).to_numpy()
    if not is_test.any():
        is_test = held_out(y[:, None] if regression else y, test, generator(0, "test"))
        tell_absent(whose, is_test, str(path), "test")
    index = f"{NAMELESS}0"
    if index in rows and index not in {target, groups, *ignore, *categorical} and rows[index].dtype.kind == "i":
        log.warning("%s: the first column has no name, so it is taken for the rows' numbers, and left out", path)
        ignore = [*ignore, index]
    taken = rows[[name for name in rows if name not in {target, groups, *ignore}]]
    if taken.columns.empty:
        raise SettingError("ignore", f"={[*ignore]} leaves no column to learn from.")
    for name in taken if missing == "refuse" else ():
        _full(rows[name], f"leave it out, data.ignore=[{name}], or take the training rows' mean, data.missing=mean")
    coded = [name for name in taken if name in categorical or taken[name].dtype.kind not in "iuf"]
    for name in set(coded) - {*categorical}:
        leave_or_name = f"leave it out, data.ignore=[{name}], or name it in data.categorical=[{name}] if all are codes"
        _refuse_texts(taken[name], decimal, MANY, leave_or_name)
    numbers = taken.drop(columns=coded).apply(lambda column: column.fillna(column[~is_test].mean()))
    if odd := [name for name in numbers if not np.isfinite(numbers[name]).all()]:
        what = "has no number in the training rows, or an infinite one"
        raise ValueError(f"column {odd[0]} {what}: leave it out, data.ignore=[{odd[0]}].")
    values, switches = numbers.to_numpy(np.float64), [_one_hot(taken[name], is_test) for name in coded]
    for name in numbers.columns[(np.diff(values[: FEW + 1], axis=0) == 1).all(0)] if len(rows) > FEW else ():
        if (numbers[name].diff()[1:] == 1).all():
            log.warning("column %s counts the rows: leave it out, data.ignore=[%s], if it is no feature", name, name)
    x = np.concatenate([values, *switches], axis=1)
    widths = {name: part.shape[1] for name, part in zip(coded, switches, strict=True)}
    words = "%s: %d columns make %d numbers of a row; categories, with the columns of each: %s"
    log.info(words, path, taken.shape[1], x.shape[1], widths or "none")
    content = {"x": x[~is_test], "y": y[~is_test], "x_test": x[is_test], "y_test": y[is_test]}
    if whose is not None:
        content["groups"] = whose[~is_test]
    return from_arrays(content, str(path), test)


def _refuse_texts(column: Series, decimal: str, most: int, advice: str) -> None:
    """Refuses texts that are no categories: numbers written otherwise or with other cells among them, such as the ? of
    an unknown one; more than ``most`` values, or too many for the rows, as dates, names and free text have.
    """
    import pandas as pd

    name, known = column.name, column.dropna()
    if column.dtype.kind in "iufb" or not len(known):
        return
    known = known.astype(str)
    plain = known.str.translate(str.maketrans(",.", ".,")) if decimal == "," else known
    odd = known[pd.to_numeric(plain, errors="coerce").isna()]
    like = pd.to_numeric(known.str.replace(NOTATION, "", regex=True), errors="coerce").notna()
    if len(odd) and like.mean() > 0.5:
        cells = "empty such cells (data.missing=mean then fills them)"
        raise ValueError(
            f"column {name} holds numbers and {odd.iloc[0]!r}: write all plainly (see data.decimal), {cells}, {advice}."
        )
    kinds = known.unique()
    if len(kinds) > most or (len(kinds) > FEW and 4 * len(kinds) > len(known)):
        raise ValueError(f"column {name} has {len(kinds):,} texts in {len(known):,} rows, as {kinds[0]!r}: {advice}.")
    if len({kind.casefold() for kind in kinds}) < len(kinds):
        log.warning("column %s has values that differ in upper and lower case alone, as categories of their own", name)


def _read(path: str | None, encoding: str, **form: Any) -> tuple[DataFrame, np.ndarray, np.ndarray | None]:
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
    contents: dict[Path, bytes] = {}
    for file in files:
        try:
            contents[file] = file.read_bytes().decode(encoding).encode()
            tables.append(_table(file, contents[file], **form))
        except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeError, OSError) as error:
            remedy = f"{SEP}, or name all columns in the first line"
            if isinstance(error, UnicodeError):
                remedy = "set data.encoding, as latin-1 or utf-16"
            raise ValueError(
                f"{file} cannot be read as a CSV file ({' '.join(str(error).split())}): {remedy}."
            ) from error
        if not len(tables[-1]) or {*tables[-1]} != {*tables[0]}:
            raise ValueError(f"{file} has no row, or other columns than {files[0]}: {', '.join(map(str, tables[-1]))}.")
    kinds = {name: {table[name].dtype.kind for table in tables} for name in tables[0]}
    mixed = {name for name, kind in kinds.items() if len(kind) > 1 and not kind <= set("iuf")}
    again = [*mixed]
    if any(map(_may_have_codes, contents.values())):
        again += [name for name in kinds if name not in mixed and any(_is_whole(table[name]) for table in tables)]
    texts = [_table(*entry, **form, usecols=again, dtype=object) for entry in contents.items() if again]
    for name in again:
        if name in mixed or any(text[name].str.match(r"[+-]?0\d").any() for text in texts):
            for table, text in zip(tables, texts, strict=True):
                table[name] = text[name]
    names = np.repeat([file.stem for file in files], [len(table) for table in tables])
    is_test = np.isin(names, [file.stem for file in tests[:1]])
    several = len(files) - len(tests[:1]) > 1
    rows = pd.concat(tables, ignore_index=True)
    rows = rows.drop(columns=[name for name in rows if name.startswith(NAMELESS) and rows[name].isna().all()])
    return rows, is_test, names if several else None


def _table(file: Path, content: bytes, *, sep: str, decimal: str, **options: Any) -> DataFrame:
    """A CSV file, each column of the kind that all its cells have, texts without space around them.

    Raises ValueError for a header that does not fit; others as pandas.
    """
    import pandas as pd

    read = partial(pd.read_csv, sep=sep, decimal=decimal, skipinitialspace=True)
    # With a first row, since pandas takes its first cell for an index where it has one more than the header.
    header = read(io.BytesIO(content), header=None, nrows=2, dtype=str, keep_default_na=False).iloc[0]
    names = [name.strip() or f"{NAMELESS}{i}" for i, name in enumerate(header)]
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        remedy = "rename all but one; the first line must name the columns"
        raise ValueError(f"{file}: the header has {count} columns {name}: {remedy}.")
    if len(names) == 1:
        raise ValueError(f"{file} has one column, {name!r}: {SEP}.")
    # low_memory would read by parts, between which a column may change its kind.
    table: DataFrame = read(io.BytesIO(content), header=0, names=names, low_memory=False, **options)
    for column in table:
        if table[column].dtype.kind == "O":
            table[column] = table[column].map(lambda cell: cell.strip() if isinstance(cell, str) else cell)
    return table


def _is_whole(column: Series) -> bool:
    return column.dtype.kind in "iu" or (column.dtype.kind == "f" and not (column % 1).any())


def _may_have_codes(content: bytes) -> bool:
    """Whether 0 and a digit stand in it that neither a digit nor a point comes before, as in 01234: only then are
    columns of whole numbers read a second time, as texts, which takes ten times as long.
    """
    byte = np.frombuffer(content, np.uint8)
    digit = byte - ord("0") < 10
    return bool((digit[2:] & (byte[1:-1] == ord("0")) & ~digit[:-2] & (byte[:-2] != ord("."))).any())


def _target(rows: DataFrame, name: str, regression: bool) -> np.ndarray:
    column = _full(rows[name])
    kind = column.dtype.kind
    if not regression and kind == "f" and not (column % 1).any():  # 0.0 and 1.0, as pandas and R write them
        column, kind = column.astype(np.int64), "i"
    if regression and kind not in "iuf":
        what = f"holds {column.iloc[0]!r}, and data.regression=true needs plain numbers; see data.decimal"
        raise ValueError(f"data.target={name} {what}.")
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
