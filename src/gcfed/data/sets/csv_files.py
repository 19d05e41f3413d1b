"""CSV files as tables of text: one file, or a folder with one file per client."""

import re
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pandas import DataFrame

from gcfed.data.sets.files import TESTS, entries, note_unread, why_unread
from gcfed.data.sets.names import clean
from gcfed.utils.refusal import MissingFile, Refusal, message_of

log = getLogger(__name__)
FILE_NAME = re.compile(r"(?P<name>.+)\.csv(\.(bz2|gz|xz|zip))?", re.IGNORECASE)

#: The first bytes of files that people take for CSV files → their kind.
OTHER_KINDS = {
    b"PK\x03\x04": "an Excel",
    b"\xd0\xcf\x11\xe0": "an Excel",
    b"PAR1": "a Parquet",
}


@dataclass(frozen=True)
class Form:
    """How the files are written."""

    sep: str
    decimal: str
    encoding: str


@dataclass(frozen=True)
class Cells:
    """All rows, as text.

    rows: the cells, without spaces around them; NaN for empty ones.
    files: the name of each row's file, [n].
    is_test: which rows are the test split, bool [n].
    clients: the name of each row's file, if each file is a client, [n].
    """

    rows: DataFrame
    files: np.ndarray
    is_test: np.ndarray
    clients: np.ndarray | None


def read_cells(path: str | None, form: Form) -> Cells:
    """Reads a file, or the files of a folder.

    Raises MissingFile if there is none; Refusal, with the file's name, if one cannot be read or has
    no row or other columns than the first, or if there is only a test split.
    """
    files, test_name = _files(path)
    tables: list[DataFrame] = []
    first = next(iter(files.values()))
    for file in files.values():
        _refuse_other_kinds(file)
        try:
            table = _texts(file, form)
            tables.append(table)
            if not len(table) or {*table} != {*tables[0]}:
                raise Refusal(f"it has no row, or other columns than {first}: {', '.join(table)}")
        except Exception as error:  # of pandas, of decoding or of decompression
            remedy = (
                "see data.sep=semicolon (or tab), data.encoding=latin-1 (or utf-16), and the first"
                " line"
            )
            text = message_of(error)
            raise Refusal(f"{file} cannot be read as a CSV file: {text}: {remedy}.") from error
    names = np.repeat([*files], [len(table) for table in tables])
    is_test = np.array([name == test_name for name in names.tolist()])
    if is_test.all():
        raise Refusal(
            f"data.path={path} has a file {first.name}, but none to train on: call it train.csv."
        )
    several = len(files) - is_test.any() > 1
    rows = pd.concat(tables, ignore_index=True)
    return Cells(rows, names, is_test, names if several else None)


def _refuse_other_kinds(file: Path) -> None:
    """Raises Refusal for a spreadsheet and the like, by the first bytes."""
    with file.open("rb") as opened:
        first = opened.read(4)
    if first in OTHER_KINDS and not file.name.lower().endswith(".zip"):
        raise Refusal(f"{file} is {OTHER_KINDS[first]} file: save it as CSV.")


def _files(path: str | None) -> tuple[dict[str, Path], str | None]:
    """The files to read, by their names without ``.csv``, and the name of the test split, if any.

    Raises MissingFile if there is none; Refusal for two files of one name.
    """
    place = Path(path or "")
    if path and not place.exists():
        raise MissingFile(
            f"data.path={path}: there is no such file or folder. Relative paths begin in"
            f" {Path.cwd()}."
        )
    if path and place.is_file():
        return {place.stem: place}, None
    files: dict[str, Path] = {}
    why_left: dict[Path, str] = {}
    for file in entries(place) if path and place.is_dir() else ():
        reason = why_unread(file, place) or _why_no_table(file, place)
        if reason:
            why_left[file] = reason
            continue
        other = files.setdefault(_name_of(file), file)
        if other != file:
            raise Refusal(f"{other} and {file} have the same name: take one of them away.")
    tests = [name for wanted in TESTS for name in files if name.lower() == wanted]
    for name in tests[1:]:
        why_left[files.pop(name)] = f"{files[tests[0]].name} is the test split"
    note_unread(place, why_left)
    if not files:
        what = (
            "is no CSV file, nor a folder with some: give yours, as in data.path=people.csv"
            " data.target=income"
        )
        raise MissingFile(f"data.path={path or 'null'} {what}.")
    return files, tests[0] if tests else None


def _why_no_table(file: Path, place: Path) -> str:
    """Why a file in the folder is not read; empty if it is."""
    if file.parent != place:
        return "in a subfolder"
    return "" if _name_of(file) else "its name does not end in .csv"


def _name_of(file: Path) -> str:
    """The name of a file without ``.csv``; empty if it has another ending."""
    match = FILE_NAME.fullmatch(file.name)
    return clean(match["name"]) if match else ""


def _texts(file: Path, form: Form) -> DataFrame:
    """The cells of the columns with a name as text, without spaces around them; NaN for empty
    cells.

    The header is read as a row. Otherwise pandas would rename repeated columns.
    """
    options: Any = {
        "sep": form.sep,
        "encoding": form.encoding,
        "header": None,
        "dtype": str,
        "skipinitialspace": True,
    }
    # a column may be called NA
    cells = pd.read_csv(file, **options, nrows=1, keep_default_na=False).iloc[0]
    header = np.array([clean(cell) for cell in cells], object)
    has_name = header != ""
    named = header[has_name].tolist()
    if len(header) == 1 or len(set(named)) < len(named):
        raise Refusal(f"it has one column, or two of one name: {', '.join(named)}")
    if len(named) < len(header):
        log.warning("%s: columns without a name are left out", file)
    rows = pd.read_csv(file, **options).iloc[1:].apply(lambda column: column.str.strip())
    return rows.set_axis(header, axis=1).loc[:, has_name]
