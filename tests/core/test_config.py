"""Settings are checked once, and wrong ones say what would be right."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from zerohvd.config import MIB, STAGES, ZeroConfig


def test_the_defaults_are_stage_2_and_buckets_of_8_mib():
    config = ZeroConfig()
    assert config.stage == 2
    assert config.bucket_bytes == 16 * MIB
    assert config.partition == "auto"
    assert config.grad_clip is None


@pytest.mark.parametrize(
    "settings",
    [
        *({"stage": stage} for stage in STAGES),
        {"bucket_bytes": 1},
        {"partition": "parameter"},
        {"reduce_dtype": "bfloat16", "master_dtype": "float32"},
        {"grad_clip": 1},
        {"grad_clip": math.inf},
    ],
    ids=str,
)
def test_settings_that_exist(settings):
    config = ZeroConfig(**settings)
    assert {key: config.as_dict()[key] for key in settings} == settings


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"stage": 4}, ValueError, r"stage must be one of \(0, 1, 2, 3\), got 4"),
        ({"stage": -1}, ValueError, "stage must be one of"),
        ({"stage": "2"}, TypeError, "stage must be an integer"),
        ({"stage": True}, TypeError, "stage must be an integer"),
        ({"stage": 2.0}, TypeError, "stage must be an integer"),
        ({"bucket_bytes": 0}, ValueError, "bucket_bytes must be at least 1.*default is 16777216"),
        ({"bucket_bytes": 1e6}, TypeError, "integer number of bytes"),
        ({"bucket_bytes": True}, TypeError, "integer number of bytes"),
        ({"partition": "whole"}, ValueError, "partition must be one of .*got 'whole'"),
        ({"reduce_dtype": "fp16"}, ValueError, "reduce_dtype must be None or one of .*'fp16'"),
        ({"master_dtype": "int32"}, ValueError, "master_dtype must be None or one of"),
        ({"grad_clip": 0}, ValueError, "grad_clip must be greater than 0.*pass None"),
        ({"grad_clip": -1.0}, ValueError, "grad_clip must be greater than 0"),
        ({"grad_clip": math.nan}, ValueError, "grad_clip must be greater than 0"),
        ({"grad_clip": "1"}, TypeError, "grad_clip must be a number or None"),
        ({"grad_clip": True}, TypeError, "grad_clip must be a number or None"),
    ],
    ids=str,
)
def test_settings_that_do_not(settings, error, message):
    with pytest.raises(error, match=message):
        ZeroConfig(**settings)


def test_settings_cannot_be_changed_afterwards_nor_given_by_position():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ZeroConfig().stage = 3
    with pytest.raises(TypeError):
        ZeroConfig(3)


def test_settings_can_be_written_to_a_manifest_and_read_back():
    config = ZeroConfig(stage=3, reduce_dtype="float16", grad_clip=0.5)
    assert ZeroConfig(**json.loads(json.dumps(config.as_dict()))) == config
