"""The model that most of these tests patch."""

import pytest
import torch

from support.models import new_model


@pytest.fixture(scope="module")
def eager():
    """A small llama with eager attention; tests do not change it."""
    torch.manual_seed(1)
    return new_model(implementation="eager")
