"""The piece of a variable that this rank owns, with the interface of a variable.

The inner optimizer builds its slots on pieces and updates pieces. A piece stores nothing between
steps: its value is read from the model's variable when an update begins, and the result is a
tensor that the next allgather sends; at stage 3, where nothing is sent, an update may change the
variable's memory itself. Only 16-bit variables keep a wider master.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from zerohvd.compression.policies import Plain
from zerohvd.config import ZeroConfig
from zerohvd.keras.communication import arrays
from zerohvd.keras.compat import stored_dtype, variable_key
from zerohvd.keras.params import buffers
from zerohvd.layout import Layout, ParamSpec, Piece
from zerohvd.numerics import master_dtype
from zerohvd.training.graph import updated_pieces


def shard_of(variable: Any) -> Any:
    """This rank's part of a variable that is sharded (stage 3), or None."""
    return getattr(variable, "zero_shard", None)


def tf_variable(variable: Any) -> Any:
    """The tf.Variable behind a keras.Variable; a tf.Variable is one itself. Of a sharded variable,
    this rank's part of it."""
    shard = shard_of(variable)
    if shard is not None:
        return shard.piece
    return variable if isinstance(variable, tf.Variable) else variable.value


def read_rows(table: tf.Variable, rows: Any) -> Any:
    """Rows of a table; a read of all of it would be a copy, as `write_rows` writes in place."""
    return tf.raw_ops.ResourceGather(resource=table.handle, indices=rows, dtype=table.dtype)


def write_rows(table: tf.Variable, rows: Any, values: Any) -> Any:
    """Overwrite rows of a table in place; returns an operation to wait for."""
    values = tf.cast(tf.reshape(values, [-1, *table.shape[1:]]), table.dtype)
    return tf.raw_ops.ResourceScatterUpdate(resource=table.handle, indices=rows, updates=values)


def dtype_of(variable: Any) -> str:
    """The dtype that a variable is stored in; it need not have memory yet."""
    if isinstance(variable, tf.Variable):
        return str(variable.dtype.base_dtype.name)
    return stored_dtype(variable)


def key_of(variable: Any) -> str:
    """What Keras' optimizers identify the variable by."""
    shard = shard_of(variable)
    return variable_key(tf_variable(variable)) if shard is None else str(shard.key)


def variable_path(variable: Any) -> str:
    return getattr(variable, "path", None) or str(variable.name).split(":")[0]


def initialized(variables: Sequence[Any]) -> bool:
    """Whether all of them have values; those made by the tf.function being traced have none yet."""
    with tf.init_scope():
        return all(bool(tf_variable(v).is_initialized()) for v in variables)


class PieceVariable:
    """Replaces a variable in the inner optimizer's build and update_step.

    It has what Keras' optimizers use: shape, dtype, path and name (slots are named after them, and
    weight decay is switched off by them), the key that identifies the variable, the three assigns,
    and arithmetic. It is no keras.Variable, which Keras would unwrap.
    """

    # What keras.Optimizer and its subclasses read of a trainable variable.
    trainable = True
    constraint = None
    overwrite_with_gradient = False

    def __init__(
        self, variable: Any, spec: ParamSpec, piece: Piece, dtype: str, chunk: int
    ) -> None:
        native = tf_variable(variable)
        self.variable, self.spec, self.piece = variable, spec, piece
        self.path = variable_path(variable)
        # Keras builds on keras.Variables, whose name is short, and updates tf.Variables.
        self.name = self.path.split("/")[-1]
        self.whole = piece.param_span == (0, spec.numel)
        self.shape = tf.TensorShape(spec.shape if self.whole else [piece.param_span.length])
        self.dtype = tf.as_dtype(dtype)
        self.device = native.device
        # The name under which Keras reads it: it excludes variables from weight decay by this key.
        self._unique_id = key_of(variable) + (f"#{chunk}" if chunk else "")
        self.master: tf.Variable | None = None
        # By how much the value differs from what all ranks have, where variables travel packed.
        self.left_over: tf.Variable | None = None
        self._held: Any = None  # the value, during an update
        self._in_place = False

    @property
    def key(self) -> str:
        """What Keras' optimizers identify the piece by."""
        return self._unique_id

    @property
    def _value(self) -> Any:
        return self._current() if self._held is None else self._held

    def load(self) -> None:
        """Take the current value of the model's variable."""
        self._held = self._current()

    def _current(self) -> Any:
        stored = self.read()
        if self.left_over is not None:
            return tf.cast(stored, self.dtype) + self.left_over
        if self.master is None:
            return tf.cast(stored, self.dtype)
        # The master has more digits, unless somebody else has assigned to the variable since.
        same = tf.equal(tf.cast(self.master, stored.dtype), stored)
        return tf.where(same, self.master, tf.cast(stored, self.dtype))

    def read(self) -> Any:
        """This piece of the model's variable, in the variable's dtype."""
        shard = shard_of(self.variable)
        if shard is not None and shard.width:
            rows = read_rows(shard.piece, self.rows)
            return tf.reshape(rows, self.shape)
        native = tf.convert_to_tensor(tf_variable(self.variable))
        if shard is not None:
            span = self.piece.param_span.shift(-shard.span.start)
            return arrays.reshape(buffers.cut(native, span), self.shape)
        if self.whole:
            return native
        return buffers.cut(tf.reshape(native, [-1]), self.piece.param_span)

    @property
    def rows(self) -> Any:
        """Which rows of a table's part on this rank the piece is."""
        shard = shard_of(self.variable)
        span = self.piece.param_span.shift(-shard.span.start)
        return tf.range(span.start // shard.width, span.stop // shard.width)

    def finish_build(self) -> None:
        self.drop()
        shard = shard_of(self.variable)
        self.name = tf_variable(self.variable).name if shard is None else shard.native_name

    @property
    def can_change_in_place(self) -> bool:
        """Whether the piece is all that a tf.Variable stores."""
        shard = shard_of(self.variable)
        if shard is None or shard.width or self.master is not None:
            return False
        return shard.span == self.piece.param_span and shard.piece.dtype == self.dtype

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, what is added and subtracted goes to the variable's own memory. A new value would
        lie elsewhere: of the many that a step makes, holes stay behind."""
        self._in_place, self._held = True, None
        try:
            yield
        finally:
            self._in_place = False

    @property
    def is_stored(self) -> bool:
        """Whether the value is the variable's, and there is none to store."""
        return self._held is None

    def make_master(self) -> None:
        with tf.init_scope():
            self.load()
            self.master = tf.Variable(self._value, trainable=False, name="master")

    def make_left_over(self) -> None:
        with tf.init_scope():
            zeros = tf.zeros(self.shape, self.dtype)
            self.left_over = tf.Variable(zeros, trainable=False, name="left_over")

    def leave_over(self, value: Any, stored: Any) -> None:
        """Keep what is lost when the variable stores `stored` in the place of `value`."""
        if self.left_over is not None:
            rest = value - tf.cast(tf.reshape(stored, self.shape), self.dtype)
            self.left_over.assign(rest)

    def drop(self) -> None:
        """Forget the value: a tensor of one graph or one eager step."""
        self._held = None

    def set(self, value: Any) -> None:
        """Set the value, and that of the master."""
        self._held = value
        if self.master is not None:
            self.master.assign(value)

    # -- what an optimizer calls on a variable ----------------------------------------------------

    def assign(self, value: Any, *_: Any, **__: Any) -> PieceVariable:
        if self._in_place:
            tf_variable(self.variable).assign(self._flat(value), read_value=False)
            return self
        self._held = arrays.reshape(tf.cast(value, self.dtype), self.shape)
        return self

    def assign_add(self, value: Any, *_: Any, **__: Any) -> PieceVariable:
        if self._in_place:
            tf_variable(self.variable).assign_add(self._flat(value), read_value=False)
            return self
        return self.assign(self._value + tf.cast(value, self.dtype))

    def assign_sub(self, value: Any, *_: Any, **__: Any) -> PieceVariable:
        if self._in_place:
            tf_variable(self.variable).assign_sub(self._flat(value), read_value=False)
            return self
        return self.assign(self._value - tf.cast(value, self.dtype))

    def _flat(self, value: Any) -> Any:
        value = tf.cast(value, self.dtype)
        return arrays.flatten(value if value.shape.rank else tf.fill(self.shape, value))

    def read_value(self) -> Any:
        return self._value

    def numpy(self) -> Any:
        return self._value.numpy()

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        return tf.convert_to_tensor(self._value, dtype=dtype, name=name)

    def __getitem__(self, key: Any) -> Any:
        return self._value[key]

    def __repr__(self) -> str:
        start, stop = self.piece.param_span
        return f"<piece [{start}:{stop}] of {self.path} {self.spec.shape} {self.dtype.name}>"


def _forward(operator: str) -> Any:
    def method(self: PieceVariable, *others: Any) -> Any:
        others = tuple(o._value if isinstance(o, PieceVariable) else o for o in others)
        return getattr(self._value, operator)(*others)

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    setattr(PieceVariable, f"__{_name}__", _forward(f"__{_name}__"))
    setattr(PieceVariable, f"__r{_name}__", _forward(f"__r{_name}__"))
for _name in ("neg", "abs", "lt", "le", "gt", "ge"):
    setattr(PieceVariable, f"__{_name}__", _forward(f"__{_name}__"))


def owned_pieces(
    layout: Layout, variables: Sequence[Any], rank: int, config: ZeroConfig
) -> list[PieceVariable]:
    """What `rank` owns and updates, in the layout's order."""
    found: list[PieceVariable] = []
    chunks: dict[int, int] = {}
    for piece in updated_pieces(layout, rank, config):
        spec = layout.params[piece.param]
        dtype = master_dtype(spec.dtype, config.master_dtype)
        chunk = chunks.get(piece.param, 0)
        chunks[piece.param] = chunk + 1
        found.append(PieceVariable(variables[piece.param], spec, piece, dtype, chunk))
        packed = config.param_compression != Plain() and layout.size > 1
        if packed and shard_of(variables[piece.param]) is None:
            if dtype != spec.dtype:
                raise ValueError(
                    f"param_compression={config.param_compression} packs the changes of float32 "
                    f"variables, and {spec.name!r} is {spec.dtype}, with a master of {dtype}. Keep "
                    'variables in float32 (dtype policy "mixed_bfloat16" does), or use stage 3'
                )
            found[-1].make_left_over()
        if dtype != spec.dtype:
            found[-1].make_master()
    return found
