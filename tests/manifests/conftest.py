"""Fixtures of plans."""

from tests.appliance.conftest import shared_renderers

__all__ = ["shared_renderers"]
