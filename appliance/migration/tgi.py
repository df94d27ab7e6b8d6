"""Options of text-generation-inference: `text-generation-launcher`, each also as an environment variable. Source: the
launcher's reference."""

from appliance.migration.rules import Key, Keys, Missing, NoEquivalent, Rule, Server, Unneeded
from appliance.migration.values import adapters, lookup_tokens, source
from appliance.migration.vllm import (
    API_KEY,
    CUDA_GRAPHS,
    DTYPES,
    KV_DTYPES,
    NO_CODE,
    QUANTIZE,
    REVISION,
)

_TOGETHER = "prompt and reply share model.max_context"


def _graphs(text: str) -> bool:
    if text != "0":
        raise NoEquivalent("CUDA graphs are captured for the sizes that the plan lists")
    return False


_RULES: dict[str, Rule] = {
    "model-id": Keys(("model.source",), source),
    "revision": REVISION,
    "validation-workers": Unneeded("the gateway tokenizes in threads"),
    "sharded": Missing("set parallelism.tensor", neutral=("false",)),
    "num-shard": Key("parallelism.tensor"),
    "quantize": QUANTIZE,
    "kv-cache-dtype": Key("quantization.kv_cache", KV_DTYPES),
    "dtype": Key("model.dtype", DTYPES),
    "speculate": Keys(("speculation",), lookup_tokens),
    "trust-remote-code": NO_CODE,
    "max-concurrent-requests": Key("limits.max_waiting", note="running requests are not counted"),
    "max-best-of": Key("limits.max_choices"),
    "max-stop-sequences": Key("limits.max_stop"),
    "max-top-n-tokens": Key("limits.max_logprobs"),
    "max-input-tokens": Missing(_TOGETHER),
    "max-input-length": Missing(_TOGETHER),
    "max-total-tokens": Key("model.max_context"),
    "waiting-served-ratio": Missing("every step contains prompts and replies"),
    "max-waiting-tokens": Missing("every step contains prompts and replies"),
    "max-batch-prefill-tokens": Key("engine.scheduling.max_step_tokens"),
    "max-batch-total-tokens": Missing("the KV cache is sized in bytes: hardware.kv_cache_memory"),
    "max-batch-size": Key("engine.scheduling.max_running"),
    "cuda-graphs": Key("hardware.graphs", _graphs),
    "hostname": Key("endpoints.host"),
    "port": Key("endpoints.port"),
    "prometheus-port": Unneeded("metrics are published at /metrics of the same port"),
    "shard-uds-path": Unneeded("engines and gateway choose their sockets"),
    "master-addr": Missing("one service runs on one machine"),
    "master-port": Missing("one service runs on one machine"),
    "huggingface-hub-cache": Key("model.download.cache"),
    "weights-cache-override": Key("model.download.cache"),
    "disable-custom-kernels": Missing("set hardware.kernels: torch", flag=True),
    "cuda-memory-fraction": Key("hardware.memory_share", note="a share of the free memory"),
    "rope-scaling": Missing("edit rope_scaling in config.json of the checkpoint"),
    "rope-factor": Missing("edit rope_scaling in config.json of the checkpoint"),
    "json-output": Key("observability.log_format", flag=True, value="json"),
    "otlp-endpoint": Unneeded("set observability.traces.endpoint (OTLP/HTTP), or OTEL_EXPORTER_OTLP_ENDPOINT"),
    "otlp-service-name": Unneeded("set the variable OTEL_SERVICE_NAME"),
    "cors-allow-origin": Key("endpoints.cors_origins"),
    "api-key": API_KEY,
    "watermark-gamma": Missing("replies have no watermark"),
    "watermark-delta": Missing("replies have no watermark"),
    "ngrok": Missing("no tunnel is opened", flag=True),
    "tokenizer-config-path": Missing("the tokenizer is the one of the checkpoint"),
    "disable-grammar-support": Missing("structured output is always available", flag=True),
    "enable-prefill-logprobs": Unneeded("a request selects prompt_logprobs", flag=True),
    "max-client-batch-size": Key("limits.max_prompts"),
    "lora-adapters": Keys(("adapters",), adapters),
    "usage-stats": Unneeded("no usage data is sent"),
    "payload-limit": Key("limits.max_body"),
    "disable-usage-stats": Unneeded("no usage data is sent", flag=True),
    "enable-cuda-graphs": Unneeded("hardware.graphs is auto", flag=True),
    "disable-cuda-graphs": CUDA_GRAPHS,
    "prefix-caching": Key("engine.cache.prefix"),
    "use-prefix-caching": Key("engine.cache.prefix"),
    "attention": Missing("the plan selects kernels (hardware.kernels)"),
    "log-level": Missing("set observability.log_level", neutral=("info",)),
}
TGI = Server(
    "TGI",
    "TGI",
    3000,
    _RULES,
    short={"-p": "port"},
    images=("text-generation-inference",),
    image_port=80,
    env_options=True,
)
