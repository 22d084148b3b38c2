"""Which numbers of ranks a file of tests runs at: all that there are, or its `RANKS`."""

from __future__ import annotations

import os

import pytest

from zerohvd.launchers import detect


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the files that another number of ranks tests as well."""
    size = detect(os.environ).size or 1
    everything = list(items)
    items[:] = [item for item in everything if size in getattr(item.module, "RANKS", [size])]
    kept = set(items)
    config.hook.pytest_deselected(items=[item for item in everything if item not in kept])
