"""Code search: the questions are about functions that stand whole in real source."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest

from kvtune.errors import InputError
from kvtune.workloads import get_workload, stdlib_source
from kvtune.workloads.stdlib_source import documented_functions, read_source, source_files


def test_source_files_are_sorted_library_code() -> None:
    names = source_files()
    assert list(names) == sorted(set(names))
    assert {"json/decoder.py", "textwrap.py"} <= set(names)
    assert not any({"test", "tests", "site-packages"} & set(name.split("/")) for name in names)


@pytest.mark.parametrize("name", ["json/decoder.py", "textwrap.py", "graphlib.py"])
def test_functions_end_where_their_source_does(name: str) -> None:
    source = read_source(name)
    functions = documented_functions(name)
    assert functions
    for function in functions:
        body = source[: function.end]
        start = [match.start() for match in re.finditer(rf"def {function.name}\b", body)][-1]
        first_line = source.rfind("\n", 0, start) + 1
        indent = start - first_line
        tree = ast.parse("\n".join(line[indent:] for line in source[first_line : function.end].split("\n")))
        assert len(tree.body) == 1  # the whole function and nothing else
        assert " ".join((ast.get_docstring(tree.body[0]) or "").split()).startswith(function.description)
        assert function.name.strip("_").lower() not in function.description.lower()


def test_questions_are_about_functions_whole_and_unique_in_the_context(tokenizer: Any) -> None:
    (sample,) = get_workload("code_search").samples(tokenizer, 6000, 1, 2, 3, seed=2)
    context = tokenizer.decode(sample.context_ids)
    asked = [turn for request in sample.requests for turn in request.turns]
    assert len({turn.reference for turn in asked}) == 6
    for turn in asked:
        assert turn.reference is not None
        assert len(re.findall(rf"\bdef {turn.reference}\b", context)) == 1
        described = re.search(r'described by this text: "(.*)" Answer', turn.question)
        assert described is not None
        assert described.group(1) in " ".join(context.split())
        assert turn.reference not in turn.question


def test_contexts_are_real_source_under_its_module_name(tokenizer: Any) -> None:
    (sample,) = get_workload("code_search").samples(tokenizer, 6000, 1, 1, 1, seed=2)
    context = tokenizer.decode(sample.context_ids)
    files = re.split(r"^# File: (\S+)\n", context, flags=re.M)[1:]
    assert files
    for name, text in zip(files[::2], files[1::2]):
        assert not name.startswith("/")
        assert text.strip()[:200] in read_source(name)


def test_more_questions_than_functions_are_refused(tokenizer: Any) -> None:
    with pytest.raises(InputError, match="documented functions at best, 90 questions are asked for"):
        list(get_workload("code_search").samples(tokenizer, 1000, 1, 30, 3, seed=0))


def test_more_tokens_than_the_library_has_are_refused(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtune.workloads.code_search.source_files", lambda: ("textwrap.py", "graphlib.py"))
    with pytest.raises(InputError, match="shorter than 100000 tokens"):
        list(get_workload("code_search").samples(tokenizer, 100_000, 1, 1, 1, seed=0))


def test_a_python_without_its_source_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(stdlib_source, "_root", lambda: tmp_path)
    with pytest.raises(InputError, match="without the source of its standard library"):
        source_files.__wrapped__()
