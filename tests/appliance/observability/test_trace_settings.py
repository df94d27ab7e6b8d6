"""Settings of traces: the manifest, then the OTEL_ variables with the meaning that OpenTelemetry specifies."""

import logging

import pytest

from appliance.config.gateway import SecretRef
from appliance.config.sections.observability import Observability, Traces
from appliance.observability.trace_settings import Sampler, trace_settings
from appliance.security.headers import parse_headers
from engine.api.errors import ConfigError

BASE = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}


@pytest.fixture
def resolve(new_config):
    def settings(traces: Traces | None = None, environ: dict[str, str] | None = None, **fields):
        config = new_config(observability=Observability(traces=traces or Traces()), **fields)
        return trace_settings(config, environ or {})

    return settings


def test_traces_are_off_without_an_endpoint(resolve):
    assert resolve() is None
    assert resolve(environ={"OTEL_SERVICE_NAME": "x"}) is None


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        (BASE, "http://collector:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "https://host/base/"}, "https://host/base/v1/traces"),
        ({**BASE, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://other/x"}, "http://other/x"),
        ({**BASE, "OTEL_SDK_DISABLED": "true"}, None),
        ({**BASE, "OTEL_TRACES_EXPORTER": "none"}, None),
        ({**BASE, "OTEL_TRACES_EXPORTER": "otlp"}, "http://collector:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"}, None),
    ],
)
def test_endpoint_of_the_variables(resolve, environ, url):
    found = resolve(environ=environ)
    assert (None if found is None else found.url) == url


def test_manifest_precedes_the_variables(resolve, tmp_path):
    (tmp_path / "headers").write_text("authorization=Bearer%20mine\nx-tenant=a\n")
    traces = Traces(endpoint="http://mine:1", sample=0.5, service_name="chat", attributes=("team=ml=x",), content=True)
    environ = {
        **BASE,
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=theirs",
        "OTEL_TRACES_SAMPLER": "always_off",
        "OTEL_SERVICE_NAME": "theirs",
        "OTEL_RESOURCE_ATTRIBUTES": "team=theirs,region=eu%2Cwest",
    }
    found = resolve(traces, environ, trace_headers=SecretRef(file=str(tmp_path / "headers")))
    assert found.url == "http://mine:1/v1/traces" and found.has_content
    assert found.sampler == Sampler(0.5)
    assert found.headers == {"authorization": "Bearer mine", "x-tenant": "a"}
    assert found.resource["service.name"] == "chat"
    assert (found.resource["team"], found.resource["region"]) == ("ml=x", "eu,west")
    assert "Bearer" not in repr(found)


@pytest.mark.parametrize(
    ("name", "argument", "sampler"),
    [
        ("always_on", "", Sampler(1.0, follows_parent=False)),
        ("always_off", "", Sampler(0.0, follows_parent=False)),
        ("traceidratio", "0.25", Sampler(0.25, follows_parent=False)),
        ("parentbased_traceidratio", "0.25", Sampler(0.25)),
        ("parentbased_always_off", "", Sampler(0.0)),
        ("parentbased_traceidratio", "7", Sampler(1.0)),
        ("xray", "", Sampler(1.0)),
        ("", "", Sampler(1.0)),
    ],
)
def test_sampler_of_the_variables(resolve, name, argument, sampler):
    environ = {**BASE, "OTEL_TRACES_SAMPLER": name, "OTEL_TRACES_SAMPLER_ARG": argument}
    assert resolve(environ=environ).sampler == sampler


def test_variables_set_limits_of_batches(resolve):
    environ = {
        **BASE,
        "OTEL_BSP_SCHEDULE_DELAY": "250",
        "OTEL_BSP_MAX_QUEUE_SIZE": "10",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "20",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "3000",
        "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": "gzip",
    }
    found = resolve(environ=environ)
    assert (found.delay_s, found.timeout_s, found.compresses) == (0.25, 3.0, True)
    assert (found.max_queue, found.max_batch) == (20, 20)


def test_invalid_variables_are_ignored_with_a_warning(resolve, caplog):
    caplog.set_level(logging.WARNING)
    environ = {**BASE, "OTEL_BSP_SCHEDULE_DELAY": "soon", "OTEL_EXPORTER_OTLP_HEADERS": "secret-canary"}
    found = resolve(environ=environ)
    assert found.delay_s == 5.0 and found.headers == {}
    assert "OTEL_BSP_SCHEDULE_DELAY is ignored" in caplog.text and "pair 1" in caplog.text
    assert "canary" not in caplog.text


@pytest.mark.parametrize("text", ["", "\n", "novalue", "a b=c", "a=%00", "ok=1\na=%0d%0ax: y", "a=\u20ac"])
def test_bad_headers_are_refused_without_their_values(text):
    with pytest.raises(ConfigError) as raised:
        parse_headers(text, "file x")
    assert "file x" in str(raised.value) and "novalue" not in str(raised.value)


def test_missing_header_file_is_named(resolve, tmp_path):
    with pytest.raises(ConfigError, match="observability.traces.headers: file .*absent cannot be read"):
        resolve(Traces(endpoint="http://c"), trace_headers=SecretRef(file=str(tmp_path / "absent")))
