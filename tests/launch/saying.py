"""What the ranks of a job say, in files: mpirun may mix the lines of ranks that print at once."""

from __future__ import annotations

from pathlib import Path


def say(folder: Path, rank: int, text: str) -> None:
    with (folder / f"said by {rank}").open("a") as file:
        file.write(text + "\n")
    print(text, flush=True)  # for the report of a test that fails


def heard(folder: Path) -> list[str]:
    files = sorted(folder.glob("said by *"))
    return [line for file in files for line in file.read_text().splitlines()]
