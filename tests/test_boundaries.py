"""Who may import whom: the core knows no framework, the adapters only their own, none twice."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "zerohvd"
ADAPTERS = {"torch": ROOT / "torch_adapter", "keras": ROOT / "tf_adapter"}
FRAMEWORKS = {"torch", "tensorflow", "keras", "horovod"}

# What must not be loaded, or named in an import, on either side.
FOREIGN = {
    "torch": ("tensorflow", "keras", "horovod.tensorflow", "horovod.keras", "zerohvd.keras"),
    "keras": ("torch", "horovod.torch", "zerohvd.torch"),
}


def modules(folder: Path, package: str) -> dict[str, Path]:
    """Dotted name -> file, of all modules below `folder`; links are not followed."""
    found = {}
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if (Path(parent) / f / "__init__.py").exists())
        folders[:] = [f for f in folders if not (Path(parent) / f).is_symlink()]
        for file in sorted(files):
            if file.endswith(".py") and file != "__main__.py":
                path = Path(parent) / file
                parts = [package, *path.relative_to(folder).with_suffix("").parts]
                found[".".join(p for p in parts if p != "__init__")] = path
    return found


CORE_MODULES = modules(CORE, "zerohvd")
ADAPTER_MODULES = {
    name: modules(folder, f"zerohvd.{name}") if (folder / "__init__.py").exists() else {}
    for name, folder in ADAPTERS.items()
}


def imports(path: Path, module: str, *, typing: bool = False) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a file imports, in functions too; of `from a import b`
    both a and a.b. What only type checkers see counts if `typing`."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text(), str(path))
    for node in ast.walk(tree) if typing else running_code(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [base])])
            yield node.lineno, base
            for name in node.names:
                yield node.lineno, f"{base}.{name.name}"


def running_code(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield from running_code(child)


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == p or name.startswith(p + ".") for p in packages)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def loaded_by(names: list[str]) -> set[str]:
    """What a fresh interpreter has loaded after importing `names`."""
    code = (
        "import importlib, json, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_core_loads_no_framework_no_horovod_and_starts_no_mpi():
    loaded = loaded_by(["zerohvd", *CORE_MODULES])
    assert set(CORE_MODULES) <= loaded
    assert {name.partition(".")[0] for name in loaded} & {*FRAMEWORKS, "mpi4py"} == set()
    assert not {name for name in loaded if within(name, ("zerohvd.torch", "zerohvd.keras"))}


def test_no_core_module_names_an_adapter():
    for module, path in CORE_MODULES.items():
        for line, name in imports(path, module):
            assert not within(name, ("zerohvd.torch", "zerohvd.keras")), f"{path}:{line}: {name}"


def loaded_by_name(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every string handed to import_module or, after "-m", to an interpreter."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            handed: list[ast.AST] = [*node.args]
        elif isinstance(node, ast.List | ast.Tuple):
            flags = [isinstance(e, ast.Constant) and e.value == "-m" for e in node.elts]
            handed = [e for e, flag in zip(node.elts[1:], flags, strict=False) if flag]
        else:
            continue
        for each in handed:
            # A name looked up in a table counts with all that the table may hold.
            names = {n.id for n in ast.walk(each) if isinstance(n, ast.Name)}
            tables = [t for t in ast.walk(ast.parse(path.read_text())) if assigns(t, names)]
            for part in (p for tree in (each, *tables) for p in ast.walk(tree)):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield node.lineno, part.value


def assigns(node: ast.AST, names: set[str]) -> bool:
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(t, ast.Name) and t.id in names for t in targets)


def test_no_core_module_loads_an_adapter_by_a_string():
    for path in CORE_MODULES.values():
        for line, text in loaded_by_name(path):
            assert not text.startswith(("zerohvd.torch", "zerohvd.keras")), f"{path}:{line}"


def test_a_table_of_names_is_not_overlooked(tmp_path):
    file = tmp_path / "m.py"
    file.write_text('T = {"a": "zerohvd.torch.x"}\nimportlib.import_module(T[name])\n')
    assert (2, "zerohvd.torch.x") in loaded_by_name(file)
    file.write_text('argv = [python, "-m", "zerohvd.keras"]\n')
    assert list(loaded_by_name(file)) == [(1, "zerohvd.keras")]


def import_graph(among: dict[str, Path], *, typing: bool = False) -> dict[str, set[str]]:
    """Module -> which of the same modules it imports."""
    graph = {}
    for module, path in among.items():
        named = {name for _, name in imports(path, module, typing=typing)} & set(among)
        # `from package import submodule` names both; only the submodule is meant.
        graph[module] = {n for n in named if not any(o.startswith(n + ".") for o in named)}
        graph[module].discard(module)
    return graph


def core_graph() -> dict[str, set[str]]:
    return import_graph(CORE_MODULES)


def circle(graph: dict[str, set[str]]) -> dict[str, list[str]]:
    """The nodes on a cycle or behind one, with what they wait for."""
    done: set[str] = set()
    while free := {m for m, needs in graph.items() if m not in done and needs <= done}:
        done |= free
    return {m: sorted(graph[m] - done) for m in sorted(set(graph) - done)}


def test_imports_in_the_core_run_one_way():
    found = circle(core_graph())
    assert not found, f"these modules import each other: {found}"


@pytest.mark.parametrize(
    ("module", "may_import"),
    [
        ("zerohvd.compression.policies", set()),
        ("zerohvd.config", {"zerohvd.compression", "zerohvd.compression.policies"}),
        ("zerohvd.errors", set()),
        ("zerohvd.ending", set()),
        ("zerohvd.limits", {"zerohvd.ending", "zerohvd.errors"}),
        ("zerohvd.numerics", set()),
        ("zerohvd.communication.log", {"zerohvd.config"}),
        ("zerohvd.layout", {"zerohvd.config"}),
        ("zerohvd.schedule", {"zerohvd.layout"}),
        ("zerohvd.relayout", {"zerohvd.layout"}),
        ("zerohvd.memory", {"zerohvd.config"}),
        ("zerohvd.communication.hosts", set()),
        (
            "zerohvd.communication.collectives",
            {"zerohvd.communication.hosts", "zerohvd.communication.log", "zerohvd.limits"},
        ),
    ],
)
def test_the_foundations_stand_on_little(module, may_import):
    assert core_graph()[module] <= may_import


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_names_only_its_own_framework(adapter):
    for module, path in ADAPTER_MODULES[adapter].items():
        for line, name in imports(path, module):
            assert not within(name, FOREIGN[adapter]), f"{path}:{line}: imports {name}"


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_loads_only_its_own_framework(adapter):
    if not ADAPTER_MODULES[adapter]:
        pytest.skip(f"there is no zerohvd.{adapter} yet")
    # Asked in a process of its own: two frameworks in this one may not get along.
    horovod = {"torch": "horovod.torch", "keras": "horovod.tensorflow"}[adapter]
    if python(f"import {horovod}").returncode != 0:
        pytest.skip(f"{horovod} is not installed")
    loaded = loaded_by(list(ADAPTER_MODULES[adapter]))
    assert not {name for name in loaded if within(name, FOREIGN[adapter])}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_is_never_loaded_a_second_time_under_its_folders_name(adapter):
    if not ADAPTER_MODULES[adapter]:
        pytest.skip(f"there is no zerohvd.{adapter} yet")
    folder = ADAPTERS[adapter].name
    done = python(f"import {folder}")
    if done.returncode == 0:
        done = python(f"import {folder}, zerohvd.{adapter} as z; assert {folder} is z")
        assert done.returncode == 0, done.stderr
    else:
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("ImportError") and f"zerohvd.{adapter}" in last


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_can_be_imported_from_a_checkout(adapter):
    assert (CORE / adapter).resolve() == ADAPTERS[adapter]


# -- rules of the house: CONTRIBUTING explains them ------------------------------------------------

PRODUCT = {"core": CORE_MODULES, **ADAPTER_MODULES}
# Methods of NamedTuples, and os._exit, which are public although their names are not.
DOCUMENTED = {"_replace", "_asdict", "_fields", "_make", "_field_defaults", "_exit"}
BY_NAME = {"getattr", "setattr", "hasattr", "delattr"}


def parts(**pending: str) -> list[object]:
    """The parts of the product as parameters; `pending` says which may still fail, and why."""
    return [
        pytest.param(p, marks=pytest.mark.xfail(strict=False, reason=pending[p]))
        if p in pending
        else p
        for p in PRODUCT
    ]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def nodes(part: str, *, compat: bool = False) -> Iterator[tuple[Path, ast.Module, ast.AST]]:
    """Every node of every file, without compat.py unless asked for."""
    for path in PRODUCT[part].values():
        if path.name != "compat.py" or compat:
            tree = ast.parse(path.read_text(), str(path))
            for node in ast.walk(tree):
                yield path, tree, node


def at(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


def own_members(tree: ast.Module) -> set[str]:
    """Private names that classes of this file define: these may use them on each other."""
    found = set()
    for cls in (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)):
        for node in ast.walk(cls):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


def base(node: ast.expr) -> str:
    """`a` of `a.b.c`; "" for anything else."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def framework_names(tree: ast.Module) -> set[str]:
    """What a file calls the framework modules it imports, and what it takes from them."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [n for n in node.names if n.name.partition(".")[0] in FRAMEWORKS]
            found |= {n.asname or n.name.partition(".")[0] for n in names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            foreign = (node.module or "").partition(".")[0] in FRAMEWORKS
            found |= {n.asname or n.name for n in node.names if foreign}
    return found


@pytest.mark.parametrize("part", parts())
def test_no_module_reads_private_members_of_other_objects(part):
    found = []
    for path, tree, node in nodes(part):
        if not isinstance(node, ast.Attribute) or not is_private(node.attr):
            continue
        mine = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        inherited = ast.unparse(node.value) == "super()"
        if not (mine or inherited or node.attr in DOCUMENTED | own_members(tree)):
            found.append(at(path, node))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("part", parts())
def test_our_own_marks_on_foreign_objects_are_read_and_written_in_one_file_each(part):
    files: dict[str, set[str]] = {}
    for path, _, node in nodes(part):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and text.startswith("_zero") and text.isidentifier():
            files.setdefault(text, set()).add(str(path.relative_to(ROOT)))
    assert not {mark: sorted(used) for mark, used in files.items() if len(used) > 1}


@pytest.mark.parametrize("part", parts())
def test_private_names_of_frameworks_are_in_compat_alone(part):
    found = []
    for path, tree, node in nodes(part):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            above = [] if isinstance(node, ast.Import) else (node.module or "").split(".")
            named = [[*above, *n.name.split(".")] for n in node.names]
            foreign = [n for n in named if n[0] in FRAMEWORKS and not getattr(node, "level", 0)]
            private = any(is_private(x) or x == "src" for n in foreign for x in n)
        elif isinstance(node, ast.Attribute):
            private = is_private(node.attr) and base(node) in framework_names(tree)
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            by_name = isinstance(node.func, ast.Name) and node.func.id in BY_NAME
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            private = by_name and is_private(str(name)) and not name.startswith("_zero")
        else:
            continue
        if private:
            found.append(at(path, node))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("part", parts())
def test_imports_run_one_way_also_in_functions_and_for_type_checkers(part):
    found = circle(import_graph(PRODUCT[part], typing=True))
    assert not found, f"these modules import each other: {found}"


@pytest.mark.parametrize("part", parts())
def test_the_rooms_import_one_way(part):
    """The same for whole folders; a file beside them is a room of its own."""

    def room(module: str) -> str:
        return ".".join(module.split(".")[: 2 if part == "core" else 3])

    graph: dict[str, set[str]] = {}
    for module, needs in import_graph(PRODUCT[part], typing=True).items():
        graph.setdefault(room(module), set()).update(room(n) for n in needs)
    for name, needs in graph.items():
        needs.discard(name)
    found = circle(graph)
    assert not found, f"these folders import each other: {found}"


@pytest.mark.parametrize("part", parts())
def test_no_folder_has_more_than_a_dozen_entries(part):
    folders = {path.parent for path in PRODUCT[part].values()} - {CORE}
    for folder in folders:
        entries = [e.name for e in folder.iterdir() if e.name != "__pycache__"]
        assert len(entries) <= 12, f"{folder.relative_to(ROOT)} has {len(entries)}"


BANNED = {
    "sys._getframe",
    "sys.getrefcount",
    "gc.get_objects",
    "gc.get_referrers",
    "inspect.currentframe",
    "inspect.stack",
}


@pytest.mark.parametrize("part", parts())
def test_nothing_reaches_below_python(part):
    """No ctypes, no reference counts, no scans of all objects, no looking at the caller's frame."""
    found = []
    for path, _, node in nodes(part, compat=True):
        if isinstance(node, ast.Import):
            banned = any(n.name.partition(".")[0] == "ctypes" for n in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{n.name}" for n in node.names}
            banned = (node.module or "").partition(".")[0] == "ctypes" or bool(names & BANNED)
        else:
            banned = isinstance(node, ast.Attribute) and ast.unparse(node) in BANNED
        if banned:
            found.append(at(path, node))
    assert not found, "\n".join(found)
