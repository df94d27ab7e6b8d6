"""The configuration of the gateway passes through a file, and single values of its sections are replaced."""

from pathlib import Path

import msgspec
import pytest
from pydantic import ValidationError

from appliance.config.gateway import (
    GatewayConfig,
    SamplingDefaults,
    Tls,
    decode,
    encode,
    read_config,
    with_values,
    write_config,
)
from appliance.config.sections.endpoints import Connections, Endpoints
from appliance.config.sections.limits import Limits
from appliance.runtime.gateway_control import ApplyConfig

PLAIN = GatewayConfig(names=("m",), model="/m", engines=(), max_context=9, vocab_size=97)
FULL = GatewayConfig(
    names=("m", "n"),
    model="/m",
    engines=("e",),
    max_context=9,
    vocab_size=97,
    endpoints=Endpoints(port=0, cors_origins=("*", "https://a"), keep_alive="2m", connections=Connections(max=3)),
    limits=Limits(max_logprobs=-1, max_body="2KiB", max_output_tokens=4),
    tls=Tls(certificate="c", key="k"),
    sampling=SamplingDefaults(top_k=7),
)


@pytest.mark.parametrize("config", [PLAIN, FULL], ids=["defaults", "values"])
def test_a_configuration_is_read_as_it_was_written(tmp_path: Path, config: GatewayConfig) -> None:
    write_config(config, tmp_path / "gateway.json")
    assert read_config(tmp_path / "gateway.json") == config


def test_units_are_resolved_before_they_are_written(tmp_path: Path) -> None:
    write_config(FULL, tmp_path / "gateway.json")
    written = msgspec.json.decode((tmp_path / "gateway.json").read_bytes())
    assert (written["endpoints"]["keep_alive"], written["limits"]["max_body"]) == (120.0, 2048)


def test_an_unknown_key_of_a_section_is_refused(tmp_path: Path) -> None:
    write_config(FULL, tmp_path / "gateway.json")
    text = (tmp_path / "gateway.json").read_text()
    (tmp_path / "gateway.json").write_text(text.replace('"max_stop"', '"max_stopp"'))
    with pytest.raises((ValidationError, msgspec.ValidationError), match="max_stopp"):
        read_config(tmp_path / "gateway.json")


def test_values_at_any_depth_are_replaced_and_all_others_stay() -> None:
    new = with_values(FULL, {"endpoints.connections.max": 4, "limits.max_stop": 2, "sampling.top_p": 0.5, "model": "n"})
    assert new.endpoints == FULL.endpoints.model_copy(
        update={"connections": FULL.endpoints.connections.model_copy(update={"max": 4})}
    )
    assert new.limits == FULL.limits.model_copy(update={"max_stop": 2})
    assert (new.sampling.top_p, new.sampling.top_k, new.model, new.names) == (0.5, 7, "n", ("m", "n"))
    assert FULL.limits.max_stop == 16


def test_values_without_sections_are_replaced_as_a_whole() -> None:
    assert with_values(FULL, {"tls": None, "limits": Limits()}) == msgspec.structs.replace(
        FULL, tls=None, limits=Limits()
    )


def test_an_unknown_field_is_an_error() -> None:
    with pytest.raises(AttributeError, match="max_stopp"):
        with_values(FULL, {"limits.max_stopp": 2})


def test_a_message_contains_a_configuration() -> None:
    assert decode(encode(ApplyConfig(FULL)), ApplyConfig) == ApplyConfig(FULL)
