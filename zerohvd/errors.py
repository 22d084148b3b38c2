"""Errors that a user may want to catch.

Each of them, and each that is derived from them, says in its traceback where it is explained.
"""

from __future__ import annotations

from typing import Any

_EXPLAINED = "docs/troubleshooting.md"


class ZeroError(RuntimeError):
    """Base of the errors below.

    Attributes:
        help: Where an error of this class is explained.
    """

    help = f"{_EXPLAINED}#zeroerror"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.help = f"{_EXPLAINED}#{cls.__name__.lower()}"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # A note stands under the message in tracebacks, and is no part of it. Since Python 3.11.
        note = getattr(self, "add_note", None)
        if note is not None:
            note(f"What to do: {self.help}")


class DisagreementError(ZeroError):
    """The ranks do not run the same model or settings. Raised on every one of them."""


class ShardedStateError(ZeroError):
    """A call that would treat this rank's shard as if it were the whole state."""


class NonFiniteError(ZeroError):
    """Gradients are NaN or infinite. Raised on every rank."""


class WaitTimeoutError(ZeroError, TimeoutError):
    """Another rank did not come, or has ended; see `zerohvd.limits`. Raised on ranks that wait."""
