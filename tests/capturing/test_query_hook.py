"""What the hook records is what the model's attention saw, and recording changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import CONFIGS, tiny_loaded, tokens
from torch import Tensor

from kvtune.capturing import loop
from kvtune.capturing.hook import DecodeQueries, QueryHook
from kvtune.capturing.loop import Session, chunk_length
from kvtune.models import attention_through, cached, feed, new_cache, sdpa
from kvtune.models.loading import LoadedModel


@pytest.fixture(params=list(CONFIGS))
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return tiny_loaded(request.param)


def hook_for(loaded: LoadedModel, **chosen: Any) -> QueryHook:
    geometry = loaded.geometry
    layers = chosen.get("layers", range(geometry.n_layers))
    heads = chosen.get("kv_heads", range(geometry.n_kv_heads))
    return QueryHook(layers, heads, geometry.n_kv_heads, geometry.group)


def attention(query: Tensor, position: int, keys: Tensor, values: Tensor, info: Any) -> Tensor:
    """Slow, obvious, float64: a query at p sees every key at positions ≤ p, cut by its window."""
    first = 0 if info.window is None else max(0, position - info.window + 1)
    rows = []
    for head in range(info.n_heads):
        seen = slice(first, position + 1)
        k, v = keys[head // info.group, seen].double(), values[head // info.group, seen].double()
        weights = torch.softmax(k @ query[head].double() * info.scaling, 0)
        rows.append(weights @ v)
    return torch.stack(rows)


def test_recorded_vectors_give_the_models_own_attention(loaded: LoadedModel):
    """Queries, keys and the rule of the trace reproduce each layer's output, decode steps included."""
    outputs: dict[int, list[Tensor]] = {}
    queries = DecodeQueries()
    hook = hook_for(loaded)

    def attend(module: Any, *args: Any, **options: Any) -> Any:
        output = hook(module, *args, **options)
        outputs.setdefault(module.layer_idx, []).append(output[0][0])
        return output

    session = Session(loaded)
    with attention_through(loaded.model, attend), hook.to(queries):
        session.feed(tokens(40))
        for token in tokens(5, seed=1):
            session.feed([token])
    for layer in range(loaded.geometry.n_layers):
        keys, values = cached(session.cache, layer)
        kept, own, info = queries.take(layer), torch.cat(outputs[layer]), loaded.geometry.layer(layer)
        assert kept.shape[0] == 45
        for position in range(45):
            expected = attention(kept[position], position, keys, values, info)
            torch.testing.assert_close(own[position].double(), expected, rtol=1e-4, atol=1e-5)


def test_chunked_prefill_gives_the_logits_of_a_whole_one(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    """An attention function registered without a mask would fail here from the second chunk on."""
    ids = torch.tensor(tokens(90))
    whole = loaded.model(ids[None]).logits[0]
    monkeypatch.setattr(loop, "chunk_length", lambda total: 16)
    rows = []
    with attention_through(loaded.model, hook_for(loaded)):
        cache = new_cache()
        rows += [feed(loaded.model, part, cache, keep=0) for part in ids.split(16)]
        session = Session(loaded)
        session.feed(ids.tolist())
    torch.testing.assert_close(torch.cat(rows), whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(session.mark().logits, whole[-1], rtol=1e-4, atol=1e-4)


def test_hooked_logits_are_bit_for_bit_the_plain_ones(loaded: LoadedModel):
    ids = torch.tensor(tokens(30))
    plain = feed(loaded.model, ids, new_cache(), keep=0)
    with attention_through(loaded.model, hook_for(loaded)), hook_for(loaded).to(DecodeQueries()):
        assert torch.equal(feed(loaded.model, ids, new_cache(), keep=0), plain)


def test_attention_weights_are_never_asked_for():
    """transformers#38750: sdpa falls back or warns with output_attentions; capture must not need it."""
    loaded = tiny_loaded()
    asked: list[Any] = []

    def attend(module: Any, *args: Any, **options: Any) -> Any:
        asked.append(options.get("output_attentions"))
        return sdpa(module, *args, **options)

    with attention_through(loaded.model, attend):
        Session(loaded).feed(tokens(20))
    assert asked and not any(asked)


def test_query_heads_follow_their_kv_head():
    """TransformerLens#1553: query head q reads kv head q // group, not q % kv_heads."""
    loaded = tiny_loaded()
    both, second = DecodeQueries(), DecodeQueries()
    for sink, hook in ((both, hook_for(loaded)), (second, hook_for(loaded, kv_heads=[1]))):
        with attention_through(loaded.model, hook), hook.to(sink):
            Session(loaded).feed(tokens(20))
    group = loaded.geometry.group
    assert group == 3
    assert torch.equal(second.take(0), both.take(0)[:, group : 2 * group])


@pytest.mark.parametrize("first", [0, 5, 16, 39, 40])
def test_only_late_positions_and_chosen_layers_are_shown(first: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loop, "chunk_length", lambda total: 16)
    loaded = tiny_loaded()
    shown: list[tuple[int, int, int]] = []
    hook = hook_for(loaded, layers=[1])
    with (
        attention_through(loaded.model, hook),
        hook.to(lambda layer, position, queries: shown.append((layer, position, len(queries))), first=first),
    ):
        Session(loaded).feed(tokens(40))
    positions = [p for _, start, count in shown for p in range(start, start + count)]
    assert positions == list(range(first, 40))
    assert {layer for layer, _, _ in shown} <= {1}


def test_nothing_is_recorded_outside_the_block():
    loaded = tiny_loaded()
    hook, queries = hook_for(loaded), DecodeQueries()
    with attention_through(loaded.model, hook):
        with hook.to(queries):
            Session(loaded).feed(tokens(8))
        Session(loaded).feed(tokens(8))
    assert len(queries.take(0)) == 8


def test_nested_and_failing_routes_give_the_models_attention_back():
    loaded = tiny_loaded()
    before = loaded.model.config._attn_implementation
    with pytest.raises(RuntimeError, match="inner"), attention_through(loaded.model, sdpa):
        outer = loaded.model.config._attn_implementation
        with attention_through(loaded.model, hook_for(loaded)):
            assert loaded.model.config._attn_implementation != outer
        assert loaded.model.config._attn_implementation == outer
        raise RuntimeError("inner")
    assert loaded.model.config._attn_implementation == before


@pytest.mark.parametrize("total", [1, 1000, 32_768, 131_072, 1_000_000])
def test_a_chunks_mask_stays_small(total: int):
    assert 128 <= chunk_length(total) <= 1024
    assert chunk_length(total) * total <= max(1 << 25, 128 * total)
