"""Writes ``docs/configuration.md``, the files of ``configs/`` on one page: ``python -m gcfed.utils.reference``."""

import re
from pathlib import Path

from gcfed.utils.files import replacing
from gcfed.utils.resolvers import ROOT

CONFIGS, PAGE = ROOT / "configs", ROOT / "docs/configuration.md"
HEAD = """# Configuration

The files of `configs/`, group by group, with their comments. Written by `make docs`: change the files, not this page.

A run is composed of an option of each group and of single keys: `python src/train.py data=cifar10 client.epochs=1`.
`key=value` sets a key that is there, `+key=value` adds one, `~key` drops one; commas and brackets need quotes:
`'metrics=[drift,cka]'`. With `-m` commas mean a sweep: `-m seed=1,2,3`. Later groups override earlier ones, in the
order of this table, and the command line overrides all. `python src/train.py --cfg job` prints what comes out.

A value such as `${rounds}` follows another key. `base` files hold what options share, and are no options themselves.

| group | options | default |
|---|---|---|
"""


def options(group: str, configs: Path = CONFIGS) -> list[Path]:
    """The files of a group, what its options share first."""
    return sorted((configs / group).glob("*.yaml"), key=lambda path: (path.stem != "base", path.stem))


def groups(configs: Path = CONFIGS) -> dict[str, str]:
    """Group → its default, in the order in which ``train.yaml`` composes them; then the others, but papers' tables."""
    lines = re.findall(r"^  - (?:override )?/?([\w/]+): (\w+)", (configs / "train.yaml").read_text(), re.M)
    folders = {path.parent.relative_to(configs).as_posix() for path in configs.rglob("*.yaml")} - {".", "paper"}
    return {group: default for group, default in lines if group in folders} | dict.fromkeys(
        sorted(folders - {group for group, _ in lines}), "null"
    )


def page(configs: Path = CONFIGS) -> str:
    """The whole page."""
    entries = sorted(configs.glob("*.yaml"), reverse=True)  # train.yaml first
    table, sections = [], [_section(path.name, [path]) for path in entries]
    for group, default in groups(configs).items():
        files = options(group, configs)
        names = ", ".join(f"`{path.stem}`" for path in files if path.stem != "base")
        table.append(f"| [{group}](#{group.replace('/', '')}) | {names} | `{default}` |\n")
        sections.append(_section(group, files))
    return "".join([HEAD, *table, *sections])


def _section(title: str, files: list[Path]) -> str:
    texts = [path.read_text().removeprefix("# @package _global_\n").rstrip() for path in files]
    blocks = [f"```yaml\n# {path.stem}\n{text}\n```\n" for path, text in zip(files, texts, strict=True)]
    return f"\n## {title}\n\n" + "\n".join(blocks)


if __name__ == "__main__":
    with replacing(PAGE) as temporary:
        temporary.write_text(page())
