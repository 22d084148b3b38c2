"""What each of two ranks runs to prove a Horovod.

    mpirun -np 2 python -m zerohvd.tools.builder.proof torch
"""

from __future__ import annotations

import importlib
import sys


def main(framework: str) -> None:
    hvd = importlib.import_module(f"horovod.{framework}")
    hvd.init()
    if hvd.size() != 2:
        sys.exit(f"two ranks were started, but Horovod sees {hvd.size()}: another MPI's mpirun?")
    array = importlib.import_module(framework)
    total = hvd.allreduce(array.ones(1000) * (hvd.rank() + 1), op=hvd.Sum, name="proof")
    if not bool((total.numpy() == 3).all()):
        sys.exit(f"1 + 2 over two ranks gave {total[:4]}")
    print(f"rank {hvd.rank()}: proved", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
