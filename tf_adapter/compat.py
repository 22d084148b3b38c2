"""The private names of Keras and TensorFlow that the adapter cannot do without.

Nothing else in the adapter uses one. Each function says why it is needed and what is lost without
it. All of them were run on Keras 3.15.1 with TensorFlow 2.21; where an older Keras 3 lacks a name,
the function says what it returns then.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.legacy.saving import legacy_h5_format
from keras.src.losses import loss as loss_module
from keras.src.saving import saving_lib
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
    return dict(model._compile_config.config)


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """Have a `fit` that has just begun start at `epoch`, as keras.callbacks.BackupAndRestore does.
    Without it, a resumed `fit` would run all epochs again."""
    model._initial_epoch = epoch


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


def output_losses(model: Any) -> list[Any]:
    """The metrics for the losses of a model's several outputs. Without it, a batch of one sample
    would count in them as much as a full one."""
    return getattr(getattr(model, "_compile_loss", None), "metrics", None) or []


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
            native = value if isinstance(value, tf.Variable) else value.value
            self.of[native.ref()] = f"{self._path}/vars/{key}" if self._path else f"vars/{key}"


def weights_places(model: Any, skip: Collection[Any]) -> dict[Any, str]:
    """Variable (by reference) -> its place in a .weights.h5 file, without the objects in `skip`.

    The place does not depend on the numbers that Keras appends to layer names. Without it, a
    checkpoint could be loaded only into a model made at the same point of a program.
    """
    store = _Places()
    saving_lib._save_state(model, store, None, "", {id(part) for part in skip})
    return store.of
