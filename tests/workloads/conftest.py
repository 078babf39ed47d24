"""The tokenizer most workload tests use."""

from __future__ import annotations

import pytest
from small_tokenizers import CHATML, CountingTokenizer, byte_level
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_level(CHATML)


@pytest.fixture
def counting(tokenizer: PreTrainedTokenizerFast) -> CountingTokenizer:
    return CountingTokenizer(tokenizer)
