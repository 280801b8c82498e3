"""The version of both packages; pyproject.toml reads it here."""

__version__ = "0.2.0"
OLD_NAMES_GO_WITH = "0.3.0"  # what was renamed in this minor version works until then (docs/stability.md)
