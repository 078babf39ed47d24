from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.commands.options import parse_fractions, parse_layers, parse_settings
from kvtune.errors import InputError


@pytest.mark.parametrize(
    ("text", "layers"),
    [(None, [0, 1, 2, 3, 4, 5, 6, 7, 8]), ("0,5-8", [0, 5, 6, 7, 8]), ("3", [3]), (" 2 , 1-2 ", [1, 2])],
)
def test_layers(text, layers):
    assert parse_layers(text, 9) == layers


@given(st.sets(st.integers(0, 40), min_size=1))
def test_layers_written_one_by_one_come_back(layers):
    assert parse_layers(",".join(map(str, layers)), 41) == sorted(layers)


@pytest.mark.parametrize("text", ["", "a", "1,", "-1", "1-", "2-1", "9", "0-9", "1.5", "1--2", "²"])
def test_bad_layers(text):
    with pytest.raises(InputError, match="layer"):
        parse_layers(text, 9)


def test_settings():
    pairs = ["sink=4", "share=0.5", "estimate=true", "path=a=b", "name=paper", "limit=none", "big=1e3"]
    assert parse_settings(pairs) == {
        "sink": 4,
        "share": 0.5,
        "estimate": True,
        "path": "a=b",
        "name": "paper",
        "limit": None,
        "big": 1000.0,
    }
    assert parse_settings(None) == {}


@pytest.mark.parametrize("pairs", [["sink"], ["=4"], ["sink=1", "sink=2"]])
def test_bad_settings(pairs):
    with pytest.raises(InputError, match="--set"):
        parse_settings(pairs)


def test_fractions():
    assert parse_fractions("0.05, 0.02,1,0.05", "--budgets") == [0.02, 0.05, 1.0]


@pytest.mark.parametrize("text", ["", "0", "-0.1", "1.01", "nan", "inf", "x", "0.1,,0.2"])
def test_bad_fractions(text):
    with pytest.raises(InputError, match="--budgets"):
        parse_fractions(text, "--budgets")
