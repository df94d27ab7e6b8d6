"""Commands of pages that run in the process of the test share the processes for chat templates."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def use_shared_renderers(shared_renderers: None) -> None:
    """Share the processes for templates in all tests of this folder."""
