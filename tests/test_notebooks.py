"""Every notebook runs from top to bottom, and git holds none of its output."""

from pathlib import Path

import nbformat
import pytest
from conftest import CACHE
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def path(request) -> Path:
    return request.param


def test_there_are_notebooks():
    assert {"quickstart.ipynb", "speculative_decoding.ipynb"} <= {path.name for path in PATHS}


def test_outputs_are_stripped(path):
    cells = nbformat.read(path, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert code
    for cell in code:
        assert cell.outputs == [] and cell.execution_count is None, cell.source


def test_notebook_runs_and_shows_its_plots(path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(CACHE))  # inherited by the kernel
    notebook = nbformat.read(path, as_version=4)
    plots = sum("plt.show()" in cell.source for cell in notebook.cells)
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": NOTEBOOKS}}
    ).execute()
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", ())]
    assert sum("image/png" in o.get("data", {}) for o in outputs) == plots > 0
