"""Packaged models are found without running their package's code."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from kvtune.errors import InputError
from kvtune.models.catalog import CATALOG, PackagedModel
from kvtune.models.joining import joined_file


def packaged(*modules: str) -> PackagedModel:
    return PackagedModel("toy", "a toy", "pip install toys", modules, "*.gguf*", 1, 128, "MIT")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that modules are found in, and a cache of the test's own."""
    monkeypatch.setenv("KVTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def module(site: Path, name: str, **files: bytes) -> None:
    """A package that must not be imported."""
    (site / name).mkdir()
    (site / name / "__init__.py").write_text("raise RuntimeError('imported')")
    for stem, content in files.items():
        (site / name / f"{stem}.gguf").write_bytes(content)


def test_the_package_is_not_imported(site: Path):
    module(site, "toy_weights", toy=b"GGUF")
    model = packaged("toy_weights")
    assert model.find() == model.require() == site / "toy_weights" / "toy.gguf"
    assert model.missing == ()


def test_a_package_without_weights_is_not_installed(site: Path):
    module(site, "toy_empty")
    assert packaged("toy_empty").find() is None and packaged("toy_empty").missing == ("toy-empty",)


def test_a_missing_package_says_how_to_install_it():
    with pytest.raises(InputError, match=r"'toy' is not installed: it needs the package no-such$") as error:
        packaged("no_such").require()
    assert error.value.hint == "run: pip install toys"


def test_parts_are_joined_in_their_order(site: Path):
    module(site, "toy_b", whole=b"GGUF")
    module(site, "toy_a", whole=b" and more")
    model = replace(packaged("toy_b", "toy_a"), sha256=hashlib.sha256(b"GGUF and more").hexdigest())
    assert model.find() is None and model.missing == (), "installed, but not joined"
    assert model.require().read_bytes() == b"GGUF and more"
    assert model.find() == joined_file("toy", model.sha256)


def test_every_missing_part_is_named(site: Path):
    module(site, "toy_part2", whole=b"GGUF")
    model = replace(packaged("toy_part1", "toy_part2", "toy_part3"), sha256="0" * 64)
    assert model.find() is None
    with pytest.raises(InputError, match=r"needs the packages toy-part1, toy-part3$"):
        model.require()


def test_a_joined_file_without_its_packages_is_no_model(site: Path):
    module(site, "toy_only", whole=b"GGUF")
    model = replace(packaged("toy_only"), sha256=hashlib.sha256(b"GGUF").hexdigest())
    model.require()
    assert replace(model, modules=("toy_only", "toy_gone")).find() is None


def test_rows_are_filed_under_their_names():
    assert CATALOG and all(name == model.name for name, model in CATALOG.items())
    for model in CATALOG.values():
        assert model.install.startswith("pip install ") and model.license
        assert len(model.modules) == 1 or len(model.sha256) == 64, "parts need a sum"
