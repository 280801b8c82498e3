"""The bytes of profiles, read and changed without the checks of the package."""

import json
from pathlib import Path

from safetensors.torch import save

from s2o_runtime.profile import METADATA_KEY

FORMAT = Path(__file__).parents[2] / "s2o_runtime" / "profile" / "FORMAT.md"


# of one length and three layers: one was left as it was, one got less of its budget, one became dense
CERTIFICATE = {
    "confidence": 0.95,
    "method": "bounds",
    "lengths": [
        {
            "length": 8192,
            "prompts": 19,
            "groups": 17,
            "tokens": 19 * 8192,
            "share": 0.8384,
            "error_over_limit": 1.75,
            "kl": 2e-3,
            "mean_kl": 1e-3,
            "noise_floor": 1e-4,
            "top1": 0.985,
            "retrieval": {"found": 32, "kept": 30, "low": 0.79, "high": 0.99},
            "domains": [
                {"domain": "code", "prompts": 10, "groups": 10, "kl": 1e-3}
                | {"error_over_limit": 0.4, "answer_over_limit": 1.2},
                {"domain": "prose", "prompts": 9, "groups": 7, "kl": 2e-3}
                | {"error_over_limit": 0.5, "answer_over_limit": 0.9},
            ],
            "layers": [
                {"mean": 5e-4, "bound": 8e-4, "density": 0.5, "limit": 1e-3},
                {"mean": 5e-4, "bound": 7e-4, "spent": 0.7, "density": 0.6, "limit": 1e-3},
                {"mean": 0.0, "bound": 0.0, "spent": 0.0, "density": 1.0, "limit": 1e-3},
            ],
        }
    ],
}


def document_of(data):
    """What a profile's bytes say, as JSON gives it."""
    size = int.from_bytes(data[:8], "little")
    return json.loads(json.loads(data[8 : 8 + size])["__metadata__"][METADATA_KEY])


def file_of(document, tensors):
    """The bytes of a profile with this document, or text in its place, and these tensors, whatever they are."""
    text = document if isinstance(document, str) else json.dumps(document)
    return save(tensors, metadata={METADATA_KEY: text})
