"""Engines of both servers, for tests of what they share."""

import pytest

from s2o_runtime.serving.fit import Rank
from support.engines import ENGINES
from support.fake_server import FakeServer
from support.server_batches import two_layers


@pytest.fixture(params=ENGINES)
def make_engine(request):
    """Makes an engine for a profile, by default of two layers, the second of which is dense."""

    def make(profile=None, *, rank=Rank(), tested=True, **options):  # noqa: B008 (it never changes)
        server = FakeServer(profile or two_layers(), rank, "cpu", 2048, tested)
        return ENGINES[request.param](server, **options)

    return make
