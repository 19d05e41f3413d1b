"""Text files are read without a last line that was cut short, and written whole."""

import os
from contextlib import suppress

import pytest

from gcfed.utils.files import replacing, whole_lines, write_text


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (None, []),
        ("", []),
        ("round", []),
        ("round\n", ["round"]),
        ("round\n1\n2", ["round", "1"]),
        ("round\r\n1\r\n", ["round", "1"]),
    ],
)
def test_a_line_without_its_end_is_left_out(tmp_path, content, lines):
    path = tmp_path / "metrics.csv"
    if content is not None:
        path.write_bytes(content.encode())
    assert whole_lines(path) == lines


def test_the_name_of_any_folder_can_be_written(tmp_path):
    name = os.fsdecode(b"f\xff")  # no UTF-8
    write_text(tmp_path / "page.html", f"λ {name}")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == "λ f\\udcff"


def test_a_file_stays_if_its_replacement_fails(tmp_path):
    path = tmp_path / "config.yaml"
    write_text(path, "old")
    with suppress(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["config.yaml"]  # noqa: PTH208
