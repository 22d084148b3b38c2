"""A wrapper that passes for the optimizer it wraps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch


class Resembling:
    """`isinstance(opt, TheirOptimizer)` is true, and their methods and attributes are those of the
    wrapped optimizer, as with Horovod's wrapper, which is a subclass made on the spot.

    Inheriting from their class would run their methods on the wrapper: attributes that they set
    would not be those that their `step()` reads.

    Attributes:
        inner: The wrapped optimizer.
    """

    inner: torch.optim.Optimizer

    @property
    def _resembles(self) -> bool:
        """Whether the wrapper is complete: torch's own constructor has to see what it is."""
        raise NotImplementedError

    # isinstance() asks for the type first, and then for this.
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.inner) if self._resembles else type(self)

    if not TYPE_CHECKING:  # or misspelt names would pass

        def __getattr__(self, name: str) -> Any:
            inner = vars(self).get("inner")
            if inner is None or name.startswith("__"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(inner, name)

        def __setattr__(self, name: str, value: Any) -> None:
            theirs = (
                not name.startswith("_")
                and self._resembles
                and name not in vars(self)
                and not hasattr(type(self), name)
                and hasattr(self.inner, name)
            )
            if theirs:
                setattr(self.inner, name, value)
            else:
                super().__setattr__(name, value)
