"""Tests of how the code reads: verbs for functions, docstrings that stand alone, signatures a caller can follow."""

import ast
import re
from collections import Counter
from functools import cache

from support.pages import ROOT

# The bounds of today: at each step they are tightened to what there is, never loosened.
MOST_SHARE_OF_NOUNS = 0.13  # of functions
MOST_PARAMETERS = 10  # of a function that runs on the host

# Frozen. Other names are a constructor's (`from_...`), a property's, or one of mathematics.
VERBS = frozenset((ROOT / "tests" / "repository" / "verbs.txt").read_text(encoding="utf-8").split())
MATHEMATICS = frozenset(
    {"softmax", "logsumexp", "covariance", "quantile", "mean", "median", "interval", "hull", "sha256"}
)
QUESTIONS = frozenset({"what", "who", "whether", "how", "why", "which", "where", "when", "that"})
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


PACKAGES = ("s2o_runtime", "calibrate")


@cache
def trees(folders):
    """The syntax trees of folders by path in the repository."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def nodes(kinds, folders=PACKAGES):
    return [(path, node) for path, tree in trees(folders).items() for node in ast.walk(tree) if isinstance(node, kinds)]


def has_decorator(node, pattern):
    return any(re.search(pattern, ast.unparse(decorator)) for decorator in node.decorator_list)


def functions():
    """Functions and methods with their files, without special methods and properties, which are named as values."""
    return [
        (path, node)
        for path, node in nodes(ast.FunctionDef | ast.AsyncFunctionDef)
        if not node.name.startswith("__") and not has_decorator(node, r"property|\.setter$")
    ]


def begins_with_a_verb(name):
    words = name.strip("_")
    return words.partition("_")[0] in VERBS or words.startswith("from_") or words in MATHEMATICS


def asks(docstring):
    return re.split(r"\W", docstring.strip().lower(), maxsplit=1)[0] in QUESTIONS


def parameters(node):
    """The names of a function's parameters, without the object or class that a method is of."""
    listed = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [parameter.arg for parameter in listed if parameter.arg not in ("self", "cls")]


def test_functions_begin_with_a_verb():
    names = [node.name for _, node in functions()]
    nouns = [name for name in names if not begins_with_a_verb(name)]
    assert len(names) > 1000
    assert len(nouns) / len(names) <= MOST_SHARE_OF_NOUNS, nouns


def test_docstrings_do_not_begin_with_a_question_word():
    documented = nodes(DOCUMENTED, (*PACKAGES, "tests", "scripts"))
    docstrings = [text for _, node in documented if (text := ast.get_docstring(node))]
    assert len(docstrings) > 1000
    assert list(filter(asks, docstrings)) == []


def test_no_class_name_is_used_twice():
    """A name means one thing in the whole repository."""
    classes = [(node.name, path) for path, node in nodes(ast.ClassDef, (*PACKAGES, "scripts"))]
    counts = Counter(name for name, _ in classes)
    assert len(counts) > 100
    assert [found for found in classes if counts[found[0]] > 1] == []


def test_no_host_function_has_too_many_parameters():
    """Kernels take what Triton specialises one by one."""
    assert [
        f"{path}:{node.name}"
        for path, node in nodes(ast.FunctionDef | ast.AsyncFunctionDef)
        if len(parameters(node)) > MOST_PARAMETERS and not has_decorator(node, r"\bjit\b|overload")
    ] == []
