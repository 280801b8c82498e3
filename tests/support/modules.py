"""Modules that are not installed here, such as those of servers, in tests of what imports them."""

import sys
from types import ModuleType


def put_modules(monkeypatch, contents):
    """Put modules with these contents, by dotted names, in the place of what is there; they import nothing.

    Packages above them that are not there are made too.
    """
    for dotted, content in contents.items():
        parts = dotted.split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[:count])
            if name not in sys.modules or count == len(parts):
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[dotted]).update(content)
