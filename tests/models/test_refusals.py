"""What the hook cannot serve is refused in one sentence that names the layer class."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from tiny_models import CONFIGS, WINDOW, tiny_model
from transformers import AutoModelForCausalLM

from kvtune.errors import InputError
from kvtune.models import adopt
from kvtune.models.adapters import decoder_config
from kvtune.models.geometry import read_geometry, refuse_unserved
from kvtune.models.probe import confirm

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("Gemma2Config", {"head_dim": 8}, "Gemma2Attention", "softcap"),
    ("GptOssConfig", {"head_dim": 8, "num_local_experts": 2}, "GptOssAttention", "sinks"),
    ("DeepseekV3Config", {"n_routed_experts": 8, "n_group": 4}, "DeepseekV3Attention", "latent attention"),
    ("BloomConfig", {"n_layer": 2, "n_head": 4}, "BloomAttention", "ALiBi"),
    ("FalconConfig", {"alibi": True}, "FalconAttention", "ALiBi"),
    ("MptConfig", {"d_model": 32, "n_heads": 4, "n_layers": 2}, "MptAttention", "ALiBi"),
    ("MambaConfig", {}, "MambaMixer", "no attention layer"),
    ("Qwen3NextConfig", {"head_dim": 8, "num_experts": 4}, "Qwen3NextGatedDeltaNet", "no attention layer"),
    ("JambaConfig", {"num_experts": 2}, "JambaMambaMixer", "no attention layer"),
    ("Llama4TextConfig", {"head_dim": 8}, "Llama4TextAttention", "chunked attention"),
]


@pytest.mark.parametrize(("name", "more", "layer", "why"), REFUSED, ids=[row[0] for row in REFUSED])
def test_unserved_attention_is_named(name: str, more: dict[str, Any], layer: str, why: str):
    sizes = {} if name in ("BloomConfig", "MptConfig") else SMALL
    config = getattr(transformers, name)(**{**sizes, **more})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(InputError) as error:
        refuse_unserved(model)
    assert layer in error.value.message and why in error.value.message
    assert error.value.message.count("\n") == 0


EXPECTED = {
    "llama": (6, 2, 8, 8**-0.5, (None, None, None)),
    "qwen3": (6, 2, 16, 16**-0.5, (None, None, None)),
    "qwen2_windows": (6, 2, 8, 8**-0.5, (None, WINDOW, WINDOW)),
    "mistral": (6, 2, 8, 8**-0.5, (WINDOW, WINDOW, WINDOW)),
    "gemma3": (6, 2, 16, 25**-0.5, (WINDOW, None, WINDOW)),
    "gpt_neox": (6, 6, 8, 8**-0.5, (None, None, None)),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_geometry_is_read_and_confirmed(family: str):
    model = tiny_model(family)
    promised = read_geometry(decoder_config(model), "float32")
    found = (promised.n_heads, promised.n_kv_heads, promised.head_dim, promised.scaling, promised.windows)
    assert found == EXPECTED[family]
    refuse_unserved(model)
    assert confirm(model, promised) == promised


def test_the_text_decoder_of_a_multimodal_model_is_served():
    """Its vision tower has attention of its own, which is not the decoder's."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    text = {**sizes, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64}
    vision = {**sizes, "num_hidden_layers": 3, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, image_token_index=60)
    model = AutoModelForCausalLM.from_config(config).eval()
    loaded = adopt(model, None, "multimodal")
    assert (loaded.geometry.n_layers, loaded.geometry.n_kv_heads, loaded.geometry.head_dim) == (2, 2, 8)


def test_a_window_that_is_not_promised_is_noticed():
    model = tiny_model("mistral")
    model.config.sliding_window = 4
    geometry = replace(read_geometry(decoder_config(model), "float32"), windows=(None, None, None))
    with pytest.raises(InputError, match=r"MistralAttention\).*(window|masks)"):
        confirm(model, geometry)


def test_a_rescaled_layer_is_noticed():
    model = tiny_model("llama")
    model.model.layers[2].self_attn.scaling = 0.5
    with pytest.raises(InputError, match=r"layer 2 of this model \(LlamaAttention\) scales its scores"):
        confirm(model, read_geometry(decoder_config(model), "float32"))


def test_a_layer_that_bypasses_the_hook_is_noticed():
    model = tiny_model("llama")
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(InputError, match="layer 1 of this LlamaForCausalLM does not pass"):
        confirm(model, read_geometry(decoder_config(model), "float32"))


def test_the_probe_leaves_the_model_as_it_was():
    model = tiny_model("llama")
    before = model(torch.tensor([[5, 6, 7]])).logits
    confirm(model, read_geometry(decoder_config(model), "float32"))
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(torch.tensor([[5, 6, 7]])).logits, before)
