"""Locks of these tests are about files: no engine computes golden prompts for them."""

import pytest


@pytest.fixture(autouse=True)
def without_golden_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPWAY__LIFECYCLE__SELF_TEST__PROMPTS", "0")
