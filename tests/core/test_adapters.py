"""Adapters are found through the metadata of installed packages, and nowhere else."""

from __future__ import annotations

import configparser
import sys
from pathlib import Path

import pytest

from zerohvd.tools.adapters import GROUP, AdapterNotFoundError, load_adapter

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Registers entry points as an installed package would."""

    def register(**points):
        info = tmp_path / "someone_else-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someone-else\nVersion: 1.0\n")
        lines = [f"{name} = {module}" for name, module in points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    return register


def test_an_adapter_of_any_package_is_found(install, tmp_path):
    (tmp_path / "plugin_for_jax.py").write_text("arrays = 'operations'\n")
    install(jax="plugin_for_jax")
    assert load_adapter("jax").arrays == "operations"


def test_without_an_installed_package_the_error_says_what_to_do(install):
    install(jax="plugin_for_jax")
    with pytest.raises(AdapterNotFoundError, match=r"'mxnet' is not .*jax.*pip install -e \."):
        load_adapter("mxnet")


def test_both_adapters_are_registered():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    points = setup["options.entry_points"][GROUP].split("\n")
    named = dict(line.split(" = ") for line in points if line)
    assert named == {"torch": "zerohvd.torch.plugin", "keras": "zerohvd.keras.plugin"}
    for module in named.values():
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists()
