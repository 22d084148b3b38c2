"""Many checkpoints in one folder: which to write, which to keep, and writing beside the training.

A manager keeps the newest `keep` checkpoints and the best one. With `asynchronous=True` a save
copies this rank's share and returns; a thread writes it. That thread makes no collective call:
ranks tell each other through the folder itself, and errors show at the manager's next call, on all
ranks. One save is under way at most, so memory is bounded by one copy of this rank's share.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerohvd.checkpoint import format as fmt
from zerohvd.checkpoint import writer
from zerohvd.checkpoint.entries import Content
from zerohvd.checkpoint.errors import CheckpointError, describe, together
from zerohvd.checkpoint.manifest import is_complete, read_manifest
from zerohvd.communication.collectives import Collectives

_NAME = re.compile(r"step-(\d+)")
# When the script has ended, the first rank waits this long for what other ranks are writing.
_LAST_SECONDS = 60.0
METRIC = "metric"  # where a checkpoint's state says how good it is


@dataclasses.dataclass(frozen=True)
class Policy:
    """Which checkpoints to write and to keep.

    Args:
        keep: The newest so many stay; None: all.
        every: `due` says yes at multiples of this many steps; None: at every step.
        mode: Whether a lower ("min") or a higher ("max") metric is better.
    """

    keep: int | None = 3
    every: int | None = None
    mode: str = "min"

    def __post_init__(self) -> None:
        for field in ("keep", "every"):
            value = getattr(self, field)
            if value is not None and (
                not isinstance(value, int) or isinstance(value, bool) or value < 1
            ):
                raise ValueError(
                    f"{field} must be a whole number of at least 1, or None, got {value!r}"
                )
        if self.mode not in ("min", "max"):
            raise ValueError(f'mode must be "min" or "max", got {self.mode!r}')

    def due(self, step: int) -> bool:
        return self.every is None or (step > 0 and step % self.every == 0)


def checkpoints(folder: Path) -> dict[int, Path]:
    """The complete checkpoints of a manager's folder, by step, in ascending order."""
    found = {}
    if folder.is_dir():
        for path in folder.iterdir():
            name = _NAME.fullmatch(path.name)
            if name and is_complete(path):
                found[int(name[1])] = path
            left = fmt.leftover(path)
            # Killed between two renames: the old one is still the checkpoint of that step.
            if left and left[1] == "replaced" and is_complete(path):
                name = _NAME.fullmatch(left[0])
                if name:
                    found.setdefault(int(name[1]), folder / left[0])
    return dict(sorted(found.items()))


class CheckpointFolder:
    """A folder of checkpoints: writing, listing and removing them; it knows no framework.

    Args:
        folder: Where checkpoints lie, as `step-<number>`.
        policy: What to write and to keep.
        asynchronous: Write in a thread.
    """

    def __init__(self, folder: Path, policy: Policy, *, asynchronous: bool = False) -> None:
        self.folder, self.policy, self.asynchronous = folder, policy, asynchronous
        self._under_way: _Write | None = None

    # -- looking ----------------------------------------------------------------------------------

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        found = list(checkpoints(self.folder).values())
        return found[-1] if found else None

    def best(self) -> Path | None:
        """The one with the best metric, the older one of equals; None: none has a metric."""
        found = [(m, p) for p, m in self.metrics().items() if m is not None and not math.isnan(m)]
        if not found:
            return None
        sign = 1 if self.policy.mode == "min" else -1
        return min(found, key=lambda pair: sign * pair[0])[1]

    def metrics(self) -> dict[Path, float | None]:
        found: dict[Path, float | None] = {}
        for path in checkpoints(self.folder).values():
            try:
                state = read_manifest(path)[1].state
            except CheckpointError:
                state = None  # damaged: never the best, and for load() to complain about
            value = state.get(METRIC) if isinstance(state, Mapping) else None
            found[path] = value if isinstance(value, (int, float)) else None
        return found

    # -- saving -----------------------------------------------------------------------------------

    def save(self, step: int, collectives: Collectives, plan: writer.SavePlan) -> Path:
        """Store the checkpoint of `step`; all ranks must call it."""
        self.wait(collectives)
        path = self.path(step)
        if not self.asynchronous:
            writer.save(path, collectives, plan)
            self._tidy(collectives)
            return path
        draft, said = writer.begin(path, collectives, plan)
        copies: list[Content] = []
        try:
            together(collectives, "copy", lambda: copies.append(plan.make(said).copied()))
        except BaseException:
            draft.discard()
            raise
        self._under_way = _Write(draft, copies[0])
        return path

    def wait(self, collectives: Collectives) -> None:
        """Until the save under way, if there is one, is complete; all ranks must call it.

        Raises:
            CheckpointError: It failed; the same on all ranks.
        """
        if self._under_way is None:
            return
        under_way, self._under_way = self._under_way, None
        try:
            together(collectives, "written", under_way.written)
            together(collectives, "published", under_way.published)
        except Exception:
            under_way.abandon()
            raise
        self._tidy(collectives)

    def _tidy(self, collectives: Collectives) -> None:
        """Remove what is not to be kept; the first rank does, and nobody waits for it."""
        if collectives.rank != 0:
            return
        found = checkpoints(self.folder)
        if self.policy.keep is not None:
            spared = {*list(found.values())[-self.policy.keep :], self.best()}
            for path in found.values():
                if path not in spared:
                    writer.remove(path)

    def clean(self) -> None:
        """Remove what killed saves have left; for the first rank, before the first save."""
        if not self.folder.is_dir():
            return
        for path in list(self.folder.iterdir()):
            left = fmt.leftover(path)
            whole = left is not None and is_complete(self.folder / left[0])
            if left and (left[1] == "partial" or whole) and _NAME.fullmatch(left[0]):
                writer.remove_leftover(path)
            writer.remove_dead_claim(path)


class _Write:
    """One save, in a thread of its own."""

    def __init__(self, draft: writer.Draft, content: Content) -> None:
        self._draft = draft
        self._content: Content | None = content
        self._stop = threading.Event()
        self._is_written = threading.Event()
        self._errors: dict[str, tuple[str, str]] = {}
        self._alone_since: float | None = None
        # Not a daemon: a script that ends without close() still gets its last checkpoint.
        self._thread = threading.Thread(target=self._run, name="zerohvd checkpoint")
        self._thread.start()

    def _run(self) -> None:
        try:
            assert self._content is not None
            self._draft.write(self._content)
        except Exception as error:
            self._note("written", error)
        self._content = None
        self._is_written.set()
        if self._errors:
            return
        try:
            self._draft.publish(self._give_up, patient=True)
        except Exception as error:
            self._note("published", error)

    def _note(self, what: str, error: Exception) -> None:
        self._errors[what] = describe(error)
        if not self._stop.is_set():
            # At once, too: the script may not come back to the manager for a long time, or ever.
            print(f"zerohvd: {self._draft.path} was not saved: {error}", file=sys.stderr)

    def _give_up(self) -> bool:
        """Whether the other ranks' files will not come: nobody must wait for dead ranks."""
        if self._stop.is_set():
            return True
        if threading.main_thread().is_alive():
            return False
        now = time.monotonic()
        self._alone_since = now if self._alone_since is None else self._alone_since
        return now - self._alone_since > _LAST_SECONDS

    def written(self) -> None:
        self._is_written.wait()
        self._raise("written")

    def published(self) -> None:
        """When all ranks have written, so that the first one waits for nobody."""
        self._thread.join()
        self._raise("published")

    def _raise(self, what: str) -> None:
        if what in self._errors:
            raise CheckpointError(self._errors[what][1])

    def abandon(self) -> None:
        self._stop.set()
        self._thread.join()
        self._draft.discard()

    def done(self) -> bool:
        return not self._thread.is_alive()


def check_metric(metric: Any) -> float | None:
    if metric is None:
        return None
    try:
        return float(metric)
    except (TypeError, ValueError):
        raise TypeError(f"metric must be a number, got {metric!r}") from None
