"""Errors whose message is all that a user needs: a wrong setting, file or combination.

A command prints the message of a refusal in one line. Other errors keep their traceback.
"""

import sysconfig
import traceback
from pathlib import Path

#: Folders of installed packages, also of another environment that this one can see.
INSTALLED = frozenset(("site-packages", "dist-packages"))
#: Sources of compiled packages. Their paths are those of the machine that compiled them.
COMPILED = (".pyx", ".pxd", ".pxi")


class Refusal(ValueError):
    """A setting, a file or a combination that cannot work; names the key or the file."""


class MissingFile(Refusal, FileNotFoundError):
    """A file or folder that is not there; names the key."""


class Failed(BaseException):
    """Carries an error past Hydra, which would print a line of its own, or only warn."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def message_of(error: BaseException | str) -> str:
    """The message of an error in one line."""
    return " ".join(str(error).split())


def says_all(error: BaseException) -> bool:
    """True if the message of an error is enough: the traceback shows no code of the user's own."""
    if isinstance(error, Refusal):
        return not in_own_code(error.__cause__)  # the error that it explains
    return isinstance(error, OSError) and not in_own_code(error)


def in_own_code(error: BaseException | None) -> bool:
    """True if an error, or one that caused it, came from a file of the user's own."""
    while error is not None:
        if any(_is_own(file) for file in _files(error)):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _files(error: BaseException) -> set[str]:
    """The source files on an error's way up, without that of the command itself."""
    files = set()
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") != "__main__":
            files.add(frame.f_code.co_filename)
    return files


def _is_own(file: str) -> bool:
    """Whether a file is neither this project's, nor an installed package's, nor Python's."""
    if file.startswith("<"):  # code without a file
        return False
    path = Path(file)
    if path.suffix in COMPILED or not INSTALLED.isdisjoint(path.parts):
        return False
    folders = [Path(__file__).parents[2]]  # of this package
    for kind in ("stdlib", "platstdlib"):
        folders.append(Path(sysconfig.get_path(kind)))
    return not any(path.is_relative_to(folder) for folder in folders)
