"""Profiles as YAML text and files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from kvtune.errors import InputError
from kvtune.profiles.files import refuse_existing, write_text
from kvtune.profiles.messages import explain
from kvtune.profiles.schema import VERSION, Profile
from kvtune.profiles.strict_yaml import load_yaml, type_name

_VERSION_KEY = "kvtune_profile"


def parse_profile(data: Mapping[str, Any], source: str = "profile") -> Profile:
    """A profile from plain data (as from YAML or JSON: mappings, lists, numbers, text).

    Raises ``InputError`` naming ``source`` and the key path for anything the schema does not allow, and
    for a format version that this kvtune does not read.
    """
    _require_version(data, source)
    # JSON is the one form in which strict types still take a list for a tuple and text for a layer number.
    try:
        return Profile.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise explain(error, source, Profile) from None


def load_profile(path: str | Path) -> Profile:
    """Read a profile file. Raises ``InputError`` in one sentence for whatever is wrong with it."""
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path} is a folder, not a profile", "name the YAML file in it")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"there is no profile {path}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a profile: not UTF-8 text") from None
    return parse_profile(load_yaml(text, str(path)), str(path))


def to_yaml(profile: Profile) -> str:
    """The profile as YAML: same profile, same text; keys in schema order, nulls left out."""
    data = profile.model_dump(exclude_none=True)
    return yaml.safe_dump(
        _lists(data), sort_keys=False, default_flow_style=None, allow_unicode=True, width=100
    )


def save_profile(profile: Profile, path: str | Path, overwrite: bool = False) -> Path:
    """Write the profile atomically. ``InputError`` where ``path`` exists and ``overwrite`` is false."""
    path = Path(path)
    if not overwrite:
        refuse_existing(path)
    write_text(path, to_yaml(profile))
    return path


def _require_version(data: Mapping[str, Any], source: str) -> None:
    if _VERSION_KEY not in data:
        raise InputError(f"{source} is not a kvtune profile: the key '{_VERSION_KEY}' is missing")
    version = data[_VERSION_KEY]
    if isinstance(version, bool) or not isinstance(version, int):
        shown = version if isinstance(version, str | float) else type_name(version)
        raise InputError(f"{source}: '{_VERSION_KEY}' must be a version number, not {shown}")
    if version > VERSION:
        raise InputError(
            f"{source} has profile format {version}; this kvtune reads up to {VERSION}", "upgrade kvtune"
        )
    if version < 1:
        raise InputError(f"{source} has profile format {version}; the first one is 1")


def _lists(value: Any) -> Any:
    """``value`` with tuples as lists (what ``safe_dump`` knows)."""
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_lists(item) for item in value]
    return value
