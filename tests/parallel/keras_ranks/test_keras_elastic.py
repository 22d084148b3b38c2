"""A Keras training that is committed to memory goes on from there."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras_world import RANK, SIZE, X, Y, at_two_ranks, few, make_model

import zerohvd.keras as zero


def build(stage: int, seed: int) -> keras.Model:
    model, opt = make_model(seed), keras.optimizers.AdamW(1e-2)
    if stage == 3:
        model, opt = zero.zeroify(model, opt, stage=3)
    else:
        opt = zero.DistributedOptimizer(opt, stage=stage)
    model.compile(optimizer=opt, loss="mse")
    return model


def fit(model: keras.Model, first: int, stop: int, *callbacks) -> list[float]:
    x, y = X[RANK::SIZE], Y[RANK::SIZE]
    done = model.fit(
        x, y, batch_size=4, shuffle=False, verbose=0, initial_epoch=first, epochs=stop,
        callbacks=list(callbacks),
    )  # fmt: skip
    return done.history["loss"]


def values(model: keras.Model) -> list[np.ndarray]:
    with zero.gathered(model):
        return [v.numpy() for v in model.variables]


@pytest.mark.parametrize("stage", few([0, 1, 2, 3], "") or [2, 3])
def test_training_goes_on_from_a_commit_bit_by_bit(stage, shared_folder, monkeypatch):
    monkeypatch.setenv("ZEROHVD_ELASTIC", str(shared_folder / "job"))
    model = build(stage, 7)
    state = zero.elastic.KerasState(model, epoch=0)
    state.restore()
    fit(model, 0, 2, zero.elastic.CommitStateCallback(state))
    losses = fit(model, 2, 4)

    other = build(stage, 1)
    begun = zero.elastic.KerasState(other, epoch=0)

    @zero.elastic.run
    def train(state):
        assert state.epoch == 2
        return fit(other, state.epoch, 4)

    assert train(begun) == losses
    for a, b in zip(values(model), values(other), strict=True):
        np.testing.assert_array_equal(a, b)


@at_two_ranks
def test_horovods_elastic_states_are_refused_with_the_line_to_write():
    from horovod.tensorflow.elastic import TensorFlowKerasState

    model = build(2, 7)
    fit(model, 0, 1)
    with pytest.raises(zero.ShardedStateError, match=r"Write zero\.elastic\.KerasState"):
        TensorFlowKerasState(model, model.optimizer)
    assert list(model.optimizer.variables)  # still a list


@at_two_ranks
def test_a_callback_needs_a_state_that_counts_epochs():
    with pytest.raises(ValueError, match=r"KerasState\(model, epoch=0\)"):
        zero.elastic.CommitStateCallback(zero.elastic.KerasState(build(2, 7), step=0))
