"""The notebooks run at a small scale. Their stored outputs are small and name no machine."""

import copy
import re

import nbformat
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient
from omegaconf import open_dict

from gcfed.api import configure
from gcfed.utils.resolvers import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Replaces the cell tagged "parameters", and the assertion after all cells.
SMALL = {
    "01_quickstart": ("ROUNDS = 3", "assert 0.3 < accuracy <= 1 and result.frame.index.tolist() == [1, 2, 3]"),
    "02_lambda_sweep": (
        "ROUNDS, SEEDS, LAMBDAS = 2, [1], [0.0, 1.0]",
        "assert seeds.shape == (3, 1) and (seeds > 5).all(axis=None) and (table['seeds'] == 1).all()\n"
        "a, b = (comparison.frame.loc[f'λ = {lam}']['train/loss'] for lam in ('0.00', '1.00'))\n"
        "assert not a.equals(b)",
    ),
    "03_write_your_own_method": (
        "ROUNDS = 2",
        "assert 0 <= largest < 1e-12\n"
        "a, b = comparison.curves('test/acc').values()\n"
        "assert len(a) == len(b) == 2 and not np.allclose(a, b)",
    ),
    "04_reading_results": (
        "ROUNDS, SEEDS = 2, [1]",
        "assert [(run.state, run.rounds) for run in runs] == [('finished', 2)] * 2\n"
        "assert [*frame.groupby('method').size()] == [1, 1]",
    ),
}


def printed(notebook):
    """The lines that the cells tagged "same" print. At a small scale they print some of the stored lines."""
    cells = [cell for cell in notebook.cells if "same" in cell.metadata.get("tags", [])]
    return [line for cell in cells for output in cell.outputs for line in output.get("text", "").splitlines()]


def numbers(line):
    """The text of a line without its numbers, and these."""
    pattern = r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?"
    return re.sub(pattern, "#", line), [float(number) for number in re.findall(pattern, line)]


def outputs(notebook, kind=""):
    """The outputs of a notebook, or their data of one type."""
    found = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return [output.data[kind] for output in found if kind in output.get("data", {})] if kind else found


def results(notebook):
    """The kinds of its outputs without printed text, which a busy machine splits into more parts."""
    return [output.output_type for output in outputs(notebook) if output.output_type != "stream"]


def test_a_config_from_python_is_that_of_the_command_line():
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        cfg = compose("train", ["gc=none", "seed=3"])
    with open_dict(cfg):
        cfg.paths.output_dir, cfg.trainer.devices, cfg.callbacks.progress = "logs/here", 1, None
    assert configure("gc=none", ["seed=3"], folder="logs/here") == cfg
    assert configure("trainer.devices=2", folder="logs/here").trainer.devices == 2


@pytest.mark.slow
def test_the_notebooks_run_at_a_small_scale(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))  # the clone's own code, whatever is installed
    for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    # One kernel for all of them, since it imports torch; emptied in between, and moved from their folder to the root.
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(ROOT / "notebooks"))
    assert [path.stem for path in NOTEBOOKS] == sorted(SMALL)
    try:
        for path in NOTEBOOKS:
            notebook = nbformat.read(path, as_version=4)
            stored = copy.deepcopy(notebook)
            parameters, check = SMALL[path.stem]
            (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
            cell.source = f"{parameters}\nLOGS = {str(tmp_path / path.stem)!r}"
            notebook.cells.append(nbformat.v4.new_code_cell(check))
            notebook.cells.append(nbformat.v4.new_code_cell("%reset -f\n%cd -q " + str(ROOT)))
            NotebookClient(notebook, km=manager, timeout=300).execute()
            assert len(outputs(notebook, "image/png")) == len(outputs(stored, "image/png")) > 0, path.stem
            known = [numbers(line) for line in printed(stored)]
            assert results(notebook) == results(stored)
            assert len(printed(notebook)) > 1
            for text, found in map(numbers, printed(notebook)):  # stored outputs are those of the present code
                near = (pytest.approx(values, abs=0.02, rel=0.01) for words, values in known if words == text)
                assert any(found == values for values in near), (path.stem, text, found)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_stored_is_light_and_says_nothing_of_a_machine(path):
    assert path.stat().st_size < 150_000
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)], "run it from top to bottom"
    assert 1 <= len(outputs(notebook, "image/png")) <= 2
    stored = [cell.source for cell in notebook.cells]
    for output in outputs(notebook):
        assert output.output_type != "error"
        assert output.get("name") != "stderr", output
        stored += [output.get("text", ""), *(v for k, v in output.get("data", {}).items() if k != "image/png")]
    assert not re.findall(r"(?<![\w.…<])/(?:\w[\w.-]*/)+|[A-Z]:\\", "\n".join(stored)), "a path of somebody's machine"


def test_links_between_documents_lead_somewhere():
    """Files, and headings as GitHub names them."""
    for source in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *NOTEBOOKS]:
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
                slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
                assert heading in slugs, f"{source.name}: {link}"
