"""What mkdocs calls while it builds the site: see mkdocs.yml.

- Files of the repository that pages link to (ARCHITECTURE.md, benchmarks, examples) get pages of
  their own, and links to them are turned to these. A link to a file that does not exist is a
  warning, which `--strict` makes an error.
- Mermaid's diagrams become SVG.
- `<!-- api: module -->` becomes the reference of the names in the module's `__all__`, and
  `<!-- examples -->` the code of all examples.
"""

from __future__ import annotations

import ast
import logging
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).resolve().parent))

import sequence  # noqa: E402

log = logging.getLogger("mkdocs.hooks.zerohvd")
# Repository file -> its page.
PAGES = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "benchmarks/README.md": "benchmarks.md",
    # Written by `make bench`.
    **{str(p.relative_to(ROOT)): "measured.md" for p in ROOT.glob("benchmarks/RESULTS.md")},
    **{
        f"benchmarks/results/{path.name}": f"measured-{path.name.replace('_', '-')}"
        for path in sorted((ROOT / "benchmarks" / "results").glob("*.md"))
    },
}
SOURCES = {page: source for source, page in PAGES.items() if source != "README.md"}
# Where a name has its docstring, if that is not where it is imported from.
DOCUMENTED = {
    "CheckpointManager": "zerohvd.checkpoint.manager.checkpoint_manager.CheckpointManager",
}
# What users call of a class that has more.
MEMBERS = {
    "ZeroOptimizer": [
        *("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group"),
        *("clip_grad_norm_", "grad_norm", "no_sync", "synchronize", "skip_synchronize"),
        *("set_backward_passes_per_step", "close", "param_groups", "state"),
    ],
    "DistributedOptimizer": ["build", "apply", "apply_gradients", "scale_loss"],
    "Layout": [],
    "Monitor": ["log", "close", "last"],
}
LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?(\))")


def on_config(config: Any) -> Any:
    """Pages that the navigation does not name are added to it."""
    named = set(re.findall(r"[\w-]+\.md", str(config.nav)))
    more = sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name not in named)
    if more:
        config.nav.append({"More": more})
    return config


def on_files(files: Any, config: Any) -> Any:
    for page, source in SOURCES.items():
        text = (ROOT / source).read_text()
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    own = page.file.src_uri
    source = SOURCES.get(own, f"docs/{own}")
    markdown = re.sub(r"<!-- api: ([\w.]+) -->", lambda m: reference(m[1]), markdown)
    markdown = markdown.replace("<!-- examples -->", examples())
    markdown = re.sub(
        r"^```mermaid\n(.*?)^```$",
        lambda m: sequence.draw(m[1]),
        markdown,
        flags=re.DOTALL | re.MULTILINE,
    )
    return LINK.sub(lambda m: f"{m[1]}{turned(m[2], m[3] or '', source)}{m[4]}", markdown)


def turned(target: str, anchor: str, source: str) -> str:
    """The site's link to what a file of the repository links to."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if not (ROOT / path).exists() and path.removeprefix("docs/") not in SOURCES:
        log.warning("%s links to %s, which does not exist", source, path)
        return target + anchor
    if path in PAGES:
        return PAGES[path] + anchor
    if path.startswith("examples"):
        name = Path(path).stem
        return f"examples.md#{name}" if Path(path).suffix else "examples.md"
    if (ROOT / path).is_dir() and f"{path}/README.md" in PAGES:
        return PAGES[f"{path}/README.md"]
    if path.startswith("docs/"):
        return path.removeprefix("docs/") + anchor
    log.warning("%s links to %s, which has no page: name it in %s", source, path, __file__)
    return target + anchor


def reference(module: str) -> str:
    """One entry per public name of ours, errors last; those that are Horovod's own are listed."""
    path = ROOT.joinpath(*module.split("."))
    names: list[str] = []
    origin: dict[str, str] = {}
    for node in ast.parse((path / "__init__.py").read_text()).body:
        if isinstance(node, ast.ImportFrom):
            origin.update({alias.name: node.module or "" for alias in node.names})
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = [name for name in ast.literal_eval(node.value) if not name.startswith("_")]
    theirs = [name for name in names if origin.get(name, "").startswith("horovod")]
    ours = sorted(set(names) - set(theirs), key=lambda name: (name.endswith("Error"), name.lower()))
    entries = [_entry(module, name) for name in ours]
    if theirs:
        said = ", ".join(f"`{name}`" for name in theirs)
        entries.append(f"## Horovod's own\n\nGiven on as they are: {said}.")
    return "\n\n".join(entries)


def _entry(module: str, name: str) -> str:
    said = f"::: {DOCUMENTED.get(name, f'{module}.{name}')}"
    if name in MEMBERS:
        said += f"\n    options:\n      members: [{', '.join(MEMBERS[name])}]"
    return said


def examples() -> str:
    """The code of every example, and its difference from a Horovod script where there is one."""
    parts = []
    for path in sorted((ROOT / "examples").glob("*.py")):
        parts.append(f"### {path.stem}\n\n```python\n{path.read_text().rstrip()}\n```")
        diff = path.parent / "diffs" / f"{path.stem}.diff"
        if diff.exists():
            parts.append(f"What was changed in it:\n\n```diff\n{diff.read_text()}```")
    return "\n\n".join(parts)
