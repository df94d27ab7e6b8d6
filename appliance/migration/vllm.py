"""Options of vLLM: `vllm serve`, and its API server as a module. Source: vLLM's engine and server arguments."""

from appliance.migration.rules import Key, Keys, Missing, NoEquivalent, NothingToSet, Rule, Server, Unneeded
from appliance.migration.values import (
    adapters,
    calls,
    gibibytes,
    mapped,
    media_counts,
    reasoning,
    sampling,
    secret,
    source,
    speculation,
    template,
    words,
)

DTYPES = words(
    auto="auto",
    half="float16",
    float16="float16",
    fp16="float16",
    bfloat16="bfloat16",
    bf16="bfloat16",
    float="float32",
    float32="float32",
    fp32="float32",
)
KV_DTYPES = mapped(
    {"auto": "auto", "fp8": "fp8", "fp8_e4m3": "fp8", "bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16"}
    | {"int8_per_token_head": "int8"},
    "quantization.kv_cache has float32, bfloat16, float16, fp8 (e4m3), int8 and int4",
)
_STORED_METHODS = (
    *("awq", "awq_marlin", "gptq", "gptq_marlin", "gptq_marlin_24", "marlin", "compressed-tensors", "gguf", "mxfp4"),
    *("modelopt", "modelopt_fp4", "w8a8_int8", "w8a8_fp8", "auto-round", "quark", "fbgemm_fp8", "blockwise_int8"),
    *("awq-marlin", "gptq-marlin", "exl2", "eetq", "hqq", "bitsandbytes", "torchao", "inc", "auto_round", "none"),
    *("modelopt_mixed", "modelopt_mxfp8", "fp_quant", "aqlm", "bitblas", "gptq_bitblas"),
)


def _quantization(text: str) -> str:
    if text.lower() in _STORED_METHODS:
        raise NothingToSet("the checkpoint declares how its weights are stored")
    if text.lower() != "fp8":
        raise NoEquivalent("weights are rounded at load only to fp8, int8 and int4 (quantization.weights)")
    return "fp8"


QUANTIZE = Key("quantization.weights", _quantization, note="remove the line if the checkpoint is stored in fp8")
MEMORY = Key("hardware.memory_share", note="a share of the free memory")
API_KEY = Keys(("endpoints.api_keys", "secrets"), secret("API_KEYS"), many=True, secret=True)
CUDA_GRAPHS = Key("hardware.graphs", flag=True, value=False)
ALL_LOADED = "all adapters are loaded at the start, with the rank that each of them has"
NO_DRAFT_TREE = "drafts are chains of speculation.tokens tokens"
NO_PIPELINE = "models are divided by parallelism.tensor only"
NO_OFFLOAD = "weights and KV cache stay in the memory of the device"
NO_KERNEL = "the plan selects kernels (hardware.kernels)"
NO_NODES = "one service runs on one machine"
NO_CODE = Missing("no code of the checkpoint is executed, except slipway_model.py (model.trust_remote_code)", flag=True)
REVISION = Key("model.source.huggingface.revision")

_RULES: dict[str, Rule] = {
    "model": Keys(("model.source",), source),
    "revision": REVISION,
    "code-revision": Missing("code of the checkpoint is in its repository, at the same revision"),
    "tokenizer": Missing("the tokenizer is the one of the checkpoint"),
    "tokenizer-mode": Missing("the tokenizer is the one of the checkpoint", neutral=("auto", "slow")),
    "tokenizer-revision": Missing("the tokenizer is the one of the checkpoint"),
    "skip-tokenizer-init": Missing("the gateway needs the tokenizer", flag=True),
    "trust-remote-code": NO_CODE,
    "hf-config-path": Missing("the configuration is the one of the checkpoint"),
    "hf-overrides": Missing("edit config.json of the checkpoint"),
    "hf-token": Unneeded("Slipway reads the environment variable HF_TOKEN"),
    "rope-scaling": Missing("edit rope_scaling in config.json of the checkpoint"),
    "rope-theta": Missing("edit rope_theta in config.json of the checkpoint"),
    "download-dir": Key("model.download.cache"),
    "load-format": Missing("safetensors and GGUF files are read", neutral=("auto", "safetensors", "gguf")),
    "config-format": Missing("config.json is read", neutral=("auto", "hf")),
    "model-loader-extra-config": Missing("weights are mapped from the files"),
    "safetensors-load-strategy": Unneeded("weights are mapped from the files"),
    "config": Missing("options in a configuration file are not converted; write them in the command line"),
    "dtype": Key("model.dtype", DTYPES),
    "max-model-len": Key("model.max_context", automatic=("auto", "-1")),
    "quantization": QUANTIZE,
    "kv-cache-dtype": Key("quantization.kv_cache", KV_DTYPES),
    "calculate-kv-scales": Missing("scales of an fp8 cache come from the checkpoint", flag=True),
    "gpu-memory-utilization": MEMORY,
    "kv-cache-memory-bytes": Key("hardware.kv_cache_memory"),
    "num-gpu-blocks-override": Missing("set hardware.kv_cache_memory in bytes"),
    "swap-space": Missing("preempted requests are computed again, not swapped to the host", neutral=("0",)),
    "cpu-offload-gb": Missing(NO_OFFLOAD, neutral=("0",)),
    "kv-offloading-size": Missing(NO_OFFLOAD, neutral=("0",)),
    "kv-transfer-config": Missing("prefill and decoding run in the same engine"),
    "enforce-eager": CUDA_GRAPHS,
    "compilation-config": Missing("CUDA graphs are configured by hardware.graphs only"),
    "cuda-graph-sizes": Missing("CUDA graphs are captured for the sizes that the plan lists", many=True),
    "max-seq-len-to-capture": Missing("CUDA graphs are captured for every length"),
    "max-num-partial-prefills": Missing("the number of prompts in a step is not limited", neutral=("1",)),
    "max-num-seqs": Key("engine.scheduling.max_running"),
    "max-num-batched-tokens": Key("engine.scheduling.max_step_tokens"),
    "enable-chunked-prefill": Unneeded("prompts longer than a step are always divided", flag=True),
    "scheduling-policy": Key("engine.scheduling.policy"),
    "async-scheduling": Key("engine.scheduling.overlap"),
    "enable-prefix-caching": Key("engine.cache.prefix"),
    "prefix-caching-hash-algo": Unneeded("block hashes include the complete prefix"),
    "disable-sliding-window": Missing("windows of the checkpoint are always applied", flag=True),
    "disable-cascade-attn": Unneeded("there is no cascade attention", flag=True),
    "attention-backend": Missing(NO_KERNEL),
    "block-size": Key("engine.cache.block_tokens"),
    "seed": Unneeded("a request without a seed gets a random one, which a client can set"),
    "tensor-parallel-size": Key("parallelism.tensor"),
    "data-parallel-size": Key("parallelism.data"),
    "pipeline-parallel-size": Missing(NO_PIPELINE, neutral=("1",)),
    "decode-context-parallel-size": Missing(NO_PIPELINE, neutral=("1",)),
    "enable-expert-parallel": Missing("experts are divided by tensor parallelism", flag=True),
    "enable-eplb": Missing("experts are divided by tensor parallelism", flag=True),
    "distributed-executor-backend": Unneeded("ranks are processes of the engine"),
    "disable-custom-all-reduce": Unneeded("sums of ranks use NCCL", flag=True),
    "nnodes": Missing(NO_NODES, neutral=("1",)),
    "node-rank": Missing(NO_NODES, neutral=("0",)),
    "master-addr": Missing(NO_NODES),
    "device": Key(
        "hardware.device", mapped({"auto": "auto", "cuda": "cuda", "cpu": "cpu"}, "devices are cpu and cuda")
    ),
    "enable-lora": Unneeded("adapters of the manifest are served", flag=True),
    "lora-modules": Keys(("adapters",), adapters, many=True),
    "max-loras": Key("adapter_loading.max_active"),
    "max-lora-rank": Key("adapter_loading.max_rank"),
    "max-cpu-loras": Unneeded("adapters in the host's memory are limited by bytes: adapter_loading.host_cache"),
    "speculative-config": Keys(("speculation",), speculation),
    "speculative-model": Key("speculation.model", note="set speculation.method to draft"),
    "num-speculative-tokens": Key("speculation.tokens"),
    "limit-mm-per-prompt": Keys(("limits.media.images", "limits.media.videos", "limits.media.audios"), media_counts),
    "mm-processor-kwargs": Missing("the settings of the image processor are those of the checkpoint"),
    "mm-processor-cache-gb": Key("limits.media.cache", gibibytes),
    "allowed-media-domains": Key("limits.media.hosts"),
    "allowed-local-media-path": Key("limits.media.folders"),
    "language-model-only": Key("model.text_only", flag=True),
    "mm-encoder-only": Key("model.media.encoder_only", flag=True),
    "enable-mm-embeds": Key("model.media.accept_embeddings", flag=True),
    "guided-decoding-backend": Unneeded("structured output needs no choice of a backend"),
    "structured-outputs-config": Unneeded("structured output needs no choice of a backend"),
    "generation-config": Key(
        "model.generation_config",
        mapped({"auto": "auto", "vllm": "ignore"}, "the file is the generation_config.json of the checkpoint"),
    ),
    "override-generation-config": Keys(("engine.sampling", "limits.max_output_tokens"), sampling),
    "task": Key(
        "model.task",
        mapped(
            {"auto": "auto", "generate": "generate", "embed": "embed", "embedding": "embed"}
            | {"classify": "classify", "score": "score"},
            "tasks are generate, embed, classify and score",
        ),
    ),
    "runner": Missing("model.task selects the task", neutral=("auto", "generate")),
    "convert": Key(
        "model.task",
        mapped({"auto": "auto", "none": "auto", "embed": "embed", "classify": "classify"}, "see model.task"),
    ),
    "pooler-config": Missing("set model.pooling"),
    "max-logprobs": Key("limits.max_logprobs"),
    "logits-processors": Missing("requests can use logit_bias, grammars and penalties", many=True),
    "logprobs-mode": Missing("log probabilities are computed before sampling", neutral=("raw_logprobs",)),
    "disable-log-stats": Unneeded("statistics are published at /metrics", flag=True),
    "served-model-name": Key("model.names"),
    "host": Key("endpoints.host"),
    "port": Key("endpoints.port"),
    "uds": Missing("the gateway listens on a port"),
    "api-key": API_KEY,
    "chat-template": Key("model.chat_template", template),
    "chat-template-content-format": Unneeded("detected from the chat template"),
    "trust-request-chat-template": Key("endpoints.trust_request_chat_template", flag=True),
    "response-role": Missing("replies have the role assistant", neutral=("assistant",)),
    "enable-auto-tool-choice": Unneeded("tools of a request are always parsed", flag=True),
    "tool-call-parser": Keys(("model.format",), calls),
    "tool-parser-plugin": Missing("formats are declared in appliance/output_formats"),
    "reasoning-parser": Keys(("model.format",), reasoning),
    "enable-reasoning": Unneeded("reasoning is parsed if the format has it", flag=True),
    "exclude-tools-when-tool-choice-none": Unneeded("tool_choice none omits the tools", flag=True),
    "allowed-origins": Key("endpoints.cors_origins"),
    "allow-credentials": Missing("browsers send no cookies to the API", flag=True),
    "allowed-methods": Unneeded("browsers may use all methods of the API"),
    "allowed-headers": Unneeded("browsers may send all headers of the API"),
    "ssl-keyfile": Key("endpoints.tls.key"),
    "ssl-certfile": Key("endpoints.tls.certificate"),
    "ssl-ca-certs": Missing("clients authenticate with API keys, not with certificates"),
    "enable-ssl-refresh": Unneeded("changed files of the certificate are read again", flag=True),
    "root-path": Missing("a proxy that adds a prefix to paths must remove it"),
    "middleware": Missing("the gateway runs no other code", many=True),
    "enable-log-requests": Key("observability.log_requests", flag=True),
    "disable-log-requests": Unneeded("requests are not logged", flag=True),
    "enable-log-outputs": Key("observability.log_outputs", flag=True, value="final"),
    "max-log-len": Missing("texts are logged completely"),
    "uvicorn-log-level": Key(
        "observability.log_level",
        mapped(
            {"debug": "debug", "trace": "debug", "info": "info", "warning": "warning", "error": "error"}
            | {"critical": "error"},
            "levels are debug, info, warning and error",
        ),
    ),
    "disable-uvicorn-access-log": Unneeded("each reply is one log record", flag=True),
    "disable-fastapi-docs": Key("endpoints.docs", flag=True, value=False),
    "otlp-traces-endpoint": Unneeded("set observability.traces.endpoint, or the variable OTEL_EXPORTER_OTLP_ENDPOINT"),
    "return-tokens-as-token-ids": Missing("log probabilities contain texts and bytes of tokens", flag=True),
    "enable-prompt-tokens-details": Unneeded("usage contains the cached tokens of the prompt", flag=True),
    "enable-server-load-tracking": Unneeded("the load is published at /metrics", flag=True),
    "enable-force-include-usage": Missing("a stream reports usage if the request asks for it", flag=True),
    "enable-sleep-mode": Missing("an engine keeps its weights until it stops", flag=True),
    "h11-max-incomplete-event-size": Key("endpoints.connections.max_head"),
    "h11-max-header-count": Key("endpoints.connections.max_headers"),
    "api-server-count": Missing("one gateway serves all engines", neutral=("1",)),
    "shutdown-timeout": Key("lifecycle.drain"),
    "headless": Missing(NO_NODES, flag=True),
    "disable-frontend-multiprocessing": Missing("gateway and engine are separate processes", flag=True),
    "enable-dbo": Missing("a step is one batch", flag=True),
    "performance-mode": Unneeded("the plan selects the values"),
    "optimization-level": Missing("CUDA graphs are configured by hardware.graphs only"),
}
VLLM = Server(
    "vLLM",
    "vLLM",
    8000,
    _RULES,
    short={
        **{"-tp": "tensor-parallel-size", "-dp": "data-parallel-size", "-pp": "pipeline-parallel-size"},
        **{"-q": "quantization", "-sc": "speculative-config", "-cc": "compilation-config", "-O": "optimization-level"},
        **{"-asc": "api-server-count", "-n": "nnodes", "-r": "node-rank"},
    },
    images=("vllm/", "vllm-openai", "vllm-cpu"),
    positional="model",
    negatable=True,
    full_name=True,
    vllm_api=True,
)
