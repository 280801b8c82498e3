"""The version of both packages; pyproject.toml reads it here."""

__version__ = "0.1.0"
