"""The notebooks run at a small scale.

Their stored outputs are small and contain no path of a machine.
"""

import copy
import os
import re

import nbformat
import pytest
from conftest import forked
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from omegaconf import open_dict

from gcfed.api import configure
from gcfed.utils.resolvers import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# For each notebook: a cell that replaces the one tagged "parameters", and an assertion after all
# cells.
SMALL = {
    "01_quickstart": (
        "ROUNDS = 3",
        "assert 0.3 < accuracy <= 1 and result.frame.index.tolist() == [1, 2, 3]",
    ),
    "02_lambda_sweep": (
        "ROUNDS, SEEDS, LAMBDAS = 1, [1], [0.0, 1.0]",
        (
            "assert seeds.shape == (3, 1) and (seeds > 5).all(axis=None) and (table['seeds'] =="
            " 1).all()\na, b = (comparison.frame.loc[f'λ = {lam}']['train/loss'] for lam in"
            " ('0.00', '1.00'))\nassert not a.equals(b)"
        ),
    ),
    "03_write_your_own_method": (
        "ROUNDS = 2",
        (
            "assert 0 <= largest < 1e-12\n"
            "a, b = comparison.curves('test/acc').values()\n"
            "assert len(a) == len(b) == 2 and not np.allclose(a, b)"
        ),
    ),
    "04_reading_results": (
        "ROUNDS, SEEDS = 2, [1]",
        (
            "assert [*runs['state']] == ['finished'] * 2 and [*runs['rounds']] == [2, 2]\n"
            "assert [*runs.groupby('method').size()] == [1, 1]"
        ),
    ),
}


def printed(notebook):
    """The lines that the cells tagged "same" print.

    At a small scale they print some of the stored lines.
    """
    cells = [cell for cell in notebook.cells if "same" in cell.metadata.get("tags", [])]
    return [
        line
        for cell in cells
        for output in cell.outputs
        for line in output.get("text", "").splitlines()
    ]


def numbers(line):
    """The text of a line without its numbers, and the numbers."""
    pattern = r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?"
    return re.sub(pattern, "#", line), [float(number) for number in re.findall(pattern, line)]


def outputs(notebook, kind=""):
    """The outputs of a notebook, or with ``kind`` their data of this type."""
    found = [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]
    return (
        [output.data[kind] for output in found if kind in output.get("data", {})] if kind else found
    )


def results(notebook):
    """The data types of a notebook's tables and figures."""
    return [
        sorted(output.data)
        for output in outputs(notebook)
        if {*output.get("data", {})} - {"text/plain"}
    ]


class Shell(InteractiveShell):
    def enable_gui(self, gui=None):
        """A notebook's figures need no window."""


def execute(notebook):
    """Runs all cells in this process, as a kernel does, and stores their outputs.

    An error is raised.
    """
    shell = Shell.instance()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            with capture_output() as captured:
                done = shell.run_cell(cell.source)
            done.raise_error()
            shown = [output.data for output in captured.outputs]
            if done.result is not None:
                shown.append(shell.display_formatter.format(done.result)[0])
            cell.outputs = [nbformat.v4.new_output("display_data", data) for data in shown]
            cell.outputs.append(nbformat.v4.new_output("stream", text=captured.stdout))


def test_a_config_from_python_equals_that_of_the_command_line():
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        cfg = compose("train", ["gc=none", "seed=3"])
    with open_dict(cfg):
        cfg.paths.output_dir = "logs/here"
        cfg.trainer.devices = 1
        cfg.callbacks.progress = None
    assert configure("gc=none", ["seed=3"], folder="logs/here") == cfg
    assert configure("trainer.devices=2", folder="logs/here").trainer.devices == 2


def run_small(path, folder):
    """Executes a notebook at a small scale and compares its outputs with the stored ones."""
    stored = nbformat.read(path, as_version=4)
    notebook = copy.deepcopy(stored)
    parameters, check = SMALL[path.stem]
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    cell.source = f"{parameters}\nLOGS = {str(folder)!r}"
    notebook.cells.append(nbformat.v4.new_code_cell(check))
    os.chdir(path.parent)
    execute(notebook)
    assert len(outputs(notebook, "image/png")) > 0
    assert results(notebook) == results(stored)
    known = [numbers(line) for line in printed(stored)]
    assert printed(notebook)
    for text, found in map(numbers, printed(notebook)):  # the stored outputs must be up to date
        near = (
            pytest.approx(values, abs=0.02, rel=0.01) for words, values in known if words == text
        )
        assert any(found == values for values in near), (text, found)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_at_a_small_scale(path, tmp_path, unrendered):
    """A fork of this process runs it. Figures are rendered for the page, but not for files."""
    code = forked(lambda: run_small(path, tmp_path / "logs"), tmp_path / "printed.txt")
    assert code == 0, (tmp_path / "printed.txt").read_text()[-4000:]


def imported(text):
    """The modules of the package from which a text imports."""
    return {*re.findall(r"^from (gcfed[\w.]*) import", text, re.MULTILINE)}


def test_notebooks_import_what_the_pages_document():
    pages = [ROOT / "docs/python.md", ROOT / "docs/add-a-method.md"]
    documented = set().union(*(imported(page.read_text()) for page in pages))
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
        assert imported(code) <= documented, path.name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_small_and_contain_no_path(path):
    assert path.stat().st_size < 150_000
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)], (
        "run it from top to bottom"
    )
    assert 1 <= len(outputs(notebook, "image/png")) <= 2
    stored = [cell.source for cell in notebook.cells]
    for output in outputs(notebook):
        assert output.output_type != "error"
        assert output.get("name") != "stderr", output
        stored += [
            output.get("text", ""),
            *(v for k, v in output.get("data", {}).items() if k != "image/png"),
        ]
    assert not re.findall(r"(?<![\w.…<])/(?:\w[\w.-]*/)+|[A-Z]:\\", "\n".join(stored)), (
        "a path of a machine"
    )


def test_links_between_documents_are_valid():
    """Links lead to files, or to headings with GitHub's names."""
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("reproductions/**/*.md"),
    ]
    for source in [*pages, *NOTEBOOKS]:
        text = source.read_text()
        if source.suffix == ".ipynb":
            notebook = nbformat.read(source, as_version=4)
            text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" in link:
                continue
            name, _, heading = link.partition("#")
            target = source.parent / name if name else source
            assert target.exists(), f"{source.name}: {link}"
            if heading:
                titles = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE)
                slugs = [
                    re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles
                ]
                assert heading in slugs, f"{source.name}: {link}"
