"""The terms of a step as the terminal shows them: predicted, and beside what was measured."""

from __future__ import annotations

from kvtune.commands.output import Output
from kvtune.commands.step_time import show_terms
from kvtune.hardware.cost import TERMS

STEP = {
    "total_ms": 9.0,
    "measured_ms": 8.5,
    "hidden_ms": 0.25,
    "terms": {**dict.fromkeys(TERMS, 0.0), "scan": 2.0, "fixed": 0.5, "projections": 6.0},
}


def rows(out: str) -> dict[str, list[str]]:
    """Cells behind the label of each line."""
    found = {}
    for line in filter(str.strip, out.splitlines()):
        label, *cells = [part for part in line.strip().split("  ") if part.strip()]
        found[label] = [cell.strip() for cell in cells]
    return found


def test_without_a_measurement_only_what_is_predicted(capsys):
    show_terms(Output(), STEP, "terms")
    found = rows(capsys.readouterr().out)
    assert found["index scan"] == ["2.000"] and "top-k" not in found


def test_measured_stages_stand_beside_the_predicted_terms(capsys):
    show_terms(Output(), STEP, "terms", {"scan": 1.5, "choose": 0.125, "model": 6.5})
    found = rows(capsys.readouterr().out)
    assert found["index scan"] == ["1.500", "2.000"]
    assert found["top-k"] == ["0.1250"]
    assert found["fixed, by layer"] == ["0.5000"]
    assert found["projections and MLP"] == ["6.500", "6.000"]
    assert found["step"] == ["8.500", "9.000"]
