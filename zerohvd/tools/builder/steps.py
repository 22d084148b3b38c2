"""Running long commands so that a person sees what happens.

On a terminal: one live line per step with the time it has taken, how far it is, and its log.
Elsewhere (CI, a pipe): a line at the start, one every 15 seconds, and one at the end.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner

from zerohvd.launching import end_session, sigterm_raises
from zerohvd.tools.builder.errors import BuilderError

_PERCENT = re.compile(rb"\[\s*(\d{1,3})%\]")
_ERROR = re.compile(r"\b(fatal )?error\b:?", re.IGNORECASE)
_WIDEST_LINE = 300


class StepFailed(BuilderError):
    """A command of a step failed; the message holds the end of its log."""


class Steps:
    """Numbered steps of one job, shown on a console.

    Args:
        total: How many there will be.
        console: Where to show them.
        interval: Seconds between two lines when the console is not a terminal.
    """

    def __init__(self, total: int, console: Console, interval: float = 15.0) -> None:
        self._total = total
        self._console = console
        self._interval = interval
        self._number = 0

    def run(
        self,
        title: str,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        hint: str = "",
    ) -> None:
        """Run one command as the next step, its output in `log`.

        Raises:
            StepFailed: It ended with another exit code than 0.
        """
        label = self._next(title)
        start = time.monotonic()
        with log.open("wb") as output:
            # A session of its own: Ctrl-C reaches us alone, and we end it with all its children.
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(os.environ if env is None else env),
                cwd=cwd,
                start_new_session=True,
            )
            try:
                with sigterm_raises():
                    self._watch(process, label, log, start)
            finally:
                end_session(process)
        if process.returncode != 0:
            self._console.print(f"{label} [red]failed[/red] after {_clock(start)}")
            raise StepFailed(failure_message(title, command, process.returncode, log, hint))
        self._console.print(f"{label} done in {_clock(start)}")

    def call(self, title: str, action: Callable[[], None]) -> None:
        """Run a function that takes a while as the next step."""
        label = self._next(title)
        start = time.monotonic()
        with self._console.status(label) if self._console.is_terminal else nullcontext():
            action()
        self._console.print(f"{label} done in {_clock(start)}")

    def say(self, title: str, outcome: str) -> None:
        """A step that has nothing to run."""
        self._console.print(f"{self._next(title)} {escape(outcome)}")

    def note(self, text: str) -> None:
        self._console.print(escape(text))

    def _next(self, title: str) -> str:
        self._number += 1
        # Rich takes square brackets for markup.
        return escape(f"[{self._number}/{self._total}] {title}")

    def _watch(self, process: subprocess.Popen[bytes], label: str, log: Path, start: float) -> None:
        if not self._console.is_terminal:
            self._console.print(f"{label} (log: {escape(str(log))})")
            self._report(process, log, start)
            return
        spinner = Spinner("dots", text="")
        with (
            log.open("rb") as reader,
            Live(spinner, console=self._console, transient=True, refresh_per_second=8),
        ):
            where = Progress(reader)
            while process.poll() is None:
                text = f"{label} {_clock(start)}  {escape(where.look())}"
                spinner.update(text=f"{text}  [dim]log: {escape(str(log))}")
                time.sleep(0.2)

    def _report(self, process: subprocess.Popen[bytes], log: Path, start: float) -> None:
        with log.open("rb") as reader:
            where = Progress(reader)
            while True:
                try:
                    process.wait(self._interval)
                    return
                except subprocess.TimeoutExpired:
                    self._console.print(f"      {_clock(start)}  {escape(where.look())}")


class Progress:
    """How far a command is, told from the log it writes."""

    def __init__(self, log: IO[bytes]) -> None:
        self._log = log
        self._text = ""

    def look(self) -> str:
        """make's last percentage where there is one, else the last line."""
        new = self._log.read()
        percents = _PERCENT.findall(new)
        lines = new.decode(errors="replace").split("\n")
        # The last one may still be being written.
        complete = [line.strip() for line in lines[:-1]]
        complete = [line for line in complete if line and not line.startswith("WARNING")]
        if percents:
            self._text = f"{int(percents[-1])} %"
        elif complete and not self._text.endswith("%"):
            self._text = complete[-1][:60]
        return self._text


def failure_message(
    title: str, command: Sequence[str], returncode: int, log: Path, hint: str = "", lines: int = 20
) -> str:
    """What failed, the lines that say why, and what to do."""
    text = log.read_text(errors="replace").rstrip().splitlines() if log.exists() else []
    first_errors = [line for line in text if _ERROR.search(line)][:3]
    tail = text[-lines:]
    parts = [
        f"{title} failed with exit code {returncode}.",
        f"Command: {shlex.join(command)}"[:_WIDEST_LINE],
    ]
    if first_errors and not set(first_errors) <= set(tail):
        parts += ["First errors in the log:", *_indented(first_errors)]
    parts += [f"Last lines of {log}:", *_indented(tail)]
    return "\n".join([*parts, hint] if hint else parts)


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line[:_WIDEST_LINE]}" for line in lines]


def _clock(start: float) -> str:
    seconds = int(time.monotonic() - start)
    return f"{seconds // 60}:{seconds % 60:02d}"
