"""Checkpoints of numpy parameters, in any layout, by ranks that are threads."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from zerohvd.checkpoint import (
    CheckpointError,
    Content,
    Entry,
    Reader,
    SavePlan,
    Want,
    save,
    together,
)
from zerohvd.communication.collectives import Collectives
from zerohvd.layout import Layout, ParamSpec, Span, build_layout
from zerohvd.testing import ThreadWorld

KINDS = ("param", "exp_avg")


def some_layout(size: int, *, scale: int = 1, **options) -> Layout:
    specs = [
        ParamSpec("embed.weight", (31 * scale, 7)),
        ParamSpec("up.weight", (7, 53 * scale)),
        ParamSpec("up.bias", (53,), "float16"),
        ParamSpec("scale", ()),
        ParamSpec("head.weight", (11, 7), "float64"),
    ]
    return build_layout(specs, size, **{"bucket_bytes": 700, **options})


def values_of(layout: Layout, version: int) -> dict[str, np.ndarray]:
    """Every tensor, flat; those of another version differ everywhere."""
    found = {}
    for kind in KINDS:
        for index, spec in enumerate(layout.params):
            rng = np.random.default_rng([version, index, KINDS.index(kind)])
            found[f"{kind}/{spec.name}"] = rng.normal(size=spec.numel).astype(spec.dtype)
    return found


def content(layout: Layout, rank: int, values: dict[str, np.ndarray], step: int) -> Content:
    """What `rank` stores."""
    entries, named = [], {}
    for piece in layout.pieces(rank):
        spec = layout.params[piece.param]
        for kind in KINDS:
            data = values[f"{kind}/{spec.name}"][slice(*piece.param_span)]
            span = piece.param_span
            entries.append(Entry(kind, spec.name, spec.dtype, spec.shape, span, data))
        if piece.param_span.start == 0:
            named[spec.name] = {"step": step}
    if rank == 0:
        entries += [
            Entry(kind, s.name, s.dtype, s.shape, Span(0, 0), np.empty(0, s.dtype))
            for s in layout.params
            if s.numel == 0
            for kind in KINDS
        ]
    return Content("numpy", entries, named, {"version": step}, {"rank": rank}, step)


def planned(make) -> SavePlan:
    """The plan of a rank that need not know what the others have."""
    return SavePlan(lambda: None, lambda said: make())


def store(path: Path, collectives: Collectives, layout: Layout, version: int) -> None:
    values = values_of(layout, version)
    save(path, collectives, planned(lambda: content(layout, collectives.rank, values, version)))


def fetch(path: Path, collectives: Collectives, layout: Layout) -> dict[str, list]:
    """This rank's ranges: key -> [(span, values)], if all ranks found theirs sound."""
    memory: dict[str, list] = {}

    def read() -> None:
        wants = []
        for piece in layout.pieces(collectives.rank):
            spec = layout.params[piece.param]
            for kind in KINDS:
                key = f"{kind}/{spec.name}"
                data = np.zeros(piece.param_span.length, spec.dtype)
                memory.setdefault(key, []).append((piece.param_span, data))
                wants.append(Want(key, piece.param_span, memoryview(data).cast("B")))
        Reader.open(path).read(wants, collectives.rank, collectives.size)

    together(collectives, "check", read)
    return memory


def refused(ranks: int, act: Callable[[Collectives], object]) -> str:
    """What `act` complains about, on every rank in the same words."""
    said = []

    def attempt(collectives: Collectives) -> None:
        try:
            act(collectives)
        except CheckpointError as error:
            said.append(str(error))

    ThreadWorld(ranks).run(attempt)
    assert len(said) == ranks and len(set(said)) == 1, said
    return said[0]


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """From here on, the shard of `rank` cannot be written."""
    plain = os.write

    def write(fd: int, data: memoryview) -> int:
        if f"shard-{rank:05d}" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(fd, data)

    monkeypatch.setattr(os, "write", write)


def assert_holds(parts: list[dict[str, list]], expected: dict[str, np.ndarray]) -> None:
    """The ranks together hold `expected`, each element once."""
    for key, flat in expected.items():
        held = sorted(
            ((span, data) for part in parts for span, data in part.get(key, [])),
            key=lambda h: h[0],
        )
        whole = np.concatenate([data for _, data in held]) if held else flat[:0]
        np.testing.assert_array_equal(whole, flat, err_msg=key)
