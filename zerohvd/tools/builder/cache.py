"""Built wheels under the user's cache folder.

    <cache>/zerohvd/wheels/<key>/horovod-….whl     finished ones, put there by one rename
                                 proved            environments in which it passed the proof
    <cache>/zerohvd/build/<end of key>/            unfinished builds; a rerun continues there
    <cache>/zerohvd/locks/<key>                    held while one process builds
    <cache>/zerohvd/logs/<end of key>/             one log per step

pip's own cache is of no use: it does not know about torch, TensorFlow and MPI versions.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from zerohvd.tools.builder.errors import BuilderError


@dataclass(frozen=True)
class Cache:
    root: Path

    @classmethod
    def of_user(cls, environ: Mapping[str, str] = os.environ) -> Cache:
        base = environ.get("XDG_CACHE_HOME") or ""
        # The XDG specification: relative paths are invalid and must be ignored.
        folder = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
        return cls(folder / "zerohvd")

    def wheel(self, key: str) -> Path | None:
        """The finished wheel, if there is one."""
        return next(iter(sorted((self.root / "wheels" / key).glob("horovod-*.whl"))), None)

    def store(self, key: str, wheel: Path) -> Path:
        """Put a wheel into the cache: a reader sees all of it or nothing."""
        final = self._folder("wheels", key) / wheel.name
        partial = final.with_name(f".{wheel.name}.{os.getpid()}.partial")
        try:
            shutil.copyfile(wheel, partial)
            os.replace(partial, final)
        finally:
            partial.unlink(missing_ok=True)
        return final

    def build_folder(self, key: str) -> Path:
        return self._folder("build", _short(key))

    def log(self, key: str, name: str) -> Path:
        return self._folder("logs", _short(key)) / f"{name}.log"

    def sdist_folder(self) -> Path:
        return self._folder("sdist")

    def is_proved(self, key: str) -> bool:
        """Whether the wheel has passed the proof in this environment."""
        try:
            lines = (self.root / "wheels" / key / "proved").read_text().splitlines()
        except OSError:
            return False
        return sys.prefix in lines

    def set_proved(self, key: str) -> None:
        if not self.is_proved(key):
            with (self._folder("wheels", key) / "proved").open("a") as file:
                file.write(f"{sys.prefix}\n")

    @contextlib.contextmanager
    def lock(self, key: str, waiting: Callable[[str], None]) -> Iterator[None]:
        """Let one process at a time build `key`.

        The lock goes with the process that holds it, however that ends, so there is no stale one.

        Args:
            key: What is built.
            waiting: Called once, with the holder's process id, if another process is at it.
        """
        path = self._folder("locks") / key
        with path.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                waiting(file.read().strip() or "unknown")
                self._wait(file.fileno())
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    @staticmethod
    def _wait(descriptor: int) -> None:
        # Not one blocking call: Ctrl-C must get through at once.
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(0.2)

    def _folder(self, *names: str) -> Path:
        folder = self.root.joinpath(*names)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BuilderError(
                f"Cannot write to the cache folder {folder}: {error.strerror}.\n"
                "Set XDG_CACHE_HOME to a folder of yours with about 500 MB of room."
            ) from error
        return folder


def _short(key: str) -> str:
    """The hash at the end of a key, for paths that are shown or handed to build tools."""
    return key.rpartition("-")[2]
