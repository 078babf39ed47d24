"""Models by name, folder and hub id; identity; no network where none is needed."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import EOS, tiny_model, tiny_tokenizer
from transformers import T5Config

from kvtune.errors import InputError
from kvtune.models import Rope, adopt, load_model, open_model
from kvtune.models.fingerprint import file_digest, template_hash


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama").save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def test_a_folder_is_a_model(folder: Path):
    loaded = load_model(str(folder), device="cpu")
    assert loaded.id == str(folder) and loaded.eos_ids == {EOS}
    assert loaded.geometry.dtype == "float32" and loaded.geometry.max_positions == 256
    ids = torch.arange(3, 30)[None]
    torch.testing.assert_close(loaded.model(ids).logits, tiny_model("llama")(ids).logits)


def test_the_fingerprint_names_the_weights(folder: Path):
    loaded = load_model(str(folder), device="cpu")
    same = [
        load_model(str(folder), device="cpu", dtype="bfloat16"),
        load_model(str(folder), device="cpu", rope="yarn:4"),
        adopt(tiny_model("llama"), tiny_tokenizer(), "in memory"),
    ]
    assert {model.fingerprint for model in same} == {loaded.fingerprint}
    assert adopt(tiny_model("llama", seed=1), None, "other").fingerprint != loaded.fingerprint
    assert adopt(tiny_model("qwen3"), None, "other").fingerprint != loaded.fingerprint


def test_one_changed_row_changes_the_fingerprint():
    model = tiny_model("llama")
    before = adopt(model, None, "m").fingerprint
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0] += 1.0
    assert adopt(model, None, "m").fingerprint != before


def test_an_override_is_recorded_and_can_be_repeated(folder: Path):
    loaded = load_model(str(folder), device="cpu", rope="dynamic:4", length=700)
    assert loaded.rope == Rope("dynamic:4", 700) and loaded.geometry.max_positions == 1024
    again = load_model(str(folder), device="cpu", rope=loaded.rope)
    assert again.geometry == loaded.geometry
    assert open_model(str(folder)).geometry("float32", loaded.rope) == loaded.geometry


def test_nothing_local_touches_the_network(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object, **_: object) -> None:
        pytest.fail(f"network touched: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    load_model(str(folder), device="cpu")


def test_a_hub_id_that_cannot_be_had_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(InputError, match="'nobody/nothing' cannot be had") as error:
        load_model("nobody/nothing")
    assert "smollm2-135m" in (error.value.hint or "")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2-135", "unknown model 'smollm2-135'"),
        ("./nowhere", "does not exist"),
        ("missing.gguf", "does not exist"),
        ("a model", "unknown model"),
    ],
)
def test_a_name_that_is_nothing(name: str, message: str):
    with pytest.raises(InputError, match=message):
        load_model(name)


def test_a_folder_without_configuration(tmp_path: Path):
    with pytest.raises(InputError, match=r"holds no config\.json"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("content", ["", "{", '{"model_type": "no_such_type"}', '{"model_type": 3}'])
def test_a_configuration_that_cannot_be_read(folder: Path, tmp_path: Path, content: str):
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match="cannot be loaded") as error:
        load_model(str(tmp_path))
    assert "\n" not in error.value.message


def test_a_folder_without_weights(folder: Path, tmp_path: Path):
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(InputError, match=r"weights in .* cannot be loaded"):
        load_model(str(tmp_path))


def test_weights_that_lack_a_tensor(folder: Path, tmp_path: Path):
    """transformers would fill it with random numbers and only warn."""
    state = tiny_model("llama").state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    incomplete(folder, tmp_path, state)
    with pytest.raises(InputError, match=r"lack 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load_model(str(tmp_path))


def test_weights_of_another_shape(folder: Path, tmp_path: Path):
    state = tiny_model("llama").state_dict()
    state["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 3)
    incomplete(folder, tmp_path, state)
    with pytest.raises(InputError, match="cannot be loaded"):
        load_model(str(tmp_path))


def test_truncated_weights(folder: Path, tmp_path: Path):
    incomplete(folder, tmp_path, tiny_model("llama").state_dict())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match="cannot be loaded"):
        load_model(str(tmp_path))


def incomplete(folder: Path, target: Path, state: dict[str, torch.Tensor]) -> None:
    """A model folder with the weights ``state``."""
    tiny_tokenizer().save_pretrained(target)
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})


def test_pickled_weights_are_not_read(folder: Path, tmp_path: Path):
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    torch.save(tiny_model("llama").state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"weights in .* cannot be loaded"):
        load_model(str(tmp_path))


def test_remote_code_is_not_run(folder: Path, tmp_path: Path):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    with pytest.raises(InputError, match="cannot be loaded"):
        load_model(str(tmp_path))


def test_an_encoder_decoder_is_refused(tmp_path: Path):
    T5Config(d_model=32, num_layers=1, architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="T5ForConditionalGeneration is an encoder-decoder"):
        load_model(str(tmp_path))


def test_devices_and_dtypes_are_checked(folder: Path):
    with pytest.raises(InputError, match="device 'cuda:99' is not available"):
        load_model(str(folder), device="cuda:99")
    with pytest.raises(InputError, match="device 'gpu'"):
        load_model(str(folder), device="gpu")
    with pytest.raises(InputError, match="unknown dtype 'float61'") as error:
        load_model(str(folder), device="cpu", dtype="float61")
    assert error.value.hint == "did you mean 'float16'?"


def test_half_precision_loads_as_such(folder: Path):
    loaded = load_model(str(folder), device="cpu", dtype="bfloat16")
    assert loaded.model.dtype == torch.bfloat16 and loaded.geometry.item_bytes == 2


def test_template_hashes():
    tokenizer = tiny_tokenizer()
    assert template_hash(tokenizer) == ""
    tokenizer.chat_template = "{{ messages }}"
    first = template_hash(tokenizer)
    tokenizer.chat_template = "{{ messages }} "
    assert len(first) == 16 and template_hash(tokenizer) != first


def test_file_digests_see_size_and_content(tmp_path: Path):
    def digest(content: bytes) -> str:
        (tmp_path / "file").write_bytes(content)
        return file_digest(tmp_path / "file")

    large = bytes(1 << 21)
    seen = [digest(content) for content in (b"", b"a", b"b", large, large[:-1], large[:-1] + b"x")]
    assert len(set(seen)) == len(seen)
