"""One clustered trace for all tuning tests."""

from __future__ import annotations

import pytest
from clustered_traces import write_clustered

from kvtune.traces import Trace, open_trace


@pytest.fixture(scope="session")
def clustered_trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return open_trace(write_clustered(tmp_path_factory.mktemp("tuning") / "clustered"))
