"""Reading and writing sharded variables outside of the model's own passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from zerohvd.errors import ShardedStateError
from zerohvd.keras.communication.wire import join
from zerohvd.keras.params.pieces import shard_of, tf_variable
from zerohvd.keras.stage3.placeholder import ShardedVariable


@contextlib.contextmanager
def gathered(what: Any, writable: bool = False, *, from_rank: int = 0) -> Iterator[None]:
    """Hold variables gathered inside the block, on every rank. All ranks must enter it.

        with zero.gathered(model.layers[0]):
            print(model.layers[0].kernel.numpy())
        with zero.gathered(model.layers[0], writable=True):
            model.layers[0].set_weights(values)

    Variables that are not sharded may be among them. Take one layer after the other of a model
    that does not fit. Inside, the layers themselves may be called, and nothing may be trained.

    Args:
        what: A layer or model, a variable, or several of them.
        writable: Keep what has been written when the block ends. All ranks get the values of rank
            `from_rank`, whatever the others have written.
        from_rank: The rank, inside the optimizer's process set, whose values are kept.
    """
    variables = _variables(what)
    sharded = [v for v in variables if shard_of(v) is not None]
    held = [v for v in sharded if shard_of(v).lent is None]  # a block inside a block
    try:
        _lend(held)
        yield
        if writable:
            _publish(variables, from_rank)
        else:
            _refuse_writes(held)
    finally:
        for variable in held:
            shard_of(variable).lent = None


def _variables(what: Any) -> list[Any]:
    if hasattr(what, "variables") and not isinstance(what, keras.Variable):
        found = list(what.variables)
    elif isinstance(what, (keras.Variable, tf.Variable)):
        found = [what]
    elif isinstance(what, Iterable):
        found = [v for item in what for v in _variables(item)]
    else:
        raise TypeError(
            f"gathered() takes a layer, a variable or several of them, got {what!r}"
        )
    return list({id(v): v for v in found}.values())


def _lend(variables: Sequence[ShardedVariable]) -> None:
    done: dict[int, dict[int, Any]] = {}
    for variable in variables:
        bucket = shard_of(variable).home.bucket_of(variable)
        if id(bucket) not in done:
            whole = bucket.gather(bucket.pieces(), "zero/gathered", [])
            wanted = {id(v) for v in variables}
            for member, value in zip(bucket.variables, whole, strict=True):
                if id(member) in wanted:
                    shard_of(member).lent = tf.Variable(value, name=member.name)
            done[id(bucket)] = {}


def _publish(variables: Sequence[Any], root: int) -> None:
    for index, variable in enumerate(variables):
        shard = shard_of(variable)
        native = tf_variable(variable) if shard is None else shard.lent
        wire = join() if shard is None else shard.home.wire.eager
        if wire.size > 1 and native.shape.num_elements():
            value = tf.reshape(tf.convert_to_tensor(native), [-1])
            native.assign(
                tf.reshape(wire.broadcast(value, root, name=f"zero/written/{index}"), native.shape)
            )
        if shard is not None:
            shard.piece.assign(tf.reshape(_own_part(shard), shard.piece.shape))


def _refuse_writes(variables: Sequence[Any]) -> None:
    for variable in variables:
        shard = shard_of(variable)
        if not bool(tf.reduce_all(tf.equal(_bits(_own_part(shard)), _bits(_stored(shard))))):
            raise ShardedStateError(
                f"variable {variable.path!r} has been written to inside zero.gathered(...), and "
                "the values are lost: use zero.gathered(..., writable=True)"
            )


def _own_part(shard: Any) -> Any:
    return tf.reshape(shard.lent, [-1])[shard.span.start : shard.span.stop]


def _stored(shard: Any) -> Any:
    return tf.reshape(shard.piece, [-1])


def _bits(x: Any) -> Any:
    return tf.bitcast(tf.convert_to_tensor(x), tf.uint8)  # a NaN is equal to itself
