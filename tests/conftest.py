"""What every test shares: one thread a process, and a model cache of the suite's own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch or numba is imported: results must not depend on the machine's cores.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# Triton kernels run in its interpreter where there is no GPU (read when triton is first imported).
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A slow machine is no failure.
settings.register_profile("kvtune", deadline=None)
settings.load_profile("kvtune")


@pytest.fixture(scope="session", autouse=True)
def kvtune_cache(pytestconfig: pytest.Config) -> Path:
    """The user cache (converted models), kept between runs of the suite and apart from the user's own."""
    folder = Path(pytestconfig.cache.mkdir("kvtune"))
    os.environ["KVTUNE_CACHE"] = str(folder)
    return folder
