"""Which engines there are, in which versions: one row each, the newest version of an engine last."""

from __future__ import annotations

from pathlib import Path

from kvtune import __version__
from kvtune.errors import InputError, unknown
from kvtune.profiles.checks import plan_of
from kvtune.profiles.exporters import lmcache, retroinfer, sglang, tensorrt_llm, transformers, vllm
from kvtune.profiles.exporters.base import MANIFEST, Export, Exporter, Ledger, manifest
from kvtune.profiles.files import write_all
from kvtune.profiles.schema import Profile

EXPORTERS: tuple[Exporter, ...] = (
    retroinfer.V0,
    retroinfer.V1,
    transformers.V5_24,
    vllm.V0_33,
    sglang.V0_5_23,
    tensorrt_llm.V1_4,
    lmcache.V0_5_6,
)


def engines() -> dict[str, tuple[str, ...]]:
    """Engine → its versions, oldest first."""
    return {
        name: tuple(row.engine_version for row in EXPORTERS if row.engine == name)
        for name in dict.fromkeys(row.engine for row in EXPORTERS)
    }


def engines_for(policy: str) -> list[str]:
    """Engines that can run the policy called ``policy``, in the order of the table."""
    return list(dict.fromkeys(row.engine for row in EXPORTERS if row.runs(policy)))


def get_exporter(engine: str, engine_version: str | None = None) -> Exporter:
    """The exporter of an engine (``None``: its newest version). ``InputError`` with a suggestion."""
    known = engines()
    if engine not in known:
        raise unknown("engine", engine, known)
    version = engine_version or known[engine][-1]
    if version not in known[engine]:
        raise unknown(f"version of {engine}", version, known[engine])
    return next(row for row in EXPORTERS if (row.engine, row.engine_version) == (engine, version))


def export_profile(
    profile: Profile, engine: str, engine_version: str | None = None, context_length: int | None = None
) -> Export:
    """The profile as files of ``engine``, its functions evaluated at ``context_length`` tokens.

    ``context_length`` is the longest that the profile was tuned for where none is given. Raises
    ``InputError`` for an unknown engine or version, a policy that the engine cannot run, and parameters
    that the policy refuses.
    """
    exporter = get_exporter(engine, engine_version)
    ledger = Ledger(profile, profile.context_length.max if context_length is None else context_length)
    plan_of(ledger.resolved)
    policy = profile.policy.name
    if exporter.required and not exporter.runs(policy):
        able = ", ".join(exporter.policies or ())
        raise InputError(
            f"{exporter.title} cannot run the policy '{policy}' (it runs: {able})",
            f"engines that can: {', '.join(engines_for(policy))}",
        )
    files = exporter.write(ledger)
    expressed, not_expressible = ledger.account()
    return Export(
        engine=exporter.engine,
        engine_version=exporter.engine_version,
        usage=exporter.usage,
        context_length=ledger.resolved.context_length,
        files=files,
        expressed=expressed,
        not_expressible=not_expressible,
    )


def write_export(profile: Profile, export: Export, folder: Path, overwrite: bool = False) -> list[Path]:
    """Write the files and, last, the manifest; their paths in order.

    ``InputError``, with nothing written, where one exists and ``overwrite`` is false.
    """
    files = {**export.files, MANIFEST: manifest(profile, export, __version__)}
    return write_all(folder, files, overwrite)
