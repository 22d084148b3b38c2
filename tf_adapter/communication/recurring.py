"""Operations that recur in a step: traced for each of their uses, in the graph once.

A graph takes tens of KiB per operation: its definition, TensorFlow's optimized copies of it, and
the executor's tables. The blocks of a transformer differ in nothing but what they are given: their
operations become one function, which every block calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from zerohvd.keras import compat

# Inlined, every call would be a copy of its own again.
_ATTRIBUTES = {"_noinline": True}
# What a node says about gradients and names, which no longer matters once it is traced.
_IGNORED = ("_gradient_op_type", "_user_specified_name")


def recurring(body: Callable[..., Sequence[Any]], inputs: Sequence[Any]) -> list[Any]:
    """`body(*inputs)`, which takes and gives tensors and has no gradient.

    Traced, it is one operation, a call of a function. Calls in one graph whose bodies have become
    the same operations share the function; nothing else about `body` is compared. It may use other
    tensors and variables: they are inputs of the function too, and each call has its own.

    What `body` leaves in Python objects are tensors of the function, of no use outside of it.
    """
    if tf.executing_eagerly():
        return list(body(*inputs))
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in inputs]
    function = tf.function(body, autograph=False, experimental_attributes=_ATTRIBUTES)
    traced = function.get_concrete_function(*specs)
    known = kept_in_graph("recurring").setdefault(_digest(traced), traced)
    with compat.stop_recording():
        made = _call(known, [*inputs, *traced.captured_inputs])
    for tensor, inner in zip(made, traced.outputs, strict=True):
        tensor.set_shape(inner.shape)
    return made


def kept_in_graph(kind: str) -> dict[Any, Any]:
    """A dictionary that lives as long as the graph that is being traced, and may hold its tensors:
    in a weak dictionary of graphs, these would keep the graph alive for ever."""
    graph = tf.compat.v1.get_default_graph()
    # A graph begins with copies of what the graph around it has.
    found = graph.get_collection_ref(f"zero/{kind}/{id(graph)}")
    if not found:
        found.append({})
    kept: dict[Any, Any] = found[0]
    return kept


def _call(function: Any, inputs: Sequence[Any]) -> list[Any]:
    stateful = any(op.op_def.is_stateful for op in function.graph.get_operations())
    call = tf.raw_ops.StatefulPartitionedCall if stateful else tf.raw_ops.PartitionedCall
    made = call(args=inputs, Tout=[t.dtype for t in function.outputs], f=function)
    return list(made) if function.outputs else []


def _digest(traced: Any) -> bytes:
    """Equal for functions of the same operations, shapes and constants, whatever their names."""
    definition = traced.graph.as_graph_def(add_shapes=True)
    names = {node.name: str(i) for i, node in enumerate(definition.node)}
    for node in definition.node:
        node.name = names[node.name]
        node.ClearField("experimental_debug_info")
        renamed = [_renamed(name, names) for name in node.input]
        node.input[:] = renamed
        for key in _IGNORED:
            node.attr.pop(key, None)
        if "_class" in node.attr:
            places = [names.get(s.decode().removeprefix("loc:@"), "") for s in
                      node.attr["_class"].list.s]
            node.attr["_class"].list.s[:] = [place.encode() for place in places]
    said = hashlib.sha256(definition.SerializeToString(deterministic=True))
    said.update(repr([_renamed(t.name, names) for t in traced.outputs]).encode())
    said.update(repr([_renamed(t.name, names) for t in traced.inputs]).encode())
    return said.digest()


def _renamed(name: str, names: dict[str, str]) -> str:
    """The name of a tensor, or "^" and that of an operation, by its operation's new name."""
    mark = "^" if name.startswith("^") else ""
    operation, colon, output = name.removeprefix("^").partition(":")
    return f"{mark}{names[operation]}{colon}{output}"
