"""Every Keras optimizer gives what plain Keras on averaged gradients gives."""

import keras
import keras_world as world
import pytest

FLAT = [
    "SGD",
    "RMSprop",
    "Adam",
    "AdamW",
    "Nadam",
    "Adamax",
    "Adagrad",
    "Adadelta",
    "Ftrl",
    "Lion",
    "ScheduleFreeAdamW",
]
WHOLE = ["Adafactor", "Lamb", "Muon"]


def _exists(names):
    return [n for n in names if hasattr(keras.optimizers, n)]


@pytest.mark.parametrize("name", _exists(FLAT))
def test_elementwise_optimizers_are_cut_flat(name):
    def make():
        return getattr(keras.optimizers, name)(learning_rate=0.01)

    got, optimizer = world.sharded(make)
    assert optimizer.step.layout.partition == "flat"
    world.assert_same(got, world.plain(make))
    world.assert_ranks_agree(got)


@pytest.mark.parametrize("name", _exists(WHOLE))
def test_whole_tensor_optimizers_keep_variables_whole(name):
    def make():
        return getattr(keras.optimizers, name)(learning_rate=0.01)

    got, optimizer = world.sharded(make)
    assert optimizer.step.layout.partition == "parameter"
    # Muon's matrix products may round differently from run to run.
    world.assert_same(got, world.plain(make), bitwise=False)
    world.assert_ranks_agree(got)


@pytest.mark.parametrize("stage", world.few("01", "0"))
def test_lower_stages(stage):
    def make():
        return keras.optimizers.Adam(0.01)

    got, _ = world.sharded(make, stage=int(stage))
    world.assert_same(got, world.plain(make))


def test_small_buckets_and_chunks_change_nothing(monkeypatch):
    from zerohvd.training import graph

    monkeypatch.setattr(graph, "_CHUNK_BYTES", 256)

    def make():
        return keras.optimizers.AdamW(0.01)

    got, optimizer = world.sharded(make, bucket_bytes=256)
    buckets = optimizer.step.layout.buckets
    assert len(buckets) > 3
    if world.SIZE > 1:
        assert any(s.length < optimizer.step.layout.params[s.param].numel
                   for b in buckets for s in b.slots)  # fmt: skip
    world.assert_same(got, world.plain(make))


@pytest.mark.parametrize("stage", world.few("12", "2"))
def test_updates_in_parts_change_nothing(monkeypatch, stage):
    from zerohvd.training import graph

    monkeypatch.setattr(graph, "_LEAST_PART_BYTES", 128)

    def make():
        return keras.optimizers.AdamW(0.01, weight_decay=0.1)

    got, optimizer = world.sharded(make, bucket_bytes=1024, stage=int(stage))
    lengths = [p.piece.param_span.length for p in optimizer.step.pieces]
    if world.SIZE > 1:
        assert max(lengths) == 32 and len(lengths) > 2
    world.assert_same(got, world.plain(make))
    world.assert_ranks_agree(got)


@world.at_two_ranks
def test_unknown_subclass_keeps_variables_whole():
    class Mine(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            norm = keras.ops.norm(keras.ops.reshape(gradient, [-1]))
            super().update_step(gradient / (norm + 1.0), variable, learning_rate)

    def make():
        return Mine(0.1, momentum=0.9)

    got, optimizer = world.sharded(make)
    assert optimizer.step.layout.partition == "parameter"
    world.assert_same(got, world.plain(make))


def test_equals_one_process_on_the_union_of_the_batches():
    def make():
        return keras.optimizers.Adam(0.01)

    alone = world.loop(world.make_model(), make(), reduce=False, data=world.union)
    got, _ = world.sharded(make)
    # Means over different batches round differently, and Adam divides by their size.
    world.assert_same(got, alone, bitwise=False, tolerance=5e-6)
