"""All benchmarks, one after the other: `make bench`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from zerohvd.launching import launch

HERE = Path(__file__).resolve().parent
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_ENABLE_ONEDNN_OPTS": "0",
}

print("== PyTorch", flush=True)
subprocess.run([sys.executable, str(HERE / "torch_step_time.py")], check=True)
print("== Checkpoints", flush=True)
subprocess.run([sys.executable, str(HERE / "checkpoint.py")], check=True)
print("== Keras", flush=True)
keras = [sys.executable, str(HERE / "keras_step_time.py")]
done = launch(2, keras, timeout=1800, env=ONE_THREAD, echo=True)
sys.exit(0 if done.ok else done.explain())
