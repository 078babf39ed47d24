"""A file in parts is joined once: whole and checked, or not at all."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kvtune.errors import InputError, RunError
from kvtune.models import joining
from kvtune.models.joining import join

CONTENT = bytes(range(256)) * 9000  # more than one block of a copy
SUM = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setenv("KVTUNE_CACHE", str(tmp_path / "cache"))
    paths = []
    for i, (start, end) in enumerate([(0, 5), (5, 2_000_000), (2_000_000, len(CONTENT))]):
        paths.append(tmp_path / f"part{i}")
        paths[-1].write_bytes(CONTENT[start:end])
    return paths


def left(parts: list[Path]) -> list[str]:
    """Names of the files in the cache."""
    folder = parts[0].parent / "cache" / "models"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_the_parts_make_the_whole(parts: list[Path]):
    joined = join("toy", parts, SUM)
    assert joined.read_bytes() == CONTENT
    assert left(parts) == [joined.name] and joined.stat().st_mode & 0o777 == 0o644


def test_joining_happens_once(parts: list[Path], monkeypatch: pytest.MonkeyPatch):
    joined = join("toy", parts, SUM)
    monkeypatch.setattr(joining, "_copy", lambda *_: pytest.fail("joined again"))
    assert join("toy", parts, SUM) == joined


@pytest.mark.parametrize("change", ["order", "byte", "short"])
def test_parts_of_another_file_are_refused(parts: list[Path], change: str):
    if change == "order":
        parts.reverse()
    else:
        parts[1].write_bytes(parts[1].read_bytes()[:-1] + (b"?" if change == "byte" else b""))
    with pytest.raises(InputError, match="'toy' make another file") as error:
        join("toy", parts, SUM)
    assert "--force-reinstall" in (error.value.hint or "")
    assert left(parts) == []


def test_an_interrupted_copy_leaves_nothing(parts: list[Path], monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(joining, "_copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        join("toy", parts, SUM)
    assert left(parts) == []


def test_a_full_disk_is_one_sentence(parts: list[Path], monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(joining, "_copy", full)
    with pytest.raises(RunError, match="No space left") as error:
        join("toy", parts, SUM)
    assert "KVTUNE_CACHE" in (error.value.hint or "")
    assert left(parts) == []


def test_a_cache_that_is_a_file_is_one_sentence(parts: list[Path]):
    (parts[0].parent / "cache").write_text("in the way")
    with pytest.raises(RunError, match="could not be joined"):
        join("toy", parts, SUM)
