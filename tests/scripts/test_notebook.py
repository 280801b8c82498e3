"""The notebook of examples/ runs from its first cell to its last, and its page in the documentation is of it."""

import pytest

from scripts.docs import notebook


@pytest.fixture
def cells():
    pytest.importorskip("nbformat", reason="the notebook is read with nbformat: pip install nbclient ipykernel")
    return notebook.read(notebook.NOTEBOOK)


def test_it_is_kept_without_outputs(cells):
    code = [cell for cell in cells.cells if cell.cell_type == "code"]
    assert code
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


def test_the_page_has_its_text_and_code_and_pictures(cells):
    """The outputs between them are of some run: times, and choices that follow from times, differ from run to run."""
    page = notebook.PAGE.read_text(encoding="utf-8")
    position = 0
    for cell in cells.cells:
        text = cell.source.replace(notebook.DOCS, "") if cell.cell_type == "markdown" else f"```python\n{cell.source}\n"
        position = page.find(text, position)
        assert position >= 0, f"python -m scripts.docs.notebook writes this anew: {text}"
        position += len(text)
    pictures = sorted((notebook.PAGE.parent / notebook.PICTURES).glob("*.png"))
    assert len(pictures) == 3
    assert all(f"({notebook.PICTURES}/{picture.name})" in page for picture in pictures)


@pytest.mark.slow(reason="starts a kernel and calibrates in it; the tests above read the same notebook")
def test_every_cell_runs(cells, tmp_path):
    pytest.importorskip("ipykernel", reason="the notebook runs in ipykernel: pip install nbclient ipykernel")
    page = notebook.page_of(notebook.execute(cells, tmp_path))
    assert "written: True; needles kept: 2 of 2" in page.text
    assert "S2O finds 2 of 2 codes" in page.text
    assert len(page.pictures) == 3
    lines = [line for line in page.text.splitlines() if line.startswith("layer ") and "rel_mse" in line]
    densities = [float(line.split("density ")[1].split(",")[0]) for line in lines]
    errors = [float(line.split("rel_mse ")[1]) for line in lines]
    assert len(lines) == 6
    assert min(densities) < 0.5
    assert 0 < max(errors) < 3e-2  # the budget is 1e-2 on the mean of other prompts


@pytest.mark.slow(reason="starts a kernel, which takes seconds; nothing else is slow about it")
def test_a_cell_that_fails_is_an_error(cells, tmp_path):
    pytest.importorskip("ipykernel", reason="the notebook runs in ipykernel: pip install nbclient ipykernel")
    from nbclient.exceptions import CellExecutionError

    (first, *_) = [cell for cell in cells.cells if cell.cell_type == "code"]
    first.source = "raise ValueError('no such thing')"
    cells.cells = [first]
    with pytest.raises(CellExecutionError, match="no such thing"):
        notebook.execute(cells, tmp_path)
