"""The bytes of profiles, read and changed without the checks of the package."""

import json
from pathlib import Path

from safetensors.torch import load, save

from s2o_runtime.profile import METADATA_KEY

FORMAT = Path(__file__).parents[2] / "docs" / "profile-format.md"


def document_of(data):
    """What a profile's bytes say, as JSON gives it."""
    size = int.from_bytes(data[:8], "little")
    return json.loads(json.loads(data[8 : 8 + size])["__metadata__"][METADATA_KEY])


def file_of(document, tensors):
    """The bytes of a profile with this document, or text in its place, and these tensors, whatever they are."""
    text = document if isinstance(document, str) else json.dumps(document)
    return save(tensors, metadata={METADATA_KEY: text})


def rewrite(path, change):
    """Change a profile's document behind its back and keep the tensors."""
    document = document_of(path.read_bytes())
    path.write_bytes(file_of(change(document) or document, load(path.read_bytes())))
