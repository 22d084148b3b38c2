"""Weak references to owners: from a framework's objects, and in callbacks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class _WeakOwner(weakref.ref):  # type: ignore[type-arg]
    """A weak reference that can be pickled with its object; one from a file refers to nobody."""

    def __reduce__(self) -> Any:
        return type(None), ()


class OwnerMark:
    """Says on an object, such as a parameter, who owns it.

    A framework's references to parameters may be invisible to the garbage collector, as autograd's
    are: a strong reference from a parameter to its owner would keep a model alive for ever.
    """

    def __init__(self, attribute: str) -> None:
        """
        Args:
            attribute: Of the objects; the only mark of this name.
        """
        self._attribute = attribute

    def set(self, marked: Any, owner: Any) -> None:
        """Note the owner; None: nobody any more."""
        setattr(marked, self._attribute, None if owner is None else _WeakOwner(owner))

    def owner_of(self, marked: Any) -> Any:
        """Return the owner while it lives, or None."""
        owner = getattr(marked, self._attribute, None)
        return None if owner is None else owner()


def unless_gone(method: Callable[[], None]) -> Callable[[], None]:
    """The same call, without keeping the method's object alive; a no-op once it is gone."""
    held = weakref.WeakMethod(method)

    def call() -> None:
        living = held()
        if living is not None:
            living()

    return call
