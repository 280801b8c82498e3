"""Read a server's interface in its sources. Without torch: the doctor reads them where torch is missing."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from pathlib import Path


class ServerInterface(ABC):
    """The names in a server on which a backend relies; each server's is a frozen dataclass.

    A server promises nothing to backends outside its tree, so its sources are read, not the version alone.
    """

    @classmethod
    @abstractmethod
    def from_sources(cls, folder: Path) -> ServerInterface:
        """Read the interface in a package's folder, without an import: plugins load where no GPU may be touched.

        Raises OSError, SyntaxError or ValueError if a file, class or function is not there, or is not Python.
        """

    @abstractmethod
    def find_obstacle(self) -> str | None:
        """Return the first name that the backend was not written for, in words, or None."""


def find_interface_obstacle(interface: type[ServerInterface], folder: Path) -> str | None:
    """Return the first difference, in words, of the sources in a folder from what a backend knows; None without."""
    try:
        return interface.from_sources(folder).find_obstacle()
    except (OSError, ValueError, SyntaxError) as error:
        return f"its sources are not as expected: {error}"


def find_classes(path: Path, *names: str) -> list[ast.ClassDef]:
    """Return classes of a file by their names. Raises OSError, SyntaxError, or ValueError if one is not there."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    try:
        return [classes[name] for name in names]
    except KeyError as error:
        raise ValueError(f"there is no class {error}") from error


def find_method(owner: ast.ClassDef, name: str) -> ast.FunctionDef:
    """Return a method by its name. Raises ValueError if the class has none of it."""
    for node in owner.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise ValueError(f"{owner.name} has no {name}")


def list_parameters(owner: ast.ClassDef, name: str) -> tuple[str, ...]:
    """List a method's parameters, without the object or the class. Raises ValueError if the class has none of it."""
    arguments = find_method(owner, name).args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return tuple(name for name in names if name not in ("self", "cls"))


def read_fields(owner: ast.ClassDef) -> dict[str, object]:
    """Return the annotated names of a class, with their values where these are constants."""
    return {
        node.target.id: node.value.value if isinstance(node.value, ast.Constant) else None
        for node in owner.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
