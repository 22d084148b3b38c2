"""A checkpoint that lies about itself is refused, and nothing of it is taken."""

from __future__ import annotations

from pathlib import Path

import checkpoint_lies
import numpy as np
import pytest
from checkpoint_cases import planned
from test_checkpoint_session import NumpyTraining

from zerohvd.checkpoint import CheckpointError, Content, Entry, Reader, save, session
from zerohvd.checkpoint.offline.consolidate import consolidate
from zerohvd.checkpoint.values import generators
from zerohvd.communication.collectives import SingleProcess
from zerohvd.layout import Span
from zerohvd.testing import ThreadWorld
from zerohvd.tools.cli import main


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("lies") / "a"
    extra = {"epoch": 3, "order": (1, 2.5), "names": {"a", "b"}, "array": np.arange(5), 7: "seven"}
    session.save(path, NumpyTraining(SingleProcess(), 10.0), session.Notes(extra))
    return path


def test_every_lie_is_refused_or_without_effect(saved, tmp_path):
    path = checkpoint_lies.copied(saved, tmp_path / "a")
    refused = 0
    for lie in checkpoint_lies.lies(checkpoint_lies.read(saved)):
        checkpoint_lies.write(path, lie.document)
        training = NumpyTraining(SingleProcess(), 1.0)
        expected = NumpyTraining(SingleProcess(), 10.0)
        try:
            session.load(path, training)
        except CheckpointError as error:
            assert str(path) in str(error), lie.what
            expected, refused = NumpyTraining(SingleProcess(), 1.0), refused + 1
        except Exception as error:
            raise AssertionError(lie.what) from error
        assert (training.shard == expected.shard).all(), lie.what
        assert (training.mean == expected.mean).all(), lie.what
    assert refused > 1000


def test_tools_refuse_lies_in_words(saved, tmp_path, capsys):
    """Exit code 2 and one line that names the checkpoint, or a right answer."""
    path = checkpoint_lies.copied(saved, tmp_path / "a")
    out = tmp_path / "out.safetensors"
    for number, lie in enumerate(checkpoint_lies.lies(checkpoint_lies.read(saved), every=5)):
        checkpoint_lies.write(path, lie.document)
        command = [
            ["inspect", str(path)],
            ["inspect", "--json", str(path)],
            ["verify", str(path)],
            ["diff", str(path), str(saved)],
            ["consolidate", str(path), str(out)],
        ][number % 5]
        try:
            code = main(["checkpoint", *command])
        except BaseException as error:
            raise AssertionError(f"{command[0]}: {lie.what}") from error
        said = capsys.readouterr()
        assert code in (0, 1, 2) and (code == 0 or said.err or command[0] == "diff"), lie.what
        if code == 2:
            assert said.err.startswith("error: ") and str(path) in said.err, (lie.what, said.err)


def keras_like(path: Path) -> None:
    def make() -> Content:
        entries = [
            Entry("param", name, dtype, (3,), Span(0, 3), np.arange(3).astype(dtype))
            for name, dtype in (("dense/kernel", "float32"), ("dense/bias", "float64"))
        ]
        places = {"dense/kernel": "layers/dense/vars/0", "dense/bias": "layers/dense/vars/1"}
        state = {"weights_h5": places, "unplaced": [], "aliases": {"tied": "dense/bias"}}
        return Content("keras", entries, {}, state, {})

    save(path, SingleProcess(), planned(make))


@pytest.mark.parametrize("suffix", [".weights.h5", ".safetensors"])
def test_consolidating_a_lie_leaves_no_file(tmp_path, suffix):
    pytest.importorskip("h5py")
    keras_like(tmp_path / "good")
    path = checkpoint_lies.copied(tmp_path / "good", tmp_path / "a")
    out = tmp_path / f"out{suffix}"
    for lie in checkpoint_lies.lies(checkpoint_lies.read(path), every=4, first=len(suffix)):
        checkpoint_lies.write(path, lie.document)
        try:
            consolidate(path, out)
            out.unlink()
        except CheckpointError as error:
            assert str(path) in str(error), (lie.what, str(error))
        except Exception as error:
            raise AssertionError(lie.what) from error
        assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "good"], lie.what


def test_a_lie_is_told_to_all_ranks(saved, tmp_path):
    path = checkpoint_lies.copied(saved, tmp_path / "a")
    document = checkpoint_lies.read(saved)
    document["tensors"]["param/w"]["shape"] = [-3, -7]
    checkpoint_lies.write(path, document)
    said = []

    def load(ranks):
        try:
            session.load(path, NumpyTraining(ranks, 1.0))
        except CheckpointError as error:
            said.append(str(error))

    ThreadWorld(3).run(load)
    assert len(said) == 3 and len(set(said)) == 1
    assert "manifest.json: tensors['param/w'].shape[0] should be a whole number" in said[0]


def test_names_of_files_lead_nowhere_else(saved, tmp_path):
    path = checkpoint_lies.copied(saved, tmp_path / "a")
    document = checkpoint_lies.read(saved)
    name = document["files"][0]["name"]
    document["files"][0]["name"] = f"../other/{name}"
    checkpoint_lies.copied(saved, tmp_path / "other")
    checkpoint_lies.write(path, document)
    with pytest.raises(CheckpointError, match="name of a file in the same folder"):
        Reader.open(path)


def test_an_object_that_refuses_its_state_leaves_the_others_as_they_were(saved):
    class Refusing(NumpyTraining):
        def changes(self, stored):
            self.steps = []
            yield session.Change("first", lambda: self.steps.append("put 1"),
                                 lambda: self.steps.append("undo 1"))  # fmt: skip
            yield session.Change("second", lambda: {}["no"], lambda: self.steps.append("undo 2"))

    training = Refusing(SingleProcess(), 1.0)
    with pytest.raises(CheckpointError, match=f"{saved}, second: KeyError: 'no'"):
        session.load(saved, training)
    assert training.steps == ["put 1", "undo 2", "undo 1"]
    assert (training.shard == NumpyTraining(SingleProcess(), 1.0).shard).all()


@pytest.mark.parametrize(
    ("which", "wrong"),
    [
        ("python", [3, np.arange(5, dtype=np.uint64), None]),
        ("python", [2, np.zeros(625, np.uint64), "gauss"]),
        ("python", [3, np.full(625, 2**40, np.uint64), None]),
        ("numpy", ["MT19937", np.zeros(624, np.uint32), 10**6, 0, 0.0]),
        ("numpy", ["MT19937", np.zeros(624, np.uint32), -1, 0, 0.0]),
        ("numpy", ["MT19937", np.zeros(6, np.uint32), 0, 0, 0.0]),
        ("numpy", ["PCG64", np.zeros(624, np.uint32), 0, 0, 0.0]),
        ("numpy", []),
        ("numpy", 5),
    ],
)
def test_states_of_generators_are_tried_out_before_they_are_set(which, wrong):
    states = generators.states()
    generators.prepare(states)()
    with pytest.raises(CheckpointError, match=f"generator '{which}'"):
        generators.prepare({**states, which: wrong})
    with pytest.raises(CheckpointError, match="lacks the generator"):
        generators.prepare({k: v for k, v in states.items() if k != which})
