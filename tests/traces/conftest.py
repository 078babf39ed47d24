"""Flushing to disk is left out here: it takes most of the time, and what it prevents can't be tested."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_flush():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: None)
        yield
