"""The optimizer's state by name: this rank's share, the whole of it, and back.

Keras' optimizers keep what belongs to a variable in lists as long as the list of variables they
were built on (`_momentums`, `_velocities`, ...), and everything else in single variables. A key is
"slots:<list>:<index of the variable in the model>" or "scalar:<attribute>".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from zerohvd.errors import ShardedStateError
from zerohvd.keras.params.pieces import PieceVariable

_NOT_SLOTS = ("_trainable_variables", "_variables")
_LEARNING_RATE = "scalar:_learning_rate"


class _Held(NamedTuple):
    """A slot of a piece."""

    key: str
    piece: PieceVariable
    variable: tf.Variable


def _slots(optimizer: Any) -> list[_Held]:
    step = optimizer.step
    held = []
    for attribute, slots in sorted(vars(step.inner).items()):
        if attribute in _NOT_SLOTS or not isinstance(slots, list):
            continue
        if len(slots) != len(step.pieces) or not all(_is_slot(s) for s in slots):
            continue
        for piece, slot in zip(step.pieces, slots, strict=True):
            if slot is not None:
                held.append(_Held(f"slots:{attribute}:{piece.piece.param}", piece, slot.value))
    for piece in step.pieces:
        if piece.master is not None:
            held.append(_Held(f"slots:master:{piece.piece.param}", piece, piece.master))
    return held


def _is_slot(slot: Any) -> bool:
    return slot is None or isinstance(slot, keras.Variable)


def _scalars(optimizer: Any) -> dict[str, Any]:
    """What all ranks hold alike."""
    found = {}
    parts = {"": optimizer.inner_optimizer, "scaler.": optimizer.scaler}
    for prefix, part in parts.items():
        for attribute, value in sorted(vars(part).items()) if part is not None else ():
            if isinstance(value, keras.Variable) and not (prefix and value.ndim):
                found[f"scalar:{prefix}{attribute}"] = value
    return found


def slot_bytes(optimizer: Any) -> dict[str, int]:
    """Bytes per list of slots on this rank; "scalars" for the rest."""
    sizes: dict[str, int] = {}
    for held in _slots(optimizer):
        kind = held.key.split(":")[1]
        sizes[kind] = sizes.get(kind, 0) + _nbytes(held.variable)
    return sizes


def _nbytes(variable: Any) -> int:
    return int(np.prod(variable.shape, dtype=np.int64)) * tf.as_dtype(variable.dtype).size


def local_state(optimizer: Any) -> dict[str, np.ndarray]:
    """The whole state, where every rank holds all of it."""
    state = {key: np.asarray(v) for key, v in _scalars(optimizer).items()}
    for held in _slots(optimizer):
        value = held.variable.numpy()
        if held.piece.shape == value.shape:
            value = value.reshape(held.piece.spec.shape)
        state[held.key] = value
    return {key: _storable(value) for key, value in state.items()}


def whole_state(optimizer: Any, root: int = 0) -> dict[str, np.ndarray] | None:
    """Everything, on rank `root`; None elsewhere. All ranks must call it."""
    step = optimizer.step
    if step.layout.size == 1:
        return local_state(optimizer) if step.wire.rank == root else None
    mine = {}
    for held in _slots(optimizer):
        if not held.piece.whole and held.variable.shape != held.piece.shape:
            raise ShardedStateError(
                f"{held.key} has shape {held.variable.shape} for a piece of "
                f"{held.piece.path!r} of shape {held.piece.shape}: pieces cannot be put together "
                'again. Use partition="parameter" with this optimizer.'
            )
        mine.setdefault(held.key, []).append(held)
    described = {
        key: [held[0].piece.piece.param_span[0], held[0].variable.dtype.name, _shape(held[0])]
        for key, held in mine.items()
    }
    everyone = step.wire.eager.allgather_object(described, name="zero/state/keys")
    state: dict[str, np.ndarray] = {}
    for key in sorted(set().union(*everyone)):
        owners = [d[key] for d in everyone if key in d]
        value = _gather(step, key, mine.get(key, []), tf.as_dtype(owners[0][1]))
        if step.wire.rank == root:
            state[key] = value.reshape(owners[0][2])
    if step.wire.rank != root:
        return None
    scalars = {key: np.asarray(v) for key, v in _scalars(optimizer).items()}
    return {key: _storable(value) for key, value in {**scalars, **state}.items()}


def _shape(held: _Held) -> list[int]:
    """Of the whole slot: as it is where the variable is whole, else that of the variable."""
    return list(held.variable.shape if held.piece.whole else held.piece.spec.shape)


def _gather(step: Any, key: str, held: list[_Held], dtype: Any) -> np.ndarray:
    """The parts of all ranks in the order in which they lie in the variable."""
    parts = [tf.reshape(h.variable, [-1]) for h in held]
    sent = tf.concat(parts, 0) if parts else tf.zeros([0], dtype)
    spans = [[*h.piece.piece.param_span] for h in held]
    lengths = [int(np.prod(h.variable.shape, dtype=np.int64)) for h in held]
    eager = step.wire.eager
    meta = eager.allgather_object([spans, lengths], name="zero/state/spans")
    values = eager.to_numpy(eager.allgather(sent, name="zero/state/values"))
    found, at = [], 0
    for rank_spans, rank_lengths in meta:
        for (start, _), length in zip(rank_spans, rank_lengths, strict=True):
            found.append((start, values[at : at + length]))
            at += length
    return np.concatenate([v for _, v in sorted(found, key=lambda f: f[0])])


def _storable(value: np.ndarray) -> np.ndarray:
    # HDF5 knows no bfloat16; float32 holds all of its values.
    return value.astype(np.float32) if value.dtype.name == "bfloat16" else value


def load_state(optimizer: Any, stored: Mapping[str, np.ndarray]) -> None:
    """Take this rank's share of a whole state."""
    wanted = {held.key for held in _slots(optimizer)} | set(_scalars(optimizer))
    _check_has(optimizer, wanted - _optional(optimizer), stored)
    load_scalars(optimizer, stored)
    for held in _slots(optimizer):
        if held.key not in stored:
            continue
        value = np.asarray(stored[held.key])
        if not held.piece.whole:
            start, stop = held.piece.piece.param_span
            value = value.reshape(-1)[start:stop]
        if value.size != np.prod(held.variable.shape, dtype=np.int64):
            raise ShardedStateError(
                f"{held.key} was stored with shape {np.shape(stored[held.key])}, which does not "
                f"fit {held.piece.path!r} of shape {held.piece.spec.shape}"
            )
        held.variable.assign(tf.cast(value.reshape(held.variable.shape), held.variable.dtype))


def _check_has(optimizer: Any, wanted: set[str], stored: Mapping[str, np.ndarray]) -> None:
    missing = sorted(wanted - set(stored))
    if missing:
        raise ShardedStateError(
            f"the stored optimizer state lacks {missing[:3]} (of {len(missing)} missing): it was "
            f"saved by another kind of optimizer than {type(optimizer.inner_optimizer).__name__}"
        )


def check_scalars(optimizer: Any, stored: Mapping[str, np.ndarray]) -> None:
    """Raise if it is not for such an optimizer; what can be said before it is built."""
    _check_has(optimizer, set(_scalars(optimizer)) - {_LEARNING_RATE}, stored)


def load_scalars(optimizer: Any, stored: Mapping[str, np.ndarray]) -> None:
    """Take the part of a state that all ranks hold alike, such as `iterations`."""
    for key, variable in _scalars(optimizer).items():
        if key in stored:
            variable.assign(np.asarray(stored[key]))


def _optional(optimizer: Any) -> set[str]:
    """What a state may lack: masters, when it was saved with wider variables."""
    held = {h.key for h in _slots(optimizer) if h.key.startswith("slots:master:")}
    return held | {_LEARNING_RATE}


def plain_optimizer(optimizer: Any, root: int = 0) -> Any:
    """The inner optimizer with the whole state, as Keras alone would have it, on rank `root`.

    All ranks must call it; the others get None.
    """
    optimizer.build_loaded()
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
    variables = list(optimizer.step.variables)
    plain.build(variables)
    for attribute, slots in vars(plain).items():
        key = f"scalar:{attribute}"
        if isinstance(slots, keras.Variable) and key in state:
            slots.assign(state[key])
        if isinstance(slots, list) and len(slots) == len(variables):
            for index, slot in enumerate(slots):
                key = f"slots:{attribute}:{index}"
                if isinstance(slot, keras.Variable) and key in state:
                    slot.assign(state[key])
    return plain
