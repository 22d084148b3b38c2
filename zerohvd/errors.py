"""Errors that a user may want to catch."""

from __future__ import annotations


class ZeroError(RuntimeError):
    """Base of the errors below."""


class DisagreementError(ZeroError):
    """The ranks do not run the same model or settings. Raised on every one of them."""


class ShardedStateError(ZeroError):
    """A call that would treat this rank's shard as if it were the whole state."""


class NonFiniteError(ZeroError):
    """Gradients are NaN or infinite. Raised on every rank."""


class WaitTimeoutError(ZeroError, TimeoutError):
    """Another rank did not come, or has ended; see `zerohvd.limits`. Raised on ranks that wait."""
