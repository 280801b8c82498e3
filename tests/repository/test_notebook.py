"""The notebook of examples/ is kept without outputs and runs from its first cell to its last."""

import os

import pytest

from support.pages import ROOT


@pytest.fixture
def notebook():
    nbformat = pytest.importorskip("nbformat", reason="the notebook is read with nbformat: pip install nbclient")
    return nbformat.read(ROOT / "examples" / "look_inside.ipynb", as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_it_is_kept_without_outputs(notebook):
    assert code_cells(notebook)
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code_cells(notebook))


@pytest.mark.exhaustive(reason="starts a kernel and calibrates in it")
def test_every_cell_runs(notebook, tmp_path):
    pytest.importorskip("ipykernel", reason="the notebook runs in ipykernel: pip install nbclient ipykernel")
    from nbclient import NotebookClient

    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=os.environ | {"PYTHONPATH": paths})
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    assert "written: True; needles kept: 2 of 2" in printed
    assert "S2O finds 2 of 2 codes" in printed
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
