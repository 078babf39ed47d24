"""What every test shares: one thread a process, a model cache of the suite's own, and the program."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from command_line import Ran
from hypothesis import settings

if TYPE_CHECKING:
    from kvtune.models import LoadedModel

# Before torch or numba is imported: results must not depend on the machine's cores.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# What a command prints must not follow a width that the test runner sets.
os.environ.pop("COLUMNS", None)

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


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """``cli("policies", "--json")`` runs a command line in this process."""
    from kvtune.commands.app import run

    monkeypatch.delenv("KVTUNE_DEBUG", raising=False)

    def call(*arguments: object) -> Ran:
        capsys.readouterr()
        before = dict(os.environ)
        try:
            exit_code = run([str(argument) for argument in arguments])
        finally:
            logging.disable(logging.NOTSET)
            os.environ.clear()
            os.environ.update(before)
        return Ran(exit_code, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The packaged model, in float32 on the CPU."""
    from kvtune.models import load_model

    return load_model("smollm2-135m", device="cpu")


@pytest.fixture(scope="session")
def smollm2_trace(smollm2: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real trace: two samples of 1,200 tokens and 16 decode steps, with two requests and one request.

    Long enough for the wave index, which is dense until 1,024 tokens lie outside the steady zone.
    """
    from tiny_models import GivenSamples

    from kvtune.capturing import capture
    from kvtune.workloads import get_workload

    task = get_workload("niah_single")
    shared, single = task.samples(smollm2.tokenizer, 1200, 2, 1, 2, 0)
    samples = GivenSamples([shared, replace(single, requests=single.requests[:1])])
    folder = tmp_path_factory.mktemp("traces") / "smollm2.trace"
    capture(smollm2, samples, folder, decode=16, prompt_queries=128)
    return folder
