"""Faults of S2O end tests, as they end no server."""

import pytest

from s2o_runtime.monitor.counters import Counters


@pytest.fixture(autouse=True)
def _raise_faults(request, monkeypatch):
    """Raise what a server survives, unless a test is of faults, by its name."""

    def count_fault(self, layer, error):
        raise error

    if "_fault" not in request.node.name:
        monkeypatch.setattr(Counters, "count_fault", count_fault)
