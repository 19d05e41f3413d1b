"""Reads tables: those of the package by name, any other by its path."""

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gcfed.folders.reading import read_yaml
from gcfed.tables.records import Axis, Search, Selection, Table
from gcfed.utils.checked import sentence
from gcfed.utils.files import YamlLoader
from gcfed.utils.near import suggestion
from gcfed.utils.refusal import MissingFile, Refusal, message_of

#: The package's own tables: a YAML each. ``setting/`` has what several of them share.
CATALOG = Path(__file__).parent / "catalog"
#: Where a record stands in the YAML → the record.
RECORDS: dict[str, type] = {
    "": Table,
    "rows": Axis,
    "columns": Axis,
    "scales": Selection,
    "search": Search,
}


def names() -> list[str]:
    """The names of the package's tables."""
    return sorted(path.stem for path in CATALOG.glob("*.yaml"))


def heading(name: str) -> str:
    """The first line of a table's comment."""
    first = (CATALOG / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("# ")


def load(name: str | Path, changes: Mapping[str, Any] | None = None) -> Table:
    """A table of the package by its name, or any file by its path.

    Args:
        changes: new values of ``search`` and ``search.<key>``.

    Raises Refusal, with the file and the key, if it is not a table.
    """
    path = Path(name) if Path(name).suffix else CATALOG / f"{name}.yaml"
    if not path.is_file():
        raise MissingFile(_no_table(name))
    try:
        raw = _with_shared({"name": path.stem} | _mapping(path))
        for key, value in (changes or {}).items():
            _change(raw, key, value)
        return Table(**raw)
    except Refusal:
        raise
    except ValidationError as error:
        reasons = "; ".join(reason(one) for one in error.errors())
        raise Refusal(f"{path} is no table: {reasons}") from None
    except (OSError, TypeError, AttributeError, KeyError, ValueError, yaml.YAMLError) as error:
        text = message_of(error)
        raise Refusal(f"{path} is no table: {type(error).__name__}: {text}") from None


def _no_table(name: str | Path) -> str:
    if Path(name).suffix:
        return f"{name}: there is no such file in {Path.cwd()}."
    known = names()
    hint = suggestion(str(name), known).replace(": did", " Did").removesuffix(".")
    return f"There is no table {name}.{hint} The package has {', '.join(known)}."


def _mapping(path: Path) -> dict[Any, Any]:
    try:
        mapping = read_yaml(path, aliases=True)
    except Refusal as error:
        raise Refusal(f"{path} is no table: {error}. A table has rows and columns.") from None
    _refuse_repeated_keys(yaml.compose(path.read_text(encoding="utf-8"), YamlLoader), path)
    return mapping


def _refuse_repeated_keys(node: yaml.Node | None, path: Path) -> None:
    """Raises Refusal if a mapping has a key twice: YAML would take the last one, without a word."""
    if isinstance(node, yaml.SequenceNode):
        for entry in node.value:
            _refuse_repeated_keys(entry, path)
    if isinstance(node, yaml.MappingNode):
        known = set()
        for key, value in node.value:
            if key.value in known:
                line = key.start_mark.line + 1
                raise Refusal(f"{path} is no table: line {line} has the key {key.value} again")
            known.add(key.value)
            _refuse_repeated_keys(value, path)


def _change(raw: dict[str, Any], key: str, value: Any) -> None:
    group, _, last = key.rpartition(".")
    node = raw.get(group) if group else raw
    if not isinstance(node, dict):
        raise Refusal(f"{key}={value}: {raw['name']} has no {group} that it could change.")
    node[last] = value


def _with_shared(raw: dict[str, Any]) -> dict[str, Any]:
    """Adds the file of ``setting/`` that ``shared_setting`` names.

    There, rows and columns have names, and a label alone stands for one of them.
    """
    name = raw.pop("shared_setting", None)
    if name is None:
        return raw
    common = read_yaml(CATALOG / "setting" / f"{name}.yaml", aliases=True)
    raw["setting"] = common["setting"] | raw.get("setting", {})
    for kind in ("rows", "columns"):
        known = common.pop(kind, {})
        for place, one in enumerate(raw[kind]):
            if isinstance(one, str):
                raw[kind][place] = {"label": one} | known[one]
    return common | raw


def reason(finding: ErrorDetails) -> str:
    """Pydantic's finding in words, with the key."""
    # without the names of types, which pydantic adds where a key has one of several
    place = [str(part) for part in finding["loc"] if not re.fullmatch(r"int|list\[.*\]", str(part))]
    key = ".".join(place)
    if finding["type"] == "missing":
        return f"the key {key} is missing"
    if finding["type"] == "unexpected_keyword_argument":
        record = RECORDS[place[0] if len(place) > 1 else ""]
        known = [one.name for one in fields(record)]
        return f"the key {key} is unknown{suggestion(place[-1], known).removesuffix('.')}"
    if finding["type"] == "list_type" and isinstance(finding["input"], dict):
        return f"{key} must be a list, such as [{{label: FedAvg, overrides: [gc=none]}}]"
    if finding["type"] == "dataclass_type" and key:
        return f"{key} must have keys, such as {{label: FedAvg, overrides: [gc=none]}}"
    if finding["type"] == "value_error":  # of a record's own check
        text = finding["msg"].removeprefix("Value error, ")
        return f"{key}: {text}" if key else text
    return key + sentence([finding | {"loc": ()}]).removesuffix(".")
