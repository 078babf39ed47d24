"""Every task in the packaged model's own tokens and chat template."""

from __future__ import annotations

from typing import Any

import pytest

from kvtune.models import find_model, load_tokenizer
from kvtune.workloads import get_workload, workload_names

pytestmark = pytest.mark.model

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@pytest.fixture(scope="module")
def smollm2() -> Any:
    return load_tokenizer(find_model("smollm2-135m"))


@pytest.mark.parametrize("task", workload_names())
def test_pieces_equal_the_template_tokenised_as_a_whole(smollm2: Any, task: str) -> None:
    (sample,) = get_workload(task).samples(smollm2, 4096, 1, 3, 2, seed=0)
    assert 4080 <= len(sample.context_ids) <= 4096
    head = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
    text = smollm2.decode(sample.context_ids, clean_up_tokenization_spaces=False)
    assert text.startswith(head)
    context = text.removeprefix(head)
    for request in sample.requests:
        together = list(sample.context_ids)
        messages: list[dict[str, Any]] = []
        for turn in request.turns:
            together += [*turn.question_ids, *turn.reference_ids]
            question = turn.question if messages else f"{context}\n\n{turn.question}"
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": turn.reference})
        whole = smollm2.apply_chat_template(messages, tokenize=True, return_dict=False)
        closing = smollm2("<|im_end|>\n", add_special_tokens=False)["input_ids"]
        assert together + closing == list(whole)
