"""A GGUF file becomes a transformers folder: the same numbers, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from transformers import LlamaConfig, LlamaForCausalLM

from kvtune.errors import InputError, RunError
from kvtune.models import cache, conversion, find_model, load_model, load_tokenizer
from kvtune.models.cache import cache_folder
from kvtune.models.conversion import convert, converted_folder, is_converted

HEADS, KV_HEADS, LAYERS = 4, 2, 2
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVTUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def vocabulary() -> list[str]:
    """An end token, GPT-2's 256 byte symbols and four merged pairs."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    return ["<|end|>", *symbols, "fg", "hi", "12", "ĠĠ"]


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of rotary rows, as its converter writes q and k."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: Path, **extra: Any) -> LlamaForCausalLM:
    """A random llama as float32 GGUF; returns the same model in transformers."""
    words = vocabulary()
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()  # what a conversion keeps exactly
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(extra.get("splitting", "default"))
    writer.add_token_list(words)
    writer.add_token_types([3] + [1] * (len(words) - 1))
    writer.add_token_merges(["f g", "h i", "1 2", "Ġ Ġ"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for key, value in extra.items():
        if key == "scaling":
            writer.add_rope_scaling_type(gguf.RopeScalingType(value))
            writer.add_rope_scaling_factor(4.0)
            writer.add_rope_scaling_orig_ctx_len(32)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    for layer in range(LAYERS):
        for name, short in NAMES.items():
            weight = state[f"model.layers.{layer}.{name}.weight"]
            if short in ("attn_q", "attn_k"):
                weight = permuted(weight, HEADS if short == "attn_q" else KV_HEADS)
            writer.add_tensor(f"blk.{layer}.{short}.weight", np.ascontiguousarray(weight))
    if "rope_freqs" in extra:
        writer.add_tensor("rope_freqs.weight", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_weights_and_tokenizer_come_through(tmp_path: Path):
    model = write_gguf(tmp_path / "toy.gguf")
    loaded = load_model(str(tmp_path / "toy.gguf"), device="cpu")
    ids = torch.arange(1, 40)[None]
    torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits)
    text = "Hello, world: 12 x"
    assert loaded.tokenizer.decode(loaded.tokenizer(text)["input_ids"]) == text
    assert loaded.eos_ids == {0}
    assert loaded.geometry.dtype == "float32" and loaded.geometry.max_positions == 128


def test_digits_are_split_as_the_file_says(tmp_path: Path):
    """SmolLM parts digits first, so that two spaces before one stay together; GPT-2 does not."""
    words = {}
    for splitting in ("smollm", "default"):
        write_gguf(tmp_path / f"{splitting}.gguf", splitting=splitting)
        tokenizer = load_tokenizer(find_model(str(tmp_path / f"{splitting}.gguf")))
        words[splitting] = tokenizer.convert_ids_to_tokens(tokenizer("a  12")["input_ids"])
    assert words == {"smollm": ["a", "ĠĠ", "1", "2"], "default": ["a", "Ġ", "Ġ", "12"]}


def test_conversion_happens_once(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch):
    write_gguf(tmp_path / "toy.gguf")
    assert not is_converted(tmp_path / "toy.gguf")
    folder = convert(tmp_path / "toy.gguf")
    assert folder.parent == own_cache / "models" and is_converted(tmp_path / "toy.gguf")
    monkeypatch.setattr(conversion, "_read", lambda *_: pytest.fail("converted again"))
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (tmp_path / "toy.gguf").rename(moved / "toy.gguf")
    assert convert(moved / "toy.gguf") == folder, "the content counts, not the path"


def test_an_interrupted_conversion_leaves_nothing(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
):
    write_gguf(tmp_path / "toy.gguf")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "_tokenizer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "toy.gguf")
    assert not converted_folder(tmp_path / "toy.gguf").exists()
    assert list((own_cache / "models").iterdir()) == []


def test_a_full_disk_is_one_sentence(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch):
    write_gguf(tmp_path / "toy.gguf")

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(conversion, "save_file", full)
    with pytest.raises(RunError, match="No space left") as error:
        convert(tmp_path / "toy.gguf")
    assert "KVTUNE_CACHE" in (error.value.hint or "")
    assert list((own_cache / "models").iterdir()) == []


def test_a_race_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_gguf(tmp_path / "toy.gguf")
    tokenizer = conversion._tokenizer

    def slower(path: Path, reader: Any) -> Any:
        monkeypatch.setattr(conversion, "_tokenizer", tokenizer)
        convert(path)
        return tokenizer(path, reader)

    monkeypatch.setattr(conversion, "_tokenizer", slower)
    folder = convert(tmp_path / "toy.gguf")
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_scaled_rope_is_kept(tmp_path: Path):
    write_gguf(tmp_path / "toy.gguf", scaling="yarn")
    rope = load_model(str(tmp_path / "toy.gguf"), device="cpu").geometry.rope
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4.0, 32)


def test_rope_frequencies_in_the_file_are_refused(tmp_path: Path):
    write_gguf(tmp_path / "toy.gguf", rope_freqs=True)
    with pytest.raises(InputError, match="rope frequencies of its own"):
        convert(tmp_path / "toy.gguf")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04" * 100, b"GGUF\x03\0\0\0" + b"\xff" * 64])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, own_cache: Path, content: bytes):
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(InputError, match=r"bad\.gguf cannot be read as a GGUF model"):
        convert(tmp_path / "bad.gguf")
    assert list((own_cache / "models").iterdir()) == []


def test_a_truncated_file_is_refused(tmp_path: Path):
    write_gguf(tmp_path / "toy.gguf")
    whole = (tmp_path / "toy.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"cut\.gguf cannot be read"):
        convert(tmp_path / "cut.gguf")


def test_the_cache_is_where_the_platform_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("KVTUNE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache.sys, "platform", "linux")
    assert cache_folder() == tmp_path / "kvtune"
    monkeypatch.setattr(cache.sys, "platform", "darwin")
    assert cache_folder() == Path("~/Library/Caches/kvtune").expanduser()
