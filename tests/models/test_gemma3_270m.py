"""The packaged hybrid model, where its packages are installed (240 MB, so that they need not be)."""

from __future__ import annotations

import pytest
import torch

from kvtune.models import CATALOG, LoadedModel, cached, feed, load_model, new_cache

ROW = CATALOG["gemma3-270m"]
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(bool(ROW.missing), reason=f"not installed ({ROW.install})"),
]


@pytest.fixture(scope="module")
def gemma3() -> LoadedModel:
    return load_model("gemma3-270m", device="cpu")


def test_the_geometry_is_the_models(gemma3: LoadedModel):
    geometry = gemma3.geometry
    assert (geometry.n_layers, geometry.n_heads, geometry.n_kv_heads, geometry.head_dim) == (18, 4, 1, 256)
    assert [layer for layer, window in enumerate(geometry.windows) if window is None] == [5, 11, 17]
    assert set(geometry.windows) == {None, 512}
    assert geometry.scaling == 256**-0.5 and set(geometry.softcaps) == {None}
    assert geometry.max_positions == ROW.context
    assert geometry.rope["full_attention"]["rope_theta"] == 1e6
    assert geometry.rope["sliding_attention"]["rope_theta"] == 1e4


def test_the_row_says_what_the_weights_are(gemma3: LoadedModel):
    assert sum(parameter.numel() for parameter in gemma3.model.parameters()) == ROW.parameters
    assert gemma3.model.lm_head.weight is gemma3.model.model.embed_tokens.weight
    assert gemma3.eos_ids == {1, 106}


def test_text_is_cut_as_google_cuts_it(gemma3: LoadedModel):
    """Ids of the tokenizer.json that the model was published with."""
    text = "  Hello,   world: 12\n\n\tdef f(x):\n        return 'é漢字🎉'<end_of_turn>"
    assert gemma3.tokenizer(text)["input_ids"] == [
        *(2, 138, 9259, 236764, 139, 12392, 236787, 236743, 236770, 236778, 108, 255968, 2063, 517, 236769),
        *(236781, 1473, 107, 144, 2060, 756, 236859, 201637, 242061, 236789, 106),
    ]
    assert gemma3.tokenizer.chat_template is None, "these are the base model's weights"


def test_it_continues_what_it_has_learnt(gemma3: LoadedModel):
    ids = torch.tensor(gemma3.tokenizer("The three primary colours are red,")["input_ids"])
    cache, words = new_cache(), []
    for _ in range(4):
        ids = feed(gemma3.model, ids, cache).argmax(-1)
        words.append(int(ids))
    assert gemma3.tokenizer.decode(words) == " yellow and blue."


def test_chunked_and_whole_prefill_agree_beyond_the_window(gemma3: LoadedModel):
    ids = torch.randint(300, 200_000, (700,), generator=torch.Generator().manual_seed(0))
    whole, chunked = new_cache(), new_cache()
    expected = feed(gemma3.model, ids, whole)
    for part in ids.split(250):
        logits = feed(gemma3.model, part, chunked)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    for layer in range(gemma3.geometry.n_layers):
        assert cached(whole, layer)[0].shape == (1, 700, 256)
        torch.testing.assert_close(cached(chunked, layer), cached(whole, layer), rtol=1e-3, atol=1e-3)
