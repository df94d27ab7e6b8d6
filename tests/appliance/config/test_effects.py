"""Every key of the manifest is classified exactly once, and there are no other entries."""

import pytest

from appliance.config.effects import effect, effects
from appliance.config.keys import LAYER_KEYS, leaves


def test_every_key_is_classified_and_nothing_else() -> None:
    assert set(effects()) == {key.name for key in leaves()} | {".".join(path) for path in LAYER_KEYS}


def test_live_keys_affect_only_the_gateway() -> None:
    for key, row in effects().items():
        assert not row.live or (row.restart == "none" and not row.caches and not row.graphs), key


def test_changes_of_memory_graphs_or_caches_restart_engines() -> None:
    for key, row in effects().items():
        assert not (row.caches or row.graphs or row.memory) or row.restart in ("engine", "service"), key


def test_a_secret_is_found_by_its_name() -> None:
    assert effect("secrets.clients") == effect("secrets.clients.env") == effects()["secrets.*.env"]
    assert effect("secrets.clients.file") == effects()["secrets.*.file"]
    with pytest.raises(KeyError):
        effect("limits.max_stops")
