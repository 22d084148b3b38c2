"""A worker asks the launcher for its new place, and becomes its script again, or ends."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from zerohvd.elastic import rejoin, reset

SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


@pytest.fixture
def launcher():
    """Answers as Horovod's rendezvous server; `said` is what it says next, and to whom it was."""
    said = {"answer": "", "asked": []}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            said["asked"].append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(said["answer"].encode())

        def log_message(self, *args):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    said["port"] = server.server_port
    yield said
    server.shutdown()
    server.server_close()


def worker(port: int, **more: str) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_HOSTNAME": "node7",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_SIZE": "8",
        "http_proxy": "http://127.0.0.1:1",
        **more,
    }
    argv = [sys.executable, str(Path(rejoin.__file__)), sys.executable, "-c", SHOW]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_a_worker_becomes_its_script_in_its_new_place(launcher):
    launcher["answer"] = "2,3,0,1,2,3"
    done = worker(launcher["port"], ZEROHVD_RESTART="4")
    assert done.returncode == 0, done.stderr
    env = json.loads(done.stdout)
    assert launcher["asked"] == ["/rank_and_size/node7:1"]
    assert (env["HOROVOD_RANK"], env["HOROVOD_SIZE"], env["HOROVOD_CROSS_RANK"]) == ("2", "3", "2")
    assert (env["HOROVOD_LOCAL_RANK"], env["HOROVOD_LOCAL_SIZE"]) == ("0", "1")
    assert env["ZEROHVD_RESTART"] == "5"


def test_a_worker_without_a_place_ends_well(launcher):
    launcher["answer"] = "-1,-1,-1,-1,-1,-1"
    done = worker(launcher["port"])
    assert done.returncode == 0 and "no place in the job any more" in done.stdout


def test_a_launcher_that_is_gone_is_said():
    done = worker(1)
    assert done.returncode == 1 and "the launcher of this job does not answer" in done.stderr


def test_which_errors_tell_of_a_lost_rank():
    class HorovodInternalError(RuntimeError):
        pass

    assert reset.tells_of_a_loss(HorovodInternalError("gloo: connection closed"))
    assert not reset.tells_of_a_loss(ValueError("a mistake"))
    try:
        try:
            raise RuntimeError("Horovod has been shut down. This was caused by ...")
        except RuntimeError as error:
            raise KeyError("in a callback") from error
    except KeyError as outer:
        assert reset.tells_of_a_loss(outer)
