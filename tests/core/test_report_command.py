"""`zerohvd report` and `zerohvd trace`: files that people open."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import struct
import subprocess
import xml.etree.ElementTree

import pytest

from zerohvd.monitoring.trace import Trace
from zerohvd.tools.cli import main

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
RANKS = 4


def record(step, **more):
    slow = 2 if step > 100 else None
    waits = [0.02 if r == slow or slow is None else 0.05 for r in range(RANKS)]
    behind = [max(0.0, 0.05 - w) if slow is not None else 0.0 for w in waits]
    return {
        "step": step,
        "wall_time": 1.76e9 + step,
        "loss": 4.0 / step,
        "time/step": 0.25,
        "time/compute": 0.2 - waits[0] + 0.02,
        "time/communication": waits[0],
        "time/update": 0.03,
        "samples_per_second": 512.0,
        "grad_norm": 1.5,
        "loss_scale": 1024.0,
        "skipped_total": 3,
        "bytes/reducescatter": 1 << 26,
        "bytes/total": 1 << 26,
        **{f"memory/{k}": 1 << 27 for k in ("params", "grads", "optimizer", "master", "buffers")},
        "memory/total": 5 << 27,
        "memory/peak": 1 << 30,
        "slowest": "" if slow is None else "rank 2 (node<1>) +30 ms",
        "ranks/compute": [0.2] * RANKS,
        "ranks/communication": waits,
        "ranks/update": [0.03] * RANKS,
        "ranks/behind": behind,
        "ranks/memory": [5 << 27] * RANKS,
        "hosts": ["node<0>", "node<0>", "node<1>", "node<1>"],
        **more,
    }


def written(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


@pytest.fixture
def page(tmp_path):
    run = written(tmp_path / "run.jsonl", [record(s) for s in range(10, 4000, 10)])
    assert main(["report", str(run), "--html", str(tmp_path / "out.html")]) == 0
    return tmp_path / "out.html"


class Outline(html.parser.HTMLParser):
    VOID = ("meta", "br")

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_has_everything_in_itself(page):
    text = page.read_text()
    outline = Outline()
    outline.feed(text)
    assert not outline.open and not outline.links
    assert "script" not in outline.tags and "http" not in text and "url(" not in text
    assert outline.tags.count("svg") >= 6
    for said in ("Loss", "Time of a step", "Slow ranks", "Memory by kind", "rank 2", "skipped"):
        assert said in text
    assert "node<1>" not in text and "node&lt;1&gt;" in text
    assert len(text) < 400_000  # whatever the length of the run


@pytest.mark.parametrize(
    "records",
    [
        [record(10)],
        [record(10, loss=None), record(20, loss=None)],
        [{k: v for k, v in record(10).items() if k in ("step",) or k.startswith("time/")}],
        [record(10, **{"ranks/behind": [0.0], "memory/peak": 0})],
    ],
    ids=["one record", "no loss that is finite", "little", "one rank"],
)
def test_runs_that_have_little_to_show_have_a_page_too(records, tmp_path):
    run = written(tmp_path / "run.jsonl", records)
    assert main(["report", str(run)]) == 0
    outline = Outline()
    outline.feed((tmp_path / "run.html").read_text())
    assert not outline.open


def test_a_run_that_was_resumed_or_killed_can_be_read(tmp_path, capsys):
    from zerohvd.tools.reporter import read_records

    run = written(tmp_path / "run.jsonl", [record(s) for s in (10, 20, 30, 20, 30, 40)])
    with run.open("a") as file:
        file.write('{"step": 50, "tim')
    assert [r["step"] for r in read_records(run)] == [10, 20, 30, 40]


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "no records"), ("{}\n{}\n", "'step'"), ("x\n{}\n", "line 1"), (None, "No such file")],
)
def test_what_is_no_run_is_refused(text, said, tmp_path, capsys):
    run = tmp_path / "run.jsonl"
    if text is not None:
        run.write_text(text)
    assert main(["report", str(run)]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run.html").exists()


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: the page is not looked at")
def test_a_browser_shows_the_page_on_phones_screens_and_paper(page, tmp_path):
    """Nothing sticks out to the right on a phone, text is large enough, and it can be printed."""
    # The page measures itself, in a copy that has a script.
    script = """<script>addEventListener("load", () => {
      const texts = [...document.querySelectorAll("svg text")];
      const sizes = texts.map(t => t.getBoundingClientRect().height);
      const out = texts.filter(t => {
        const b = t.getBoundingClientRect(), f = t.closest("svg").getBoundingClientRect();
        return b.left < f.left - 1 || b.right > f.right + 1; });
      document.title = JSON.stringify({wide: document.documentElement.scrollWidth,
        inner: innerWidth, smallest: Math.min(...sizes), out: out.map(t => t.textContent)});
      document.body.setAttribute("data-found", document.title); });</script></body>"""
    copy = tmp_path / "measured.html"
    copy.write_text(page.read_text().replace("</body>", script))
    browser = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    browser.append(f"--user-data-dir={tmp_path / 'profile'}")

    def look(*options):
        done = subprocess.run(
            [*browser, *options], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    # Headless windows are at least 500 wide: a phone is a frame of 390 in one.
    frame = tmp_path / "phone.html"
    frame.write_text(
        '<body style="margin:0"><iframe src="measured.html" width="390" height="800" '
        "onload=\"setTimeout(() => document.body.setAttribute('data-found', "
        "this.contentDocument.title), 300)\"></iframe></body>"
    )
    for file in (frame, copy):
        dom = look(
            "--allow-file-access-from-files",
            "--virtual-time-budget=3000",
            "--window-size=1200,900",
            "--dump-dom",
            file.as_uri(),
        )
        found = json.loads(
            re.search(r'data-found="([^"]+)"', dom)[1].replace("&quot;", '"').replace("&lt;", "<")
        )
        assert found["wide"] <= found["inner"], found
        assert found["smallest"] >= 9, found
        assert not found["out"], found
    look("--window-size=1200,1400", f"--screenshot={tmp_path / 'page.png'}", page.as_uri())
    data = (tmp_path / "page.png").read_bytes()
    assert struct.unpack(">II", data[16:24]) == (1200, 1400) and len(data) > 20_000
    look(f"--print-to-pdf={tmp_path / 'page.pdf'}", page.as_uri())
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF-")


def test_traces_are_merged_by_one_command(tmp_path, capsys):
    for rank in (0, 1):
        trace = Trace(tmp_path / "traces", rank)
        trace.span("step 1", 1.0, 2.0)
        trace.flush()
    assert main(["trace", "merge", str(tmp_path / "traces"), "-o", str(tmp_path / "o.json")]) == 0
    merged = json.loads((tmp_path / "o.json").read_text())
    assert {e["pid"] for e in merged["traceEvents"]} == {0, 1}
    assert main(["trace", "merge", str(tmp_path / "traces"), "-o", str(tmp_path / "o.svg")]) == 0
    drawn = xml.etree.ElementTree.parse(tmp_path / "o.svg").getroot()
    titles = [e.text for e in drawn.iter() if e.tag.endswith("title")]
    assert titles == ["step 1: 1000.00 ms"] * 2
    assert main(["trace", "merge", str(tmp_path / "nothing")]) == 2
    assert "zero.Monitor" in capsys.readouterr().err
