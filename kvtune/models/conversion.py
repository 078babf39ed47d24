"""A GGUF file as a transformers folder: made once, in a cache of the user's, because it takes a while."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvtune.errors import InputError, KvtuneError, RunError
from kvtune.models.adapters import quiet
from kvtune.models.fingerprint import file_digest
from kvtune.progress import Progress, silent

VERSION = 2
"""Of the conversion: a cached folder of another version is not used."""

_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""llama.cpp's names of pre-tokenisers that part digits before GPT-2's pattern (transformers does not)."""

_ROPE_SCALING = {"none": None, "linear": "linear", "yarn": "yarn"}


def cache_folder() -> Path:
    """``$KVTUNE_CACHE``, or the platform's cache folder for this user."""
    chosen = os.environ.get("KVTUNE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kvtune"


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
            config, state, splitting = _read(gguf)
            step.advance(note="weights read")
            _write(workplace, config, state)
            step.advance(note="weights written")
            _tokenizer(gguf, splitting).save_pretrained(workplace)
            step.advance(note="tokenizer")
        _publish(workplace, folder)
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
    return folder


def _read(gguf: Path) -> tuple[Any, dict[str, torch.Tensor], str]:
    """Configuration, dequantised weights in bfloat16, and the name of the pre-tokeniser."""
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with _reading(gguf):
        reader = GGUFReader(gguf)
        rope = _rope(reader)
        splitting = reader.get_field("tokenizer.ggml.pre")
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
    return config, loaded["tensors"], splitting.contents() if splitting else ""


@contextmanager
def _reading(gguf: Path) -> Iterator[None]:
    """Turn whatever the GGUF readers raise into one sentence, and keep their own progress bars away."""
    from transformers import modeling_gguf_pytorch_utils as library

    bars: Any = library.tqdm
    library.tqdm = partial(bars, disable=True)
    try:
        yield
    except (KvtuneError, OSError, MemoryError):
        raise
    except Exception as error:  # the tokenizers library raises nothing narrower
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{gguf} cannot be read as a GGUF model: {reason}") from error
    finally:
        library.tqdm = bars


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


def _tokenizer(gguf: Path, splitting: str) -> Any:
    with _reading(gguf):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    if splitting in _DIGITS_APART:
        gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
        apart = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([apart, gpt2])
    return tokenizer


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
