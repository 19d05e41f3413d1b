"""Writes the sources of the site into ``.site``; ``make docs`` then runs ``zensical build -f
.site.toml``.

It copies the pages and converts the notebooks with their saved outputs. From YAMLs, constructors
and docstrings it makes a card for each algorithm, a reference of the keys of ``configs/`` with
their allowed values, and the Python API.
"""

import html
import inspect
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import griffe
import nbformat
import yaml
from hydra.utils import get_object
from jinja2 import Template
from nbconvert import MarkdownExporter
from pydantic import PydanticSchemaGenerationError, TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema

import gcfed

ROOT = Path(__file__).parent.parent
SITE, CONFIGS = ROOT / ".site", ROOT / "configs"
HEAD = ["key", "default", "allowed", "meaning"]
SENTENCE = 55  # letters; a cell with more is a sentence, for which a phone needs its whole width
MOST_COLUMNS = 6  # of a table that site.css shows as cards
#: The names of ``import gcfed``, in the order in which a reader needs them.
PUBLIC = ["configure", "train", "RunResult", "compare", "Comparison", "runs", "report"]
API = {  # package → its modules that a user's own parts use; None: all
    "federated": [
        "parts.part",
        "parts.client",
        "parts.server",
        "parts.method",
        "parts.transport",
        "protocol.messages",
        "protocol.rounds",
        "network.stack",
        "training.solver",
        "state.client_states",
        "state.store",
        "engine.round",
        "engine.server",
        "engine.round_sums",
    ],
    **dict.fromkeys(
        ["methods", "aggregators", "attacks", "data", "participation", "models", "metrics", "optim"]
    ),
}


class Roles(griffe.Extension):
    """For mkdocstrings: replaces a docstring's roles, ``:class:`~gcfed.a.B```, by
    their last name.
    """

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = plain(obj.docstring.value)


class Key(NamedTuple):
    """A setting of a YAML: dotted name, default as written, and its comment."""

    name: str
    default: str
    comment: str


def write(page: str, *parts: str) -> None:
    """Writes a page of ``.site`` without empty parts."""
    path = SITE / page
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(filter(None, parts)) + "\n")


def plain(text: str | None) -> str:
    """Converts a docstring to Markdown: roles become their last name, tables of two columns become
    tables.
    """

    def columns(found: re.Match[str]) -> str:
        width = len(found[1])
        rows = [[line[:width].strip(), line[width:].strip()] for line in found[2].splitlines()]
        for i in reversed([i for i, row in enumerate(rows) if not row[0]]):
            rows[i - 1][1] += f" {rows.pop(i)[1]}"
        return table(["", ""], rows)

    text = re.sub(r"^(=+ +)=+\n(.*?)\n=+ +=+$", columns, text or "", flags=re.MULTILINE | re.DOTALL)
    return re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text).replace("``", "`")


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows] if rows else []
    return "\n".join(
        "| " + " | ".join(re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in row) + " |"
        for row in lines
    )


def about(path: Path) -> str:
    """The comment at the head of a YAML; commands become code blocks, and its paper a link."""
    head = re.match(r"(?:#.*\n)*", path.read_text())[0].replace("# @package _global_\n", "")  # type: ignore[index]
    head = re.sub(r"^# Paper: (.*)", r"#\n# [The paper](\1)", head, flags=re.MULTILINE)
    lines = [line.removeprefix("#") for line in head.splitlines()]
    return re.sub(
        r"\n{3,}",
        "\n\n",
        "\n".join(f"\n {x}\n" if x.startswith("   ") else x.strip() for x in lines),
    )


@cache
def keys(path: Path) -> list[Key]:
    """The settings of a YAML, without those that name runs, label them, or configure Hydra."""
    text, group = path.read_text(), path.parent.relative_to(CONFIGS).as_posix()
    inside = group != "." and not text.startswith("# @package _global_")
    nodes = [(-1, group.replace("/", "."))] if inside else []
    found = []
    for line in re.finditer(r"^( *)([\w/]+):(?: +([^#\s].*?))?(?: +# *(.*))?$", text, re.MULTILINE):
        while nodes and nodes[-1][0] >= len(line[1]):
            nodes.pop()
        nodes.append((len(line[1]), line[2]))
        name = ".".join(key for _, key in nodes)
        if line[2] != "defaults" and not re.match(r"(tags|labels|hydra|defaults|override)\b", name):
            found.append(Key(name, line[3] or "", line[4] or ""))
    return found


@cache
def nearest(path: Path) -> list[Key]:
    """All settings, those of this YAML first, then those of its group, then the others."""
    files = sorted(CONFIGS.rglob("*.yaml"))
    files.sort(key=lambda file: (file != path, file.parent != path.parent, file.stem != "base"))
    found = [(file, key) for file in files for key in keys(file)]
    found.sort(
        key=lambda pair: (pair[0] != path, pair[0].parent.name != pair[1].name.partition(".")[0])
    )
    return [key for _, key in found]


@cache
def nodes(path: Path) -> dict[str, str]:
    """Node → the class or function that it calls."""
    targets = [
        key
        for key in reversed(nearest(path))
        if key.name.endswith("._target_") and key.default != "null"
    ]
    return {key.name.removesuffix("._target_"): key.default for key in targets}


def given_to(name: str, path: Path) -> list[tuple[Any, str]]:
    """The constructors that get a key, with the argument's name: its own node's, and those of
    groups that follow it.
    """
    group, last = name.partition(".")[0], name.rpartition(".")[2]
    followers = [
        key.name
        for key in nearest(path)
        if key.default == f"${{{name}}}" and key.name.endswith(f".{last}")
    ]
    places = [name, *(other for other in followers if other.partition(".")[0] != group)]
    built = [nodes(path).get(place.rpartition(".")[0]) for place in places]
    return [(get_object(one), last) for one in built if one and one.startswith("gcfed.")]


def arguments(built: Any) -> dict[str, str]:
    """Argument → its description in the docstring; ``as :class:`X``` adds the descriptions of X."""
    block = re.search(r"^Args:.*\n(?: {4}.*\n?|\n)*", inspect.getdoc(built) or "", re.MULTILINE)
    found: dict[str, str] = {}
    for other in re.findall(r"as :class:`~?([\w.]+)`", block[0]) if block else ():
        found |= arguments(get_object(other if "." in other else f"{built.__module__}.{other}"))
    for names, text in (
        re.findall(r"^ {4}([\w, ]+): (.*(?:\n {5,}.*)*)", block[0], re.MULTILINE) if block else ()
    ):
        found |= dict.fromkeys(names.split(", "), plain(" ".join(text.split())))
    return found


@cache
def annotations(built: Any) -> dict[str, Any]:
    return get_type_hints(built.__init__ if isinstance(built, type) else built, include_extras=True)


def in_words(hint: Any) -> str:
    """The values that an annotation allows, from pydantic's JSON schema: ``integer, at least 1, or
    null``.
    """
    try:
        schema = TypeAdapter(hint).json_schema()
    except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema):  # a class, or a function
        return "a group of settings"

    def words(one: dict[str, Any]) -> str:
        if "anyOf" in one:
            return ", or ".join(map(words, one["anyOf"]))
        spoken = {
            "minimum": "at least",
            "exclusiveMinimum": "above",
            "maximum": "at most",
            "exclusiveMaximum": "below",
        }
        limits = [
            f"{spoken[key]} {one[key]:g}" for key in spoken if key in one and abs(one[key]) < 1e9
        ]
        limits = [limit.replace("at least 1e-18", "above 0") for limit in limits]
        kind = " or ".join(
            map(str, one.get("enum", [one.get("const", one.get("type", "any value"))]))
        )
        items = [f"each {words(one['items'])}"] if "items" in one else []
        return ", ".join([kind, *items, *limits])

    return words(schema)


def settings(path: Path) -> list[list[str]]:
    """One row per key: allowed values from the constructor, meaning from its docstring, else from
    the comment.
    """
    chosen = [
        key for key in keys(path) if key.default and not re.search(r"_(target|partial)_$", key.name)
    ]
    return [[f"`{key.name}`", f"`{key.default}`", *explained(key.name, path)] for key in chosen]


def explained(key: str, path: Path) -> tuple[str, str]:
    """The allowed values of a key and its meaning, as this YAML uses it."""
    given = given_to(key, path)
    allowed = [in_words(annotations(one)[name]) for one, name in given if name in annotations(one)]
    said = [arguments(one).get(name, "") for one, name in given if key.endswith(f".{name}")]
    comments = [other.comment for other in nearest(path) if other.name == key]
    other = nodes(path).get(key.rpartition(".")[0], "gcfed.")
    allowed += [f"see `{other}`"] * (not other.startswith("gcfed."))
    return next(iter(allowed), ""), re.sub(
        r"\bNone\b", "null", next(filter(None, [*said, *comments]), "")
    )


def set_by_others(group: str) -> list[list[str]]:
    """Rows as in :func:`settings` for the keys of a group that models and data sets set; the
    default names them.
    """
    option = min(path for path in CONFIGS.glob(f"{group}/*.yaml") if path.stem != "base")
    base, sources = (
        CONFIGS / group / "base.yaml",
        [*CONFIGS.glob("model/*.yaml"), *CONFIGS.glob("data/*.yaml")],
    )
    known = {key.name for key in keys(base)} if base.exists() else set()
    found: dict[str, list[str]] = {}
    for path in sorted(path for path in sources if path.parent.name != group):
        for key in keys(path):
            if key.name.startswith(f"{group}.") and key.name not in known:
                found.setdefault(key.name, []).append(f"`{path.parent.name}={path.stem}`")
    return [
        [
            f"`{name}`",
            "set by " + ", ".join(options),
            *explained(name, option),
        ]
        for name, options in found.items()
    ]


def config_pages() -> None:
    index = []
    for path in sorted(CONFIGS.glob("*.yaml")):
        write(
            f"reference/config/{path.stem}.md",
            f"# {path.name}",
            about(path),
            table(HEAD, settings(path)),
        )
        index.append([f"[{path.name}]({path.stem}.md)", about(path).partition("\n")[0]])
    for group in sorted({path.parent for path in CONFIGS.rglob("*.yaml")} - {CONFIGS}):
        name, page = (
            group.relative_to(CONFIGS).as_posix(),
            group.relative_to(CONFIGS).as_posix().replace("/", "-"),
        )
        parts, options = (
            [f"# {name}"],
            sorted(group.glob("*.yaml"), key=lambda path: (path.stem != "base", path.stem)),
        )
        for path in options:
            heading = f"## {path.stem}" if path.stem != "base" else "## All options"
            parts += [heading, about(path), table(HEAD, settings(path))]
        if others := set_by_others(name):
            parts += ["## Set by models and data sets", table(HEAD, others)]
        write(f"reference/config/{page}.md", *parts)
        index.append(
            [
                f"[{name}]({page}.md)",
                ", ".join(f"`{path.stem}`" for path in options if path.stem != "base"),
            ]
        )
    intro = (
        "`group=option` chooses an option, `key=value` sets a key. Made from `configs/` and the"
        " constructors."
    )
    write("reference/config/README.md", "# Keys", intro, table(["group", "options"], index))


def method_cards() -> None:
    """One page per algorithm and kind of GC, from its YAML, its docstrings, methods.md and the
    pages of results.
    """
    card = Template((ROOT / "docs/card.jinja").read_text(), trim_blocks=True)
    index = []
    # the card of gc=gcfed
    algorithms = [path for path in CONFIGS.glob("algorithm/*.yaml") if path.stem != "gcfed"]
    for path in sorted([*algorithms, *CONFIGS.glob("gc/[!bn]*.yaml")]):
        text, name, group = path.read_text(), path.stem, path.parent.name
        label = yaml.safe_load(text)["labels"][group]
        head, _, link = about(path).partition("[The paper]")
        commands = [f"{group}={name}", *["algorithm=gcfed"] * (name == "gcfed")]
        what, _, when = (" ".join(part.split()) for part in head.partition("When: "))
        chosen = [
            CONFIGS / f"{'/'.join(pair)}.yaml"
            for pair in re.findall(r"override /(\w+): (\w+)", text)
        ]
        files = [path, *chosen, *[CONFIGS / "gc/base.yaml"] * (group == "gc")]
        adds, *costs = row_of(f"gc={name}" if group == "gc" else name)
        rows = [row for file in files for row in settings(file)]
        known = {row[0] for row in rows}
        rows += [row for row in set_by_others("gc") if group == "gc" and row[0] not in known]
        targets = [
            key.default for file in files for key in keys(file) if key.name.endswith("_target_")
        ]
        built = [paper(target) for target in targets if re.match(r"gcfed\.(methods|optim)", target)]
        # fedsmoo is feddyn with more
        bases = re.findall(r"^defaults: \[(\w+), _self_\]", text, re.MULTILINE)
        named = re.compile(f"`({'|'.join([name, *bases])})`")
        refusals = [
            row
            for row in rows_of("docs/methods.md", 2)
            if named.search(row[0]) and row[0] != f"`{name}`"
        ]
        measured = "\n".join(f"- [{title}](../../{page})" for page, title in measurements(label))
        fills = {
            "rows": table(HEAD, rows),
            "refused": table(["refused", "because"], refusals),
            "measured": measured,
        }
        write(f"reference/methods/{name}.md", card.render(locals() | fills))
        index.append([f"[{label}]({name}.md)", what, when])
    write(
        "reference/methods/README.md",
        "# One card per method",
        table(["method", "what it does", "when"], index),
    )


def rows_of(page: str, cells: int) -> list[list[str]]:
    """The rows of so many cells of a page's tables."""
    rows = re.findall(r"^\| (.*) \|$", (ROOT / page).read_text(), re.MULTILINE)
    return [row.split(" | ") for row in rows if row.count(" | ") == cells - 1]


def measurements(label: str) -> list[tuple[str, str]]:
    """The pages of results that have a row on a method, and their titles."""
    pages = sorted((ROOT / "reproductions/results").glob("[!R]*.md"))
    texts = {page.relative_to(ROOT).as_posix(): page.read_text() for page in pages}
    row = re.compile(rf"^\| [*`]*{re.escape(label)}\b", re.MULTILINE)
    return [
        (page, text.partition("\n")[0].removeprefix("# "))
        for page, text in texts.items()
        if row.search(text)
    ]


def paper(target: str) -> dict[str, str]:
    """The name of a class and the docstring of its module."""
    return {"name": target, "paper": plain(inspect.getdoc(inspect.getmodule(get_object(target))))}


def row_of(name: str) -> list[str]:
    """A method's row in methods.md: what it adds, its states and its bytes.

    A test compares the bytes with a run's.
    """
    for first, *cells in rows_of("docs/methods.md", 6):
        group = "gc=" if "gc=" in first else ""
        if name in [group + one for one in re.findall(r"`(?:gc=)?(\w+)`", first)]:
            return cells
    raise ValueError(f"docs/methods.md has no row for {name}.")


def python_pages() -> None:
    assert {*PUBLIC} == {*gcfed.__all__}
    blocks = []
    for name in PUBLIC:
        used = f"gcfed.{name}"  # as users write it
        one = get_object(used)
        place = f"{one.__module__}.{one.__qualname__}"
        blocks.append(f"::: {place}\n    options:\n      heading: {used}\n      toc_label: {used}")
    write("reference/python/README.md", "# From Python", *blocks)
    for package, modules in API.items():
        files = [
            path.with_suffix("") for path in sorted((ROOT / "src/gcfed" / package).rglob("*.py"))
        ]
        names = [
            ".".join(file.relative_to(ROOT / "src").parts)
            for file in files
            if file.name != "__init__"
        ]
        names = [f"gcfed.{package}.{module}" for module in modules or ()] or names
        write(
            f"reference/python/{package}.md",
            f"# gcfed.{package}",
            *(f"::: {name}" for name in names),
        )


def notebook_pages() -> None:
    index = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        body, resources = MarkdownExporter().from_notebook_node(nbformat.read(path, as_version=4))
        write(f"notebooks/{path.stem}.md", body.replace("](output_", f"]({path.stem}_output_"))
        for name, picture in resources["outputs"].items():
            (SITE / f"notebooks/{path.stem}_{name}").write_bytes(picture)
        index.append(f"- [{re.search('^# (.*)', body, re.MULTILINE)[1]}]({path.stem}.md)")  # type: ignore[index]
    write("notebooks/README.md", "# Notebooks", "With their saved outputs.", "\n".join(index))


def copy_pages() -> None:
    pictures = ["docs/images", "reproductions/results/images"]
    names = ["*.md", "LICENSE", "CITATION.cff", "Dockerfile", "docs/site.css", *pictures]
    names.append(":!src/gcfed/project")  # its README is the template of a new project's
    for name in filter(
        None,
        subprocess.check_output(["git", "ls-files", "-z", "--", *names], cwd=ROOT, text=True).split(
            "\0"
        ),
    ):
        (SITE / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, SITE / name)


def as_cards(page: Path) -> None:
    """Puts each table of a page whose cells are sentences into a block that site.css shows as cards
    on a phone: a row is a card, and the heads of its columns stand before its cells.
    """
    row = r"\|.*\|\n"
    tables = re.compile(rf"^(?P<head>{row})\|[-:| ]+\|\n(?P<rows>(?:{row})+)", re.MULTILINE)
    pieces = re.split(r"(^```.*?^```$)", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    pieces[::2] = [tables.sub(_as_card, piece) for piece in pieces[::2]]  # code is between them
    page.write_text("".join(pieces))


def _as_card(found: re.Match[str]) -> str:
    head = _cells(found["head"])
    widths = [max(map(len, _cells(row))) for row in found["rows"].splitlines()]
    if len(head) > MOST_COLUMNS or sum(widths) < SENTENCE * len(widths):
        return found[0]
    labels = ""
    if len(head) > 2:  # a name and its meaning need no label
        for number, name in enumerate(head, 1):
            name = html.escape(re.sub(r"[`'\"\\]| …", "", name))
            labels += f"--label{number}: '{name}: '; " if name else ""
    return f'<div class="cards" style="{labels}" markdown="1">\n\n{found[0]}\n</div>\n'


def _cells(row: str) -> list[str]:
    """The texts of a table's row, without the addresses of links."""
    cells = re.split(r"(?<!\\)\|", row.strip()[1:-1])
    return [re.sub(r"\]\(\S+\)", "]", cell).strip() for cell in cells]


def lead_to_pages(page: Path) -> None:
    """Redirects a page's links to folders, YAMLs, modules and notebooks to the pages made from
    them.

    Copies other files of the repository to which it links. A link to a folder becomes text.

    Raises:
        FileNotFoundError: a link leads to nothing. ``zensical`` checks the links between pages.
    """
    pages = {
        r"configs": "reference/config/README.md",
        r"configs/([\w/]+?)(?:\.yaml)?": r"reference/config/\1.md",
        r"src/gcfed/(\w+)": r"reference/python/\1.md",
        r"src/gcfed/(\w+)/(\w+)\.py": r"reference/python/\1.md#gcfed.\1.\2",
        r"notebooks": "notebooks/README.md",
        r"reproductions": "reproductions/README.md",
        r"(notebooks/\w+)\.ipynb": r"\1.md",
    }

    def link_to(link: re.Match[str]) -> str:
        place = os.path.relpath(os.path.normpath(page.parent / link[2]), SITE)
        found = [
            match.expand(there)
            for pattern, there in pages.items()
            if (match := re.fullmatch(pattern, place))
        ]
        if found:
            return f"[{link[1]}]({os.path.relpath(SITE / found[0], page.parent)})"
        if (ROOT / place).is_dir():
            return link[1]
        if not (SITE / place).exists():
            (SITE / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / place, SITE / place)
        return link[0]

    page.write_text(re.sub(r"\[([^][]*)\]\(([\w./-]+)\)", link_to, page.read_text()))


def write_settings() -> None:
    """Writes zensical.toml with its navigation's patterns replaced by the pages that match."""

    def pages(pattern: re.Match[str]) -> str:
        found = sorted(
            path.relative_to(SITE).as_posix()
            for path in SITE.glob(pattern[1])
            if path.stem != "README"
        )
        return "".join(f'"{page}", ' for page in found)

    text = (ROOT / "zensical.toml").read_text()
    (ROOT / ".site.toml").write_text(re.sub(r'"([\w/]+\*\.md)"(?:, ?)?', pages, text))


if __name__ == "__main__":
    shutil.rmtree(SITE, ignore_errors=True)
    copy_pages()
    notebook_pages()
    config_pages()
    method_cards()
    python_pages()
    for written in SITE.rglob("*.md"):
        lead_to_pages(written)
        as_cards(written)
    write_settings()
