"""Building a model without its memory: `with zero.deferred_init():`.

Keras' initializers carry their seeds: what they give does not depend on when they are called. So a
large variable keeps its initializer, and is given memory when somebody reads or writes it, or
never, if `zeroify(stage=3)` shards it first.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from zerohvd.keras import compat

# Smaller variables are real: they cost nothing.
REAL_BELOW = 4096


class DeferredVariable(keras.Variable):
    """A variable that has an initializer and no memory; only turned into inside the scope."""

    @property
    def value(self) -> Any:
        if compat.in_symbolic_scope():
            return compat.autocast(self, tf.zeros(self.shape, compat.stored_dtype(self)))
        scoped = compat.scoped_value(self)
        if scoped is not None:
            return compat.autocast(self, scoped)
        compat.realise(self)
        return self.value  # now that of an ordinary variable

    def _direct_assign(self, value: Any) -> None:
        compat.realise(self)
        self.assign(value)


class deferred_init:
    """Build a model inside, and its large variables take no memory until `zeroify(stage=3)`.

        keras.utils.set_random_seed(0)
        with zero.deferred_init():
            model = make_model()
        model, opt = zero.zeroify(model, keras.optimizers.AdamW(1e-3), stage=3)

    `zeroify` gives the variables the values they would have had, a few at a time: the first rank
    calls their initializers for all. A model that is not built inside gets its variables when it
    is, and those are real. Whatever reads a variable before gives it its memory. To start from
    saved values, call `zero.load(path, model)` after `zeroify`.
    """

    def __enter__(self) -> None:
        self._undo = compat.replace_initialization(_defer)

    def __exit__(self, *error: Any) -> None:
        self._undo()


def _defer(variable: Any, shape: Any) -> type | None:
    """The class of a variable that is to have no memory; None: it shall have some."""
    large = math.prod(shape) >= REAL_BELOW and type(variable) is keras.Variable
    return DeferredVariable if large else None
