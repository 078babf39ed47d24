"""``kvtune policies``: the methods kvtune can model, their parameters and where they come from."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from kvtune.commands.options import JsonFlag, QuietFlag
from kvtune.commands.output import Output


def policies(json: JsonFlag = False, quiet: QuietFlag = False) -> None:
    """List the policies with their parameters' defaults."""
    output = Output(json=json, quiet=quiet)

    from kvtune.policies import all_policies

    document = [
        {
            "name": name,
            "title": policy.title,
            "source": policy.source,
            "parameters": {
                field.name: None if field.default is MISSING else field.default for field in fields(policy)
            },
            "budget": policy.budget,
        }
        for name, policy in all_policies().items()
    ]
    output.result(document, lambda out: _human(out, document))


def _human(output: Output, document: list[dict[str, Any]]) -> None:
    for policy in document:
        output.line(f"{policy['name']}: {policy['title']}")
        output.line(f"  {policy['source']}")
        for name, default in policy["parameters"].items():
            mark = "  (budget)" if name == policy["budget"] else ""
            output.line(f"  --set {name}={default}{mark}")
        output.line()
    output.closing(None, "kvtune analyze TRACE --policy NAME --set KEY=VALUE")
