"""Run scripts one after the other on the same ranks: importing a framework takes longer than most.

    examples_job.py SCRIPT [OPTIONS ...] -- SCRIPT [OPTIONS ...] ...
"""

from __future__ import annotations

import itertools
import os
import runpy
import sys
from pathlib import Path

from zerohvd.launchers import detect

jobs = [
    list(words)
    for between, words in itertools.groupby(sys.argv[1:], lambda word: word == "--")
    if not between
]
for script, *options in jobs:
    if detect(os.environ).is_first:  # which is the one that prints losses
        print(f"== {Path(script).stem}", flush=True)
    sys.argv = [script, *options]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
