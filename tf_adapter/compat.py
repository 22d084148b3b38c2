"""The private names of Keras and TensorFlow that the adapter cannot do without.

Nothing else in the adapter uses one. Each function says why it is needed and what is lost without
it. All of them were run on Keras 3.15.1 with TensorFlow 2.21; where an older Keras 3 lacks a name,
the function says what it returns then.
"""

from __future__ import annotations

import contextlib
import copy
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.backend.common import global_state, masking, stateless_scope, symbolic_scope
from keras.src.backend.tensorflow import random as backend_random
from keras.src.initializers import random_initializers
from keras.src.legacy.saving import legacy_h5_format
from keras.src.losses import loss as loss_module
from keras.src.random import seed_generator
from keras.src.saving import saving_lib
from tensorflow.python.eager import record
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

# -- the optimizer that is wrapped -----------------------------------------------------------------


def iterations(optimizer: Any) -> Any:
    """The counter of calls. The public `iterations` is divided by the accumulation steps, and is
    not a variable then: there would be nothing to advance."""
    return optimizer._iterations


def update_variables(
    optimizer: Any, grads: Sequence[Any], variables: Sequence[Any], rate: Any
) -> None:
    """Call `update_step` for each variable, and what an optimizer does once per step (Nadam's
    momentum product). Without it, such optimizers would have to be refused."""
    optimizer._backend_update_step(grads, variables, rate)


def updates_together(optimizer: Any) -> bool:
    """Whether the optimizer has an `update_variables` of its own, which wants all variables in one
    call. Calling it bucket by bucket would advance Nadam's momentum once per bucket."""
    plain = keras.optimizers.SGD._backend_update_step
    return type(optimizer)._backend_update_step is not plain


def updates_like(optimizer: Any, cls: type) -> bool:
    """Whether the optimizer is a `cls` and overrides nothing that decides what an update reads.
    Without it, a subclass with a per-tensor norm would be cut at shard boundaries."""
    methods = ("update_step", "_backend_update_step", "build")
    return isinstance(optimizer, cls) and all(
        getattr(type(optimizer), method) is getattr(cls, method) for method in methods
    )


def apply_weight_decay(optimizer: Any, variables: Sequence[Any]) -> None:
    """Decay `variables` except the excluded ones. Copying the formula would be the alternative;
    some optimizers override it."""
    optimizer._apply_weight_decay(variables)


def decay_exclusions(optimizer: Any) -> set[str]:
    """The keys of the variables without weight decay, to which those of their pieces are added.
    Without it, `exclude_from_weight_decay(var_list=...)` would be ignored."""
    return getattr(optimizer, "_exclude_from_weight_decay", None) or set()


def variable_key(variable: tf.Variable) -> str:
    """What Keras' optimizers identify a variable by, on the TensorFlow backend."""
    return variable._unique_id


def update_averages(optimizer: Any, variables: Sequence[Any]) -> None:
    """Take `variables` into the moving averages of `use_ema`. Public is only `apply`, which does
    it for the variables it has updated itself, before they are gathered and constrained."""
    optimizer._update_model_variables_moving_average(variables)


def averages(optimizer: Any) -> Sequence[Any]:
    """The moving averages. Without it, they could not be written to the model or swapped."""
    return optimizer._model_variables_moving_average


def accumulated_gradients(optimizer: Any) -> list[tf.Variable]:
    """The sums that Keras makes for `gradient_accumulation_steps`. Without it, stage 2 would need
    sums of its own beside them: 4 bytes more per parameter of the shard."""
    return [v.value for v in optimizer._accumulated_gradients]


# The attributes of an optimizer that are lists as long as its variables, but no slots.
NOT_SLOTS = ("_trainable_variables", "_variables")
# What Keras calls two parts of its state that are treated differently from others.
ACCUMULATED, LEARNING_RATE = "_accumulated_gradients", "_learning_rate"


def check_any_gradient(optimizer: Any, grads: Sequence[Any], variables: Sequence[Any]) -> None:
    """Raise if all gradients are None, and warn if some are, in the words that Keras uses."""
    optimizer._filter_empty_gradients(grads, variables)


def scaler_variables(scaler: Any) -> list[Any]:
    """A LossScaleOptimizer's own variables. The public `variables` include the inner optimizer's,
    of which a rank holds a share: saving them would store that as if it were everything."""
    return list(scaler._variables)


def before_checkpoints(cls: type, check: Callable[[Any], None]) -> None:
    """Call `check` on an object of `cls` whenever tf.train.Checkpoint stores it. Without it, a
    checkpoint would hold one rank's shards as if they were everything; nothing else is asked
    when TensorFlow saves, as it collects the variables by itself.

    A SavedModel (`model.export`) is for inference: it gets no variables of the object. Which of the
    two is made only the call says that asks for children, which comes first.
    """
    all_children = cls._trackable_children  # type: ignore[attr-defined]
    asked: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def children(self: Any, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        asked[self] = save_type
        return all_children(self, save_type, **kwargs) if save_type == "checkpoint" else {}

    def tensors(self: Any) -> dict[str, Any]:
        if asked.get(self, "checkpoint") == "checkpoint":
            check(self)
        return {}

    cls._trackable_children = children  # type: ignore[attr-defined]
    cls._serialize_to_tensors = tensors  # type: ignore[attr-defined]
    cls._restore_from_tensors = lambda self, restored: []  # type: ignore[attr-defined]


# -- models, callbacks and datasets ----------------------------------------------------------------


def compile_arguments(model: Any) -> dict[str, Any]:
    """What `model.compile` was called with. The public `get_compile_config` has it serialized,
    which custom losses and metrics do not survive."""
    return dict(getattr(getattr(model, "_compile_config", None), "config", None) or {})


def compiled_metrics(model: Any) -> list[Any]:
    """The metrics that `model.compile` was given as objects. The public `metrics` has them from the
    first step on: what a step without samples does to them could not be taken back in that one."""
    given = keras.tree.flatten(list(compile_arguments(model).values()))
    return [m for m in given if isinstance(m, keras.metrics.Metric)]


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """Have a `fit` that has just begun start at `epoch`, as keras.callbacks.BackupAndRestore does.
    Without it, a resumed `fit` would run all epochs again."""
    model._initial_epoch = epoch


def build_metrics(model: Any, batch: Any) -> None:
    """Make the variables of the metrics of `compile`, which Keras makes in the first step. Without
    it, there would be nothing to put the metrics of an interrupted epoch into before that step."""
    model._symbolic_build(data_batch=batch)


def loss_reduction() -> tuple[Any, str]:
    """(module, function) by which every loss reduces its values to a number. Without it, a loss
    that is no mean over samples would differ from that of the whole batch."""
    return loss_module, "reduce_weighted_values"


def masked_weights(weights: Any, mask: Any, dtype: Any) -> Any:
    """The weights that "mean_with_sample_weight" divides by, as Keras joins them with the mask."""
    return loss_module.apply_mask(weights, mask, dtype, "mean_with_sample_weight")


def is_plain_step(step: Any) -> bool:
    """Whether `step` is Keras' own train_step, which applies one loss with one optimizer. It is
    public, but its class, from which a model inherits it, is not."""
    return getattr(step, "__func__", None) is keras.Model.train_step


def metrics_in(metric: Any) -> list[Any]:
    """The metrics that a metric is made of: those of `compile`, or of a metric of the user's.
    Without it, nobody could tell whose variable is whose, and how it is combined over ranks."""
    ours = type(metric).__module__.startswith("keras.")
    of_compile = list(getattr(metric, "metrics", ())) if ours else []
    return of_compile + [m for m in metric._metrics if m not in of_compile]


def metric_variables(metric: Any) -> list[Any]:
    """The variables that a metric has itself; the public `variables` include those of others."""
    return list(metric._variables)


def flatten_metrics(model: Any, logs: dict[str, Any]) -> Any:
    """What `evaluate` returns for these logs without return_dict: numbers in Keras' order."""
    return model._flatten_metrics_in_order(logs)


def dataset_inputs(dataset: tf.data.Dataset) -> Sequence[tf.data.Dataset]:
    """What a dataset was made of. Without it, `shard_dataset(...).repeat()` would lose the mark
    that tells `fit` to weight ranks by their samples."""
    return dataset._inputs()


@contextlib.contextmanager
def outside_of_traces() -> Iterator[None]:
    """A context like tf.init_scope in which variables may be made at any time. tf.function forbids
    new ones after its first trace, inside an init_scope too; but the variables of a model without
    an Input layer have values only then, and the optimizer is built on these."""
    tracing = not tf.executing_eagerly()
    with tf.init_scope():
        if not tracing:
            yield
            return
        with tf.variable_creator_scope(lambda _, **options: ResourceVariable(**options)):
            yield


def in_xla() -> bool:
    """Whether the caller is being compiled by XLA, for which Horovod has no operations. Without
    it, the error would be TensorFlow's: an unsupported operation without any advice."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context()
        while context is not None:
            if context.IsXLAContext():
                return True
            context = context.outer_context
        graph = getattr(graph, "outer_graph", None)
    return False


def model_savers() -> tuple[tuple[Any, str], tuple[Any, str]]:
    """(module, function) that write a .keras and an HDF5 file. They are patched, not `Model.save`,
    which `keras.models.save_model` does not go through: rank 0 would store its share alone."""
    return (saving_lib, "save_model"), (legacy_h5_format, "save_model_to_hdf5")


def average_swappers() -> list[tuple[Any, str]]:
    """(class, method) of SwapEMAWeights that swap averages in, and that keep them at the end; empty
    where Keras lacks it. Unpatched they would pair whole variables with the averages of pieces."""
    cls = getattr(keras.callbacks, "SwapEMAWeights", None)
    names = ("_swap_variables", "_finalize_ema_values")
    return [(cls, name) for name in names] if all(hasattr(cls, n) for n in names) else []


def global_seed() -> Any:
    """The generator behind `keras.random` calls without a seed, or None if there is none yet.
    Without it, a resumed job would repeat the random numbers of its beginning."""
    return global_state.get_global_attribute("global_seed_generator")


class _Places(saving_lib.H5IOStore):
    """Stands in for a .weights.h5 file, and notes where Keras would put each variable."""

    def __init__(self) -> None:
        self.of: dict[Any, str] = {}
        self._path = ""

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: Any = None) -> _Places:
        self._path = path
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, (keras.Variable, tf.Variable)):
            native = value if isinstance(value, tf.Variable) else value._value
            self.of[native.ref()] = f"{self._path}/vars/{key}" if self._path else f"vars/{key}"


def weights_places(model: Any, skip: Collection[Any]) -> dict[Any, str]:
    """Variable (by reference) -> its place in a .weights.h5 file, without the objects in `skip`.

    The place does not depend on the numbers that Keras appends to layer names. Without it, a
    checkpoint could be loaded only into a model made at the same point of a program.
    """
    store = _Places()
    saving_lib._save_state(model, store, None, "", {id(part) for part in skip})
    return store.of


# -- stage 3: layers whose variables are gathered when they are called -----------------------------


def all_layers(model: Any) -> list[Any]:
    """A model and all layers in it, parents first. The public `layers` knows direct children of
    models alone: the sublayers of a custom layer would be missed, and never sharded."""
    found: dict[int, Any] = {}

    def walk(layer: Any) -> None:
        if id(layer) not in found:
            found[id(layer)] = layer
            for child in sublayers(layer):
                walk(child)

    walk(model)
    return list(found.values())


def sublayers(layer: Any) -> list[Any]:
    """The layers that a layer holds itself, lists of them included; see `all_layers`."""
    inner = layer._flatten_layers(include_self=False, recursive=False)
    return [child for child in inner if isinstance(child, keras.layers.Layer)]


def own_weights(layer: Any) -> list[Any]:
    """The weights that a layer has itself, frozen or not. The public lists include its sublayers'
    and depend on `trainable`: a frozen weight would not be told from a statistic."""
    return list(layer._trainable_variables)


def stored_dtype(variable: Any) -> str:
    """The dtype that a variable is stored in. The public `dtype` is another inside of layers with
    mixed precision."""
    return str(variable._dtype)


def stored_value(variable: Any) -> Any:
    """A variable's value as it is stored, or as an enclosing StatelessScope says; see
    `stored_dtype`."""
    found = scoped_value(variable)
    return tf.convert_to_tensor(variable._value) if found is None else found


def first_value(variable: Any) -> Any:
    """A variable's value; that of its initializer if it has none yet (`zero.deferred_init`).
    Without it, the variable would have to be given memory first."""
    if variable._value is not None:
        return tf.convert_to_tensor(variable._value)
    initializer = variable._initializer

    def make() -> Any:
        return initializer(variable._shape, dtype=variable._dtype)

    if not type(initializer).__module__.startswith("keras."):
        return make()
    # A graph computes in place: outside of one, the most that is held would be twice the value.
    # Traced by hand: TensorFlow warns of functions that are traced again and again.
    return tf.function(make, autograph=False).get_concrete_function()()


class Distribution(NamedTuple):
    """What an initializer draws from."""

    kind: str  # "uniform", "normal", "truncated_normal" or "constant"
    first: float  # the lower bound, the mean, or the constant
    second: float  # the upper bound, or the standard deviation
    seed: tuple[int, int]


def distribution_of(variable: Any) -> Distribution | None:
    """What the initializer of a variable without memory draws from; None where that is not known.
    Public is only the call of an initializer, which makes all values at once: without it, one rank
    would have to hold whole variables when a model is sharded."""
    initializer, kinds = variable._initializer, keras.initializers
    constants = {kinds.Zeros: 0.0, kinds.Ones: 1.0}
    if type(initializer) in constants:
        return Distribution("constant", constants[type(initializer)], 0.0, (0, 0))
    if not isinstance(getattr(initializer, "seed", None), int):
        return None  # a SeedGenerator gives other seeds when it is asked again
    seed = _drawn_seed(initializer.seed)
    if type(initializer) is kinds.RandomUniform:
        return Distribution("uniform", initializer.minval, initializer.maxval, seed)
    if type(initializer) is kinds.RandomNormal:
        return Distribution("normal", initializer.mean, initializer.stddev, seed)
    if type(initializer) is kinds.TruncatedNormal:
        return Distribution("truncated_normal", initializer.mean, initializer.stddev, seed)
    if type(initializer).__call__ is kinds.VarianceScaling.__call__:
        return _scaled_distribution(initializer, tuple(variable._shape), seed)
    return None


def _scaled_distribution(initializer: Any, shape: Any, seed: tuple[int, int]) -> Distribution:
    """What VarianceScaling does before it draws."""
    axes = [getattr(initializer, name, None) for name in ("input_axes", "output_axes")]
    fans = random_initializers.compute_fans(shape, *(axes if None not in axes else ()))
    fan = {"fan_in": fans[0], "fan_out": fans[1], "fan_avg": sum(fans) / 2.0}[initializer.mode]
    scale = initializer.scale / max(1.0, fan)
    if initializer.distribution == "uniform":
        limit = math.sqrt(3.0 * scale)
        return Distribution("uniform", -limit, limit, seed)
    if initializer.distribution == "untruncated_normal":
        return Distribution("normal", 0.0, math.sqrt(scale), seed)
    return Distribution("truncated_normal", 0.0, math.sqrt(scale) / 0.87962566103423978, seed)


def _drawn_seed(seed: int) -> tuple[int, int]:
    """The two numbers that keras.random makes of a seed."""
    drawn = backend_random._cast_seed(seed_generator.draw_seed(seed))
    first, second = drawn.numpy().tolist()
    return first, second


def native_variable(variable: Any) -> tf.Variable | None:
    """The tf.Variable behind a variable, None if it has no memory yet."""
    return variable._value


def become(variable: Any, cls: type, native: tf.Variable) -> None:
    """Give a variable another class and another tf.Variable. Keras has no public way to replace
    the memory behind a variable: without it, no memory would ever be freed."""
    if type(variable) not in (keras.Variable, cls) and variable._value is not None:
        raise TypeError(
            f"variable {variable.path!r} is of the class {type(variable).__name__}; stage 3 can "
            "shard keras.Variable only"
        )
    variable._value, variable._initializer = native, None
    variable.__class__ = cls


def autocast(variable: Any, value: Any) -> Any:
    """The value as a layer sees it that computes in another dtype (mixed precision)."""
    return variable._maybe_autocast(value)


def scoped_value(variable: Any) -> Any:
    """A variable's value in the enclosing keras.StatelessScope, or None. Public is the scope, but
    not which one encloses the caller."""
    scope = stateless_scope.get_stateless_scope()
    return None if scope is None else scope.get_current_value(variable)


def in_symbolic_scope() -> bool:
    """Whether Keras only asks for shapes: a collective would wait for ever."""
    return bool(symbolic_scope.in_symbolic_scope())


def ensure_global_seed() -> Any:
    """The generator behind `keras.random` calls without a seed, made if there is none yet. Made
    inside of a layer's call, it would be unknown to the recomputation: another dropout mask."""
    return seed_generator.global_seed_generator()


def get_mask(x: Any) -> Any:
    """The mask that travels with a tensor. Without it, masks would end at a unit."""
    return masking.get_keras_mask(x)


def set_mask(x: Any, mask: Any) -> None:
    masking.set_keras_mask(x, mask)


class CallState(NamedTuple):
    """What Keras knows in a layer's call besides its arguments."""

    context: Any
    autocast: Any


def call_state() -> CallState:
    """`training` as the outermost layer was given it, and the dtype of mixed precision. Without
    them a layer that is called again in the backward pass would drop nothing out."""
    context = global_state.get_global_attribute("current_call_ctx")
    autocasting = global_state.get_global_attribute("autocast_scope")
    return CallState(copy.copy(context), autocasting)


@contextlib.contextmanager
def in_call_state(state: CallState) -> Iterator[None]:
    """Call layers inside as if where `call_state` was asked."""
    before = [global_state.get_global_attribute(n) for n in ("current_call_ctx", "autocast_scope")]
    global_state.set_global_attribute("current_call_ctx", copy.copy(state.context))
    global_state.set_global_attribute("autocast_scope", state.autocast)
    try:
        yield
    finally:
        global_state.set_global_attribute("current_call_ctx", before[0])
        global_state.set_global_attribute("autocast_scope", before[1])


@contextlib.contextmanager
def unchanged(layer: Any) -> Iterator[None]:
    """Take back what the block leaves in the attributes of a layer and the layers in it. Without
    it, a tensor that a layer keeps for its user would be one of the recomputation."""
    before = [(x, dict(vars(x)), _containers(x)) for x in all_layers(layer)]
    try:
        yield
    finally:
        for x, attributes, contents in before:
            now = vars(x)
            for name in [n for n in now if n not in attributes]:
                del now[name]
            now.update((n, v) for n, v in attributes.items() if now.get(n) is not v)
            for held, kind, values in contents:
                _refill(held, kind, values)


def _containers(layer: Any) -> list[tuple[Any, type, Any]]:
    held = [(v, k) for v in vars(layer).values() for k in (list, dict, set) if isinstance(v, k)]
    return [(v, kind, kind(v)) for v, kind in held]


def _refill(held: Any, kind: Any, values: Any) -> None:
    """By the methods of plain containers: Keras' own would track, or refuse, layers in them."""
    if kind is list:
        list.__setitem__(held, slice(None), values)
    else:
        kind.clear(held)
        kind.update(held, values)


def stop_recording() -> contextlib.AbstractContextManager[None]:
    """No tape sees what happens inside; public is only a method of one tape, which a layer does
    not know. Without it, eager tapes would keep gathered variables alive until backward."""
    return record.stop_recording()


def is_recorded(tensors: Sequence[Any]) -> bool:
    """Whether a tape records what is done to one of the tensors. Without it, a gradient that
    cannot be computed would be lost without a word."""
    return bool(record.should_record_backprop(list(tensors)))


def in_branch() -> bool:
    """Whether the caller is traced into a branch of tf.cond or the body of a loop. Without it,
    ranks that take different branches would wait for each other for ever."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    return type(graph).__name__ in ("CondBranchFuncGraph", "WhileCondFuncGraph")


_realised: list[Any] = []  # the variable that is being given its memory


def realise(variable: Any) -> None:
    """Turn a variable without memory into an ordinary one; see `zero.deferred_init`."""
    variable.__class__ = keras.Variable
    if stateless_scope.get_stateless_scope() is not None:
        return  # Keras calls the initializer again and again there
    _realised.append(variable)
    try:
        variable._deferred_initialize()
    finally:
        _realised.pop()


def replace_initialization(defer: Callable[[Any, Any], type | None]) -> Callable[[], None]:
    """Have variables that `defer` gives a class keep their initializer instead of calling it;
    returns what ends that. Public is only a StatelessScope, which forbids whatever else the
    constructor of a model may do to variables."""
    original = keras.Variable._initialize_with_initializer
    later = keras.Variable._deferred_initialize

    def initialize(self: Any, initializer: Any) -> None:
        is_realised = any(self is variable for variable in _realised)  # in the same scope
        cls = None if is_realised else defer(self, self._shape)
        if cls is None:
            original(self, initializer)
            return
        self._value, self._initializer = None, initializer
        self.__class__ = cls

    def initialize_later(self: Any) -> None:
        """For variables made in a symbolic call: Keras drops the initializer behind this."""
        initializer = self._initializer
        later(self)
        if self._value is None:
            self._initializer = initializer

    keras.Variable._initialize_with_initializer = initialize
    keras.Variable._deferred_initialize = initialize_later

    def undo() -> None:
        keras.Variable._initialize_with_initializer = original
        keras.Variable._deferred_initialize = later

    return undo
