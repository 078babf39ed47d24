"""Rope overrides, and length-dependent ropes made constant."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import CONFIGS
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvtune.errors import InputError
from kvtune.models.adapters import feed, new_cache
from kvtune.models.rope import OWN_ROPE, Rope, ntk_base, parse_rope, resolve_rope


def llama(**rope: object) -> LlamaConfig:
    config = CONFIGS["llama"]()
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, **rope}
    return config


@pytest.mark.parametrize("text", ["yarn", "yarn:", "yarn:x", "yarn:1", "yarn:-4", "yarn:nan", "yarn:inf"])
def test_a_factor_above_one_is_needed(text: str):
    with pytest.raises(InputError, match="factor above 1"):
        parse_rope(text)


def test_an_unknown_method_is_answered_with_a_suggestion():
    with pytest.raises(InputError) as error:
        parse_rope("yarm:4")
    assert error.value.hint == "did you mean 'yarn'?"


def test_yarn_keeps_theta_and_raises_the_limit():
    config = llama()
    rope = resolve_rope(config, Rope("yarn:4", 900))
    assert config.rope_parameters == {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    assert config.max_position_embeddings == 1024
    assert rope == Rope("yarn:4", None), "yarn does not depend on the length"


def test_a_second_yarn_starts_from_the_trained_length():
    config = llama(rope_type="yarn", factor=2.0, original_max_position_embeddings=128)
    resolve_rope(config, Rope("yarn:4"))
    assert config.rope_parameters["original_max_position_embeddings"] == 128
    assert config.max_position_embeddings == 512


def test_ntk_is_a_larger_base():
    config = llama()
    resolve_rope(config, Rope("ntk:4"))
    dim = config.hidden_size // config.num_attention_heads
    assert config.rope_parameters["rope_type"] == "default"
    assert math.isclose(config.rope_parameters["rope_theta"], 10000.0 * 4 ** (dim / (dim - 2)))


@pytest.mark.parametrize("length", [100, 256, 700, 1024])
def test_dynamic_is_fixed_as_transformers_would_have_it_at_that_length(length: int):
    varying = llama(rope_type="dynamic", factor=4.0)
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](varying, "cpu", seq_len=length)
    fixed = llama(rope_type="dynamic", factor=4.0)
    rope = resolve_rope(fixed, Rope(None, length))
    assert fixed.rope_parameters["rope_type"] == "default" and rope.length == length
    dim = fixed.hidden_size // fixed.num_attention_heads
    found = 1.0 / fixed.rope_parameters["rope_theta"] ** (torch.arange(0, dim, 2) / dim)
    torch.testing.assert_close(found, expected)
    override = llama()
    resolve_rope(override, Rope("dynamic:4", length))
    assert override.rope_parameters["rope_theta"] == pytest.approx(fixed.rope_parameters["rope_theta"])


def test_a_dynamic_model_gives_the_same_keys_chunked_and_whole():
    config = llama(rope_type="dynamic", factor=4.0)
    config.max_position_embeddings = 32
    resolve_rope(config, Rope(None, 96))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(3, 96, (96,))
    whole, chunked = new_cache(), new_cache()
    feed(model, ids, whole)
    for part in ids.split(16):
        feed(model, part, chunked)
    torch.testing.assert_close(chunked.layers[0].keys, whole.layers[0].keys)


@pytest.mark.parametrize(("length", "chosen"), [(100, "short"), (200, "long"), (None, "long")])
def test_longrope_takes_the_factors_of_its_length(length: int | None, chosen: str):
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = llama(rope_type="longrope", original_max_position_embeddings=128, **factors)
    resolve_rope(config, Rope(None, length))
    assert config.rope_parameters["short_factor"] == config.rope_parameters["long_factor"]
    assert config.rope_parameters["long_factor"] == factors[f"{chosen}_factor"]


def test_a_models_own_rope_stays():
    config = llama()
    assert resolve_rope(config, Rope(None, 77)) == OWN_ROPE
    assert config.rope_parameters["rope_theta"] == 10000.0 and config.max_position_embeddings == 256


def test_a_rope_per_layer_type_cannot_be_overridden():
    with pytest.raises(InputError, match="gemma3_text model has a rope of its own for each layer type"):
        resolve_rope(CONFIGS["gemma3"](), Rope("yarn:4"))


def test_the_ntk_base_of_no_stretch_is_theta():
    assert ntk_base(500.0, 1.0, 64) == 500.0
