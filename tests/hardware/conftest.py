"""One small clustered trace, 1,500 tokens: two layers for the policy, one with a window."""

from __future__ import annotations

from pathlib import Path

import pytest
from clustered_traces import write_clustered


@pytest.fixture(scope="session")
def clustered_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clustered(tmp_path_factory.mktemp("traces") / "clustered", samples=2)
