"""Write docs/look-inside.md: the notebook of examples/, executed, with its outputs and pictures.

    python -m scripts.docs.notebook            # half a minute on a CPU

The notebook itself is kept without outputs, so that a change of it is readable. Executing it needs nbclient and
ipykernel, which are among the packages of `[dev]`.
"""

from __future__ import annotations

import base64
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent.parent
NOTEBOOK = ROOT / "examples" / "look_inside.ipynb"
PAGE = ROOT / "docs" / "look-inside.md"
PICTURES = "look-inside"  # the folder of its pictures, beside the page
SECONDS = 600  # that a cell may take; all of them together take half a minute on two free cores
DOCS = "../docs/"  # how the notebook's links to the documentation begin


class Page(NamedTuple):
    """A page of Markdown, and the pictures that it shows: PNG by file name."""

    text: str
    pictures: dict[str, bytes]


def read(path: Path) -> Any:
    """A notebook, as nbformat has it."""
    import nbformat

    return nbformat.read(path, as_version=4)


def execute(notebook: Any, folder: Path) -> Any:
    """Run every cell of a notebook in a process of its own and put the outputs into it.

    Args:
        notebook: as `read` reads it.
        folder: in which it runs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed; the error has the cell and its traceback.
    """
    from nbclient import NotebookClient

    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    client = NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(folder)}})
    return client.execute(env=os.environ | {"PYTHONPATH": paths})


def page_of(notebook: Any) -> Page:
    """An executed notebook as a page of the documentation. What cells wrote to standard error is left out."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source.replace(DOCS, ""))
            continue
        parts.append(f"```python\n{cell.source}\n```")
        printed = "".join(output.text for output in cell.outputs if output.get("name") == "stdout")  # it is in pieces
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                name = f"{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode(output.data["image/png"])
                parts.append(f"![Picture {len(pictures)} of the notebook]({PICTURES}/{name})")
    source = f"../{NOTEBOOK.relative_to(ROOT)}"
    parts.insert(
        1, f"Written by `python -m scripts.docs.notebook` from [{NOTEBOOK.name}]({source}), which you can run."
    )
    return Page("\n\n".join(parts) + "\n", pictures)


def main() -> int:
    """Execute the notebook and write its page; returns the exit code."""
    text, pictures = page_of(execute(read(NOTEBOOK), ROOT))
    folder = PAGE.parent / PICTURES
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    for name, data in pictures.items():
        (folder / name).write_bytes(data)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
