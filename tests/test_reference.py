"""docs/configuration.md: the page is the files of configs/."""

from gcfed.utils.reference import CONFIGS, PAGE, groups, options, page


def test_the_page_is_what_the_configs_say():
    assert PAGE.read_text() == page(), "run python -m gcfed.utils.reference"


def test_every_line_of_every_option_is_on_the_page_under_its_group():
    sections = dict(part.split("\n", 1) for part in page().split("\n## ")[1:])
    folders = {path.parent.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.yaml")}
    assert {*groups()} == folders - {".", "paper"}
    for group in groups():
        for path in options(group):
            lines = [line for line in path.read_text().splitlines() if "@package" not in line]
            assert "\n".join(lines) in sections[group], path


def test_every_option_says_what_it_is():
    first = {path: path.read_text().removeprefix("# @package _global_\n")[:2] for g in groups() for path in options(g)}
    assert [path for path, text in first.items() if text != "# "] == []


def test_groups_come_in_the_order_in_which_they_override_each_other(tmp_path):
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape/square.yaml").write_text("# Four sides.\nsize: 2  # in cm\n")
    (tmp_path / "colour").mkdir()
    (tmp_path / "colour/red.yaml").write_text("# @package _global_\n# Warm.\nred: true\n")
    (tmp_path / "train.yaml").write_text("defaults:\n  - shape: square  # what it looks like\n  - colour: null\n")
    assert groups(tmp_path) == {"shape": "square", "colour": "null"}
    assert page(tmp_path).endswith(
        "## shape\n\n```yaml\n# square\n# Four sides.\nsize: 2  # in cm\n```\n"
        "\n## colour\n\n```yaml\n# red\n# Warm.\nred: true\n```\n"
    )
    assert "| [shape](#shape) | `square` | `square` |" in page(tmp_path)
