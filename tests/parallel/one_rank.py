"""One rank of the parallel tests: pytest, silent but for rank 0."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from zerohvd.launchers import detect

if __name__ == "__main__":
    rank = detect(os.environ).rank or 0
    if rank > 0:
        # At the level of descriptors: Horovod's own messages belong there as well. All ranks of a
        # suite run the same tests, so one voice is enough while they pass.
        with Path(os.environ["ZEROHVD_TEST_RANKS"], f"rank-{rank}.log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    sys.exit(pytest.main(sys.argv[1:]))
