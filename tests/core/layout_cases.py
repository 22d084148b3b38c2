"""Layouts of all kinds for property tests, and numpy shards to fill them with."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from zerohvd.layout import Layout, ParamSpec, build_layout

PADDING = -1  # what tests put where no parameter lives; parameters hold numbers from 0 up

shapes = st.one_of(
    st.lists(st.integers(0, 6), max_size=3).map(tuple),
    st.tuples(st.integers(0, 3000)),
)
sizes = st.one_of(st.integers(1, 9), st.sampled_from([16, 63, 64, 65, 128]))
bucket_sizes = st.one_of(st.integers(1, 300), st.sampled_from([1024, 4096, 8 << 20]))
partitions = st.sampled_from(["flat", "parameter"])


@st.composite
def spec_lists(draw, max_params=12):
    found = draw(
        st.lists(
            st.tuples(
                shapes,
                st.sampled_from(["float32", "float16", "float64"]),
                st.sampled_from([0, 0, 1, "norms"]),
            ),
            max_size=max_params,
        )
    )
    return [ParamSpec(f"p{i}", *rest) for i, rest in enumerate(found)]


@st.composite
def layouts(draw, specs=None, max_params=12):
    specs = draw(spec_lists(max_params)) if specs is None else specs
    return build_layout(
        specs,
        draw(sizes),
        bucket_bytes=draw(bucket_sizes),
        partition=draw(partitions),
        chunk_bytes=draw(st.one_of(st.none(), bucket_sizes)),
    )


def numbered(layout: Layout) -> dict[str, np.ndarray]:
    """Every parameter, flattened, filled with numbers that occur only once, by name."""
    values = {}
    for spec in sorted(layout.params, key=lambda p: p.name):
        first = sum(v.size for v in values.values())
        values[spec.name] = np.arange(first, first + spec.numel)
    return values


def pack(layout: Layout, values: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The full flat buffer of every bucket."""
    flats = []
    for bucket in layout.buckets:
        flat = np.full(bucket.padded, PADDING)
        for slot in bucket.slots:
            value = values[layout.params[slot.param].name]
            flat[slice(*slot.span)] = value[slot.param_start : slot.param_start + slot.length]
        flats.append(flat)
    return flats


def unpack(layout: Layout, flats: list[np.ndarray]) -> dict[str, np.ndarray]:
    values = {p.name: np.full(p.numel, PADDING) for p in layout.params}
    for bucket, flat in zip(layout.buckets, flats, strict=True):
        for slot in bucket.slots:
            value = values[layout.params[slot.param].name]
            value[slot.param_start : slot.param_start + slot.length] = flat[slice(*slot.span)]
    return values


def cut(layout: Layout, flats: list[np.ndarray]) -> list[list[np.ndarray]]:
    """shards[rank][bucket]"""
    return [
        [flat[slice(*b.span(rank))] for b, flat in zip(layout.buckets, flats, strict=True)]
        for rank in range(layout.size)
    ]


def gpt2(layers: int = 12, width: int = 768, vocabulary: int = 50257) -> list[ParamSpec]:
    shapes = {"wte.weight": (vocabulary, width), "wpe.weight": (1024, width)}
    for i in range(layers):
        shapes |= {
            f"h.{i}.ln_1.weight": (width,),
            f"h.{i}.ln_1.bias": (width,),
            f"h.{i}.attn.c_attn.weight": (width, 3 * width),
            f"h.{i}.attn.c_attn.bias": (3 * width,),
            f"h.{i}.attn.c_proj.weight": (width, width),
            f"h.{i}.attn.c_proj.bias": (width,),
            f"h.{i}.ln_2.weight": (width,),
            f"h.{i}.ln_2.bias": (width,),
            f"h.{i}.mlp.c_fc.weight": (width, 4 * width),
            f"h.{i}.mlp.c_fc.bias": (4 * width,),
            f"h.{i}.mlp.c_proj.weight": (4 * width, width),
            f"h.{i}.mlp.c_proj.bias": (width,),
        }
    shapes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    return [ParamSpec(name, shape) for name, shape in shapes.items()]
