"""Sharding inside a subset of the ranks."""

import horovod.tensorflow as hvd
import keras
import keras_world as world
import numpy as np
import pytest

import zerohvd.keras as zero


def group_of(members):
    return members.ranks if members.included() and world.SIZE > 1 else [world.RANK]


@pytest.mark.parametrize("stage", world.few("012", "2"))
def test_only_the_members_share_a_model(stage, members):
    """The others train alone; initial weights are those of the first member."""
    group = group_of(members)
    model = world.make_model(seed=world.RANK)
    optimizer = zero.DistributedOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9), stage=int(stage), process_set=members
    )
    got = world.loop(model, optimizer, reduce=False)
    assert optimizer.step.wire.size == len(group)

    def union(step):
        parts = [world.batch(step, rank) for rank in group]
        return tuple(np.concatenate(p) for p in zip(*parts, strict=True))

    alone = world.make_model(seed=group[0])
    plain = keras.optimizers.SGD(0.1, momentum=0.9)
    expected = world.loop(alone, plain, reduce=False, data=union)
    world.assert_same(got, expected, bitwise=False, tolerance=5e-6)


def test_members_save_and_average_among_themselves(members, tmp_path):
    model = world.make_model()
    model.compile(
        zero.DistributedOptimizer(keras.optimizers.Adam(0.01), process_set=members), loss="mse"
    )
    # Steps that the others do not take.
    epochs = 2 if members.included() else 1
    history = model.fit(
        *world.batch(0), batch_size=world.PER_RANK, epochs=epochs, verbose=0,
        callbacks=[zero.callbacks.MetricAverage()],
    )  # fmt: skip
    path = tmp_path / "model.keras"
    zero.save_model(model, path)
    assert path.exists() == (group_of(members)[0] == world.RANK)
    everyone = hvd.allgather(np.array([history.history["loss"][-1]]), name="losses").numpy()
    mine = [everyone[r] for r in group_of(members)]
    np.testing.assert_array_equal(mine, mine[0])
