"""Fixtures of plans."""

from tests.appliance.conftest import use_shared_renderers

__all__ = ["use_shared_renderers"]
