"""Finds the installed adapters, for tools of the core that need a framework's operations.

An adapter registers a module in the entry point group `zerohvd.adapters`; the core never names one
in an import. `zerohvd.communication.collectives.ArrayOps` says what `arrays` has to offer.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from zerohvd.checkpoint.offline.consolidate import WriteWeights
from zerohvd.communication.collectives import ArrayOps
from zerohvd.errors import ZeroError
from zerohvd.planning.workload import Wishes, Workload

GROUP = "zerohvd.adapters"


class AdapterNotFoundError(ZeroError):
    """No installed package has registered the adapter."""


class Adapter(Protocol):
    """What the core's tools ask of an adapter: the module behind its entry point."""

    @property
    def arrays(self) -> ArrayOps: ...

    @property
    def weight_files(self) -> Mapping[str, WriteWeights]:
        """Suffix -> what writes weights into a file of the framework's own."""

    @property
    def workload(self) -> Callable[[Callable[[], Any], Wishes], Workload]:
        """Describes what a function makes, for `zerohvd plan`: a model, or a model and its
        optimizer. It is called so that the model takes no memory."""


def load_adapter(name: str) -> Adapter:
    """Import an adapter, and with it its framework.

    Args:
        name: As registered: "torch" or "keras".
    """
    registered = importlib.metadata.entry_points(group=GROUP)
    found = [point for point in registered if point.name == name]
    if not found:
        others = ", ".join(sorted({point.name for point in registered})) or "none"
        raise AdapterNotFoundError(
            f"the adapter {name!r} is not registered (in the entry point group {GROUP!r}: "
            f"{others}). Entry points come from the metadata of the installed package: run "
            "`python -m pip install -e .` in a checkout of zerohvd, or reinstall zerohvd with pip "
            "if it is older than this version"
        )
    adapter: Adapter = found[0].load()
    return adapter
