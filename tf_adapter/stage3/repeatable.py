"""Whether a layer may be called again in the backward pass: it must then compute the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from zerohvd.errors import ZeroError
from zerohvd.keras import compat

# Operations that draw other numbers each time they run; keras.random keeps its seeds in variables.
_DRAW = {
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "RandomGamma",
    "RandomPoisson",
    "RandomPoissonV2",
    "RandomShuffle",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "RngReadAndSkip",
    "StatefulStandardNormalV2",
    "StatefulTruncatedNormal",
    "StatefulUniform",
    "StatefulUniformFullInt",
    "StatefulUniformInt",
    "TruncatedNormal",
}


def check_repeatable(name: str, call: Callable[..., Any], inputs: Sequence[Any]) -> None:
    """Trace `call` on tensors like `inputs` and raise ZeroError if its gradient would be wrong.

    Args:
        name: The unit's, for errors.
        call: Takes and returns tensors, and changes nothing.
        inputs: What it is given in this pass.
    """
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in inputs]
    with compat.stop_recording():
        traced = tf.function(call, autograph=False).get_concrete_function(*specs)
    random = sorted(_DRAW & set(_operations(traced.graph)))
    if random:
        raise ZeroError(
            f"the unit {name!r} draws random numbers by {random[0]}, which gives others when "
            "backward calls the layer again. Draw them by keras.random with a "
            "keras.random.SeedGenerator; or give recompute=False to zeroify"
        )
    captured = [t for t, _ in traced.graph.captures if t.dtype.is_floating]
    if any(compat.is_recorded([t]) for t in captured):
        raise ZeroError(
            f"the call of {name!r} uses a tensor that is not among its arguments (an attribute, or "
            "a variable of a function around it), whose gradient would be lost. Pass it as an "
            "argument; or give recompute=False to zeroify"
        )


def _operations(graph: Any) -> Iterator[str]:
    definition = graph.as_graph_def()
    yield from (node.op for node in definition.node)
    for function in definition.library.function:
        yield from (node.op for node in function.node_def)
