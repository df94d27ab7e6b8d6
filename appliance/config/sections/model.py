"""The served model, its pooling and its number formats: `model` and `quantization`."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from appliance.config.key import (
    ENGINE,
    LIVE,
    LIVE_OUTPUTS,
    NUMBERS,
    SERVICE,
    TASK,
    Effect,
    Limit,
    Note,
    Switch,
    declare,
)
from appliance.config.sections.source import Download, Source
from appliance.config.sections.values import Auto, Count, SecretName, Section, integer_text


class Pooling(Section):
    pool: Literal["auto", "cls", "last", "mean", "max"] = declare("auto", effect=TASK, target="engine.model.task.pool")
    """Vector of a text: first token, last token, mean or maximum; auto: as the checkpoint declares, otherwise mean for
    encoders and last for decoders."""
    normalize: bool | Auto = declare("auto", effect=TASK)
    """Scale vectors to unit length; auto: as the checkpoint declares, otherwise true."""
    dimensions: tuple[Count, ...] = declare(
        (),
        effect=Effect("service", outputs="yes"),
        target="engine.model.task.dimensions",
        example=[256, 512],
        strict=False,
    )
    """Vector lengths that a request may select (Matryoshka); default: the lengths that the checkpoint declares."""
    max_input: Count | None = declare(None, effect=Effect("service", outputs="yes"), example=32768)
    """Maximum tokens of a text to embed, as the weighted mean of pieces of model.max_context; none: one piece."""
    score_tokens: tuple[str, ...] = declare(
        ("yes", "no"),
        effect=TASK,
        target="engine.model.task.score_tokens",
        example=["yes", "no"],
        strict=False,
        min_length=2,
        max_length=2,
    )
    """With model.task score: two words, each a single token; the score is the probability of the first one compared
    with the second."""


class ModelMedia(Section):
    """Towers of a multimodal model in a service of their own."""

    encoder_only: bool = declare(
        False,
        effect=TASK,
        target="engine.model.task.encoder_only",
        aliases={"vLLM": "mm_encoder_only"},
    )
    """Serve only the towers of images, videos and audio: /v1/media/embeddings returns embeddings for other services of
    the same checkpoint. The decoder is not loaded."""
    accept_embeddings: bool = declare(
        False,
        effect=TASK,
        target="engine.model.task.accepts_embeddings",
        aliases={"vLLM": "enable_mm_embeds"},
        clients=Switch(off="embeddings of media in prompts get 400", on="prompts may have embeddings of media"),
    )
    """Accept parts of messages with embeddings of images, videos and audio. With 0 as the limit of a modality in
    limits.media, its tower is not loaded, and its embeddings are still accepted."""


class Model(Section):
    source: Source
    """Location of the checkpoint: exactly one kind."""
    credentials: SecretName | None = declare(None, effect=SERVICE, example="hub")
    """Name in `secrets` of the token for the hub or web server; buckets use the machine's cloud identity."""
    download: Download = Download()
    """Download of remote checkpoints."""
    names: tuple[Annotated[str, Field(min_length=1, max_length=200)], ...] = declare(
        (),
        effect=LIVE,
        affects="gateway.names",
        aliases={
            "vLLM": "served_model_name",
            "llama.cpp": "alias",
            "NVIDIA NIM": "NIM_SERVED_MODEL_NAME",
            "synonyms": ("name", "served_names"),
        },
        examples=(["assistant"], ["assistant", "qwen3-0.6b"]),
        strict=False,
    )
    """Names of the served model; the first is canonical. Default: the last part of the source's name."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = declare("auto", effect=NUMBERS)
    """Data type of weights and activations; auto is the checkpoint's type on a GPU and float32 on a CPU."""
    max_context: Annotated[int, Field(ge=2)] | Auto = declare(
        "auto",
        effect=Effect("service", outputs="yes", graphs=True, memory=True),
        target=("engine.model.max_context", "gateway.max_context"),
        aliases={
            "vLLM": "max_model_len",
            "SGLang": ("context_length", "context_len"),
            "TGI": "max_total_tokens",
            "llama.cpp": ("ctx_size", "n_ctx"),
            "Ollama": "num_ctx",
            "NVIDIA NIM": "NIM_MAX_MODEL_LEN",
        },
        clients=Limit("longer prompts get 400, longer replies end earlier"),
        flags=("-c",),
        examples=(8192, 32768),
    )
    """Maximum tokens of prompt and reply together; auto is the longest context that the checkpoint supports and the KV
    cache can hold with hardware.capacity."""
    chat_template: str | None = declare(
        None,
        effect=LIVE_OUTPUTS,
        affects="gateway.chat_template",
        aliases={"llama.cpp": "chat_template_file"},
        clients=Note("another chat template renders conversations"),
        is_path=True,
        example="templates/chat.jinja",
    )
    """Jinja chat template file that replaces the checkpoint's template."""
    format: str = declare(
        "auto",
        effect=LIVE_OUTPUTS,
        affects="gateway.format",
        aliases={
            "vLLM": ("tool_call_parser", "reasoning_parser"),
            "llama.cpp": "reasoning_format",
            "synonyms": "tool_parser",
        },
        clients=Note("tool calls and reasoning are parsed and constrained by another format"),
        examples=("qwen3_coder", "hermes+deepseek_r1"),
        pattern=r"^[a-z0-9_]+(\+[a-z0-9_]+)?$",
    )
    """Syntax of tool calls and reasoning (docs/formats.md): a name, or two joined by +; auto detects it from the chat
    template and the model type."""
    generation_config: Literal["auto", "ignore"] = declare(
        "auto",
        effect=LIVE_OUTPUTS,
        affects=("gateway.eos_token_ids", "gateway.sampling"),
        clients=Note("sampling defaults and end tokens may change"),
    )
    """Use the sampling defaults and extra end tokens of the checkpoint's generation_config.json."""
    task: Literal["auto", "generate", "embed", "classify", "score"] = declare("auto", effect=TASK)
    """Task of the model; auto: the task of its architecture. A decoder can also embed, or score as a reranker that
    answers yes or no."""
    text_only: bool = declare(False, effect=TASK, target="engine.model.task.text_only")
    """Serve only the text decoder of a multimodal model; requests may then contain text only."""
    media: ModelMedia = ModelMedia()
    """Towers of a multimodal model in a service of their own."""
    pooling: Pooling = Pooling()
    """Pooling of vectors and scores, to override the checkpoint."""
    # built-in architectures never run remote code
    trust_remote_code: bool = declare(False, effect=ENGINE, target="engine.model.trust_remote_code")
    """Permit a checkpoint folder to define its architecture in slipway_model.py; its code is then executed."""
    # selects the reference outputs of the lock file
    lock: Literal["auto", "require", "warn", "off"] = declare("auto", effect=ENGINE)
    """Verify the checkpoint's files against the manifest's lock file; auto: if there is one, require: always, warn: log
    differences and serve, off: never."""


class Quantization(Section):
    weights: Literal["auto", "int8", "int6", "int4", "fp8"] = declare(
        "auto", effect=Effect("engine", outputs="yes", caches=("weights", "prefix"), graphs=True, memory=True)
    )
    """Number format of the weights: auto keeps the checkpoint's, other values round at load; int8 and int4 require
    compiled kernels of a CPU or Triton kernels of a GPU, int6 requires compiled kernels of a CPU, fp8 requires Triton
    kernels."""
    group_size: Annotated[Literal["auto", 32, 64, 128], BeforeValidator(integer_text)] = declare(
        "auto", effect=Effect("engine", outputs="yes", caches=("weights", "prefix"), graphs=True, memory=True)
    )
    """Inputs that share a scale of weights rounded to int8 or int4. Smaller groups are more accurate and take more
    memory, 2 bytes for each scale. auto: 64 for int8, 32 for int4 and for models that pool. int6 always has 64."""
    head: Literal["auto", "stored", "int8", "int6", "int4"] = declare(
        "auto", effect=Effect("engine", outputs="yes", caches=("weights", "prefix"), graphs=True, memory=True)
    )
    """Number format of the output head; auto is int8 with int8, int6 and int4 weights, otherwise the checkpoint's. int6
    and int4 make decoding faster where the vocabulary is large, and cost accuracy (docs/performance.md). int6 requires
    compiled kernels of a CPU."""
    embedding: Literal["auto", "stored", "int6"] = declare(
        "auto", effect=Effect("engine", outputs="yes", caches=("prefix",), graphs=True, memory=True)
    )
    """Number format of the token embedding in memory. auto and stored: as in the checkpoint, in the mapped file where
    possible; a dequantized one has 16 or 32 bits. int6 has 0.78 bytes for each number (docs/performance.md). The head
    has its own format, also if it is tied."""
    keep: bool = declare(True, effect=ENGINE)
    """Store weights rounded to int8, int6 or int4 in the user's cache folder, for the next start."""
    kv_cache: Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8", "int4"] = declare(
        "auto",
        effect=NUMBERS,
        target="engine.quantization.kv_cache",
        aliases={"vLLM": "kv_cache_dtype", "llama.cpp": ("cache_type_k", "cache_type_v")},
    )
    """Number format of the KV cache. auto: the format that the checkpoint states, such as fp8 with its scales, if the
    kernels have it; else on a GPU the activations' type, on a CPU the checkpoint's, and float16 for GGUF files and
    with weights of 8, 6 or 4 bits. fp8 requires a GPU. int8 has a scale for each head and token, int4 a
    scale and a minimum for each 32 dims of a head; both run on a CPU and a GPU. docs/performance.md has their cost."""
