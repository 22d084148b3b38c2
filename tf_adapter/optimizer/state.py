"""The optimizer's state by name: this rank's shards, the whole of it, and back.

Keras' optimizers keep what belongs to a variable in lists as long as the list of variables they
were built on (`_momentums`, `_velocities`, ...), and everything else in single variables. A key is
"slots:<list>:<index of the variable in the model>" or "scalar:<attribute>".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from zerohvd.errors import ShardedStateError
from zerohvd.keras import compat
from zerohvd.keras.communication import arrays
from zerohvd.keras.params.pieces import PieceVariable
from zerohvd.training import state as core

Array = np.ndarray[Any, Any]
MASTER = "master"  # stands for a list of slots in keys: the wide copies of 16-bit variables
_LEARNING_RATE = f"scalar:{compat.LEARNING_RATE}"


class PieceSlot(NamedTuple):
    """What the optimizer keeps for one piece, such as its momentum."""

    kind: str  # the list it is in
    piece: PieceVariable
    variable: tf.Variable

    @property
    def key(self) -> str:
        return f"slots:{self.kind}:{self.piece.piece.param}"

    @property
    def is_elementwise(self) -> bool:
        """Whether it has an element for each of the piece's."""
        return tuple(self.variable.shape) == tuple(self.piece.shape)

    @property
    def described(self) -> core.PieceValue:
        """The same as the core knows it."""
        kind = core.ELEMENT if self.is_elementwise else core.TENSOR
        shape = None if self.is_elementwise else list(self.variable.shape)
        dtype = arrays.dtype_name(self.variable)
        return core.PieceValue(self.piece.piece, self.kind, kind, dtype, shape, self.variable)

    def check_divisible(self) -> None:
        """Raise if the slots of several pieces cannot be joined."""
        core.check_joinable(self.described, self.piece.spec)


def slots(optimizer: Any) -> list[PieceSlot]:
    """This rank's slots, masters last."""
    step = optimizer.step
    found = []
    for kind, per_piece in sorted(vars(step.inner).items()):
        if kind in compat.NOT_SLOTS or not isinstance(per_piece, list):
            continue
        if len(per_piece) != len(step.pieces) or not all(_is_slot(s) for s in per_piece):
            continue
        for piece, slot in zip(step.pieces, per_piece, strict=True):
            if slot is not None:
                found.append(PieceSlot(kind, piece, slot.value))
    return found + [PieceSlot(MASTER, p, p.master) for p in step.pieces if p.master is not None]


def _is_slot(slot: Any) -> bool:
    return slot is None or isinstance(slot, keras.Variable)


def scalars(optimizer: Any) -> dict[str, Any]:
    """The variables that are the same on all ranks, by key."""
    found = {}
    parts = {"": optimizer.inner_optimizer, "scaler.": optimizer.scaler}
    for prefix, part in parts.items():
        for attribute, value in sorted(vars(part).items()) if part is not None else ():
            if isinstance(value, keras.Variable) and not (prefix and value.ndim):
                found[f"scalar:{prefix}{attribute}"] = value
    return found


def slot_bytes(optimizer: Any) -> dict[str, int]:
    """Bytes per kind of slot on this rank."""
    sizes: dict[str, int] = {}
    for slot in slots(optimizer):
        sizes[slot.kind] = sizes.get(slot.kind, 0) + arrays.nbytes(slot.variable)
    return sizes


# -- to the whole state ----------------------------------------------------------------------------


def local_state(optimizer: Any) -> dict[str, Array]:
    """The whole state, where every rank holds all of it."""
    return _whole_state(optimizer, None)


def whole_state(optimizer: Any, root: int = 0) -> dict[str, Array] | None:
    """Everything, on rank `root`; None elsewhere. All ranks must call it."""
    state = _whole_state(optimizer, root)
    return state if optimizer.step.wire.rank == root else None


def _whole_state(optimizer: Any, to: int | None) -> dict[str, Array]:
    step = optimizer.step
    held = [slot.described for slot in slots(optimizer)]
    whole = core.collect_state(
        step.wire.eager, step.layout, held, _StateArrays(), to=to, prefix=step.wire.prefix
    )
    state = {key: np.asarray(v) for key, v in scalars(optimizer).items()}
    for param, values in whole.items():
        state.update((f"slots:{kind}:{param}", value) for kind, value in values.items())
    return {key: _storable(value) for key, value in state.items()}


class _StateArrays:
    """Numpy's arrays in TensorFlow's dtypes, for the core; see `core.StateArrays`."""

    def empty(self, shape: Sequence[int], dtype: str) -> Array:
        return np.empty(tuple(shape), tf.as_dtype(dtype).as_numpy_dtype)

    def zeros(self, length: int, dtype: str, bucket: int) -> Array:
        return np.zeros(length, tf.as_dtype(dtype).as_numpy_dtype)

    def flatten(self, x: Any) -> Array:
        return arrays.to_numpy(x).reshape(-1)

    def scalar(self, value: Any, dtype: str) -> Array:
        return np.array(value, tf.as_dtype(dtype).as_numpy_dtype)

    to_wire = staticmethod(arrays.from_numpy)
    to_host = staticmethod(arrays.to_numpy)


def _storable(value: Array) -> Array:
    # HDF5 has no bfloat16; float32 holds all of its values.
    return value.astype(np.float32) if value.dtype.name == "bfloat16" else value


# -- from the whole state --------------------------------------------------------------------------


def load_state(optimizer: Any, stored: Mapping[str, Array]) -> None:
    """Load this rank's shards of a whole state."""
    mine = slots(optimizer)
    # A state saved with wider variables has no masters.
    wanted = {slot.key for slot in mine if slot.kind != MASTER} | set(scalars(optimizer))
    _check_has(optimizer, wanted, stored)
    load_scalars(optimizer, stored)
    for slot in mine:
        if slot.key not in stored:
            continue
        value, shape = np.asarray(stored[slot.key]), slot.variable.shape
        part = core.part_of(value, slot.piece.piece, slot.piece.spec, shape, slot.key)
        slot.variable.assign(tf.cast(part, slot.variable.dtype))


def check_scalars(optimizer: Any, stored: Mapping[str, Array]) -> None:
    """Raise if the state is another optimizer's, as far as that shows before it is built."""
    _check_has(optimizer, set(scalars(optimizer)), stored)


def _check_has(optimizer: Any, wanted: set[str], stored: Mapping[str, Array]) -> None:
    inner = type(optimizer.inner_optimizer).__name__
    core.check_complete(wanted - {_LEARNING_RATE}, stored, inner)


def load_scalars(optimizer: Any, stored: Mapping[str, Array]) -> None:
    """Load what all ranks hold alike, such as `iterations`."""
    for key, variable in scalars(optimizer).items():
        if key in stored:
            variable.assign(np.asarray(stored[key]))


def plain_optimizer(optimizer: Any, root: int = 0) -> Any:
    """The inner optimizer with the whole state, as Keras alone would have it, on rank `root`.

    All ranks must call it; the others get None.
    """
    optimizer.build_loaded()
    if optimizer.sharded is not None:
        raise ShardedStateError(
            "a plain optimizer needs whole variables, which no rank holds at stage 3: "
            "zero.save_model(model, path) on all ranks writes the model with its whole optimizer"
        )
    if optimizer.step is None:
        raise ShardedStateError(
            "the optimizer has no state yet: train a step, or call "
            "opt.build(model.trainable_variables) on all ranks"
        )
    state = whole_state(optimizer, root)
    if state is None:
        return None
    inner = optimizer.inner_optimizer
    plain = type(inner).from_config(inner.get_config())
    plain.build(list(optimizer.step.variables))
    for attribute, value in vars(plain).items():
        found = {f"scalar:{attribute}": value}
        if isinstance(value, list):
            found = {f"slots:{attribute}:{i}": slot for i, slot in enumerate(value)}
        for key, variable in found.items():
            if isinstance(variable, keras.Variable) and key in state:
                variable.assign(state[key])
    return plain
