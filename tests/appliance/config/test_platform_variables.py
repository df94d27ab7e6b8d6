"""Variables of hosting platforms and of other servers that set keys of the manifest."""

from pathlib import Path

import pytest

from appliance.config.overrides import read_environment
from appliance.config.platform_variables import source_of, unused_variables
from appliance.config.problems import Refused
from appliance.config.settings import Given, Settings, load

MANIFEST = "apiVersion: slipway/v2\nmodel: {source: {path: /m}, max_context: 64}\n"


def loaded(tmp_path: Path, **environ: str) -> Settings:
    path = tmp_path / "m.yaml"
    path.write_text(MANIFEST)
    return load(Given(path, environ=environ))


@pytest.mark.parametrize(
    ("name", "text", "key", "value"),
    [
        ("SM_SLIPWAY_MODEL_MAX_CONTEXT", "4096", "model.max_context", 4096),
        ("SM_SLIPWAY_ENGINE_CACHE_PREFIX", "false", "engine.cache.prefix", False),
        ("SM_VLLM_MAX_MODEL_LEN", "4096", "model.max_context", 4096),
        ("SM_VLLM_SERVED_MODEL_NAME", "a,b", "model.names", ("a", "b")),
        ("SM_VLLM_ALLOWED_ORIGINS", '["https://a.example"]', "endpoints.cors_origins", ("https://a.example",)),
        ("SM_VLLM_ENABLE_PREFIX_CACHING", "False", "engine.cache.prefix", False),
        ("SM_VLLM_DTYPE", "half", "model.dtype", "float16"),
        ("SM_VLLM_PORT", "8081", "endpoints.port", 8081),
        ("OPTION_TENSOR_PARALLEL_DEGREE", "max", "parallelism.tensor", "auto"),
        ("OPTION_MAX_ROLLING_BATCH_SIZE", "7", "engine.scheduling.max_running", 7),
        ("OPTION_MAX_MODEL_LEN", "4096", "model.max_context", 4096),
        ("OPTION_DTYPE", "bf16", "model.dtype", "bfloat16"),
        ("NIM_SERVED_MODEL_NAME", "assistant", "model.names", ("assistant",)),
        ("NIM_MAX_MODEL_LEN", "4096", "model.max_context", 4096),
        ("NIM_TENSOR_PARALLEL_SIZE", "2", "parallelism.tensor", 2),
        ("NIM_ENABLE_KV_CACHE_REUSE", "0", "engine.cache.prefix", False),
        ("NIM_KVCACHE_PERCENT", "0.5", "hardware.memory_share", 0.5),
        ("NIM_LOG_LEVEL", "WARNING", "observability.log_level", "warning"),
    ],
)
def test_a_variable_sets_its_key_and_is_named_as_the_origin(tmp_path, name, text, key, value):
    """Options of AWS's images and of NIM have precedence over the manifest."""
    settings = loaded(tmp_path, **{name: text})
    found = settings.manifest
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value and settings.origin(tuple(key.split("."))) == name
    assert not settings.notices


@pytest.mark.parametrize(
    ("more", "keep"),
    [
        ({"SAGEMAKER_ENABLE_STATEFUL_SESSIONS": "true"}, 1200.0),
        ({"SAGEMAKER_ENABLE_STATEFUL_SESSIONS": "1", "SAGEMAKER_SESSIONS_EXPIRATION": "60"}, 60.0),
        ({"SAGEMAKER_ENABLE_STATEFUL_SESSIONS": "false", "SAGEMAKER_SESSIONS_EXPIRATION": "60"}, 0.0),
    ],
)
def test_sagemaker_switches_sessions_on_and_sets_their_lifetime(tmp_path, more, keep):
    assert loaded(tmp_path, **more).manifest.endpoints.sessions.keep == keep


def test_our_variables_have_precedence_over_those_of_platforms(tmp_path):
    settings = loaded(
        tmp_path,
        SLIPWAY__MODEL__MAX_CONTEXT="4",
        SM_SLIPWAY_MODEL_MAX_CONTEXT="5",
        SM_VLLM_MAX_MODEL_LEN="6",
        OPTION_MAX_MODEL_LEN="7",
        NIM_MAX_MODEL_LEN="8",
    )
    assert settings.manifest.model.max_context == 4
    assert loaded(tmp_path, SM_VLLM_MAX_MODEL_LEN="6", OPTION_MAX_MODEL_LEN="7").manifest.model.max_context == 6
    own = loaded(tmp_path, SM_SLIPWAY_MODEL_MAX_CONTEXT="5", SM_VLLM_MAX_MODEL_LEN="6")
    assert own.manifest.model.max_context == 5


@pytest.mark.parametrize("name", ["SM_VLLM_ENFORCE_EAGER", "OPTION_ROLLING_BATCH", "NIM_ENABLE_MTP"])
def test_an_option_without_counterpart_is_a_warning_that_names_it(tmp_path, name):
    (notice,) = loaded(tmp_path, **{name: "1"}).notices
    assert notice.level == "warning" and str(notice).startswith(f"{name}: ") and "no effect" in notice.message


def test_variables_of_a_kubernetes_service_are_not_options():
    environ = {"NIM_SERVICE_HOST": "10.0.0.1", "NIM_PORT": "tcp://10.0.0.1:80", "NIM_PORT_80_TCP": "tcp://10.0.0.1:80"}
    assert not list(unused_variables(environ)) and not read_environment(Given(Path("m"), environ=environ)).value


def test_an_unknown_name_of_our_own_is_refused_with_a_suggestion(tmp_path):
    with pytest.raises(Refused, match=r"SM_SLIPWAY_MODEL_MAX_CONTEX: unknown .*SM_SLIPWAY_MODEL_MAX_CONTEXT\?"):
        loaded(tmp_path, SM_SLIPWAY_MODEL_MAX_CONTEX="1")


@pytest.mark.parametrize("name", ["SM_VLLM_MAX_MODEL_LEN", "OPTION_MAX_MODEL_LEN", "SM_SLIPWAY_MODEL_MAX_CONTEXT"])
def test_a_wrong_value_is_refused_with_its_variable(tmp_path, name):
    with pytest.raises(Refused, match=f"^{name}: "):
        loaded(tmp_path, **{name: "much"})


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("Qwen/Qwen3-0.6B", {"huggingface": {"repo": "Qwen/Qwen3-0.6B"}}),
        ("/opt/ml/model", {"path": "/opt/ml/model"}),
        ("file:///models/x", {"path": "/models/x"}),
        ("s3://bucket/x", {"s3": {"uri": "s3://bucket/x"}}),
        ("gs://bucket/x", {"gs": {"uri": "gs://bucket/x"}}),
    ],
)
def test_a_model_is_named_as_in_other_servers(tmp_path, text, source):
    assert source_of(text) == source
    settings = loaded(tmp_path, SM_VLLM_MODEL=text)
    assert settings.manifest.model.source.kind == next(iter(source)), "it replaces the source of the manifest"


def test_the_api_key_of_vllm_is_required_and_never_part_of_the_configuration(tmp_path):
    settings = loaded(tmp_path, SM_VLLM_API_KEY="sk-canary")
    name = settings.manifest.endpoints.api_keys
    assert name and settings.manifest.secrets[name].env == "SM_VLLM_API_KEY"
    assert "canary" not in repr(settings.tree) and "canary" not in settings.manifest.model_dump_json()


def test_variables_of_other_profilers_cause_a_warning_with_the_key() -> None:
    (warning,) = unused_variables({"VLLM_TORCH_PROFILER_DIR": "/tmp/x", "VLLM_LOGGING_LEVEL": "INFO"})
    assert warning.level == "warning" and warning.place.source == "VLLM_TORCH_PROFILER_DIR"
    assert "observability.profiler_folder" in warning.text
