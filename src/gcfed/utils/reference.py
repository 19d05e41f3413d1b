"""Writes ``docs/configuration.md`` from the files in ``configs/``: ``python -m gcfed.utils.reference [--check]``.

What it says of an option is the comment at the head of its file, of a key the comment behind it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

import yaml

from gcfed.utils.files import replacing
from gcfed.utils.resolvers import ROOT

CONFIGS, PAGE = ROOT / "configs", ROOT / "docs/configuration.md"
NO_GROUPS = ("paper",)  # folders of data
PARTS = ("base",)  # what options inherit from and nobody chooses
PRESETS = ("experiment", "debug")  # told by the overrides that they stand for
NAMED = ("study", "hparams_search")  # told by their comments alone

HEAD = """# Configuration

Every key with its default. Written by `python -m gcfed.utils.reference` from `configs/` and the comments there: change
those, not this page.

A run is composed of an option of each group and of single keys: `python src/train.py data=cifar10 client.epochs=1`.
`key=value` sets a key that is there, `+key=value` adds one, `~key` drops one; commas and brackets need quotes:
`'metrics=[drift,cka]'`. With `-m` commas mean a sweep: `-m seed=1,2,3`. Later groups override earlier ones, in the
order of this table, and the command line overrides all. `python src/train.py --cfg job` prints what comes out.

A value such as `${rounds}` follows another key. Where options differ, a value is told with the options that have it.

| group | what it chooses | default |
|---|---|---|
"""


@dataclass
class Option:
    """A file of ``configs/`` with what it inherits from others of its group."""

    name: str
    comment: str
    choices: dict[str, str] = field(default_factory=dict)  # group → its option there
    keys: dict[str, tuple[str, str]] = field(default_factory=dict)  # dotted key → value as it is written, comment
    classes: list[str] = field(default_factory=list)


def read_option(path: Path, group: str = "") -> Option:
    """The option of ``group`` in the file at ``path``; no group: an entry point's own file."""
    text = path.read_text()
    option = Option(path.stem, _head(text))
    for item in (yaml.safe_load(text) or {}).get("defaults", []):
        if isinstance(item, dict):
            ((name, chosen),) = item.items()
            option.choices[name.split()[-1].lstrip("/")] = str(chosen)
        elif item != "_self_" and group:
            parent = read_option(path.with_name(f"{item}.yaml"), group)
            option.choices = parent.choices | option.choices
            option.keys |= parent.keys
            option.classes += parent.classes
    is_global = not group or text.startswith("# @package _global_")
    for key, value, comment in _walk(
        yaml.compose(text, Loader=yaml.SafeLoader), text, "" if is_global else f"{group.replace('/', '.')}."
    ):
        if key.endswith("_target_"):
            option.classes += [value.rpartition(".")[2]] if value != "null" else []
        else:
            option.keys[key] = (value, comment or option.keys.get(key, ("", ""))[1])
    return option


def _head(text: str) -> str:
    """The comment that a file begins with, in one line; commands in it, which are indented, as code."""
    lines = takewhile(lambda line: line.startswith("#"), text.splitlines())
    comment = "\n".join(line[1:] for line in lines if "@package" not in line).replace("\\\n", "")
    words = (" ".join(line.split()) for line in comment.splitlines())
    return " ".join(f"`{w}`" if w.startswith("python ") else w for w in words)


def _walk(node: yaml.Node | None, text: str, prefix: str) -> Iterator[tuple[str, str, str]]:
    """Dotted key, value and comment of all that is below a mapping; a mapping in it only if it has a comment."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        name = prefix + key.value
        if key.value in ("defaults", "_partial_", "labels") or name.startswith("tags."):
            continue
        is_block = isinstance(value, yaml.CollectionNode) and not value.flow_style
        line = text[(key if is_block else value).end_mark.index :].split("\n", 1)[0]
        comment = line.partition("# ")[2] if line.strip(": ").startswith("#") else ""
        is_leaf = not is_block or isinstance(value, yaml.SequenceNode)
        if comment or is_leaf:
            yield name, _source(value, text), comment
        if not is_leaf:
            yield from _walk(value, text, f"{name}.")


def _source(node: yaml.Node, text: str) -> str:
    """A value as it is written, but blocks in one line: a list of their items, a mapping as its class."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style:
        return next((v.value.rpartition(".")[2] for k, v in node.value if k.value == "_target_"), "")
    if isinstance(node, yaml.SequenceNode) and not node.flow_style:
        return f"[{', '.join(_source(item, text) for item in node.value)}]"
    return text[node.start_mark.index : node.end_mark.index] or "null"


def groups(configs: Path = CONFIGS) -> dict[str, tuple[str, str]]:
    """Group → what ``train.yaml`` takes of it, and the comment there, in its order; then the others, without."""
    lines = re.findall(r"^  - (?:[a-z]+ )?/?([\w/]+): (\S+)(?: +# (.*))?$", (configs / "train.yaml").read_text(), re.M)
    taken = {group: (option, note) for group, option, note in lines}
    folders = {path.parent.relative_to(configs).as_posix() for path in configs.rglob("*.yaml")} - {".", *NO_GROUPS}
    names = [*taken, *sorted(folders - {*taken})]
    return {name: taken.get(name, ("null", "")) for name in names if name in folders}


def options(group: str, configs: Path = CONFIGS) -> list[Option]:
    """The options of a group that can be chosen, by name."""
    return [read_option(path, group) for path in sorted((configs / group).glob("*.yaml")) if path.stem not in PARTS]


def page(configs: Path = CONFIGS) -> str:
    """The whole page."""
    table = groups(configs)
    parts = [
        HEAD,
        *(f"| [{group}](#{_slug(group)}) | {note} | `{default}` |\n" for group, (default, note) in table.items()),
    ]
    for path in sorted(configs.glob("*.yaml"), key=lambda path: (path.stem != "train", path.stem)):
        entry = read_option(path)
        parts += [f"\n## {path.name}\n\nOf `src/{path.stem}.py`. {entry.comment}\n\n", *_keys([entry])]
    for group, (default, note) in table.items():
        found = sorted(options(group, configs), key=lambda option: option.name != default)
        parts += [f"\n## {group}\n\n", f"{note[0].upper()}{note[1:]}.\n\n" if note else ""]
        if group in PRESETS + NAMED:
            parts += [_preset(group, option) for option in found]
        else:
            parts += [f"| `{group}=` | what | builds |\n|---|---|---|\n"]
            parts += [f"| `{o.name}` | {_escaped(o.comment)} | {_particular(o, found)} |\n" for o in found]
            parts += ["\n", *_keys(found)]
    return "".join(parts)


def _preset(group: str, option: Option) -> str:
    comment = option.comment.replace(f" `python src/train.py {group}={option.name}`", "")
    overrides = {k: v for k, v in [*option.choices.items(), *((k, v) for k, (v, _) in option.keys.items())] if v}
    stands_for = " ".join(f"{key}={value}" for key, value in overrides.items())
    return f"- `{option.name}`: {comment}" + (f"\n  Stands for `{stands_for}`\n" if group in PRESETS else "\n")


def _particular(option: Option, found: Sequence[Option]) -> str:
    """The classes that not all of the options build, and what it takes of other groups."""
    classes = [name for name in option.classes if len(found) == 1 or not all(name in o.classes for o in found)]
    return ", ".join(f"`{word}`" for word in [*classes, *(f"{k}={v}" for k, v in option.choices.items())])


def _keys(found: Sequence[Option]) -> Iterator[str]:
    """A table of the keys of some options, unless they have none."""
    head = "| key | default | meaning |\n|---|---|---|\n"
    for key in dict.fromkeys(key for option in found for key in option.keys):
        having: dict[str, list[str]] = {}  # value → options
        comments = []
        for option in found:
            if key in option.keys:
                value, comment = option.keys[key]
                having.setdefault(value, []).append(option.name)
                comments += [comment] if comment else []
        if not comments and all(value.startswith("${") for value in having):
            continue  # it follows a key that is told elsewhere
        meaning = _escaped("; ".join(dict.fromkeys(comments)))
        yield f"{head}| `{key}` | {_values(having, len(found))} | {meaning} |\n"
        head = ""


def _values(having: dict[str, list[str]], of: int) -> str:
    """Values with the options that have them; what most of all have, and the others something else, is told alone."""
    first, everyone = next(iter(having)), sum(len(names) for names in having.values())
    if everyone == of and 2 * len(having[first]) > of:
        having = having | {first: []}
    return "; ".join(f"{f'`{value}`' if value else ''} {', '.join(names)}".strip() for value, names in having.items())


def _slug(group: str) -> str:
    """Its heading's address: GitHub leaves out what is neither a letter, a digit, a hyphen nor an underscore."""
    return group.replace("/", "")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def main() -> int:
    """Writes the page, or only compares; returns the exit code."""
    parser = argparse.ArgumentParser(description="Writes docs/configuration.md from the files in configs/.")
    parser.add_argument("--check", action="store_true", help="write nothing, fail if the page is not up to date")
    check, text = parser.parse_args().check, page()
    if check and (not PAGE.is_file() or PAGE.read_text() != text):
        print("docs/configuration.md is not what configs/ says: run python -m gcfed.utils.reference", file=sys.stderr)
        return 1
    if not check:
        with replacing(PAGE) as temporary:
            temporary.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
