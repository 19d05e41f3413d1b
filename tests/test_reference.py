"""``docs/configuration.md`` says what ``configs/`` says, and the reader of the files reads what Hydra composes."""

import sys

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from gcfed.utils import reference
from gcfed.utils.reference import NO_GROUPS, PAGE, PARTS, groups, options, page, read_option
from gcfed.utils.resolvers import ROOT

FILES = """\
=== train.yaml
# All of it.
defaults:
  - _self_
  - shape: square   # what it looks like
  - optional extra: null
size: 3  # in cm
=== shape/base.yaml
corners: 0         # how many
name: '# no comment'
=== shape/square.yaml
# Four sides,
# all equal.
#   python src/train.py shape=square \\
#     size=2

defaults: [base, _self_]
_target_: a.b.Square
corners: 4
=== shape/circle.yaml
# @package _global_
# Round.
defaults:
  - base
  - override /extra: more
tags:
  shape: circle
shape:
  pen:   # draws it
    _target_: a.Pen
    colours: [red, blue]   # of the | line
list:
  - one
  - two
follows: ${size}
=== extra/more.yaml
{}
=== paper/table.yaml
- not a config
=== study/both.yaml
# One of each.
units: {a: 1}
=== experiment/first.yaml
# @package _global_
# The first.
#   python src/train.py experiment=first
defaults:
  - override /shape: circle
size: 7
"""


@pytest.fixture
def configs(tmp_path):
    for file in FILES.split("=== ")[1:]:
        name, text = file.split("\n", 1)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_page_is_what_the_configs_say():
    assert PAGE.read_text() == page(), "run python -m gcfed.utils.reference"


def test_every_group_and_every_option_is_on_the_page():
    sections = dict(part.split("\n", 1) for part in PAGE.read_text().split("\n## ")[1:])
    folders = {p.parent.relative_to(ROOT / "configs").as_posix() for p in (ROOT / "configs").rglob("*.yaml")}
    assert {*groups()} == folders - {".", *NO_GROUPS}
    for group in groups():
        for path in (ROOT / "configs" / group).glob("*.yaml"):
            assert (f"`{path.stem}`" in sections[group]) == (path.stem not in PARTS), path
    for key in yaml.safe_load((ROOT / "configs/train.yaml").read_text()).keys() - {"defaults"}:
        assert f"| `{key}`" in sections["train.yaml"]


def test_every_option_says_what_it_is():
    silent = [f"{group}/{option.name}" for group in groups() for option in options(group) if not option.comment]
    assert silent == []


def test_keys_read_from_the_files_are_those_that_hydra_composes():
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = OmegaConf.to_container(compose("train", return_hydra_config=True), resolve=False)
    merged: dict[str, str] = {}
    for item in yaml.safe_load((ROOT / "configs/train.yaml").read_text())["defaults"]:
        if item == "_self_":
            option = read_option(ROOT / "configs/train.yaml")
        else:
            ((name, choice),) = item.items()
            if choice is None:
                continue
            group = name.split()[-1]
            option = next(o for o in options(group) if o.name == choice)
        merged |= {key: value for key, (value, _) in option.keys.items()}
    read = {key: value for key, value in merged.items() if not (value[:1].isupper() or value.startswith("["))}
    assert len(read) > 60
    for key, value in read.items():
        node = cfg
        for part in key.split("."):
            node = node[part]
        if not isinstance(node, dict):  # a class's name stands for a mapping
            assert node == yaml.safe_load(value), key


def test_options_inherit_comments_stay_with_their_lines(configs):
    nothing = dict.fromkeys(("extra", "experiment", "study"), ("null", ""))
    assert groups(configs) == {"shape": ("square", "what it looks like"), **nothing}
    circle, square = options("shape", configs)
    assert square.comment == "Four sides, all equal. `python src/train.py shape=square size=2`"
    assert (square.keys, square.classes) == (
        {"shape.corners": ("4", "how many"), "shape.name": ("'# no comment'", "")}, ["Square"],
    )  # fmt: skip
    assert (circle.comment, circle.choices, circle.classes) == ("Round.", {"extra": "more"}, ["Pen"])
    own = {"shape.pen": ("Pen", "draws it"), "shape.pen.colours": ("[red, blue]", "of the | line")}
    own |= {"list": ("[one, two]", ""), "follows": ("${size}", "")}
    assert {key: told for key, told in circle.keys.items() if key in own} == own


def test_the_page_tells_values_with_the_options_that_have_them(configs):
    lines = page(configs).splitlines()
    assert "| `size` | `3` | in cm |" in lines
    assert "| `square` | Four sides, all equal. `python src/train.py shape=square size=2` | `Square` |" in lines
    assert "| `shape.corners` | `4` square; `0` circle | how many |" in lines
    assert "| `shape.pen.colours` | `[red, blue]` circle | of the \\| line |" in lines
    assert not [line for line in lines if "`follows`" in line or "not a config" in line]
    assert lines[lines.index("- `first`: The first.") + 1] == "  Stands for `shape=circle size=7`"
    assert lines[-1] == "- `both`: One of each."


def test_check_tells_a_page_that_is_not_up_to_date(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(reference, "PAGE", tmp_path / "configuration.md")
    monkeypatch.setattr(sys, "argv", ["reference"])
    assert reference.main() == 0
    monkeypatch.setattr(sys, "argv", ["reference", "--check"])
    assert reference.main() == 0
    (tmp_path / "configuration.md").write_text("old")
    assert reference.main() == 1
    assert "run python -m gcfed.utils.reference" in capsys.readouterr().err
    assert (tmp_path / "configuration.md").read_text() == "old"
