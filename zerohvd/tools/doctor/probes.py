"""Runs the probes: every stack at once, each in a process that may crash or hang."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerohvd import versions

# Quiet frameworks: what they print at import is neither a finding nor our output.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0", "PYTHONWARNINGS": "ignore"}

_TELLING = re.compile(r"error|fatal|cannot|could not|undefined|not found", re.IGNORECASE)
# Open MPI's [host:pid] and [[job],rank], and its frames of dashes and stars.
_MARKS = re.compile(r"^\s*(\[\S+:\d+\]|\[\[\S+\],\S+\]|[-*]+|\s)*")


@dataclass(frozen=True)
class Finding:
    """What a probe found out about one part.

    Attributes:
        outcome: `ok`, `error` (an exception), `crash` (a signal or a sudden exit), `timeout`, or
            `skipped` (something before it in the same process ended the process).
        detail: The exception, or how the process ended and its last words.
    """

    part: str
    outcome: str
    data: Mapping[str, Any] = field(default_factory=dict)
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"


Findings = Mapping[str, Finding]


def stacks() -> list[list[str]]:
    """What to probe here: one list of parts per process, the parts in the order of import."""
    built = versions.horovod_frameworks()
    torch = ["torch"] if versions.find("torch") else []
    keras = [part for part in ("tensorflow", "keras") if versions.find(part)]
    if torch and "torch" in built:
        torch.append("horovod.torch")
    if "tensorflow" in keras and "tensorflow" in built:
        keras.append("horovod.tensorflow")
    world = next((stack for stack in (torch, keras) if stack and "horovod" in stack[-1]), None)
    if world is not None:
        world.append("world")
    mpi = ["mpi4py"] if versions.find("mpi4py") else []
    return [stack for stack in (torch, keras, mpi) if stack]


def run_all(timeout: float) -> Findings:
    """Probe everything that is installed here."""
    return _run(stacks(), timeout)


def run_world(timeout: float) -> None:
    """Only start Horovod: what the other ranks do so that rank 0's start can succeed."""
    _run([stack for stack in stacks() if "world" in stack], timeout)


def _run(todo: Sequence[Sequence[str]], timeout: float) -> Findings:
    with tempfile.TemporaryDirectory(prefix="zerohvd-doctor-") as folder:
        records = [Path(folder) / f"{number}.jsonl" for number in range(len(todo))]
        with ThreadPoolExecutor(max_workers=max(1, len(todo))) as pool:
            ended = pool.map(probe, todo, records, [timeout] * len(todo))
            return {finding.part: finding for findings in ended for finding in findings}


def probe(parts: Sequence[str], record: Path, timeout: float) -> list[Finding]:
    """Probe `parts` in one process."""
    command = [sys.executable, "-m", "zerohvd.tools.doctor.probe", str(record), *parts]
    return run_recorded(command, parts, record, timeout)


def run_recorded(
    command: Sequence[str], parts: Sequence[str], record: Path, timeout: float
) -> list[Finding]:
    """Run a probing command to its end, whatever that end is, and read its record."""
    try:
        # No session of its own: Ctrl-C and a launcher's kill must reach it.
        done = subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **_QUIET},
            timeout=timeout,
            check=False,
        )
        ending, how = "crash", f"{_ending(done.returncode)}{_last_words(done.stdout)}"
    except subprocess.TimeoutExpired:
        ending, how = "timeout", f"no answer within {timeout:.0f} s"
    return _read(parts, record, ending, how)


def _read(parts: Sequence[str], record: Path, ending: str, how: str) -> list[Finding]:
    text = record.read_text(encoding="utf-8") if record.exists() else ""
    seen = {entry["part"]: entry for entry in map(json.loads, text.splitlines())}
    findings = []
    for position, part in enumerate(parts):
        entry = seen.get(part)
        # Without any record even the interpreter did not come up: that is about the first part.
        if entry is None and (seen or position > 0):
            findings.append(Finding(part, "skipped"))
        elif entry is None or entry["outcome"] == "begun":
            findings.append(Finding(part, ending, detail=how))
        else:
            findings.append(Finding(**entry))
    return findings


def _ending(returncode: int) -> str:
    if returncode >= 0:
        return f"the process ended with exit code {returncode}"
    try:
        return f"the process was ended by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"the process was ended by signal {-returncode}"


def _last_words(output: str) -> str:
    # What went wrong comes first, and then, from MPI, a page about what that led to.
    lines = [_MARKS.sub("", line).strip() for line in output.splitlines()]
    said = [line for line in lines if line]
    telling = [line for line in said if _TELLING.search(line)]
    chosen = telling[:1] or said[-1:]
    return f": {chosen[0]}" if chosen else ""
