"""DistributedOptimizer: a Keras optimizer whose state is sharded."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from zerohvd.communication.agreement import check_agreement
from zerohvd.communication.collectives import Collectives
from zerohvd.config import MIB, ZeroConfig
from zerohvd.errors import ShardedStateError
from zerohvd.keras import compat
from zerohvd.keras.communication import horovods
from zerohvd.keras.communication.clock import Clock
from zerohvd.keras.communication.members import Members
from zerohvd.keras.communication.packed.compression import Compression, policy_of, wire_dtype
from zerohvd.keras.communication.wire import Wire, join
from zerohvd.keras.gradients.reducer import weighing
from zerohvd.keras.optimizer import averages, partition, state, weighting
from zerohvd.keras.optimizer.entry import explained
from zerohvd.keras.optimizer.step import ShardedStep
from zerohvd.keras.params import broadcasting
from zerohvd.keras.params.pieces import (
    PieceVariable,
    initialized,
    key_of,
    owned_pieces,
    shard_of,
    variable_path,
)
from zerohvd.keras.params.shards import specs_of
from zerohvd.keras.stage3.sharding import ShardedModel
from zerohvd.rank_count import check_ranks
from zerohvd.training.graph import lay_out

# What belongs to the inner optimizer, and is read and set there.
_DELEGATED = (
    "learning_rate",
    "iterations",
    "weight_decay",
    "clipnorm",
    "global_clipnorm",
    "clipvalue",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
    "loss_scale_factor",
    "gradient_accumulation_steps",
)


class _OwnVariables(list[Any]):
    """This rank's variables. Horovod's elastic states call them, as in Keras 2, to give rank 0's to
    all ranks: that call is refused."""

    def __call__(self) -> NoReturn:
        raise ShardedStateError(
            "optimizer.variables is a list, not a method. If this is one of Horovod's elastic "
            "states (KerasState, TensorFlowKerasState): it would give one rank's state of the "
            "optimizer to all ranks. Write zero.elastic.KerasState(model, ...) and "
            "@zero.elastic.run, and start the job by: zerohvd run --restarts 5 -- mpirun -np ..."
        )



@keras.saving.register_keras_serializable(package="zerohvd", name="DistributedOptimizer")
class DistributedOptimizer(keras.optimizers.Optimizer):
    """Wraps a Keras optimizer: same options and results, 1/N of its state per rank.

    Use it wherever the optimizer was used: `compile`, `apply_gradients`, `apply`. Options such as
    `clipnorm`, `use_ema` or `gradient_accumulation_steps`, and the learning rate, stay with the
    wrapped optimizer and are read and set through this one.

    Args:
        inner_optimizer: An optimizer that is not built yet, or a LossScaleOptimizer around one.
        stage: 0: plain data parallelism; 1: sharded optimizer state; 2: and accumulated gradients;
            3: and variables, by `zero.zeroify(model, optimizer, stage=3)`.
        bucket_bytes: How many bytes of variables are packed into one collective.
        partition: "flat" cuts anywhere, "parameter" keeps variables whole, "auto" chooses.
        reduce_dtype: Gradients are sent in this dtype; None: in that of their variable.
        compression: Gradients on the wire: `zero.Compression.none`, `.fp16`, `.bf16`, `.int8`,
            `.int4`, `.topk(ratio)` or `.randomk(ratio)`.
        param_compression: Variables on the wire: `zero.Compression.none`, `.fp16`, `.bf16`, `.int8`
            or `.int4`.
        master_dtype: Shards are updated in this dtype; None: float32 for 16-bit variables.
        grad_clip: Clip to this global norm; the same as the inner optimizer's `global_clipnorm`.
        broadcast: Give all ranks the weights of rank 0 when the optimizer is built.
        process_set: The ranks that take part, all of them unless given; any other trains alone.
        name: The optimizer's name.
        **horovod: As in Horovod's: `op` (Average or Sum), `backward_passes_per_step` with
            `average_aggregated_gradients` (the gradients of so many calls are summed, or averaged,
            for one update; averaged is what `gradient_accumulation_steps` does). `groups`,
            `num_groups`, `sparse_as_dense`, `device_dense`, `device_sparse` and
            `gradient_predivide_factor` change no result, and nothing here.

    The gradient of an embedding table is the sum of what the batch says of each row, whichever way
    it is sent. Plain Keras squares, clips and takes absolute values of each occurrence of a row
    by itself (tf.IndexedSlices with duplicates), so Adam and its like step differently there; its
    SGD and its gradient accumulation do as this one. docs/keras-parity.md has more.
    """

    # Whether `load_model` is compiling a model on this rank, and perhaps on no other.
    is_loading = False

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer | str | dict[str, Any],
        *,
        stage: int = 2,
        bucket_bytes: int = 8 * MIB,
        partition: str = "auto",
        reduce_dtype: str | None = None,
        compression: Any = Compression.none,
        param_compression: Any = Compression.none,
        master_dtype: str | None = None,
        grad_clip: float | None = None,
        broadcast: bool = True,
        process_set: Any = None,
        name: str | None = None,
        **horovod: Any,
    ) -> None:
        if hvd.is_initialized():
            check_ranks(os.environ, hvd.size())
        arguments = horovods.check(horovod)
        packed, reduce_dtype = wire_dtype(compression, reduce_dtype)
        config = ZeroConfig(
            stage=stage,
            bucket_bytes=bucket_bytes,
            partition=partition,
            reduce_dtype=reduce_dtype,
            compression=packed,
            param_compression=policy_of(param_compression),
            master_dtype=master_dtype,
            grad_clip=grad_clip,
        )
        optimizer = keras.optimizers.get(inner_optimizer)
        _check_inner(optimizer, config)
        super().__init__(learning_rate=0.0, name=name or f"zero_{optimizer.name}")
        self.config, self.horovod = config, arguments
        scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        self.scaler = optimizer if scaled else None
        self.inner_optimizer = optimizer.inner_optimizer if scaled else optimizer
        horovods.accumulate(self.inner_optimizer, arguments.backward_passes_per_step)
        self.broadcast = broadcast
        self._members = Members(process_set)
        self.step: Any = None  # a ShardedStep once the optimizer is built
        self.clock: Clock | None = None  # of a Monitor
        # Of the LossScaleOptimizer that the latest step came from; weak, or Keras would save it
        # as a part of this one.
        self._scaler_in_use: Any = None
        # The whole state, while `zero.save_model` saves a model; None: it has not been collected.
        self.saved_state: dict[str, Any] | None = None
        # The state that `load_model` has read, until the ranks build the optimizer together.
        self.loaded_state: dict[str, Any] | None = None
        self._loaded_variables: list[Any] = []
        # Whether the units' gradients of this step contain a weight; None: there are none.
        self._weighed: bool | None = None
        self.sharded: ShardedModel | None = None  # stage 3: the model whose variables are sharded
        self._model: Any = lambda: None  # a weak reference, once a model is compiled with this
        # Keras saves every optimizer it finds in an attribute; this one saves the whole state.
        for part in (self.inner_optimizer, self.scaler):
            if part is not None:
                part.save_own_variables = part.load_own_variables = lambda store: None

    # -- build ------------------------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def build(self, variables: Sequence[Any]) -> None:
        """Lay out `variables` and create this rank's state; all ranks must call it."""
        if self.is_loading:
            # One rank alone may load a model, to inspect it; the first step builds.
            self._loaded_variables = list(variables)
            return
        self._build(list(variables), [])

    @property
    def loss_scale(self) -> float | None:
        """Of the latest step; None: its loss was not scaled."""
        scaler = None if self._scaler_in_use is None else self._scaler_in_use()
        return None if scaler is None else float(scaler.dynamic_scale.numpy())

    def set_clock(self, clock: Clock) -> None:
        """Measure the collectives of steps that are traced from now on."""
        self.clock = clock
        if self.step is not None or self.sharded is not None:
            wire = self.step.wire if self.sharded is None else self.sharded.units.wire
            wire.clock = clock

    def build_loaded(self) -> None:
        """Build now what `load_model` deferred to the first step; all ranks must call it."""
        if self.step is None and self._loaded_variables:
            self._build(self._loaded_variables, [])

    def _build(self, variables: list[Any], tables: list[int]) -> None:
        """`build`, where the gradients of some variables (`tables`) are tf.IndexedSlices."""
        if self.step is not None or not initialized(variables):
            return
        if self.config.stage == 3:
            _check_sharded(self.sharded, variables)
        with compat.outside_of_traces():
            wire = self._wire()
            wire.clock = self.clock
            everyone = wire.eager.allgather_object(tables, name="zero/agree/tables")
            rows = {i for found in everyone for i in found}
            how = partition.choose(self.inner_optimizer, self.config.partition)
            if self.sharded is None:
                layout = lay_out(specs_of(variables, rows), how, self.config, wire.size)
            else:
                layout = self.sharded.layout
            # Keras numbers names by the order of creation, which may differ between ranks.
            options = {k: v for k, v in self.inner_optimizer.get_config().items() if k != "name"}
            settings = {
                **self.config.as_dict(),
                "optimizer": type(self.inner_optimizer).__name__,
                "config": options,
                **self.horovod.as_config(),
                "state loaded from a file": self.loaded_state is not None,
            }
            check_agreement(wire.eager, layout, settings)
            if self.broadcast:
                broadcasting.broadcast_variables([*variables, *self._statistics()], wire.eager)
            pieces = owned_pieces(layout, variables, wire.rank, self.config)
            self._build_inner(pieces)
            self.step = ShardedStep(
                self.inner_optimizer, self.config, layout, wire, variables, pieces
            )
            self.step.gain = self.horovod.gain(wire.size)
            if self.loaded_state is not None:
                state.load_state(self, self.loaded_state)
                self.loaded_state = None
        self.built = True

    def _wire(self) -> Wire:
        if self.sharded is not None:
            return self.sharded.units.wire
        return Wire(self.process_set, self.config)

    def attach(self, sharded: ShardedModel) -> None:
        """Update the variables of a sharded model (stage 3)."""
        self.sharded = sharded
        sharded.units.weigh = self._weigh

    def _weigh(self, packed: Any) -> Any:
        """This rank's contribution to the sum of a unit's gradients, before they are reduced."""
        weight = weighting.peek()
        self._weighed = weight is not None
        return weighing(weight, weighting.will_be_in_loss(self))(packed)

    def compiled_into(self, model: Any) -> None:
        """Remember the model, which was compiled with this optimizer."""
        self._model = weakref.ref(model)

    def _statistics(self) -> list[Any]:
        """The model's variables that no gradient changes; no seeds, which are integers."""
        variables = () if self._model() is None else self._model().non_trainable_variables
        return [v for v in variables if "float" in str(v.dtype)]

    def _build_inner(self, pieces: list[PieceVariable]) -> None:
        inner = self.inner_optimizer
        excluded = compat.decay_exclusions(inner)
        keys = {p.key: key_of(p.variable) for p in pieces}
        excluded.update([piece for piece, variable in keys.items() if variable in excluded])
        steps = inner.gradient_accumulation_steps
        if self.config.stage < 2:
            inner.gradient_accumulation_steps = None  # local sums are the reducer's
        try:
            with tf.name_scope(inner.name):
                (self.scaler or inner).build(pieces)
        finally:
            inner.gradient_accumulation_steps = steps
        inner.built = True
        for piece in pieces:
            piece.finish_build()

    # -- apply ------------------------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars: Any) -> Any:
        grads, variables = zip(*grads_and_vars, strict=True)
        self.apply(grads, variables)
        return compat.iterations(self.inner_optimizer)

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Average `grads` over the ranks and update the variables they belong to."""
        self.apply_scaled(grads, trainable_variables, self.scaler)

    @tf.autograph.experimental.do_not_convert
    def apply_scaled(
        self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None, scaler: Any
    ) -> None:
        """`apply` for gradients of a loss that `scaler` (a LossScaleOptimizer or None) scaled."""
        self._scaler_in_use = None if scaler is None else weakref.ref(scaler)
        grads = list(grads)
        if not grads:
            return
        if compat.in_xla():
            raise ValueError(
                "Horovod has no XLA operations for sharded training: use "
                "tf.function(jit_compile=False) around opt.apply, and "
                "model.compile(..., jit_compile=False)"
            )
        if trainable_variables is None:
            if not self.built:
                raise ValueError(
                    "apply(grads) without variables needs a built optimizer: pass the variables, "
                    "or call build(variables) first"
                )
            trainable_variables = self.step.variables
        trainable_variables = list(trainable_variables)
        if not self.built:
            rows = [i for i, g in enumerate(grads) if isinstance(g, tf.IndexedSlices)]
            self._build(trainable_variables, rows)
        if self.step is None:
            _leave_to_second_trace()
            return
        aligned: list[Any] = [None] * len(self.step.variables)
        given = [self.step.index_of(variable) for variable in trainable_variables]
        for index, grad in zip(given, grads, strict=True):
            aligned[index] = self._checked(self.step.variables[index], grad)
        _check_once(given, trainable_variables)
        weight = weighting.take()
        self._check_weighed(weight)
        present = self.step.reducer.agree_on_present(aligned, weight is not None)
        if present is not None:
            found = [True if i in present.params else None for i in given]
            compat.check_any_gradient(self, found, trainable_variables)
        with tf.name_scope(self.name), explained():
            self.step.run(aligned, scaler, weight, weighting.is_in_loss(self))

    def _checked(self, variable: Any, grad: Any) -> Any:
        """The gradient; None where a unit has none on any rank. Of a sharded variable it must be
        what the tape gives: this rank's part of the sum."""
        shard = shard_of(variable)
        if shard is None or self.sharded is None or grad is None:
            return grad
        if tuple(grad.shape) not in ((shard.span.length,), tuple(shard.piece.shape)):
            raise ValueError(
                f"the gradient of {variable_path(variable)!r} has shape {tuple(grad.shape)}; the "
                f"variable is sharded, and this rank's part of its gradient has "
                f"({shard.span.length},): pass what tape.gradient(loss, model.trainable_variables) "
                "gives"
            )
        return grad if self.sharded.units.is_connected(variable) else None

    def _check_weighed(self, weight: Any) -> None:
        """At stage 3 gradients are summed over the ranks while they are computed."""
        if self.sharded is None:
            return
        weighed, self._weighed = self._weighed, None
        if weighed is not None and (weight is not None) != weighed:
            raise ValueError(
                "at stage 3 zero.weight(n) must come before the gradients are computed: call it "
                "before tape.gradient(...), in every step or in none"
            )

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        if self.use_ema and self.step is not None:
            self.step.wire.new_traffic()
            averages.write(self.inner_optimizer, self.step)

    # -- who takes part ---------------------------------------------------------------------------

    @property
    def process_set(self) -> Any:
        """The ranks that take part; None: all of them."""
        return self._members.process_set

    @process_set.setter
    def process_set(self, process_set: Any) -> None:
        if self.step is not None:
            raise ValueError("process_set must be set before the first step: the state is sharded")
        self._members = Members(process_set)

    def find_members(self, ranks: Sequence[int] | None) -> None:
        """Take the process set of these ranks, as a configuration names it."""
        self._members = Members.of(ranks)

    # -- what belongs to the inner optimizer ------------------------------------------------------

    @property
    def variables(self) -> list[Any]:
        """This rank's state: counters, the learning rate and its shards of the slots.

        The slots of all ranks together are `zero.plain_optimizer(opt).variables`.
        """
        own = [] if self.scaler is None else compat.scaler_variables(self.scaler)
        return _OwnVariables([*own, *self.inner_optimizer.variables])

    def scale_loss(self, loss: Any) -> Any:
        loss = (self.scaler or self.inner_optimizer).scale_loss(loss)
        if not weighting.may_enter_loss():
            return loss
        # Multiplies one number, instead of all gradients later.
        weighting.put_into_loss(self)
        return loss * tf.cast(weighting.take(), loss.dtype)

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        if self.step is not None:
            raise ValueError("exclude_from_weight_decay must be called before the first step")
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def __getattr__(self, name: str) -> Any:
        # Python calls this for what is found nowhere else: beta_1, momentum and the like.
        if name.startswith("_") or "inner_optimizer" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._part_with(name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "process_set":  # Keras would read it first, which raises while it is unknown
            object.__setattr__(self, name, value)
            return
        # `opt.momentum = 0.5` means the inner optimizer, which is the one that reads it.
        own = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if not own and "inner_optimizer" in self.__dict__ and hasattr(self._part_with(name), name):
            setattr(self._part_with(name), name, value)
        else:
            super().__setattr__(name, value)

    def _part_with(self, name: str) -> Any:
        """The inner optimizer, or the scaler if only that one has the attribute."""
        scaler = self.__dict__.get("scaler")
        inner = self.inner_optimizer
        return scaler if not hasattr(inner, name) and hasattr(scaler, name) else inner

    # -- saving -----------------------------------------------------------------------------------

    @property
    def is_sharded(self) -> bool:
        """Whether this rank holds less than the whole state."""
        return self.step is not None and self.step.layout.size > 1

    def check_savable(self) -> None:
        """Raise if saving would store this rank's shard as if it were the whole state."""
        if self.sharded is not None and self.is_sharded and self.saved_state is None:
            raise ShardedStateError(
                "no rank holds the model's variables whole, so none can save them by itself. Call "
                "zero.save_model(model, path) on all ranks instead (rank 0 writes; weights alone "
                "to a path that ends with .weights.h5), or zero.save(path, model), or add "
                "zero.callbacks.Checkpoint(path) to fit."
            )
        if self.is_sharded and self.saved_state is None:
            raise ShardedStateError(
                "this would store or copy this rank's share of the optimizer state as if it were "
                "everything. Call zero.save(folder, model) or zero.save_model(model, path) on all "
                "ranks instead (rank 0 writes the file), add zero.callbacks.Checkpoint(path) to "
                "fit, or store the weights alone, which any rank can do: "
                "model.save_weights(path). zero.plain_optimizer(opt) gives the whole state."
            )

    def save_own_variables(self, store: Any) -> None:
        """Store the whole state, which `zero.save_model` has collected; `model.save` calls it."""
        self.check_savable()
        whole = self.saved_state
        if self.step is None:
            whole = self.loaded_state or {}
        for key, value in (state.local_state(self) if whole is None else whole).items():
            store[key] = value

    def load_own_variables(self, store: Any) -> None:
        """Load this rank's shard of a state saved at any number of ranks."""
        if not list(store.keys()):
            return  # saved by save_weights, which leaves the state out
        stored = {key: store[key] for key in store.keys()}  # noqa: SIM118
        if self.step is not None:
            state.load_state(self, stored)
            return
        state.check_scalars(self, stored)
        self.loaded_state = {key: np.array(value) for key, value in stored.items()}
        state.load_scalars(self, self.loaded_state)

    def get_config(self) -> dict[str, Any]:
        serialized = keras.saving.serialize_keras_object(self.scaler or self.inner_optimizer)
        return {
            "inner_optimizer": serialized,
            **self.config.as_dict(),
            **self.horovod.as_config(),
            "broadcast": self.broadcast,
            "process_set": self._members.ranks,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        config = dict(config)
        ranks = config.pop("process_set", None)
        inner = keras.saving.deserialize_keras_object(
            config.pop("inner_optimizer"), custom_objects=custom_objects
        )
        optimizer = cls(inner, **config)
        optimizer.find_members(ranks)
        return optimizer


def unwrap(optimizer: Any) -> DistributedOptimizer | None:
    """The DistributedOptimizer that `optimizer` is or wraps, or None."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer if isinstance(optimizer, DistributedOptimizer) else None


def optimizer_of(model: Any) -> DistributedOptimizer | None:
    """The DistributedOptimizer that `model` was compiled with, or None."""
    return unwrap(getattr(model, "optimizer", None))


def optimizers_of(model: Any) -> list[DistributedOptimizer]:
    """All DistributedOptimizers that `model` has, be it compiled with them or not: a train_step of
    its own may use several, which are attributes then."""
    found = [unwrap(part) for part in (getattr(model, "optimizer", None), *vars(model).values())]
    return list({id(o): o for o in found if o is not None}.values())


def ranks_of(model: Any) -> Collectives:
    """Eager collectives of the ranks that train `model`."""
    optimizer = optimizer_of(model)
    if optimizer is not None and optimizer.step is not None:
        return optimizer.step.wire.eager
    return join(None if optimizer is None else optimizer.process_set)


def _leave_to_second_trace() -> None:
    """End a step whose variables TensorFlow has just made, and will initialize after this trace.

    That is a model without an Input layer: tf.function traces it once to find its variables, and
    once more to run it. There is nothing to broadcast or lay out before.
    """
    problem = (
        "the model makes variables from the data of a step: build it before the first one, with "
        "model.build(shape) or by calling it on a batch"
    )
    tf.debugging.Assert(False, [problem])  # only if TensorFlow runs the first trace after all


def _check_sharded(sharded: ShardedModel | None, variables: Sequence[Any]) -> None:
    if sharded is None:
        raise ValueError(
            "stage 3 shards the model's variables too: model, opt = zero.zeroify(model, opt, "
            "stage=3) before the first step"
        )
    if [id(v) for v in variables] != [id(v) for v in sharded.variables]:
        raise ValueError(
            "the optimizer is built for other variables than those that were trainable when "
            "zero.zeroify(model, opt, stage=3) sharded the model"
        )


def _delegate(name: str) -> property:
    def get(self: DistributedOptimizer) -> Any:
        inner = self.__dict__.get("inner_optimizer")
        return None if inner is None else getattr(inner, name)

    def set_(self: DistributedOptimizer, value: Any) -> None:
        # keras.Optimizer.__init__ sets its defaults before there is an inner optimizer.
        if "inner_optimizer" in self.__dict__:
            setattr(self.inner_optimizer, name, value)

    return property(get, set_, doc=f"The inner optimizer's `{name}`.")


for _name in _DELEGATED:
    setattr(DistributedOptimizer, _name, _delegate(_name))
compat.before_checkpoints(DistributedOptimizer, DistributedOptimizer.check_savable)


def _check_once(given: Sequence[int], variables: Sequence[Any]) -> None:
    if len(set(given)) < len(given):
        twice = [v for i, v in zip(given, variables, strict=True) if given.count(i) > 1]
        raise ValueError(
            f"{variable_path(twice[0])!r} is given twice in one step; add up its gradients, or "
            "apply them one after the other"
        )


def _check_inner(optimizer: Any, config: ZeroConfig) -> None:
    if optimizer is None:
        raise TypeError(
            "expected a Keras optimizer, its name or its configuration to wrap, got None; for "
            'example zero.DistributedOptimizer(keras.optimizers.Adam(1e-3)), or "adam"'
        )
    if isinstance(optimizer, DistributedOptimizer):
        raise TypeError(
            f"the optimizer is a DistributedOptimizer already ({optimizer.name!r}): wrap it once"
        )
    if optimizer.built:
        raise ValueError(
            f"optimizer {optimizer.name!r} is built: it holds its full state already. Wrap a new "
            f"one: {type(optimizer).__name__}.from_config(optimizer.get_config())"
        )
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if config.grad_clip and (inner.clipnorm or inner.clipvalue or inner.global_clipnorm):
        raise ValueError(
            "grad_clip and the optimizer's own clipping are both set; use one of grad_clip, "
            "clipnorm, clipvalue and global_clipnorm"
        )
