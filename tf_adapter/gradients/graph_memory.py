"""What a step holds over time, from the graph that TensorFlow makes of it. Nothing runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from zerohvd.keras import compat
from zerohvd.planning.timeline import Event, Timeline, thinned

# They hand on the memory of their input.
_SAME_MEMORY = {
    "Identity", "IdentityN", "Reshape", "ExpandDims", "Squeeze", "StopGradient",
    "PreventGradient", "EnsureShape",
}  # fmt: skip
# They have tensors of their own that the graph does not show.
_HIDING = {"While", "StatelessWhile", "If", "StatelessIf", "PartitionedCall", "Case",
           "StatefulPartitionedCall", "StatelessCase"}  # fmt: skip


def measure(model: Any, batch: Any, loss: Callable[[Any], Any] | None) -> Timeline:
    """Trace the forward and backward pass, and follow its tensors from operation to operation.

    Args:
        batch: tf.TensorSpecs of what the model is called with.
        loss: Of the model's output; None: its sum.
    """
    trained = model.trainable_variables
    values = [_spec(v) for v in trained]
    rest = [_spec(v) for v in model.non_trainable_variables]

    # Variables are arguments: one that has no memory yet must not be given any.
    @tf.function(autograph=False, jit_compile=False)
    def step(values: Any, rest: Any, batch: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(values)
            out, _ = model.stateless_call(values, rest, batch, training=True)
            total = _sum(out) if loss is None else loss(out)
        return tape.gradient(total, values, unconnected_gradients="none")

    concrete = step.get_concrete_function(values, rest, batch)
    gradients = {}
    flat = tf.nest.flatten(concrete.structured_outputs, expand_composites=False)
    for index, grad in enumerate(flat):
        for part in () if grad is None else tf.nest.flatten(grad, expand_composites=True):
            gradients[part.ref()] = index
    return _follow(concrete.graph, gradients)


def _spec(variable: Any) -> tf.TensorSpec:
    return tf.TensorSpec(variable.shape, compat.stored_dtype(variable))


def _sum(out: Any) -> Any:
    return tf.add_n([tf.reduce_sum(tf.cast(x, tf.float32)) for x in tf.nest.flatten(out)])


def _follow(graph: Any, gradients: dict[Any, int]) -> Timeline:
    """Allocate what operations make, in the order of the graph, and free it after its last use."""
    operations = graph.get_operations()
    memory_of = _memories(operations)
    uses = Counter(memory_of[x.ref()] for op in operations for x in op.inputs)
    where = {memory_of[ref]: index for ref, index in gradients.items()}
    inputs = {memory_of[x.ref()] for x in graph.inputs}
    live, held, saved, backward = 0, {}, 0, False
    events: list[Event] = []
    for op in operations:
        if not backward and "gradient_tape/" in op.name:
            backward, saved = True, live
        for x in op.outputs:
            memory = memory_of[x.ref()]
            if memory in held or memory in inputs or op.type in ("Placeholder", "Const"):
                continue
            held[memory] = 0 if memory in where else _nbytes(x)
            live += held[memory]
            events.append(Event(live))
            if memory in where:
                events.append(Event(live, where.pop(memory)))
        for x in op.inputs:
            memory = memory_of[x.ref()]
            uses[memory] -= 1
            if uses[memory] == 0:
                live -= held.get(memory, 0)
    hides = any(op.type in _HIDING for op in operations)
    how = "TensorFlow's graph of a step" + ", without what is inside loops and calls" * hides
    return Timeline(thinned(events), saved, how)


def _memories(operations: Any) -> dict[Any, Any]:
    """For every tensor the one whose memory it has: its own, or another's."""
    memory_of: dict[Any, Any] = {}
    for op in operations:
        for place, x in enumerate(op.outputs):
            same = op.type in _SAME_MEMORY and place < len(op.inputs)
            source = op.inputs[place if op.type == "IdentityN" else 0] if same else None
            memory_of[x.ref()] = x.ref() if source is None else memory_of[source.ref()]
    return memory_of


def _nbytes(tensor: Any) -> int:
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    count = tensor.shape.num_elements()
    if count is None:
        return 0  # index tensors of shapes; what depends on values cannot be known
    return int(count) * int(tensor.dtype.size)
