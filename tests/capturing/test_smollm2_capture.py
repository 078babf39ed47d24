"""The packaged model: real text, a real trace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvtune.capturing import Session
from kvtune.models import LoadedModel, Rope, load_model, open_model
from kvtune.traces import open_trace

pytestmark = pytest.mark.model


def test_it_answers(smollm2: LoadedModel):
    tokenizer = smollm2.tokenizer
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    session = Session(smollm2)
    session.feed(prompt[0].tolist())
    answer = list(session.generate(16))
    own = smollm2.model.generate(prompt, do_sample=False, max_new_tokens=16)[0, prompt.shape[1] :]
    assert answer == [token for token in own.tolist() if token not in smollm2.eos_ids]
    assert "Paris" in tokenizer.decode(answer)


def test_the_shared_trace(smollm2: LoadedModel, smollm2_trace: Path):
    trace = open_trace(smollm2_trace, verify=True)
    assert trace.model == "smollm2-135m" and trace.fingerprint == smollm2.fingerprint
    assert trace.n_samples == 2 and len(trace.layers) == 30 and len(trace.kv_heads) == 3
    assert [len(trace.timelines(sample)) for sample in range(2)] == [2, 1]
    timeline = trace.timelines(0)[1]
    assert timeline.segments[0].length > 900
    layer = timeline.layer(7)
    assert layer.keys.shape == (3, len(timeline.token_ids), 64) and layer.keys.dtype == torch.float32
    assert 1 <= int(layer.decode.sum()) <= 16


def test_its_answer_is_the_models_own(smollm2: LoadedModel, smollm2_trace: Path):
    """The second request, forked from the shared context, says what a whole run says."""
    timeline = open_trace(smollm2_trace).timelines(0)[1]
    prompt = timeline.token_ids[None, : timeline.prompt_length]
    answer = timeline.token_ids[timeline.prompt_length :].tolist()
    own = smollm2.model.generate(prompt, do_sample=False, max_new_tokens=len(answer))
    assert own[0, timeline.prompt_length :].tolist() == answer


def test_yarn_reaches_further():
    opened = open_model("smollm2-135m")
    geometry = opened.geometry("float32", Rope("yarn:4"))
    assert geometry.max_positions == 32_768
    assert geometry.rope == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 100_000.0,
    }
    assert load_model(opened, device="cpu", rope="yarn:4").geometry == geometry
