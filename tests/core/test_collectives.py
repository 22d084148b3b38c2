"""All ranks together, against what numpy says about their arrays.

Every check below takes the collectives of one rank. It runs on one process, on threads, and (this
file as a program under mpirun) over MPI.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerohvd.communication.collectives import (
    Collectives,
    HorovodCollectives,
    MPICollectives,
    SingleProcess,
    shares,
)
from zerohvd.communication.log import Total
from zerohvd.testing import ThreadWorld

try:
    from ml_dtypes import bfloat16
except ImportError:  # then nobody has bfloat16 arrays either
    BF16 = []
else:
    BF16 = [np.dtype(bfloat16)]

FLOATS = [np.dtype(t) for t in ("float64", "float32", "float16")] + BF16
INTS = [np.dtype(t) for t in ("int64", "int32", "int16", "int8", "uint8")]
CHECKS: list[Callable[[Collectives], None]] = []


def check(function):
    CHECKS.append(function)
    return function


def brought(rank: int, rows: int, dtype: np.dtype, columns: int = 3) -> np.ndarray:
    """What `rank` brings along: small whole numbers, which every dtype adds exactly."""
    values = np.random.default_rng([rank, rows]).integers(0, 8, (rows, columns))
    return values.astype(dtype)


def same(found: np.ndarray, expected: np.ndarray, dtype: np.dtype) -> None:
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.astype(np.float64), expected.astype(np.float64))


def reduce(arrays: list[np.ndarray], op: str) -> np.ndarray:
    wide = np.stack([a.astype(np.float64) for a in arrays])
    if op == "average":
        mean = wide.sum(0) / len(arrays)
        return np.floor(mean) if arrays[0].dtype.kind in "iu" else mean.astype(arrays[0].dtype)
    return {"sum": wide.sum, "min": wide.min, "max": wide.max}[op](0)


def row_counts(size: int) -> list[int]:
    return sorted({0, 1, size, 2 * size + 1})


@check
def allreduce_combines_all_ranks(c: Collectives) -> None:
    for dtype in FLOATS + INTS:
        for op in ("sum", "min", "max", "average"):
            for rows in row_counts(c.size):
                all_of_them = [brought(r, rows, dtype) for r in range(c.size)]
                found = c.allreduce(all_of_them[c.rank], op, name=f"{op}.{dtype}.{rows}")
                same(found, reduce(all_of_them, op), dtype)


@check
def allreduce_keeps_the_shape(c: Collectives) -> None:
    for shape in ((), (1,), (2, 0, 3), (2, 3, 4)):
        found = c.allreduce(np.ones(shape, np.float32), name=f"shape.{shape}")
        assert np.shape(found) == shape
        assert (found == c.size).all()


@check
def reducescatter_keeps_this_ranks_rows(c: Collectives) -> None:
    for dtype in FLOATS + INTS:
        for op in ("sum", "average"):
            for rows in row_counts(c.size):
                all_of_them = [brought(r, rows, dtype) for r in range(c.size)]
                found = c.reducescatter(all_of_them[c.rank], op, name=f"{op}.{dtype}.{rows}")
                counts = shares(rows, c.size)
                first = sum(counts[: c.rank])
                kept = reduce(all_of_them, op)[first : first + counts[c.rank]]
                same(found, kept, dtype)


@check
def allgather_joins_arrays_of_different_lengths(c: Collectives) -> None:
    for dtype in [*FLOATS, *INTS, np.dtype(bool)]:
        all_of_them = [brought(r, (r * 2) % 3, dtype) for r in range(c.size)]
        found = c.allgather(all_of_them[c.rank], name=f"gather.{dtype}")
        same(found, np.concatenate(all_of_them), dtype)


@check
def alltoall_sends_every_rank_its_rows(c: Collectives) -> None:
    for dtype in FLOATS + INTS:
        splits = [[(sender + to) % 3 for to in range(c.size)] for sender in range(c.size)]
        all_of_them = [brought(r, sum(splits[r]), dtype) for r in range(c.size)]
        found = c.alltoall(all_of_them[c.rank], splits[c.rank], name=f"all.{dtype}")
        expected = [
            a[sum(s[: c.rank]) : sum(s[: c.rank + 1])]
            for a, s in zip(all_of_them, splits, strict=True)
        ]
        same(found, np.concatenate(expected), dtype)


@check
def broadcast_gives_the_array_of_the_root(c: Collectives) -> None:
    for dtype in FLOATS + INTS:
        for root in range(c.size):
            found = c.broadcast(brought(c.rank, 2, dtype), root, name=f"from.{root}.{dtype}")
            same(found, brought(root, 2, dtype), dtype)


@check
def narrow_floats_add_in_float32(c: Collectives) -> None:
    for dtype, large in zip(FLOATS[2:], (2048, 256), strict=False):
        # In its own dtype, large + 1 is large again.
        x = np.array([large if c.rank == 0 else 1], dtype)
        expected = np.array([large + c.size - 1], np.float32).astype(dtype)
        for found in (
            c.allreduce(x, name=f"a.{dtype}"),
            c.allgather(c.reducescatter(x, name=f"r.{dtype}"), name=f"g.{dtype}"),
        ):
            same(found, expected, dtype)


@check
def inputs_stay_as_they_are_and_results_can_be_written_to(c: Collectives) -> None:
    x = np.arange(12.0).reshape(4, 3)
    for found in (
        c.allreduce(x, name="a"),
        c.allgather(x, name="g"),
        c.reducescatter(x, name="r"),
        c.alltoall(x, shares(4, c.size), name="t"),
        c.broadcast(x, name="b"),
    ):
        if c.size > 1:
            found += 1
    assert np.array_equal(x, np.arange(12.0).reshape(4, 3))


@check
def arrays_need_not_be_contiguous(c: Collectives) -> None:
    x = np.arange(24.0).reshape(6, 4)[::2, ::2]
    same(c.allreduce(x, name="a"), x * c.size, x.dtype)
    same(c.allgather(x, name="g"), np.concatenate([x] * c.size), x.dtype)


@check
def objects_travel_between_ranks(c: Collectives) -> None:
    mine = {"rank": c.rank, "name": "ä" * c.rank, "list": [None, 1.5, True]}
    found = c.allgather_object(mine)
    assert [f["rank"] for f in found] == list(range(c.size))
    assert found[c.rank] == mine
    last = c.size - 1
    assert c.broadcast_object(mine, root=last)["rank"] == last
    c.barrier()


@check
def the_log_counts_what_was_moved(c: Collectives) -> None:
    n = c.size
    c.log.reset()
    c.allreduce(np.zeros(10 * n, np.float32), name="a")
    c.reducescatter(np.zeros(6 * n, np.float16), name="r")
    c.allgather(np.zeros((5, 2), np.float64), name="g")
    c.alltoall(np.zeros(n * (n + 1) // 2, np.int8), range(1, n + 1), name="t")
    c.broadcast(np.zeros(7, np.int16), name="b")
    if isinstance(c, SingleProcess):
        assert c.log.totals() == {}  # nobody to send anything to
        return
    assert c.log.totals() == {
        "allreduce": Total(1, 2 * 40 * (n - 1)),
        "reducescatter": Total(1, 12 * (n - 1)),
        "allgather": Total(1, 80 * (n - 1)),
        "alltoall": Total(1, n * (n + 1) // 2 - (c.rank + 1)),
        "broadcast": Total(1, 14 if n > 1 else 0),
    }
    assert [(r.name, r.elements, r.dtype) for r in c.log.records] == [
        ("a", 10 * n, "float32"),
        ("r", 6 * n, "float16"),
        ("g", 10 * n, "float64"),
        ("t", n * (n + 1) // 2, "int8"),
        ("b", 7, "int16"),
    ]


@check
def wrong_arguments_are_refused_by_every_rank_alone(c: Collectives) -> None:
    x = np.zeros((4, 2), np.float32)
    for call, message in (
        (lambda: c.allreduce(x, "median"), "op must be one of"),
        (lambda: c.reducescatter(x, "max"), "op must be one of"),
        (lambda: c.alltoall(x, [3] * c.size), "add up to the 4 rows"),
        (lambda: c.broadcast(x, c.size), "root must be"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


every_check = pytest.mark.parametrize("run_check", CHECKS, ids=lambda f: f.__name__)


@every_check
def test_alone(run_check):
    run_check(SingleProcess())


@every_check
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_on_threads(size, run_check):
    ThreadWorld(size).run(run_check)


def test_over_mpi():
    mpirun = shutil.which(
        "mpirun",
        path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))),
    )
    if mpirun is None:
        pytest.skip("no mpirun")
    pytest.importorskip("mpi4py")
    settings = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(
        [mpirun, "-np", "3", sys.executable, __file__],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"{len(CHECKS)} checks passed on 3 ranks") == 3, done.stdout


@given(st.integers(1, 6), st.integers(0, 20), st.sampled_from(FLOATS + INTS))
def test_a_reducescatter_and_an_allgather_are_an_allreduce(size, rows, dtype):
    def both(c):
        x = brought(c.rank, rows, dtype)
        return c.allreduce(x), c.allgather(c.reducescatter(x))

    results = ThreadWorld(size).run(both)
    for whole, in_parts in results:
        assert whole.tobytes() == in_parts.tobytes() == results[0][0].tobytes()


@given(st.integers(0, 1000), st.integers(1, 50))
def test_the_first_ranks_keep_one_row_more(rows, size):
    counts = shares(rows, size)
    assert sum(counts) == rows
    assert counts == sorted(counts, reverse=True)
    assert max(counts) - min(counts) <= 1


def test_horovod_collectives_want_a_horovod_module():
    with pytest.raises(TypeError, match=r"expected the module horovod.torch or"):
        HorovodCollectives(np, np)


if __name__ == "__main__":
    collectives = MPICollectives()
    for run_check in CHECKS:
        run_check(collectives)
    print(f"{len(CHECKS)} checks passed on {collectives.size} ranks", flush=True)
