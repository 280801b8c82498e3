"""A process that has a profile from its environment."""

import pytest

from s2o_runtime.profile import save_profile
from support.environment import forget, under_s2o_run


@pytest.fixture
def named(profile, tmp_path, monkeypatch):
    """The path of the file's profile, which S2O_PROFILE names."""
    path = tmp_path / "profile.safetensors"
    save_profile(profile, path)
    monkeypatch.setenv("S2O_PROFILE", str(path))
    forget()
    yield path
    forget()


@pytest.fixture
def taken_over(named):
    with under_s2o_run():
        yield named
