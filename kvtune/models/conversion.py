"""A GGUF file as a transformers folder: made once, in a cache of the user's, because it takes a while."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gguf as gguf_library
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvtune.errors import InputError, KvtuneError, RunError
from kvtune.models.adapters import quiet
from kvtune.models.cache import cache_folder
from kvtune.models.fingerprint import file_digest
from kvtune.models.gemma_tokenizer import ARCHITECTURES, END_OF_TURN, gemma_tokenizer
from kvtune.progress import Progress, silent

VERSION = 3
"""Of the conversion: a cached folder of another version is not used."""

_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""llama.cpp's names of pre-tokenisers that part digits before GPT-2's pattern (transformers does not)."""

_ROPE_SCALING = {"none": None, "linear": "linear", "yarn": "yarn"}


def converted_folder(gguf: Path) -> Path:
    """Where the conversion of ``gguf`` lies, or will; it depends on the file's content, not on its path."""
    return cache_folder() / "models" / f"{gguf.stem}-{file_digest(gguf)}-v{VERSION}"


def is_converted(gguf: Path) -> bool:
    return (converted_folder(gguf) / "config.json").is_file()


def convert(gguf: Path, progress: Progress | None = None) -> Path:
    """The transformers folder of ``gguf`` (bfloat16 safetensors and tokenizer), made if need be.

    The folder appears whole or not at all. Raises ``InputError`` for a file that is no GGUF, or of an
    architecture or rope that would not be converted faithfully.
    """
    folder = converted_folder(gguf)
    if is_converted(gguf):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    workplace = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with quiet(), (progress or silent).task(f"converting {gguf.name}", 3) as step:
            with _reading(gguf) as reader:
                config, state = _read(gguf, reader)
                step.advance(note="weights read")
                tokenizer = _tokenizer(gguf, reader)
                step.advance(note="tokenizer read")
            _set_ends(config, tokenizer)
            _write(workplace, config, state)
            tokenizer.save_pretrained(workplace)
            step.advance(note="written")
        _publish(workplace, folder)
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
    return folder


def _read(gguf: Path, reader: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Configuration, and dequantised weights in bfloat16."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    rope = _rope(reader)
    parsed = load_gguf_checkpoint(str(gguf))["config"]
    config = AutoConfig.for_model(parsed.pop("model_type"), **parsed)
    if rope:
        config.rope_parameters = {**config.rope_parameters, **rope}
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    loaded = load_gguf_checkpoint(
        str(gguf), return_tensors=True, model_to_load=skeleton, torch_dtype=torch.bfloat16
    )
    missing = sorted(set(skeleton.load_state_dict(loaded["tensors"], strict=False, assign=True).missing_keys))
    if config.tie_word_embeddings:
        missing = [name for name in missing if name != "lm_head.weight"]
    if missing:
        raise InputError(
            f"{gguf.name}: transformers' GGUF reader gives no '{missing[0]}' for {type(skeleton).__name__}",
            "use the model's Hugging Face folder instead",
        )
    config.architectures = [type(skeleton).__name__]
    config.dtype = torch.bfloat16
    return config, loaded["tensors"]


class _Reader(gguf_library.GGUFReader):
    """The reader over a plain view of its file: slicing a memory map costs several times as much."""

    @property  # type: ignore[override]
    def data(self) -> np.ndarray:
        return self._view

    @data.setter
    def data(self, mapped: np.memmap) -> None:
        self._view = mapped.view(np.ndarray)


@contextmanager
def _reading(gguf: Path) -> Iterator[Any]:
    """The file, opened once for all readers: parsing a large vocabulary takes ten seconds each time.

    Turns whatever the readers raise into one sentence, and keeps their own progress bars away.
    """
    from transformers import modeling_gguf_pytorch_utils as library

    bars: Any = library.tqdm
    opened: Any = gguf_library.GGUFReader
    library.tqdm = partial(bars, disable=True)
    try:
        reader = _Reader(gguf)
        gguf_library.GGUFReader = lambda *_, **__: reader  # type: ignore[assignment, misc]
        yield reader
    except (KvtuneError, OSError, MemoryError):
        raise
    except Exception as error:  # the tokenizers library raises nothing narrower
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{gguf} cannot be read as a GGUF model: {reason}") from error
    finally:
        library.tqdm = bars
        gguf_library.GGUFReader = opened  # type: ignore[misc]


def _rope(reader: Any) -> dict[str, Any]:
    """Rope scaling stored in the file, which transformers' reader passes over; empty if there is none."""

    def value(key: str) -> Any:
        field = reader.get_field(f"{architecture}.rope.scaling.{key}")
        return field.contents() if field else None

    architecture = reader.get_field("general.architecture").contents()
    if any(tensor.name.startswith("rope_freqs") for tensor in reader.tensors):
        raise InputError(
            "this GGUF file stores rope frequencies of its own, which transformers' reader ignores",
            "use the model's Hugging Face folder instead",
        )
    name = value("type") or "none"
    if architecture == "gpt-oss" or _ROPE_SCALING.get(name, "") is None:
        return {}
    if name not in _ROPE_SCALING:
        raise InputError(f"this GGUF file has the rope scaling '{name}', which cannot be converted")
    rope = {"rope_type": _ROPE_SCALING[name], "factor": float(value("factor") or 1.0)}
    original = value("original_context_length")
    if name == "yarn" and original:
        rope["original_max_position_embeddings"] = int(original)
    return rope


def _tokenizer(gguf: Path, reader: Any) -> Any:
    def value(key: str) -> Any:
        field = reader.get_field(key)
        return field.contents() if field else None

    if value("general.architecture") in ARCHITECTURES and value("tokenizer.ggml.model") == "llama":
        return gemma_tokenizer(reader)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    if value("tokenizer.ggml.pre") in _DIGITS_APART:
        gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
        apart = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([apart, gpt2])
    return tokenizer


def _set_ends(config: Any, tokenizer: Any) -> None:
    """Gemma's instruct models end an answer with a token that a GGUF file has no place for."""
    turn = tokenizer.get_vocab().get(END_OF_TURN)
    if turn is not None and isinstance(config.eos_token_id, int):
        config.eos_token_id = sorted({config.eos_token_id, turn})


def _write(folder: Path, config: Any, state: dict[str, torch.Tensor]) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        raise RunError(
            f"the converted model could not be written to '{folder.parent}': {error}",
            "free some space, or set KVTUNE_CACHE to a folder on another disk",
        ) from error
    config.save_pretrained(folder)


def _publish(workplace: Path, folder: Path) -> None:
    """Give the finished folder its name; another process may have been faster, which is as good."""
    for path in workplace.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        path.chmod(0o644)
    workplace.chmod(0o755)
    try:
        os.rename(workplace, folder)
    except OSError:
        if not (folder / "config.json").is_file():
            raise
