"""A worker of Horovod's elastic launcher begins anew, in the place that it has now.

    python rejoin.py COMMAND ...

Ranks that have lost another one, or that shall make room for new ones, become this program: with
the process that it was, all connections of the old world are gone, so that no rank waits for
another. It asks the launcher for its new rank, and becomes the script again. Whoever has no place
any more ends. (Horovod's own way, a second init() in the same process, aborts there, forgets
process sets, and leaves counters and names that newcomers do not share.)

Only the standard library is used: it is run by its path, before anything is set up.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence

# In the order of the launcher's answer.
_PLACE = (
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
)
RESTART_VARIABLE = "ZEROHVD_RESTART"


def is_elastic(environ: Mapping[str, str]) -> bool:
    """Whether Horovod's elastic launcher has started this process."""
    return environ.get("HOROVOD_ELASTIC", "0") not in ("", "0")


def place(answer: str) -> dict[str, str] | None:
    """The variables of a rank from what the launcher says; None: there is no place for it."""
    numbers = answer.split(",")
    if len(numbers) < len(_PLACE):
        raise ValueError(f"the launcher should have said six numbers, not {answer!r}")
    if int(numbers[0]) < 0:
        return None
    return dict(zip(_PLACE, numbers, strict=False))


def ask(environ: Mapping[str, str]) -> str:
    """Say that this worker is ready for another start, and wait until all are.

    A worker that has failed is known by its end. The answer comes when a new world stands.
    """
    address, port = (environ[f"HOROVOD_GLOO_RENDEZVOUS_{w}"] for w in ("ADDR", "PORT"))
    who = f"{environ['HOROVOD_HOSTNAME']}:{environ['HOROVOD_LOCAL_RANK']}"
    seconds = float(environ.get("HOROVOD_ELASTIC_TIMEOUT", "600"))
    url = f"http://{address}:{port}/rank_and_size/{who}"
    # No proxy: the launcher is on this network.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=seconds) as answer:
        return str(answer.read().decode())


def main(command: Sequence[str]) -> None:
    """Become `command` in a new place, or end."""
    try:
        found = place(ask(os.environ))
    except (urllib.error.URLError, OSError) as error:
        sys.exit(f"zero.elastic: the launcher of this job does not answer: {error}")
    if found is None:
        print("zero.elastic: this worker has no place in the job any more, and ends", flush=True)
        return
    restart = int(os.environ.get(RESTART_VARIABLE, "0")) + 1
    os.environ.update(found, **{RESTART_VARIABLE: str(restart)})
    os.execv(command[0], list(command))


if __name__ == "__main__":
    main(sys.argv[1:])
