"""Names that mean one thing in the whole repository."""

import ast
from collections import defaultdict

from support.pages import ROOT


def test_no_class_name_is_used_twice():
    files = defaultdict(list)
    for folder in ("s2o_runtime", "calibrate", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    files[node.name].append(str(path.relative_to(ROOT)))
    assert len(files) > 100
    assert {name: where for name, where in files.items() if len(where) > 1} == {}
