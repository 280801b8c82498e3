"""Read what a server's sources say of its interface. Without torch: the doctor reads them where torch is missing."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from pathlib import Path


class ServerInterface(ABC):
    """What of a server a backend relies on, as names; each server's is a frozen dataclass.

    A server promises nothing to backends outside its tree, so this is looked at, not the version alone.
    """

    @classmethod
    @abstractmethod
    def in_sources(cls, folder: Path) -> ServerInterface:
        """The interface in a server's sources. Nothing is imported: plugins are loaded where no GPU may be touched.

        Args:
            folder: of the server's package.

        Raises:
            OSError: a file is not there.
            ValueError: a class or function is not there, or a file is no Python.
        """

    @abstractmethod
    def obstacle(self) -> str | None:
        """What of it the backend was not written for, or None."""


def interface_obstacle(interface: type[ServerInterface], folder: Path) -> str | None:
    """What of a server's interface a backend was not written for; None if it was.

    Args:
        interface: of the server.
        folder: of the server's sources.
    """
    try:
        return interface.in_sources(folder).obstacle()
    except (OSError, ValueError, SyntaxError) as error:
        return f"its sources are not as expected: {error}"


def named_classes(path: Path, *names: str) -> list[ast.ClassDef]:
    """Classes of a file by their names. Raises OSError, SyntaxError, or ValueError if one is not there."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    try:
        return [classes[name] for name in names]
    except KeyError as error:
        raise ValueError(f"there is no class {error}") from error


def method(owner: ast.ClassDef, name: str) -> ast.FunctionDef:
    """A method by its name. Raises ValueError if the class has none of it."""
    definitions = [node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not definitions:
        raise ValueError(f"{owner.name} has no {name}")
    return definitions[0]


def parameters(owner: ast.ClassDef, name: str) -> tuple[str, ...]:
    """The parameters of a method, without the object or the class. Raises ValueError if the class has none of it."""
    arguments = method(owner, name).args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return tuple(name for name in names if name not in ("self", "cls"))


def fields(owner: ast.ClassDef) -> dict[str, object]:
    """The annotated names of a class, with their values where these are constants."""
    return {
        node.target.id: node.value.value if isinstance(node.value, ast.Constant) else None
        for node in owner.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
