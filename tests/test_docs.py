"""What the documentation says is true: its links lead somewhere, and its names exist."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from zerohvd.errors import ZeroError
from zerohvd.tools.cli import main as zerohvd

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text()

# Prints what is public in an adapter: name -> names of its parameters, and of its attributes.
LOOK = """
import importlib, inspect, json, sys
zero = importlib.import_module(sys.argv[1])
def parameters(value):
    try:
        return [p.name for p in inspect.signature(value).parameters.values()]
    except (TypeError, ValueError):
        return []
found = {n: [parameters(getattr(zero, n)), dir(getattr(zero, n))] for n in dir(zero)}
print(json.dumps(found))
"""


def blocks(page: Path, *languages: str) -> list[str]:
    return [code for language, code in FENCE.findall(page.read_text()) if language in languages]


@pytest.fixture(scope="module")
def public():
    """Of each adapter; found in processes of their own, whose settings they change."""
    found = {}
    for name in ("torch", "keras"):
        argv = [sys.executable, "-c", LOOK, f"zerohvd.{name}"]
        done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=ROOT)
        found[name] = json.loads(done.stdout)
    return found


def adapters(page: Path, code: str) -> list[str]:
    """Whose `zero` a piece of code means; it may be that of both."""
    named = [name for name in ("torch", "keras") if f"zerohvd.{name} as zero" in code]
    if named:
        return named
    if page.stem.startswith("keras"):
        return ["keras"]
    torch_alone = page.stem in ("torch", "from-deepspeed", "from-fsdp")
    return ["torch"] if torch_alone else ["torch", "keras"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_python_in_a_page_uses_names_and_options_that_exist(page, public):
    for code in blocks(page, "python"):
        known = [public[name] for name in adapters(page, code)]
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for module in imported(node):
                    assert importlib.util.find_spec(module), f"{module} cannot be imported"
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "zero":
                assert any(node.attr in names for names in known), f"there is no zero.{node.attr}"
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("zero."):
                for keyword in filter(None, (k.arg for k in node.keywords)):
                    takes(ast.unparse(node.func), keyword, known)


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]


def takes(function: str, keyword: str, known: list[dict]) -> None:
    """Raise unless an adapter's function has this keyword; zeroify passes others on."""
    name = function.split(".")[1]
    inside = "callbacks" in function or function.count(".") > 1
    also = ["DistributedOptimizer"] if name == "zeroify" else []
    options = {p for names in known for n in [name, *also] if n in names for p in names[n][0]}
    assert inside or keyword in options, f"{function} has no option {keyword}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_names_of_zero_in_the_text_of_a_page_exist(page, public):
    text = FENCE.sub("", page.read_text())
    for name, attribute in re.findall(r"`[^`\n]*?(?<![\w.])zero\.(\w+)(?:\.(\w+))?", text):
        known = [names[name] for names in public.values() if name in names]
        assert known, f"there is no zero.{name}"
        assert not attribute or any(attribute in entry[1] for entry in known), f"{name}.{attribute}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_commands_in_a_page_exist(page, capsys):
    spans = re.findall(r"`((?:zerohvd|make) [a-z][^`\n]*)`", FENCE.sub("", page.read_text()))
    lines = [line for code in blocks(page, "sh") for line in code.splitlines()]
    for line in [*lines, *spans]:
        words = shlex.split(line, comments=True)
        if "zerohvd" in words and "-m" not in words:
            check_zerohvd(words[words.index("zerohvd") + 1 :], capsys)
        if words[:1] == ["make"] and len(words) > 1 and "=" not in words[1]:
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
        for script in (w for w in words if w.startswith("examples/")):
            assert (ROOT / script).exists(), line


def check_zerohvd(words: list[str], capsys) -> None:
    """Ask for the help of a command, and look for the options in it."""
    words = words[: words.index("--")] if "--" in words else words
    actions = [w for w in words if re.fullmatch(r"[a-z]+", w)][: 2 if words[0] != "doctor" else 1]
    with pytest.raises(SystemExit) as ended:
        zerohvd([*actions, "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    for option in (w for w in words if w.startswith("--")):
        assert option in said, f"zerohvd {' '.join(actions)} has no {option}"


def subclasses(kind: type) -> list[type]:
    return [kind, *(below for each in kind.__subclasses__() for below in subclasses(each))]


def test_every_error_is_explained_where_its_traceback_says():
    rooms = ("checkpoint.errors", "elastic.copies", "peers.channel", "tools.adapters")
    for module in (*rooms, "tools.builder.steps"):
        importlib.import_module(f"zerohvd.{module}")
    kinds = [kind for kind in subclasses(ZeroError) if not kind.__module__.endswith("testing")]
    assert len(kinds) > 8
    for kind in kinds:
        page, _, anchor = kind.help.partition("#")
        heading = f"## {kind.__name__}\n"
        assert heading in (ROOT / page).read_text(), f"{kind.__name__} has no section"
        assert anchor == kind.__name__.lower()
        notes = getattr(kind("what happened"), "__notes__", None)
        assert notes == ([f"What to do: {kind.help}"] if sys.version_info >= (3, 11) else None)
        assert str(kind("what happened")) == "what happened"


def said_in_the_code() -> str:
    """All texts of the library; what f-strings fill in is left out."""
    texts = []
    for folder in ("zerohvd", "torch_adapter", "tf_adapter"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
                if isinstance(node, ast.JoinedStr):
                    parts = [v.value if isinstance(v, ast.Constant) else "…" for v in node.values]
                    texts.append("".join(parts))
    return "\n".join(texts)


def test_messages_in_troubleshooting_are_those_of_the_code():
    code = said_in_the_code()
    quoted = re.findall(r'"([^"\n]{8,})"', FENCE.sub("", TROUBLES))
    theirs = {"No space left on device"}  # the system's
    assert len(quoted) > 30
    unknown = [
        part.strip()
        for message in sorted(set(quoted) - theirs)
        for part in re.split(r"\s?…\s?|\b(?:rank )?\d+\b", message)
        if part.strip() not in code
    ]
    assert not unknown, f"the library does not say {unknown}"


def test_the_picture_of_memory_is_what_its_script_draws():
    sys.path.insert(0, str(ROOT / "docs" / "tools"))
    import memory_picture

    assert memory_picture.PICTURE.read_text() == memory_picture.draw()


def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path):
    pytest.importorskip("mkdocs", reason="the documentation's tools need Python 3.11")
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.glob("*.html"))
    assert len(pages) > 25
    for page in pages:
        html = page.read_text()
        fetched = re.findall(r"<(?:script|img|link|iframe)[^>]*(?:src|href)=\"?https?:[^ >]*", html)
        assert not fetched, f"{page.name} fetches {fetched}"
        assert "language-mermaid" not in html
    assert "clip_grad_norm_" in (tmp_path / "api-torch.html").read_text()


def test_links_of_the_readme_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", text):
        assert (ROOT / target).exists(), target


def test_the_readme_has_the_scripts_that_get_started_has():
    assert blocks(PAGES[0], "python") == blocks(ROOT / "docs" / "get-started.md", "python")
