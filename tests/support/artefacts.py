"""Files that several tests read and that take long to make: made once for all processes of a run of the tests."""

import os
import shutil

from filelock import FileLock


def shared(tmp_path_factory, name, make):
    """A folder that `make(folder)` filled, in this process or in another of the same run; tests do not change it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(f"{folder}.lock"):
        if not (folder / "whole").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            (folder / "whole").touch()
    return folder
