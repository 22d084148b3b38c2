"""From a model and its optimizer to what a checkpoint stores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from zerohvd.checkpoint import Array, Content, Entry, encode, loading, share_out, whole
from zerohvd.checkpoint.loading import OWN, SHARED
from zerohvd.errors import ShardedStateError
from zerohvd.keras import compat
from zerohvd.keras.checkpoint.holdings import Holdings
from zerohvd.keras.optimizer import state
from zerohvd.keras.params.pieces import PieceVariable
from zerohvd.layout import Span

# Kinds of tensors; an optimizer's are "state.<list of slots>".
PARAM, MASTER, BUFFER, LOCAL = "param", "master", "buffer", "grad"
STATE = "state."
SUMS = "_accumulated_gradients"  # Keras' name for gradients that wait for their update


def content(
    held: Holdings,
    *,
    extra: Any,
    step: int | None,
    metric: float | None,
    sums: list[dict[str, int]],
    rank: int,
) -> Content:
    """What this rank stores.

    Args:
        held: Of the model.
        extra: The user's.
        step: Of the training.
        metric: How good the model is.
        sums: Of every rank, the checksums of what the ranks hold beside the optimizer's shards.
        rank: This one.
    """
    size = len(sums)
    _check_same_names(sums)
    made = Content("keras", step=step)
    if held.optimizer is not None:
        pieces = list(_pieces(held.optimizer))
        replicated = held.optimizer.step.layout.size == 1
        made.entries += share_out(pieces, rank, size) if replicated else pieces
        made.entries += _local_sums(held, rank)
        made.config = {**held.optimizer.config.as_dict(), "size": size}
        if replicated or rank == 0:
            made.entries += _empty(held) if rank == 0 else []
    made.entries += _others(held, sums, rank)
    _describe(made, held, extra, metric, rank)
    return made


def _check_same_names(sums: list[dict[str, int]]) -> None:
    for rank, names in enumerate(sums):
        differing = sorted(set(names) ^ set(sums[0]))
        if differing:
            raise ValueError(
                f"ranks 0 and {rank} have other variables in the model; {differing[0]!r} is on one "
                "of them only. Make the same models, in the same order, on every rank: Keras "
                "numbers the names of layers"
            )


def entry(kind: str, name: str, shape: Any, span: Span, value: Any) -> Entry:
    """A range of a tensor; its bytes are copied out of TensorFlow when their turn comes."""
    dtype = tf.as_dtype(value.dtype).base_dtype.name
    return Entry(kind, name, dtype, tuple(shape), span, lambda: _raw(value))


def _raw(value: Any) -> np.ndarray:
    array = value.numpy() if hasattr(value, "numpy") else np.asarray(value)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def whole_entry(kind: str, name: str, value: Any) -> Entry:
    numel = int(np.prod(value.shape, dtype=np.int64))
    return entry(kind, name, value.shape, Span(0, numel), value)


def _pieces(optimizer: Any) -> Iterator[Entry]:
    for piece in optimizer.step.pieces:
        dtype = piece.spec.dtype
        yield Entry(
            PARAM,
            piece.spec.name,
            dtype,
            piece.spec.shape,
            Span(*piece.piece.param_span),
            lambda p=piece: _raw(p.read()),
        )
    for slot in state.slots(optimizer):
        attribute = slot.kind
        kind = MASTER if attribute == "master" else f"{STATE}{attribute}"
        yield _slot(kind, slot.piece, slot.variable)


def _slot(kind: str, piece: PieceVariable, variable: tf.Variable) -> Entry:
    name = piece.spec.name
    if piece.whole and tuple(variable.shape) != tuple(piece.spec.shape):
        return whole_entry(kind, name, variable)
    if variable.shape != piece.shape:
        raise ShardedStateError(
            f"{kind} of {name!r} has shape {variable.shape} for a piece of shape {piece.shape}: "
            'pieces cannot be put together again. Use partition="parameter" with this optimizer.'
        )
    return entry(kind, name, piece.spec.shape, Span(*piece.piece.param_span), variable)


def _empty(held: Holdings) -> list[Entry]:
    """Variables without elements have no owner, but belong to the model."""
    step = held.optimizer.step
    return [
        whole_entry(PARAM, spec.name, native)
        for spec, native in zip(step.layout.params, step.natives, strict=True)
        if spec.numel == 0
    ]


def own_name(name: str, rank: int) -> str:
    return f"{name}@{rank}"


def _local_sums(held: Holdings, rank: int) -> Iterator[Entry]:
    """Gradients that stages 0 and 1 add up on each rank before they are reduced."""
    step = held.optimizer.step
    for spec, total in zip(step.layout.params, step.local_sums, strict=False):
        yield whole_entry(LOCAL, own_name(spec.name, rank), total)


def _others(held: Holdings, sums: list[dict[str, int]], rank: int) -> list[Entry]:
    """What is the same everywhere is shared out; what differs is stored rank by rank."""
    frozen = held.trainable_others
    alike, mine = [], []
    for name, variable in held.others.items():
        kind = PARAM if name in frozen else BUFFER
        if all(s[name] == sums[0][name] for s in sums):
            alike.append(whole_entry(kind, name, variable))
        elif rank == 0:
            mine.append(whole_entry(kind, name, variable))
        elif sums[rank][name] != sums[0][name]:
            mine.append(whole_entry(OWN, own_name(name, rank), variable))
    return share_out(alike, rank, len(sums), uncut=True) + mine


def _describe(made: Content, held: Holdings, extra: Any, metric: float | None, rank: int) -> None:
    beside: dict[str, Array] = {}
    own: dict[str, Array] = {}
    shared: dict[str, Any] = {
        "weights_h5": held.places,
        "unplaced": held.unplaced,
        "extra": extra,
        "metric": metric,
        "aliases": {},
    }
    if held.optimizer is not None:
        shared["optimizer"] = type(held.optimizer.inner_optimizer).__name__
        shared["scalars"] = {k: _scalar(v) for k, v in held.scalars.items()}
    made.state = encode(shared, "state", beside, to_array)
    made.rank_state = encode({"rng": generators()}, f"rank{rank}", own, to_array)
    if rank == 0:
        made.entries += [whole(SHARED, name, array) for name, array in beside.items()]
    made.entries += [whole(OWN, name, array) for name, array in own.items()]


def _scalar(variable: Any) -> Any:
    value = np.asarray(variable)
    if value.dtype.name == "bfloat16":
        value = value.astype(np.float32)
    return value[()] if value.ndim == 0 else value


def to_array(value: Any) -> Array | None:
    """For `tree.encode`: tensors and variables come back as arrays."""
    if not tf.is_tensor(value) and not isinstance(value, keras.Variable):
        return None
    array = np.asarray(value)
    if array.dtype.name == "bfloat16":
        array = array.astype(np.float32)
    return Array(array.dtype.name, array.shape, np.ascontiguousarray(array), "numpy")


# -- random number generators ----------------------------------------------------------------------


def generators() -> dict[str, Any]:
    """The states of the generators that a training script draws from; layers keep their own."""
    found = loading.generators()
    if compat.global_seed() is not None:
        found["keras"] = np.asarray(compat.global_seed().state)
    return found


def restore_generators(stored: Mapping[str, Any]) -> None:
    loading.restore_generators(stored)
    if "keras" in stored and compat.global_seed() is not None:
        compat.global_seed().state.assign(stored["keras"])
