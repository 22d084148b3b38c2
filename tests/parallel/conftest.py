"""Which numbers of ranks a file of tests runs at: all that there are, or its `RANKS`."""

from __future__ import annotations

import os
import socket

import pytest

from zerohvd.launchers import detect


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the files that another number of ranks tests as well."""
    size = detect(os.environ).size or 1
    everything = list(items)
    items[:] = [item for item in everything if size in getattr(item.module, "RANKS", [size])]
    kept = set(items)
    config.hook.pytest_deselected(items=[item for item in everything if item not in kept])


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every second rank were on the other host."""
    rank = detect(os.environ).rank or 0
    monkeypatch.setattr(socket, "gethostname", lambda: f"host{rank % 2}")
