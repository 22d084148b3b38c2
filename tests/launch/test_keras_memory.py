"""What a Keras step holds at most, by TensorFlow's own log."""

import sys
from pathlib import Path

from zerohvd.launching import launch

JOB = Path(__file__).parents[2] / "benchmarks" / "keras_memory.py"
# Those that need most, and the ways through a step: all in parts, norms first, averages after it.
CHOSEN = ["Adam", "Ftrl_regularized", "RMSprop_centered", "global_clipnorm", "ema_overwrite"]


def test_a_step_holds_two_buckets_beyond_the_gradients():
    env = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"}
    result = launch(2, [sys.executable, str(JOB), *CHOSEN], timeout=240, env=env)
    assert result.ok, result.explain()
    lines = [line.split() for line in result.stdout.splitlines() if line.startswith("beyond ")]
    found = {title: float(beyond) for _, title, beyond in lines}
    assert len(found) == 2 * len(CHOSEN), result.stdout
    # The gradients themselves must show, or the log was not read.
    assert all(beyond > -7 for beyond in found.values()), found
    assert all(beyond <= 2 for beyond in found.values()), found
