"""Stage 3 against plain Horovod, FSDP2 (fully_shard per block, gloo) and DeepSpeed's ZeRO-3.

    python benchmarks/torch_stage3.py --rounds 8

All contenders in one run, as in torch_step_time.py; DeepSpeed takes part if it is installed.
"""

from __future__ import annotations

from pathlib import Path

from torch_step_time import main

RESULT = Path(__file__).resolve().parent / "results/torch_stage3.md"

if __name__ == "__main__":
    main(["horovod", "zero-2", "zero-3", "fsdp2"], ["horovod", "zero-3"], "deepspeed-3", RESULT)
