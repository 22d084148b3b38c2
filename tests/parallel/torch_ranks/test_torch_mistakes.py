"""A mistake ends as a clear error, on every rank, soon."""

from __future__ import annotations

import gc

import horovod.torch as hvd
import pytest
import torch
from horovod.torch import join as join_as_imported_before
from torch import nn
from training import (
    STAGES,
    adamw,
    batch,
    distribute,
    loss_of,
    make_model,
    plain,
    sharded,
    train,
)

import zerohvd.torch as zero

RANKS = (1, 2, 3)  # four would make the same mistakes


def wrap(model, **options):
    return distribute(model, adamw(model.parameters()), **options)


needs_ranks = pytest.mark.skipif(hvd.size() == 1, reason="one rank agrees with itself")


@needs_ranks
@pytest.mark.parametrize("last", [False, True], ids=["first rank differs", "last rank differs"])
def test_other_shapes_on_one_rank(last):
    odd = hvd.rank() == (hvd.size() - 1 if last else 0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 6 if odd else 5))
    with pytest.raises(zero.DisagreementError, match=r"parameter '1\.weight'.*\(5, 4\)") as error:
        wrap(model)
    assert "(6, 4)" in str(error.value)


@needs_ranks
def test_another_order_on_one_rank():
    named = list(nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4)).named_parameters())
    if hvd.rank() == 1:
        named = named[2:] + named[:2]
    with pytest.raises(zero.DisagreementError, match=r"'0\.weight'.*'1\.weight'"):
        zero.DistributedOptimizer(adamw([p for _, p in named]), named_parameters=named)


@needs_ranks
def test_more_parameters_on_one_rank():
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(2 + (hvd.rank() == 1))])
    with pytest.raises(zero.DisagreementError, match=r"only 4 parameters.*'2\.weight'"):
        wrap(model)


@needs_ranks
@pytest.mark.parametrize(
    "options",
    [{"stage": 1}, {"bucket_bytes": 77}, {"grad_clip": 2.0}, {"backward_passes_per_step": 2}],
    ids=lambda o: next(iter(o)),
)
def test_other_settings_on_one_rank(options):
    with pytest.raises(zero.DisagreementError, match=next(iter(options))):
        wrap(make_model(), **(options if hvd.rank() == 1 else {}))


@needs_ranks
@pytest.mark.parametrize("stage", STAGES)
def test_other_frozen_parameters_on_one_rank(stage):
    model = make_model()
    opt = wrap(model, stage=stage)
    if hvd.rank() == 1:
        model.up.weight.requires_grad_(False)
    loss_of(model, batch(0, hvd.rank())).backward()
    with pytest.raises(zero.DisagreementError, match="require gradients"):
        opt.step()


@needs_ranks
@pytest.mark.parametrize("stage", STAGES)
def test_a_constructor_that_fails_on_one_rank_is_an_error_on_all(stage):
    for mistake in ({"grad_clip": -1.0}, {"groups": -1}):
        error = (ValueError, next(iter(mistake)))
        if hvd.rank() > 0:
            mistake, error = {}, (zero.DisagreementError, "another rank could not make")
        with pytest.raises(error[0], match=error[1]):
            wrap(make_model(), stage=stage, **mistake)
    model = make_model()
    opt = wrap(model, stage=stage)
    with pytest.raises((ValueError, zero.DisagreementError), match=r"close\(\)|another rank"):
        wrap(model if hvd.rank() == 0 else make_model(), stage=stage)
    train(model, opt, steps=1)


@needs_ranks
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_joins_early_is_an_error_on_all(stage):
    model = make_model()
    opt = wrap(model, stage=stage)
    train(model, opt, steps=2)  # by now Horovod has the operations of a step in its cache
    with pytest.raises(RuntimeError, match=r"rank 0 hvd\.join\(\).*zero\.even_steps"):
        if hvd.rank() == 0:
            hvd.join()
        else:
            train(model, opt, steps=1)


@needs_ranks
def test_a_rank_that_joins_while_the_others_use_the_second_optimizer():
    models = [make_model() for _ in range(2)]
    opts = [wrap(model) for model in models]
    for model, opt in zip(models, opts, strict=True):
        train(model, opt, steps=2)
    with pytest.raises(RuntimeError, match=r"rank 0 hvd\.join\(\)"):
        if hvd.rank() == 0:
            hvd.join()
        else:
            train(models[1], opts[1], steps=1)


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_join_together_go_on(stage):
    model = make_model()
    opt = wrap(model, stage=stage)
    for _ in range(2):
        train(model, opt, steps=2)
        assert hvd.join() in range(hvd.size())
    assert join_as_imported_before() in range(hvd.size())


@needs_ranks
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("failed", [False, True], ids=["", "after a join that failed"])
def test_ranks_that_join_may_have_let_go_of_different_optimizers(failed, stage):
    model, used = make_model(), make_model()
    kept = wrap(model, stage=stage)
    opt = wrap(used, stage=stage)
    for m, o in ((model, kept), (used, opt)):
        train(m, o, steps=2)
    if failed:
        with pytest.raises(RuntimeError, match=r"rank 0 hvd\.join\(\)"):
            if hvd.rank() == 0:
                hvd.join()
            else:
                train(used, opt, steps=1)
    if hvd.rank() == 0:
        del kept, m, o
        gc.collect()
    for _ in range(3):
        assert hvd.join() in range(hvd.size())
    hvd.allreduce(torch.zeros(1), name="all are there")


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"stage": 4}, ValueError, "stage must be one of"),
        ({"stage": "2"}, TypeError, "stage must be an integer"),
        ({"bucket_bytes": 0}, ValueError, "at least 1"),
        ({"bucket_bytes": 1.5}, TypeError, "integer number of bytes"),
        ({"partition": "rows"}, ValueError, "partition must be one of"),
        ({"reduce_dtype": torch.int32}, ValueError, "reduce_dtype"),
        ({"master_dtype": "float8"}, ValueError, "master_dtype"),
        ({"grad_clip": -1.0}, ValueError, "grad_clip must be greater"),
        ({"op": hvd.Adasum}, ValueError, "Adasum"),
        ({"backward_passes_per_step": 0}, ValueError, "at least 1"),
        ({"gradient_predivide_factor": 0.0}, ValueError, "greater than 0"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, ValueError, "op=Average"),
        ({"compression": "fp16"}, ValueError, "Compression"),
        (
            {"compression": zero.Compression.fp16, "reduce_dtype": "bfloat16"},
            ValueError,
            "one of them",
        ),
        ({"groups": [["x"]]}, ValueError, "lists of tensors"),
        ({"groups": -1}, ValueError, "groups"),
        ({"process_set": hvd.ProcessSet([0])}, ValueError, "not registered"),
    ],
)
def test_bad_options_say_what_to_do(options, error, match):
    with pytest.raises(error, match=match):
        wrap(make_model(), **options)


def test_optimizers_that_cannot_be_sharded_are_refused():
    model = make_model()
    with pytest.raises(ValueError, match="LBFGS cannot be sharded"):
        zero.DistributedOptimizer(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="SparseAdam cannot be sharded"):
        zero.DistributedOptimizer(torch.optim.SparseAdam(list(model.parameters())))
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
        zero.DistributedOptimizer(model)
    with pytest.raises(ValueError, match="sharded already"):
        zero.DistributedOptimizer(wrap(model))
    _, theirs = plain(steps=0)
    with pytest.raises(ValueError, match="plain torch optimizer"):
        zero.DistributedOptimizer(theirs)


def test_names_must_fit_the_optimizer():
    model = make_model()
    with pytest.raises(ValueError, match="not among them"):
        zero.DistributedOptimizer(
            adamw(model.parameters()), named_parameters=list(model.named_parameters())[1:]
        )
    with pytest.raises(ValueError, match="pairs"):
        zero.DistributedOptimizer(adamw(model.parameters()), named_parameters=model.parameters())
    with pytest.raises(ValueError, match="twice"):
        zero.DistributedOptimizer(
            adamw(model.parameters()), [("same", p) for p in model.parameters()]
        )


def test_complex_parameters_are_refused_by_name():
    model = nn.Linear(2, 2).to(torch.complex64)
    with pytest.raises(ValueError, match=r"'weight' is torch\.complex64"):
        wrap(model)


def test_a_parameter_cannot_be_added_twice():
    model, opt = sharded(steps=0)
    with pytest.raises(ValueError, match="already"):
        opt.add_param_group({"params": [model.scale]})


def test_clipping_reports_what_is_not_finite():
    model = make_model()
    opt = wrap(model)
    (loss_of(model, batch(0, hvd.rank())) * float("nan")).backward()
    with pytest.raises(zero.NonFiniteError, match="nan"):
        opt.clip_grad_norm_(1.0, error_if_nonfinite=True)
