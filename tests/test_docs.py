"""The examples in the documentation run."""

import re
import runpy
import shlex
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import first_values
from harness import DOCUMENTED
from hydra import compose, initialize_config_dir
from PIL import Image

from gcfed.check import check
from gcfed.run import train
from gcfed.tasks import Batch
from gcfed.utils.compose import shorthand
from gcfed.utils.resolvers import CONFIGS, ROOT


def files_in(text):
    """{name: content} of the code blocks that begin with ``# <name>``."""
    bodies = re.findall(r"```(?:python|yaml)\n(.*?)```", text, re.DOTALL)
    named = [(re.search(r"\A(?:# @.*\n)*# (\S+\.(?:py|yaml))\n", body), body) for body in bodies]
    return {head[1]: body for head, body in named if head}


def test_the_method_of_the_page_is_in_the_project():
    files = files_in((ROOT / "docs/add-a-method.md").read_text())
    assert len(files) == 3
    for name, content in files.items():
        assert content.replace(f"# {name}\n", "", 1) == (ROOT / name).read_text()


def written(folder, name):
    """A file of the page about own parts, in this folder."""
    (folder / name).write_text(files_in(OWN)[name])
    return str(folder / name)


COUNTS = re.compile(r"\b(\d+) (?:other )?(?:algorithms|methods)\b|\[all (\d+)\]\(methods")


def counts_of_methods(text):
    """Each number of algorithms or methods in a text, without those of a linked table."""
    own_words = re.sub(r"\[[^\]]*\]\([^)]*results/[^)]*\)", "", text)
    return [int(number or linked) for number, linked in COUNTS.findall(own_words)]


def test_all_pages_state_one_number_of_algorithms():
    """GC-Fed counts as a kind of GC, not as an algorithm. A user's own YAML has no row in
    methods.md, and does not count.
    """
    number = len(DOCUMENTED)
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("examples/**/*.md")]
    stated = {}
    for page in pages:
        counts = counts_of_methods(page.read_text())
        if counts and page.name != "CHANGELOG.md":
            stated[page.relative_to(ROOT).as_posix()] = counts
    assert {"README.md", "docs/commands.md"} <= {*stated}
    assert not {page: counts for page, counts in stated.items() if {*counts} != {number}}


def test_a_second_number_of_algorithms_is_found():
    assert counts_of_methods("48 algorithms, 45 other methods, [all 47](methods.md)") == [
        48,
        45,
        47,
    ]
    assert not counts_of_methods("[The table of 25 methods](reproductions/results/x.md)")


CLASSES = ("Weighted", "WeightedMean")
OWN = (ROOT / "docs/bring-your-own.md").read_text()
COMMANDS = re.findall(r"^    gcfed-train (.*)$", OWN, re.MULTILINE)


@pytest.fixture(scope="module")
def own_data(tmp_path_factory):
    """A folder with the files of ``docs/bring-your-own.md`` and some images."""
    folder = tmp_path_factory.mktemp("own")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, content in files_in(OWN).items():
            Path(name).write_text(content)
        runpy.run_path("make_arrays.py")
        runpy.run_path("make_hub.py")
        for i in range(60):
            for images in ("flowers", f"sites/{i % 4}"):
                path = Path(
                    images,
                    ("rose", "tulip")[i % 2 if images == "flowers" else i // 4 % 2],
                    f"{i}.png",
                )
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (40, 30), (i, 90 * (i % 2), 0)).save(path)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_for_own_data_and_networks_run(config, own_data, monkeypatch, command):
    monkeypatch.chdir(own_data)
    monkeypatch.syspath_prepend(own_data)
    small = (
        f"paths.data_dir={own_data}",
        "rounds=1",
        "client.steps=1",
        "data.limit_train=40",
        "data.limit_test=10",
        "participation.per_round=2",
    )
    overrides = shorthand(shlex.split(command, comments=True))
    few = [] if "partition=natural" in overrides else ["participation.num_clients=4"]
    assert train(config(*small, *overrides, *few)).metrics["round"] == 1


def printed():
    """The overrides of each command on the pages.

    The commands of ``bring-your-own.md`` run above.
    """
    seen = [[]]
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        begins = (
            r"(?:python src/train\.py|`…)"
            if page.name == "commands.md"
            else r"python src/train\.py"
        )
        for line in re.findall(begins + r" ([^`…<\n]+)", page.read_text().replace("\\\n", " ")):
            words = [word for word in shlex.split(line, comments=True) if word != "-m"]
            # Left out: commands that only print, examples of errors, and the method that
            # add-a-method.md adds.
            if (
                page.name not in ("bring-your-own.md", "add-a-method.md")
                and words not in seen
                and not {"--cfg", "--help", "gc=gcfd", "client.lr=0.1"} & {*words}
            ):
                seen.append(words)
                yield pytest.param(words, id=f"{page.name}: {' '.join(words)}")


NAMES_AN_ALGORITHM = re.compile(r"(?<!tags\.)\b(algorithm|experiment)=")
ON_AN_ALGORITHM = re.compile(
    r"(?<![\w.])(attack|aggregator|privacy)=|\+methods\.|participation\.faults\."
)
A_COMMAND = re.compile(r"python |gcfed-train |configure\(|…|\w+=\S+ \w+\.\w+=")


def commands_of(page):
    """The lines of a page's code blocks, and the code in its sentences and tables."""
    text = page.read_text().replace("\\\n", " ")
    return [*re.findall(r"^    (.+)$", text, re.MULTILINE), *re.findall(r"`([^`\n]+)`", text)]


def test_a_command_with_an_attack_a_rule_or_an_own_method_names_the_algorithm():
    """Without a name it would train GC-Fed, the default, underneath."""
    found = 0
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for command in commands_of(page):
            if A_COMMAND.search(command) and ON_AN_ALGORITHM.search(command):
                found += 1
                assert NAMES_AN_ALGORITHM.search(command), f"{page.name}: {command}"
    assert found >= 12


@pytest.mark.parametrize("words", [*printed()])
def test_each_command_on_the_pages_is_accepted(config, words):
    """Sweeps are tested with their first values.

    A command that names a column must also measure it.
    """
    words = first_values(words)
    cfg = config(*words)
    check(cfg)
    for named in re.findall(r"column=(\w+)/", " ".join(words)):
        assert named == "test" or named in cfg.metrics


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
A_SCRIPT = re.compile(r"(?:\.venv/bin/)?(?:gcfed-\w+|python|pytest|make)$")


def split(command):
    """The words of a command on a page, without ``<clone>/`` and with ``X`` for ``<an address>``;
    none if it is no command of the project.
    """
    text = re.sub(r"<[^>]*>", "X", command.removeprefix("$ ").replace("<clone>/", ""))
    if not A_SCRIPT.match(text.partition(" ")[0]):
        return []
    return shlex.split(text.partition("; ")[0].removeprefix(".venv/bin/"), comments=True)


def test_each_command_on_the_pages_names_what_exists():
    """Targets of make, scripts, files, tests, and the settings of reports."""
    targets = {*re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)}
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    found = Counter()
    for page in PAGES:
        written_on_page = files_in(page.read_text())
        for command in commands_of(page):
            words = split(command)
            if len(words) < 2:
                continue
            name, *rest = words
            found[name] += 1
            said = f"{page.name}: {command}"
            files = [word for word in rest if re.search(r"^\w.*\.py$", word)]
            for file in files:
                assert file in written_on_page or (ROOT / file).is_file(), said
            if name == "make":
                assert {word for word in rest if "=" not in word} <= targets, said
            elif name.startswith("gcfed-"):
                assert name in scripts, said
            if files == ["src/report.py"] or name == "gcfed-report":
                found["reports"] += 1
                with initialize_config_dir(str(CONFIGS), version_base="1.3"):
                    compose("report", [word for word in rest if "=" in word])
    assert found["make"] > 10, found
    assert found["python"] > 30, found
    assert found["reports"] > 4, found


def test_the_tests_that_reliability_names_exist():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs/reliability.md").read_text())
    assert len(named) > 20
    for file, test in named:
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"


def test_the_page_states_how_weights_of_classes_change_a_loss(tmp_path):
    """Its two numbers are those of its two classes, and of torch."""
    page = runpy.run_path(written(tmp_path, "myweights.py"))
    outputs = torch.zeros(2, 2)
    y = torch.tensor([0, 1])
    weight = [1.0, 3.0]
    batch = Batch(outputs[None], y[None], None, torch.tensor([2.0]))
    losses = [page[name](weight).mean_losses(outputs[None], batch) for name in CLASSES]
    stated = [float(number) for number in re.findall(r"\(1.*?\) / .*? = (\d\.\d{3})", OWN)]
    assert [round(loss.item(), 3) for loss in losses] == stated
    torchs = torch.nn.CrossEntropyLoss(weight=torch.tensor(weight))(outputs, y)
    assert losses[1].item() == pytest.approx(torchs.item(), rel=1e-6)


def test_the_weighted_mean_of_a_padded_stack_is_torchs(tmp_path):
    task = runpy.run_path(written(tmp_path, "myweights.py"))["WeightedMean"]([0.5, 2.0, 7.0])
    outputs = torch.randn(2, 5, 3)
    y = torch.randint(3, (2, 5))
    rows = torch.arange(5) < torch.tensor([[5], [2]])
    batch = Batch(outputs, y, rows, rows.sum(1).float(), rows)
    torchs = torch.nn.CrossEntropyLoss(weight=task.weight)
    expected = torch.stack([torchs(outputs[0], y[0]), torchs(outputs[1, :2], y[1, :2])])
    torch.testing.assert_close(task.mean_losses(outputs, batch), expected)


@pytest.mark.parametrize("folder", ["src", "reproductions", "benchmarks"])
def test_no_formatter_has_joined_the_rows_of_a_docstrings_table(folder):
    """A table's border has a part for each column. After a reflow, its parts stand alone."""
    files = [*(ROOT / folder).rglob("*.py")]
    if not files:
        pytest.skip(f"{folder}/ is deleted")
    broken = [path.name for path in files if re.search(r"(?m)^\s*={6,}\s*$", path.read_text())]
    assert not broken
