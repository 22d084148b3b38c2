"""A missing or unfit package is a sentence with a command in it."""

import configparser
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from zerohvd import versions

NAMES = ("torch", "tensorflow", "keras", "horovod")


class Site:
    """A folder of installed packages that hold nothing but their version."""

    def __init__(self, folder):
        self.folder = folder

    def install(self, module, version, *, distribution=None):
        package = self.folder / module
        package.mkdir(exist_ok=True)
        # Whoever imports it to find its version is found out.
        (package / "__init__.py").write_text("raise AssertionError('imported')\n")
        name = (distribution or module).replace("-", "_")
        info = self.folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {distribution or module}\nVersion: {version}\n")
        (info / "top_level.txt").write_text(f"{module}\n")

    def horovod(self, *frameworks, version="0.28.1"):
        self.install("horovod", version)
        libraries = {"torch": "mpi_lib_v2", "tensorflow": "mpi_lib"}
        for framework in ("torch", "tensorflow"):
            (self.folder / "horovod" / framework).mkdir()
        for framework in frameworks:
            name = f"{libraries[framework]}.cpython-311-x86_64-linux-gnu.so"
            (self.folder / "horovod" / framework / name).touch()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An environment of its own: what the machine has installed does not count."""
    standard = [path for path in sys.path if "-packages" not in path]
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *standard])
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras-home"))
    (tmp_path / "site").mkdir()
    return Site(tmp_path / "site")


def message_of(require):
    with pytest.raises(ImportError) as caught:
        require()
    return str(caught.value)


def test_an_environment_that_has_everything_passes(site):
    site.install("torch", "2.13.0+cpu")
    site.install("tensorflow", "2.21.0")
    site.install("keras", "3.15.1")
    site.horovod("torch", "tensorflow")
    versions.require_torch()
    versions.require_keras()


def test_the_oldest_supported_versions_pass(site):
    site.install("torch", "2.6.0")
    site.install("tensorflow", "2.16.0")
    site.install("keras", "3.9.0")
    site.horovod("torch", "tensorflow", version="0.27.0")
    versions.require_torch()
    versions.require_keras()


def test_the_floors_are_the_versions_that_test_oldest_runs():
    root = Path(__file__).parents[2]
    oldest = pins(root / "requirements" / "oldest.txt")
    frameworks = {
        "torch": versions.TORCH,
        "tensorflow-cpu": versions.TENSORFLOW,
        "keras": versions.KERAS,
    }
    for name, package in frameworks.items():
        assert oldest[name].startswith(f"{package.minimum}.")
        assert f">={package.minimum}'" in package.install
        assert f"{package.title} >= {package.minimum}" in (root / "README.md").read_text()
    setup = configparser.ConfigParser()
    setup.read(root / "setup.cfg")
    python = ".".join(map(str, versions.PYTHON_MINIMUM))
    assert setup["options"]["python_requires"] == f">={python}"
    assert f"OLDEST_PYTHON=python{python} " in (root / "Makefile").read_text()
    extras = setup["options.extras_require"]
    for line in (setup["options"]["install_requires"] + extras["keras"] + extras["mpi"]).split():
        (floor,) = Requirement(line).specifier
        assert f"{oldest[Requirement(line).name]}.".startswith(f"{floor.version}.")


def pins(file):
    """The versions in a file of requirements, by the names of the packages."""
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return dict(line.split("==") for line in lines if line)


def test_the_adapters_do_not_need_each_others_framework(site):
    site.install("torch", "2.8.0")
    site.horovod("torch")
    versions.require_torch()
    assert "TensorFlow is not installed" in message_of(versions.require_keras)


def test_a_missing_horovod_is_answered_with_the_command_that_builds_it(site):
    site.install("torch", "2.8.0")
    message = message_of(versions.require_torch)
    assert "Horovod is not installed" in message
    assert "run `zerohvd horovod install`" in message


def test_a_horovod_built_without_the_framework_must_be_built_again(site):
    site.install("torch", "2.8.0")
    site.horovod("tensorflow")
    message = message_of(versions.require_torch)
    assert "Horovod 0.28.1 is installed, but built for tensorflow" in message
    assert "run `zerohvd horovod install --force`" in message


def test_a_horovod_without_reducescatter_is_too_old(site):
    site.install("torch", "2.8.0")
    site.horovod("torch", version="0.26.1")
    message = message_of(versions.require_torch)
    assert "Horovod 0.26.1 is installed" in message
    assert "Horovod >= 0.27 (the first with reducescatter)" in message
    assert "--force" in message


@pytest.mark.parametrize(
    ("module", "old", "wanted"),
    [
        ("tensorflow", "2.15.1", "TensorFlow >= 2.16"),
        ("keras", "3.8.0", "Keras >= 3.9"),
    ],
)
def test_old_versions_are_named_with_what_is_supported(site, module, old, wanted):
    for name, version in {"tensorflow": "2.21.0", "keras": "3.9.0", module: old}.items():
        site.install(name, version)
    site.horovod("tensorflow")
    message = message_of(versions.require_keras)
    assert f"{old} is installed; zerohvd needs {wanted}. To fix it: run `pip install" in message


def test_an_old_torch_is_refused(site):
    site.install("torch", "2.5.1")
    site.horovod("torch")
    assert "PyTorch 2.5.1 is installed; zerohvd needs PyTorch >= 2.6" in message_of(
        versions.require_torch
    )


def test_everything_that_is_wrong_is_said_at_once(site):
    message = message_of(versions.require_keras)
    assert all(f"{name} is not installed" in message for name in ("TensorFlow", "Keras", "Horovod"))


@pytest.mark.parametrize("distribution", ["tensorflow-cpu", "tensorflow-rocm", "tf-nightly"])
def test_tensorflow_is_found_under_whatever_name_it_was_installed(site, distribution):
    site.install("tensorflow", "2.18.0", distribution=distribution)
    found = versions.find("tensorflow")
    assert (found.version, found.distribution) == ("2.18.0", distribution)


def test_an_upgrade_keeps_the_name_it_was_installed_under(site):
    site.install("tensorflow", "2.15.0", distribution="tensorflow-cpu")
    (problem,) = versions.problems_of(versions.TENSORFLOW)
    assert "pip install 'tensorflow-cpu>=2.16'" in problem.fix


def test_a_folder_that_merely_has_the_name_is_not_the_package(site):
    (site.folder / "torch").mkdir()
    assert versions.find("torch") is None


def test_a_package_without_metadata_is_taken_as_it_is(site):
    (site.folder / "torch").mkdir()
    (site.folder / "torch" / "__init__.py").touch()
    site.horovod("torch")
    versions.require_torch()


@pytest.mark.parametrize(
    ("version", "minimum", "enough"),
    [
        ("2.1.0a0+32f93b1", "2.1", True),
        ("2.10.0", "2.9", True),
        ("2.0.9", "2.1", False),
        ("3", "3.0", True),
        ("my-own-build", "2.1", True),
    ],
)
def test_versions_are_compared_by_their_release_numbers(version, minimum, enough):
    assert versions.at_least(version, minimum) is enough


def test_another_keras_backend_is_refused_with_the_variable_to_set(site, monkeypatch):
    site.install("tensorflow", "2.21.0")
    site.install("keras", "3.15.1")
    site.horovod("tensorflow")
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    message = message_of(versions.require_keras)
    assert "Keras uses its jax backend" in message
    assert "set KERAS_BACKEND=tensorflow before importing keras" in message


def test_the_backend_of_an_imported_keras_counts_whatever_the_environment_says(monkeypatch):
    imported = SimpleNamespace(config=SimpleNamespace(backend=lambda: "torch"))
    monkeypatch.setitem(sys.modules, "keras", imported)
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    assert versions.keras_backend() == "torch"


def test_the_backend_may_come_from_keras_own_file(site, tmp_path, monkeypatch):
    home = tmp_path / "keras-home"
    assert versions.keras_backend() == "tensorflow"
    home.mkdir()
    (home / "keras.json").write_text(json.dumps({"backend": "jax"}))
    assert versions.keras_backend() == "jax"
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    assert versions.keras_backend() == "tensorflow"


def test_horovod_tells_what_it_was_built_against(site):
    site.horovod("torch")
    assert versions.horovod_frameworks() == ("torch",)
    assert versions.horovod_built_against() == {}
    record = site.folder / "horovod" / "metadata.json"
    record.write_text(json.dumps({"pytorch": "2.13.0+cpu", "dummy": "none"}))
    assert versions.horovod_built_against() == {"torch": "2.13.0+cpu"}


def test_asking_imports_no_framework():
    code = (
        "import sys; from zerohvd import launchers; from zerohvd import versions\n"
        "for ask in (versions.require_torch, versions.require_keras):\n"
        "    try: ask()\n"
        "    except ImportError: pass\n"
        f"print([m for m in {NAMES!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
