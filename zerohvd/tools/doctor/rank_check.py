"""What each rank runs under `zerohvd doctor --run N`.

    mpirun -np 2 python -m zerohvd.tools.doctor.rank_check FOLDER torch

Goes through every collective the library needs, with every dtype, over the same
`zerohvd.communication.collectives` that training uses, and compares with what numpy says. Each
rank keeps its own record: results must not travel over what is being tested.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from zerohvd.communication.collectives import Collectives, HorovodCollectives, shares
from zerohvd.launchers import detect
from zerohvd.tools.adapters import load_adapter

Values = npt.NDArray[np.float64]
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8")
ADAPTERS = {"torch": "torch", "tensorflow": "keras"}  # by the framework's name

# What Horovod itself refuses; the library never needs it.
_NOT_OFFERED = {
    ("torch", "allreduce", "uint8"),
    ("torch", "reducescatter even", "uint8"),
    ("torch", "reducescatter uneven", "uint8"),
    ("tensorflow", "reducescatter even", "uint8"),
    ("tensorflow", "reducescatter uneven", "uint8"),
}


class Framework:
    """Tensors of one framework, made from and turned into float64 values."""

    def __init__(self, name: str, hvd: ModuleType) -> None:
        self.name = name
        self._module: Any = importlib.import_module(name)
        self.device = self._device(hvd)

    def make(self, values: Values, dtype: str) -> Any:
        kind = getattr(self._module, dtype)
        if self.name == "torch":
            return self._module.from_numpy(values).to(device=self.device, dtype=kind)
        with self._module.device(self.device):
            return self._module.cast(self._module.constant(values), kind)

    def values(self, x: Any) -> Values:
        if self.name == "torch":
            x = x.to(device="cpu", dtype=self._module.float64)
        else:
            x = self._module.cast(x, self._module.float64)
        found: Values = x.numpy()
        return found

    def dtype(self, x: Any) -> str:
        return str(x.dtype).removeprefix("torch.") if self.name == "torch" else str(x.dtype.name)

    def _device(self, hvd: ModuleType) -> str:
        """A GPU of one's own if Horovod can use it, else the CPU."""
        local = hvd.local_rank()
        if self.name == "torch":
            gpus = self._module.cuda.device_count() if self._module.cuda.is_available() else 0
        else:
            gpus = len(self._module.config.list_logical_devices("GPU"))
        own = hvd.nccl_built() and gpus >= hvd.local_size()
        kind = "cuda" if self.name == "torch" else "GPU"
        return f"{kind}:{local}" if own else "cpu" if self.name == "torch" else "CPU:0"


@dataclass(frozen=True)
class Case:
    """One check on one rank: the way to talk, the way to make tensors, and which of them."""

    collectives: Collectives
    framework: Framework
    check: str
    dtype: str

    @property
    def name(self) -> str:
        return f"doctor/{self.check.replace(' ', '_')}/{self.dtype}"

    def tensor(self, values: Values) -> Any:
        return self.framework.make(values, self.dtype)

    def compare(self, got: Any, expected: Values) -> None:
        found, dtype = self.framework.values(got), self.framework.dtype(got)
        if dtype != self.dtype:
            raise AssertionError(f"came back as {dtype}")
        if found.shape != expected.shape or not np.array_equal(found, expected):
            raise AssertionError(f"expected {expected.tolist()}, got {found.tolist()}")


def rows(rank: int, count: int, size: int) -> Values:
    """`count` rows of two numbers, different from rank to rank.

    Their sum over all ranks stays below 256, up to which uint8 and bfloat16 count exactly.
    """
    limit = min(8, 255 // size + 1)
    return (np.arange(2.0 * count).reshape(count, 2) + 3 * rank) % limit


def _allreduce(case: Case) -> None:
    c = case.collectives
    inputs = np.stack([rows(rank, 3, c.size) for rank in range(c.size)])
    x = case.tensor(inputs[c.rank])
    case.compare(c.allreduce(x, "sum", name=f"{case.name}/sum"), inputs.sum(axis=0))
    case.compare(c.allreduce(x, "max", name=f"{case.name}/max"), inputs.max(axis=0))


def _allgather_even(case: Case) -> None:
    _gather(case, [2] * case.collectives.size)


def _allgather_uneven(case: Case) -> None:
    _gather(case, [rank + 1 for rank in range(case.collectives.size)])


def _gather(case: Case, counts: Sequence[int]) -> None:
    c = case.collectives
    got = c.allgather(case.tensor(rows(c.rank, counts[c.rank], c.size)), name=case.name)
    case.compare(got, np.concatenate([rows(rank, n, c.size) for rank, n in enumerate(counts)]))


def _reducescatter_even(case: Case) -> None:
    _scatter(case, 2 * case.collectives.size)


def _reducescatter_uneven(case: Case) -> None:
    _scatter(case, 2 * case.collectives.size + 1)


def _scatter(case: Case, count: int) -> None:
    c = case.collectives
    total = np.sum([rows(rank, count, c.size) for rank in range(c.size)], axis=0)
    stops = np.cumsum(shares(count, c.size))
    got = c.reducescatter(case.tensor(rows(c.rank, count, c.size)), "sum", name=case.name)
    case.compare(got, np.split(total, stops[:-1])[c.rank])


def _broadcast(case: Case) -> None:
    c = case.collectives
    root = c.size - 1
    got = c.broadcast(case.tensor(rows(c.rank, 3, c.size)), root, name=case.name)
    case.compare(got, rows(root, 3, c.size))


def _alltoall(case: Case) -> None:
    c = case.collectives
    splits = [[1 + (source + target) % 3 for target in range(c.size)] for source in range(c.size)]
    sent = [np.split(rows(r, sum(s), c.size), np.cumsum(s)[:-1]) for r, s in enumerate(splits)]
    values, expected = np.concatenate(sent[c.rank]), np.concatenate([s[c.rank] for s in sent])
    case.compare(c.alltoall(case.tensor(values), splits[c.rank], name=case.name), expected)
    # As gradients travel: a transport without 16-bit integers must count elements, not bytes.
    flat = [2 * n for n in splits[c.rank]]
    got = c.alltoall(case.tensor(values.reshape(-1)), flat, name=f"{case.name}/flat")
    case.compare(got, expected.reshape(-1))


def _barrier(case: Case) -> None:
    """Nobody may leave before the last has arrived; one of them comes late."""
    c = case.collectives
    if c.rank == c.size - 1:
        time.sleep(0.1)
    arrived = time.monotonic()
    c.barrier(name=case.name)
    times = c.allgather_object([arrived, time.monotonic()], name=f"{case.name}/times")
    if min(left for _, left in times) < max(came for came, _ in times):
        raise AssertionError("a rank left before the last one had arrived")


CHECKS: dict[str, Callable[[Case], None]] = {
    "allreduce": _allreduce,
    "allgather even": _allgather_even,
    "allgather uneven": _allgather_uneven,
    "reducescatter even": _reducescatter_even,
    "reducescatter uneven": _reducescatter_uneven,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
}


def offered(framework: str, check: str, dtype: str) -> bool:
    """Whether Horovod has this collective for this dtype at all."""
    return (framework, check, dtype) not in _NOT_OFFERED


def cases(world: Collectives, subset: Collectives | None, framework: Framework) -> list[Case]:
    """Everything to check, in the same order on every rank."""
    found = [
        Case(world, framework, check, dtype)
        for check in CHECKS
        for dtype in DTYPES
        if offered(framework.name, check, dtype)
    ]
    if subset is not None:
        found += [Case(subset, framework, "process set", dtype) for dtype in DTYPES]
    return [*found, Case(world, framework, "barrier", "float32")]


def run(case: Case) -> None:
    if case.check == "barrier":
        _barrier(case)
    elif case.check == "process set":
        # One that gathers, one that adds: both must stay among the ranks of the set.
        _allgather_uneven(case)
        if offered(case.framework.name, "allreduce", case.dtype):
            _allreduce(case)
    else:
        CHECKS[case.check](case)


def main(argv: Sequence[str]) -> int:
    folder, name = argv
    hvd = importlib.import_module(f"horovod.{name}")
    arrays = load_adapter(ADAPTERS[name]).arrays
    ranks = detect(os.environ).size or 1
    # Evens and odds, so that the sets' ranks differ from the world's.
    halves = [hvd.ProcessSet(range(half, ranks, 2)) for half in range(2)] if ranks > 1 else []
    own = detect(os.environ).rank or 0
    with open(Path(folder) / f"rank{own}.jsonl", "w", encoding="utf-8", buffering=1) as out:
        hvd.init(process_sets=halves)
        framework = Framework(name, hvd)
        note = {"size": hvd.size(), "device": framework.device, "nccl": bool(hvd.nccl_built())}
        out.write(json.dumps(note) + "\n")
        if hvd.size() != ranks:
            return 1
        subset = HorovodCollectives(hvd, arrays, halves[own % 2]) if halves else None
        failed = False
        for case in cases(HorovodCollectives(hvd, arrays), subset, framework):
            entry = {"check": case.check, "dtype": case.dtype}
            out.write(json.dumps({**entry, "outcome": "begun"}) + "\n")
            try:
                run(case)
                result = {"outcome": "ok"}
            except Exception as error:
                failed = True
                result = {"outcome": "FAIL", "detail": f"{type(error).__name__}: {error}"}
            out.write(json.dumps({**entry, **result}) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
