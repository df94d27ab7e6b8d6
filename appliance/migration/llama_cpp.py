"""Options of llama.cpp's server: `llama-server`. Source: the reference of its server."""

from appliance.migration.rules import Key, Keys, Missing, NoEquivalent, NothingToSet, Rule, Server, Unneeded, Values
from appliance.migration.values import NO_GGUF_ADAPTER, gguf_repository, key_file, mapped, source, template
from appliance.migration.vllm import API_KEY

_KV = mapped(
    {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "q8_0": "int8", "q4_0": "int4", "q4_1": "int4"},
    "quantization.kv_cache has float32, bfloat16, float16, fp8, int8 and int4",
)
_LAYERS = "hardware.device selects the device of the complete model"
_CLIENTS = "clients send it"


def _url(text: str) -> Values:
    raise ValueError("single files are not downloaded from web servers; name a file, or a repository with -hf")


def _device(text: str) -> str:
    """Return the device for a number of layers on the GPU. Servers use large numbers for all layers."""
    if text == "0":
        return "cpu"
    if text in ("-1", "all", "auto") or (text.isdigit() and int(text) >= 99):
        raise NothingToSet("all layers are on the GPU if there is one")
    raise NoEquivalent(_LAYERS)


_RULES: dict[str, Rule] = {
    "model": Keys(("model.source",), source),
    "model-url": Keys(("model.source",), _url),
    "hf-repo": Keys(("model.source",), gguf_repository),
    "hf-file": Key("model.source.huggingface.files"),
    "hf-token": Unneeded("Slipway reads the environment variable HF_TOKEN"),
    "alias": Key("model.names"),
    "ctx-size": Key("model.max_context", automatic=("0",)),
    "parallel": Key("engine.scheduling.max_running", automatic=("-1",)),
    "batch-size": Key("engine.scheduling.max_step_tokens"),
    "ubatch-size": Missing("engine.scheduling.max_step_tokens is the size of a step"),
    "cont-batching": Unneeded("requests always join the next step", flag=True),
    "threads": Key("hardware.threads", automatic=("-1",)),
    "threads-batch": Missing("prompts and replies use hardware.threads"),
    "threads-http": Unneeded("the gateway serves all connections"),
    "cpu-mask": Missing("set hardware.cpus, such as 0-3"),
    "cpu-range": Key("hardware.cpus"),
    "numa": Missing("parallelism.tensor: 2 uses one rank for each NUMA node"),
    "prio": Missing("processes have the normal priority", neutral=("0",)),
    "mlock": Missing("weights are mapped from the file; the kernel can evict their pages", flag=True),
    "no-mmap": Missing("weights are mapped from the file", flag=True),
    "n-gpu-layers": Key("hardware.device", _device),
    "split-mode": Missing("set parallelism.tensor to use several GPUs", neutral=("none",)),
    "tensor-split": Missing("all GPUs get equal shares (parallelism.tensor)"),
    "main-gpu": Missing("set CUDA_VISIBLE_DEVICES", neutral=("0",)),
    "device": Missing("set CUDA_VISIBLE_DEVICES"),
    "override-tensor": Missing(_LAYERS),
    "cpu-moe": Missing(_LAYERS, flag=True),
    "n-cpu-moe": Missing(_LAYERS),
    "no-kv-offload": Missing("the KV cache is on the device", flag=True),
    "flash-attn": Unneeded("attention never stores the scores of a prompt", optional=True),
    "cache-type-k": Key("quantization.kv_cache", _KV),
    "cache-type-v": Key("quantization.kv_cache", _KV),
    "cache-prompt": Key("engine.cache.prefix"),
    "cache-reuse": Missing("the KV cache is reused for equal prefixes only", neutral=("0",)),
    "cache-ram": Missing("the KV cache has one size: hardware.kv_cache_memory"),
    "kv-unified": Unneeded("all requests share the KV cache", flag=True),
    "context-shift": Missing("a reply ends at model.max_context", flag=True),
    "no-context-shift": Unneeded("a reply ends at model.max_context", flag=True),
    "rope-scaling": Missing("the scaling is the one in the file", neutral=("none",)),
    "rope-scale": Missing("the scaling is the one in the file"),
    "rope-freq-base": Missing("the base is the one in the file"),
    "yarn-orig-ctx": Missing("the scaling is the one in the file"),
    "n-predict": Key("limits.max_output_tokens", automatic=("-1", "-2")),
    "seed": Unneeded("a request without a seed gets a random one, which a client can set"),
    "temp": Key("engine.sampling.temperature"),
    "temperature": Key("engine.sampling.temperature"),
    "top-k": Key("engine.sampling.top_k"),
    "top-p": Key("engine.sampling.top_p"),
    "min-p": Key("engine.sampling.min_p"),
    "repeat-penalty": Key("engine.sampling.repetition_penalty"),
    "repeat-last-n": Missing("repetition_penalty counts all tokens of the request"),
    "presence-penalty": Missing(_CLIENTS, neutral=("0", "0.0")),
    "frequency-penalty": Missing(_CLIENTS, neutral=("0", "0.0")),
    "samplers": Missing("samplers have a fixed order"),
    "grammar": Missing(_CLIENTS),
    "json-schema": Missing(_CLIENTS),
    "chat-template": Key("model.chat_template", template),
    "chat-template-file": Key("model.chat_template"),
    "chat-template-kwargs": Missing("clients send chat_template_kwargs"),
    "jinja": Unneeded("chat templates are always rendered by Jinja", flag=True),
    "no-jinja": Missing("chat templates are always rendered by Jinja", flag=True),
    "reasoning-format": Missing("model.format: auto detects the format", neutral=("auto", "deepseek")),
    "reasoning-budget": Missing("clients send it", neutral=("-1",)),
    "embedding": Key("model.task", flag=True, value="embed"),
    "embeddings": Key("model.task", flag=True, value="embed"),
    "pooling": Key(
        "model.pooling.pool",
        mapped({"mean": "mean", "cls": "cls", "last": "last"}, "model.pooling.pool has cls, last, mean and max"),
    ),
    "reranking": Key("model.task", flag=True, value="score"),
    "host": Key("endpoints.host"),
    "port": Key("endpoints.port"),
    "api-key": API_KEY,
    "api-key-file": Keys(("endpoints.api_keys", "secrets"), key_file),
    "api-prefix": Missing("a proxy that adds a prefix to paths must remove it"),
    "ssl-key-file": Key("endpoints.tls.key"),
    "ssl-cert-file": Key("endpoints.tls.certificate"),
    "no-webui": Key("endpoints.page", flag=True, value=False),
    "path": Missing("the page at / is the one of Slipway"),
    "timeout": Missing("set endpoints.connections and endpoints.keep_alive"),
    "metrics": Unneeded("metrics are published at /metrics", flag=True),
    "slots": Missing("/metrics and `slipway why` show running requests", flag=True),
    "props": Missing("values are changed by `slipway reload`", flag=True),
    "slot-save-path": Missing("the KV cache is not stored"),
    "warmup": Unneeded("/ready waits for one real request of each kind", flag=True),
    "no-warmup": Missing("/ready waits for one real request of each kind", flag=True),
    "verbose": Key("observability.log_level", flag=True, value="debug"),
    "log-disable": Missing("set observability.log_level: error", flag=True),
    "log-file": Missing("the log is written to standard output"),
    "lora": Missing(NO_GGUF_ADAPTER),
    "mmproj": Missing("requests contain text"),
    "model-draft": Key("speculation.model", note="set speculation.method to draft"),
    "draft-max": Key("speculation.tokens"),
}
LLAMA_CPP = Server(
    "llama.cpp",
    "llama.cpp",
    8080,
    _RULES,
    short={
        **{"-m": "model", "-mu": "model-url", "-hf": "hf-repo", "-hfr": "hf-repo", "-hff": "hf-file", "-a": "alias"},
        **{"-c": "ctx-size", "-np": "parallel", "-b": "batch-size", "-ub": "ubatch-size", "-t": "threads"},
        **{"-tb": "threads-batch", "-cb": "cont-batching", "-C": "cpu-mask", "-Cr": "cpu-range"},
        **{"-ngl": "n-gpu-layers", "--gpu-layers": "n-gpu-layers", "-sm": "split-mode", "-ts": "tensor-split"},
        **{"-mg": "main-gpu", "-dev": "device", "-ot": "override-tensor", "-cmoe": "cpu-moe", "-ncmoe": "n-cpu-moe"},
        **{"-nkvo": "no-kv-offload", "-fa": "flash-attn", "-ctk": "cache-type-k", "-ctv": "cache-type-v"},
        **{"-cram": "cache-ram", "-kvu": "kv-unified", "-n": "n-predict", "--predict": "n-predict", "-s": "seed"},
        **{"-v": "verbose", "-md": "model-draft", "--rerank": "reranking"},
        **{"-hft": "hf-token", "-to": "timeout", "--log-verbose": "verbose"},
    },
    images=("llama.cpp",),
    local=True,
    env_prefix="LLAMA_ARG_",
)
