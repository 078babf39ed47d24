"""Timelines against an obvious reference: a decoder that remembers what it had seen at every query."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_traces import GEOMETRY, header

from kvtune.traces import Segment, Trace, TraceWriter, open_trace
from kvtune.traces.timeline import branches

turn_plans = st.tuples(
    st.integers(0, 3),  # question tokens
    st.integers(0, 3),  # answer tokens
    st.one_of(st.none(), st.integers(0, 3)),  # reference tokens fed back instead, or the answer stays
)
sample_plans = st.tuples(
    st.integers(1, 5),  # context tokens
    st.lists(st.lists(turn_plans, min_size=1, max_size=3), min_size=1, max_size=3),
)


@dataclass
class Seen:
    """A query and the serial numbers of the tokens whose keys it saw, its own last."""

    serial: int
    request: int
    turn: int
    step: int
    history: list[int]


@dataclass
class Decoder:
    """Runs a plan the obvious way: each token gets a serial number, every branch its own list of them."""

    sample: object
    serials: count
    tokens: dict[int, list[int]] = field(default_factory=dict)
    prompt: list[Seen] = field(default_factory=list)
    decoded: list[Seen] = field(default_factory=list)
    endings: list[list[int]] = field(default_factory=list)

    def run(self, plan) -> None:
        context, requests = plan
        root, history = self.feed("context", -1, -1, -1, [], context)
        for request, turns in enumerate(requests):
            segment, seen = root, history
            for turn, (asked, answered, fed_back) in enumerate(turns):
                question, seen = self.feed("question", request, turn, segment, seen, asked)
                segment, after = self.feed("generated", request, turn, question, seen, answered)
                if fed_back is None or turn == len(turns) - 1:
                    seen = after
                    continue
                self.endings.append(after)
                segment, seen = self.feed("fed_back", request, turn, question, seen, fed_back)
            self.endings.append(seen)

    def feed(self, kind, request, turn, parent, history, length):
        new = [next(self.serials) for _ in range(length)]
        segment = self.sample.segment(
            kind=kind, request=request, turn=turn, parent=parent, start=len(history), token_ids=new
        )
        self.tokens[segment] = new
        for step, serial in enumerate(new):
            seen = Seen(serial, request, turn, step, [*history, *new[: step + 1]])
            if kind == "generated":
                self.decoded.append(seen)
            elif kind != "fed_back":
                self.prompt.append(seen)
        return segment, [*history, *new]


def one_hot_of(serials: list[int], heads: int, layer: int) -> torch.Tensor:
    """Vectors [heads, n, 8] that tell their token, head and layer."""
    rows = torch.tensor(
        [[[serial, head, layer, 0, 0, 0, 0, 0] for serial in serials] for head in range(heads)]
    )
    return rows.reshape(heads, len(serials), 8).float()


def write(path: Path, plans) -> list[Decoder]:
    geometry = {**GEOMETRY.to_dict(), "value_dim": 8}
    writer = TraceWriter(path, header(geometry=geometry, dtype="float32", layers=[2]))
    serials, decoders = count(), []
    for index, plan in enumerate(plans):
        with writer.sample(index) as sample:
            decoder = Decoder(sample, serials)
            decoder.run(plan)
            decoders.append(decoder)
            for layer in writer.header["layers"]:
                for s in sample.segments:
                    new = decoder.tokens[s.segment]
                    sample.keys_values(
                        layer, s.segment, one_hot_of(new, 2, layer), -one_hot_of(new, 2, layer)
                    )
                    if s.kind != "fed_back":
                        steps = range(s.length) if s.kind == "generated" else [-1] * s.length
                        queries = one_hot_of(new, 4, layer).permute(1, 0, 2)
                        sample.queries(layer, s.segment, range(s.start, s.stop), list(steps), s.turn, queries)
    writer.finish()
    return decoders


@settings(max_examples=30, deadline=None)
@given(plans=st.lists(sample_plans, min_size=1, max_size=2))
def test_timelines_equal_the_decoders_memory(plans):
    with TemporaryDirectory() as folder:
        decoders = write(Path(folder) / "t", plans)
        trace = open_trace(Path(folder) / "t", verify=True)
        for sample, decoder in enumerate(decoders):
            compare(trace, sample, decoder)


def compare(trace: Trace, sample: int, decoder: Decoder) -> None:
    timelines = trace.timelines(sample)
    assert [t.token_ids.tolist() for t in timelines] == decoder.endings
    memory = {seen.serial: seen for seen in decoder.prompt + decoder.decoded}
    for number in trace.layers:
        met: Counter[int] = Counter()
        for timeline in timelines:
            layer = timeline.layer(number)
            ending = timeline.token_ids.tolist()
            assert layer.key_positions.tolist() == list(range(len(ending)))
            assert torch.equal(layer.keys, one_hot_of(ending, 2, number))
            assert torch.equal(layer.values, -one_hot_of(ending, 2, number))
            assert layer.query_positions.tolist() == sorted(layer.query_positions.tolist())
            prompts = set()
            for row, position in enumerate(layer.query_positions.tolist()):
                serial = int(layer.queries[row, 0, 0])
                assert torch.equal(layer.queries[row], one_hot_of([serial], 4, number)[:, 0])
                seen = memory[serial]
                # Causality: the keys at positions up to the query's are those the decoder had, its own last.
                assert layer.keys[0, : position + 1, 0].tolist() == seen.history
                assert int(layer.turns[row]) == seen.turn
                decode = layer.phases[row] == "decode"
                assert bool(layer.decode[row]) == decode == (seen in decoder.decoded)
                assert int(layer.steps[row]) == (seen.step if decode else -1)
                if decode:
                    met[serial] += 1
                    assert seen.turn in timeline.turns
                    assert seen.request == timeline.request
                else:
                    prompts.add(serial)
            assert prompts == {seen.serial for seen in decoder.prompt} & set(ending)
        assert met == Counter(seen.serial for seen in decoder.decoded)


@settings(max_examples=20, deadline=None)
@given(plan=sample_plans)
def test_turns_are_shared_out_and_prompts_end_at_the_first_answer(plan):
    with TemporaryDirectory() as folder:
        write(Path(folder) / "t", [plan])
        timelines = open_trace(Path(folder) / "t").timelines(0)
    context, requests = plan
    for request, turns in enumerate(requests):
        own = [t for t in timelines if t.request == request]
        assert len(own) == 1 + sum(fed_back is not None for _, _, fed_back in turns[:-1])
        assert sorted(turn for t in own for turn in t.turns) == list(range(len(turns)))
        assert {t.prompt_length for t in own} == {context + turns[0][0]}


@given(parents=st.lists(st.integers(0, 30), max_size=30))
def test_branches_of_any_tree(parents):
    """Every leaf ends exactly one branch, which is its chain of parents."""
    tree = [Segment(0, 0, 0, 0, "context", -1, 0, 1)]
    for segment, parent in enumerate(parents, start=1):
        tree.append(Segment(0, segment, 0, 0, "generated", parent % segment, 0, 1))
    leaves = [s.segment for s in tree if all(other.parent != s.segment for other in tree)]
    found = list(branches(tree))
    assert [branch.segments[-1].segment for branch in found] == leaves
    for branch in found:
        assert branch.segments[0].segment == 0
        assert all(b.parent == a.segment for a, b in zip(branch.segments, branch.segments[1:]))
    asked = Counter(segment for branch in found for segment in branch.asking if segment)
    assert asked == Counter(range(1, len(tree)))
