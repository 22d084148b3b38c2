"""Placeholder of a sharded variable: raises an error with the variable's name on access.

The variable keeps its identity, shape, dtype, path and regularizer. What it stores is this rank's
part, a 1-D tf.Variable: that is what gradients are taken of. Whatever would read or write values
raises, unless the variable's unit is gathered.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

import keras
import tensorflow as tf

from zerohvd.errors import ShardedStateError
from zerohvd.keras import compat
from zerohvd.keras.communication.wire import Wire
from zerohvd.layout import Span


class Home(Protocol):
    """Who knows where a variable's values are now."""

    wire: Wire

    @property
    def recomputes(self) -> bool:
        """Whether backward calls any layer again."""

    def bucket_of(self, variable: Any) -> Any:
        """The `UnitBucket` that the variable lies in."""

    def is_alone(self) -> bool:
        """Whether there is one rank, which has everything."""

    def read(self, variable: Any) -> Any:
        """The whole value, or None if no rank holds it now."""

    def regularize(self, variable: Any, regularizer: Callable[[Any], Any]) -> Any:
        """The regularizer's loss for the whole value."""

    def rewrite(self, variable: Any, change: Callable[[Any], Any]) -> Any:
        """Replace the value by `change(value)`; returns operations to wait for."""


@dataclasses.dataclass(eq=False)
class Shard:
    """This rank's part of a variable."""

    name: str
    span: Span  # of the flattened variable
    piece: tf.Variable  # 1-D, unless it is rows of a table
    home: Home
    key: str  # what Keras' optimizers have identified the variable by
    native_name: str
    width: int = 0  # elements of a row, where the piece is rows of a table: 2-D
    lent: tf.Variable | None = None  # the whole value, inside zero.gathered


class ShardedVariable(keras.Variable):
    """A variable without values; never constructed, only turned into by `hide`."""

    zero_shard: Shard

    @property
    def value(self) -> Any:
        found = compat.scoped_value(self)
        if found is None and compat.in_symbolic_scope():
            found = tf.zeros(self.shape, compat.stored_dtype(self))
        if found is None:
            found = self.zero_shard.home.read(self)
        if found is None:
            found = self.zero_shard.lent
        if found is None:
            raise refusal(self, "reading it")
        return compat.autocast(self, found)

    @property
    def handle(self) -> Any:
        return self.zero_shard.piece.handle

    def _direct_assign(self, value: Any) -> None:
        shard = self.zero_shard
        if shard.lent is not None:
            shard.lent.assign(tf.cast(value, shard.lent.dtype))
        elif shard.span.length == math.prod(self.shape) and shard.home.is_alone():
            shard.piece.assign(tf.reshape(tf.cast(value, shard.piece.dtype), shard.piece.shape))
        else:
            raise refusal(self, "assigning to it")

    def __repr__(self) -> str:
        dtype = compat.stored_dtype(self)
        return f"<Variable path={self.path}, shape={self.shape}, dtype={dtype}, sharded>"


def refusal(variable: Any, what: str) -> ShardedStateError:
    return ShardedStateError(
        f"variable {variable.path!r} is sharded over the ranks, and {what} needs all of it: no "
        "rank holds it whole now. Call the layer that it belongs to; or read and write it, on "
        "every rank, inside `with zero.gathered(layer_or_variable):`. Whole files: "
        "zero.save_model(model, path) and zero.load(path, model), on every rank."
    )


class ShardedRegularizer:
    """Calls the regularizer of a sharded variable on its whole value."""

    def __init__(self, inner: Callable[[Any], Any]) -> None:
        self.inner = inner

    def __call__(self, x: Any) -> Any:
        if not isinstance(x, ShardedVariable) or compat.in_symbolic_scope():
            return self.inner(x)
        return x.zero_shard.home.regularize(x, self.inner)


def hide(variable: Any, shard: Shard) -> None:
    """Turn a variable into a placeholder that stores this rank's part."""
    variable.zero_shard = shard
    sharded = isinstance(variable.regularizer, ShardedRegularizer)
    if variable.regularizer is not None and not sharded:
        variable.regularizer = ShardedRegularizer(variable.regularizer)
    compat.become(variable, ShardedVariable, shard.piece)


def is_sharded(variable: Any) -> bool:
    return isinstance(variable, ShardedVariable)
