"""``gcfed-new flowers``: writes a folder for a project of your own, with files that run."""

import re
import sys
from pathlib import Path

from gcfed.folders.failure import headline
from gcfed.utils.refusal import Refusal

_HERE = Path(__file__).resolve().parent
_PACKAGED = _HERE.parent / "examples"  # in a wheel
EXAMPLES = _PACKAGED if _PACKAGED.is_dir() else _HERE.parents[2] / "examples"
#: The project's file → the file that is copied.
FILES = {
    "mynet.py": EXAMPLES / "network/mynet.py",
    "fedexp.py": EXAMPLES / "method/fedexp.py",
    "conf/algorithm/fedexp_last.yaml": EXAMPLES / "method/conf/algorithm/fedexp_last.yaml",
    "conf/experiment/first.yaml": _HERE / "first.yaml",
    "my.yaml": _HERE / "table.yaml",
    "test_first.py": _HERE / "one_round.py",
    "README.md": _HERE / "README.md",
    ".gitignore": _HERE / "gitignore",
}
USAGE = "gcfed-new takes one name, that of the new folder: gcfed-new flowers"


def new_project(folder: str | Path) -> Path:
    """Writes the files of a project into a new folder; returns the folder.

    Raises Refusal for a name that is no folder's, and if the folder exists.
    """
    folder = Path(folder).expanduser()
    if not re.fullmatch(r"\w[\w.+ -]*", folder.name):
        raise Refusal(f"{folder}: the folder's name needs a letter or digit first. {USAGE}")
    if folder.exists():
        raise Refusal(f"{folder} exists already: name a new folder.")
    for name, source in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text(encoding="utf-8").replace("PROJECT", folder.name)
        path.write_text(text, encoding="utf-8")
    return folder


def main() -> None:
    """The command ``gcfed-new``."""
    words = sys.argv[1:]
    if len(words) != 1 or words[0].startswith("-"):
        sys.exit(USAGE)
    try:
        folder = new_project(words[0])
    except (ValueError, OSError) as error:
        sys.exit(headline(error))
    print(f"{folder} is ready. Its README.md names the commands.")
