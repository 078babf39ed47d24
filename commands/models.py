"""``kvtune models``: the packaged models, and which are installed and converted."""

from __future__ import annotations

from typing import Any

from kvtune.commands.options import JsonFlag, QuietFlag
from kvtune.commands.output import Output, cell


def models(json: JsonFlag = False, quiet: QuietFlag = False) -> None:
    """List the packaged models and whether they are installed and converted."""
    output = Output(json=json, quiet=quiet)

    from kvtune.models import CATALOG, cache_folder, is_converted

    rows = []
    for model in CATALOG.values():
        path = model.find()
        rows.append(
            {
                "name": model.name,
                "title": model.title,
                "parameters": model.parameters,
                "context": model.context,
                "license": model.license,
                "installed": not model.missing,
                "converted": path is not None and is_converted(path),
                "file": None if path is None else str(path),
                "install": model.install,
            }
        )
    document = {"models": rows, "cache": str(cache_folder())}
    output.result(document, lambda shown: _human(shown, document))


def _human(output: Output, document: dict[str, Any]) -> None:
    columns = ("model", "what", "context", "license", "installed", "converted")
    output.table(
        columns,
        [
            [row["name"], row["title"], row["context"], row["license"], row["installed"], row["converted"]]
            for row in document["models"]
        ],
    )
    for row in document["models"]:
        if not row["installed"]:
            output.line(f"{row['name']} is installed by: {row['install']}")
        elif not row["converted"]:
            output.line(f"{row['name']} is converted on first use (once, about a minute)")
    output.line(f"Converted models lie in {document['cache']}.")
    output.line("Any Hugging Face folder or hub id, and any .gguf file, is a model too.")
    output.closing(None, f"kvtune capture {cell(document['models'][0]['name'])}")
