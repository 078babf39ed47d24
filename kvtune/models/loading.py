"""Any model a user can name, as one value: weights, tokenizer, geometry and identity."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvtune.devices import choose_device
from kvtune.errors import InputError, unknown
from kvtune.geometry import ITEM_BYTES, ModelGeometry
from kvtune.models.adapters import decoder_config, device_of, quiet
from kvtune.models.catalog import CATALOG
from kvtune.models.conversion import convert
from kvtune.models.fingerprint import fingerprint, template_hash
from kvtune.models.geometry import read_geometry, refuse_unserved
from kvtune.models.probe import confirm
from kvtune.models.rope import OWN_ROPE, Rope, resolve_rope
from kvtune.progress import Progress

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Source:
    """Where a model's files are: ``where`` is a folder or, if ``remote``, a hub id; traces call it ``id``."""

    id: str
    where: str
    remote: bool = False


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, in evaluation mode, that the attention hook is known to serve.

    ``id`` names it (catalog name, hub id or path), ``fingerprint`` its weights and ``template_hash`` its chat
    template. ``rope`` says how its positions were chosen; ``geometry.rope`` is the result.
    """

    model: PreTrainedModel
    tokenizer: Any
    geometry: ModelGeometry
    id: str
    fingerprint: str
    template_hash: str
    rope: Rope = OWN_ROPE

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        configured = getattr(self.model.generation_config, "eos_token_id", None)
        if configured is None:
            configured = getattr(self.tokenizer, "eos_token_id", None)
        if configured is None:
            return frozenset()
        return frozenset(configured if isinstance(configured, list | tuple) else [configured])


@dataclass(frozen=True)
class ModelFiles:
    """A model whose weights are not read yet: what can be known of it in a second."""

    source: Source
    tokenizer: Any
    config: Any

    def resolved(self, rope: Rope) -> tuple[Any, Rope]:
        """A copy of the configuration with ``rope`` applied, and the rope as it turned out."""
        config = copy.deepcopy(self.config)
        return config, resolve_rope(config.get_text_config(decoder=True), rope)

    def geometry(self, dtype: str, rope: Rope = OWN_ROPE) -> ModelGeometry:
        """The geometry that the configuration promises."""
        config, _ = self.resolved(rope)
        return read_geometry(config.get_text_config(decoder=True), dtype)


def find_model(name: str, progress: Progress | None = None) -> Source:
    """Where ``name`` is: a catalog name, a folder, a ``.gguf`` file (converted if need be) or a hub id.

    Raises ``InputError`` for a name that is none of them.
    """
    if name in CATALOG:
        return Source(name, str(convert(CATALOG[name].require(), progress)))
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise InputError(f"{name} is no model: a .gguf file or a folder with config.json is wanted")
        return Source(str(path.resolve()), str(convert(path.resolve(), progress)))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"{name} holds no config.json, so it is no model folder")
        return Source(str(path.resolve()), str(path.resolve()))
    if path.suffix == ".gguf" or name.startswith((".", "/", "~")) or "\\" in name:
        raise InputError(f"model {name} does not exist")
    if _HUB_ID.fullmatch(name):
        return Source(name, name, remote=True)
    raise unknown("model", name, CATALOG)


def load_tokenizer(source: Source) -> Any:
    """The tokenizer of ``source``. Raises ``InputError`` if it has none or cannot be had."""
    return _from_pretrained(AutoTokenizer, source, "tokenizer")


def open_model(name: str, progress: Progress | None = None) -> ModelFiles:
    """Find the model called ``name`` and read all but its weights.

    Raises ``InputError`` for a model that cannot be had or is not a decoder.
    """
    source = find_model(name, progress)
    config = _from_pretrained(AutoConfig, source, "configuration")
    if getattr(config, "is_encoder_decoder", False):
        name = (config.architectures or [type(config).__name__])[0]
        raise InputError(f"{name} is an encoder-decoder, whose cross-attention kvtune cannot capture yet")
    return ModelFiles(source, load_tokenizer(source), config)


def load_model(
    model: str | ModelFiles,
    device: str = "auto",
    dtype: str = "auto",
    rope: str | Rope | None = None,
    length: int | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model, given by name or opened, and make sure that the attention hook serves it.

    ``device`` is a torch device or ``auto`` (the GPU if there is one). ``dtype`` is ``float32``,
    ``bfloat16``, ``float16`` or ``auto``: the model's own on a GPU; float32 on a CPU, which computes it two
    to four times faster than 16-bit types where it has no instructions for them. ``rope`` overrides the rope
    (``yarn:4``) or repeats a recorded one; ``length`` is the longest timeline in tokens, needed only where
    the rope depends on it. Raises ``InputError`` in one sentence for anything that cannot be had or captured.
    """
    files = open_model(model, progress) if isinstance(model, str) else model
    place = choose_device(device)
    config, resolved = files.resolved(rope if isinstance(rope, Rope) else Rope(rope, length))
    refuse_unserved(_skeleton(config))
    precision = choose_dtype(dtype, place, config)
    weights, report = _from_pretrained(
        AutoModelForCausalLM,
        files.source,
        "weights",
        config=config,
        dtype=getattr(torch, precision),
        attn_implementation="sdpa",
        use_safetensors=True,
        output_loading_info=True,
    )
    if report["missing_keys"]:
        raise InputError(f"the weights in {files.source.id} lack '{sorted(report['missing_keys'])[0]}'")
    weights.to(place)
    own = files.config.get_text_config(decoder=True)
    return adopt(weights, files.tokenizer, files.source.id, own_config=own, rope=resolved)


def adopt(
    model: PreTrainedModel,
    tokenizer: Any,
    name: str,
    own_config: Any = None,
    rope: Rope = OWN_ROPE,
) -> LoadedModel:
    """A model in memory as a :class:`LoadedModel`, checked like a loaded one (its dtype and device stay).

    ``own_config`` is the decoder's configuration before a rope override (default: the model's).
    """
    model.eval().requires_grad_(False)
    config = decoder_config(model)
    if own_config is None:
        own_config = copy.deepcopy(config)
        rope = resolve_rope(config, rope)
    refuse_unserved(model)
    geometry = confirm(model, read_geometry(config, str(model.dtype).removeprefix("torch.")))
    return LoadedModel(
        model, tokenizer, geometry, name, fingerprint(model, own_config), template_hash(tokenizer), rope
    )


def choose_dtype(dtype: str, device: torch.device, config: Any) -> str:
    """``auto`` resolved, anything else checked."""
    if dtype == "auto":
        own = str(getattr(config, "dtype", None)).removeprefix("torch.")
        return "float32" if device.type == "cpu" or own not in ITEM_BYTES else own
    if dtype not in ITEM_BYTES:
        raise unknown("dtype", dtype, ITEM_BYTES)
    return dtype


def _skeleton(config: Any) -> PreTrainedModel:
    """The model without weights: its layer classes can be looked at before anything large is read."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False)
    except ValueError:
        name = (config.architectures or [type(config).__name__])[0]
        raise InputError(f"{name} is no causal language model that transformers knows") from None


def _from_pretrained(factory: Any, source: Source, what: str, **options: Any) -> Any:
    """``factory.from_pretrained`` with every failure as one sentence, and no network for what is local."""
    try:
        with quiet():
            return factory.from_pretrained(
                source.where, local_files_only=not source.remote, trust_remote_code=False, **options
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise
        if source.remote:
            raise InputError(
                f"the {what} of '{source.id}' cannot be had: it is not in the local cache and "
                "the model hub did not give it",
                f"known without a network: {', '.join(CATALOG)}; or give a local folder or .gguf file",
            ) from None
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"the {what} in {source.id} cannot be loaded: {reason}") from None
