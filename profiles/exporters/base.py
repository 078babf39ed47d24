"""What an exporter is, and the ledger that lets it drop no setting silently."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvtune.profiles.resolved import Resolved
from kvtune.profiles.schema import Profile, is_function

MANIFEST = "kvtune-export.json"
"""Beside the engine's own files: for which engine version they are, and what they do not say."""

NO_SUCH_SETTING = "the engine has no such setting"


@dataclass(frozen=True)
class NotExpressible:
    """A setting of the profile that the exported files do not, or not fully, carry."""

    setting: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Export:
    """Files of one engine version, by relative name, and the account of the profile's settings.

    Every key of ``profile.settings()`` is in ``expressed`` or named by ``not_expressible``.
    """

    engine: str
    engine_version: str
    usage: str
    context_length: int
    files: Mapping[str, str]
    expressed: tuple[str, ...]
    not_expressible: tuple[NotExpressible, ...]


class Ledger:
    """The profile's settings at one context length, each to be expressed or declined by an exporter."""

    def __init__(self, profile: Profile, context_length: int) -> None:
        self.profile = profile
        self.resolved: Resolved = profile.resolve(context_length)
        self._settings = profile.settings()
        self._expressed: set[str] = set()
        self._declined: dict[str, str] = {}

    def express(self, *settings: str) -> None:
        """Note that the engine's files carry these settings (those that the profile has)."""
        self._expressed.update(setting for setting in settings if setting in self._settings)

    def decline(self, setting: str, reason: str) -> None:
        """Note that the files do not carry ``setting`` (a key, or a prefix such as ``overrides``) in full."""
        for key in self._under(setting):
            self._declined[key] = reason

    def account(self) -> tuple[tuple[str, ...], tuple[NotExpressible, ...]]:
        """(expressed, not expressible); a setting the exporter never looked at counts as not expressible."""
        missing = [key for key in self._settings if key not in self._expressed and key not in self._declined]
        reasons = {**self._frozen(), **self._declined, **dict.fromkeys(missing, NO_SUCH_SETTING)}
        expressed = tuple(key for key in self._settings if key not in reasons)
        lost = tuple(
            NotExpressible(key, value, reasons[key])
            for key, value in self._settings.items()
            if key in reasons
        )
        return expressed, lost

    def _frozen(self) -> dict[str, str]:
        """Functions of the context length that the files carry at one length of several."""
        tuned = self.profile.context_length
        if tuned.min == tuned.max == self.resolved.context_length:
            return {}
        reason = (
            f"it grows with the context; the files hold its value at {self.resolved.context_length} tokens"
        )
        return {key: reason for key, value in self._settings.items() if is_function(value)}

    def _under(self, setting: str) -> list[str]:
        return [key for key in self._settings if key == setting or key.startswith(f"{setting}.")]


Write = Callable[[Ledger], Mapping[str, str]]
"""An exporter's body: from the ledger to the engine's files, {relative name: text}."""


@dataclass(frozen=True)
class Exporter:
    """One engine in one version.

    ``policies`` are those it runs (``None``: all). A profile with another policy is refused where
    ``required``; elsewhere its other settings are still worth exporting, the policy is then listed as not
    expressible. ``usage`` says what to do with the files: ``{folder}`` and ``{model}`` are filled in.
    """

    engine: str
    engine_version: str
    title: str
    write: Write = field(repr=False)
    usage: str
    policies: tuple[str, ...] | None = None
    required: bool = True

    def runs(self, policy: str) -> bool:
        """Whether the engine can run the policy called ``policy``."""
        return self.policies is None or policy in self.policies


def as_json(document: Any) -> str:
    """JSON text as all exporters write it: two spaces, a final newline, no NaN."""
    return json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def manifest(profile: Profile, export: Export, kvtune_version: str) -> str:
    """Text of the manifest file: the same export, the same text."""
    return as_json(
        {
            "kvtune": kvtune_version,
            "engine": export.engine,
            "engine_version": export.engine_version,
            "model": profile.model.id,
            "fingerprint": profile.model.fingerprint,
            "context_length": export.context_length,
            "files": list(export.files),
            "not_expressible": [asdict(item) for item in export.not_expressible],
        }
    )
