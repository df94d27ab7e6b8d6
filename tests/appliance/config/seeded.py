# ruff: noqa: E501
"""Seeded mistakes: complete manifests with one mistake each, its position, the expected message and the edited text.
`⟪` marks the position that the message must name; it is removed before the manifest is read, so line and column follow
from the text alone. `becomes` is a part of the text after the edit: "" if the intended value is unknown, a zero byte
if only validity is compared."""

from dataclasses import dataclass, field

MARK = "⟪"
TOP = "apiVersion: slipway/v2\nmodel: {source: {path: tiny}}\nhardware: {device: cpu}\n"
MODEL = "apiVersion: slipway/v2\nhardware: {device: cpu}\nmodel:\n  source: {path: tiny}\n"
HARDWARE = "apiVersion: slipway/v2\nmodel: {source: {path: tiny}}\nhardware:\n  device: cpu\n"


@dataclass(frozen=True)
class Seeded:
    """A manifest with one mistake, and the expected diagnostics."""

    name: str
    text: str
    key: str
    words: str  # the suggestion, a part of the message; "" if there is none
    becomes: str = ""
    source: str = ""  # source of a mistake in options, overlays or variables, which have no line
    options: tuple[tuple[str, str], ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    certain: bool = True
    files: dict[str, str] = field(default_factory=dict)  # files in the manifest's folder; one of them may have the mark
    overlays: tuple[str, ...] = ()
    mended: str = ""  # the file that the edit changes, if it is not the marked one
    outside: str = ""  # the advice for a value that is in no file

    @property
    def marked(self) -> dict[str, str]:
        """All files, the mark in one of them."""
        return {"m.yaml": self.text, **self.files}

    @property
    def texts(self) -> dict[str, str]:
        return {name: text.replace(MARK, "") for name, text in self.marked.items()}

    @property
    def edited(self) -> str:
        """The file that the edit changes."""
        return self.mended or next(name for name, text in self.marked.items() if MARK in text)


def option(name: str, key: str, text: str, words: str) -> Seeded:
    flag = f"--set {key}"
    return Seeded(name, TOP, key, words, source=flag, options=((key, text),))


def variable(name: str, text: str, key: str, words: str) -> Seeded:
    return Seeded(f"variable {name}", TOP, key, words, source=name, variables={name: text})


SEEDED: tuple[Seeded, ...] = (
    # YAML syntax
    Seeded("no space after a colon", TOP + "endpoints:\n  host: h\n  ⟪port:8000\n", "", "port: 8000", "  port: 8000\n"),
    Seeded("no space after the only colon", TOP + "endpoints:\n  ⟪port:8000\n", "endpoints", "port: 8000",
           "  port: 8000\n"),
    Seeded("a tab", TOP + "limits:\n⟪\tmax_stop: 1\n", "", "indent with spaces", "  max_stop: 1\n"),
    Seeded("tabs two deep", TOP + "engine:\n⟪\tcache:\n\t\tprefix: true\n", "", "indent with spaces",
           "  cache:\n    prefix: true\n"),
    Seeded("crooked indentation", TOP + "limits:\n  max_stop: 1\n ⟪max_body: 1MiB\n", "", "check the indentation",
           "  max_body: 1MiB\n"),
    Seeded("unclosed brace", TOP + "limits: {max_stop: 1\nengine⟪: {}\n", "", "is not closed",
           "limits: {max_stop: 1}\nengine: {}\n"),
    Seeded("unclosed quote", TOP + "endpoints:\n  host: ⟪'h\n", "", "is not closed"),
    Seeded("a text that begins with %", TOP + "variables:\n  v: ⟪%h\n", "", "in quotes", '  v: "%h"\n'),
    Seeded("a colon within a text", TOP + "variables:\n  v: a⟪: b\n", "", "quote a text", '  v: "a: b"\n'),
    Seeded("anchor", TOP + "limits: ⟪&l {max_stop: 1}\n", "limits", "repeat the value", "limits: {max_stop: 1}\n"),
    Seeded("tag", TOP + "endpoints: {port: ⟪!!int 80}\n", "endpoints.port", "remove it", "endpoints: {port: 80}\n"),
    Seeded("second document", TOP + "⟪---\nx: 1\n", "", "one file each"),
    # duplicates
    Seeded("the same key twice", TOP + "limits:\n  max_stop: 1\n  ⟪max_stop: 1\n", "limits.max_stop", "equal", "\0"),
    Seeded("two values of a key", TOP + "limits:\n  max_stop: 1\n  ⟪max_stop: 2\n", "limits.max_stop", "keep one", "\0",
           certain=False),
    Seeded("a section twice", TOP + "limits: {max_stop: 1}\n⟪limits: {max_body: 1MiB}\n", "limits",
           "it is already set in line 4", "\0", certain=False),
    # keys: spelling and place
    Seeded("typo in a key", TOP + "endpoints:\n  ⟪prot: 1\n", "endpoints.prot", "did you mean port?", "  port: 1\n"),
    Seeded("typo in a section", TOP + "⟪endpoint: {port: 1}\n", "endpoint", "endpoints?", "endpoints: {port: 1}\n"),
    Seeded("typo deep inside", TOP + "engine:\n  cache:\n    ⟪block_token: 8\n", "engine.cache.block_token",
           "block_tokens?", "    block_tokens: 8\n"),
    Seeded("camel case", TOP + "engine: {scheduling: {⟪maxRunning: 4}}\n", "engine.scheduling.maxRunning",
           "max_running?", "engine: {scheduling: {max_running: 4}}\n"),
    Seeded("hyphens", TOP + "limits: {⟪max-body: 1MiB}\n", "limits.max-body", "max_body?",
           "limits: {max_body: 1MiB}\n"),
    Seeded("a capital letter", TOP + "⟪Endpoints: {port: 1}\n", "Endpoints", "endpoints?", "endpoints: {port: 1}\n"),
    Seeded("a key at the top", TOP + "⟪max_running: 4\n", "max_running", "engine.scheduling: max_running",
           "engine: {scheduling: {max_running: 4}}\n"),
    Seeded("a key one level too high", TOP + "engine:\n  ⟪block_tokens: 32\n", "engine.block_tokens",
           "engine.cache: block_tokens", "  cache: {block_tokens: 32}\n"),
    Seeded("a key one level too deep", TOP + "lifecycle: {restart: {max: 3, ⟪drain: 9s}}\n", "lifecycle.restart.drain",
           "lifecycle: drain", "lifecycle: {restart: {max: 3}, drain: 9s}\n"),
    Seeded("a key in another section", TOP + "limits:\n  max_stop: 2\nendpoints:\n  ⟪max_body: 1MiB\n  port: 1\n",
           "endpoints.max_body", "limits: max_body", "  port: 1\n"),
    Seeded("a section inside another", HARDWARE + "  ⟪quantization: {kv_cache: float16}\n", "hardware.quantization",
           "the top level", "\0"),
    # keys: names of other servers
    Seeded("vLLM max_model_len", MODEL + "  ⟪max_model_len: 32\n", "model.max_model_len", "model.max_context",
           "  max_context: 32\n"),
    Seeded("vLLM gpu_memory_utilization", HARDWARE + "  ⟪gpu_memory_utilization: 0.9\n",
           "hardware.gpu_memory_utilization", "memory_share", "  memory_share: 0.9\n"),
    Seeded("vLLM max_num_seqs", TOP + "engine: {⟪max_num_seqs: 8}\n", "engine.max_num_seqs", "max_running",
           "engine: {scheduling: {max_running: 8}}\n"),
    Seeded("vLLM served_model_name", MODEL + "  ⟪served_model_name: x\n", "model.served_model_name", "model.names",
           "  names: [x]\n"),
    Seeded("vLLM max_num_batched_tokens", TOP + "⟪max_num_batched_tokens: 64\n", "max_num_batched_tokens",
           "max_step_tokens", "engine: {scheduling: {max_step_tokens: 64}}\n"),
    Seeded("vLLM enable_prefix_caching", TOP + "⟪enable_prefix_caching: false\n", "enable_prefix_caching",
           "engine.cache.prefix", "engine: {cache: {prefix: false}}\n"),
    Seeded("vLLM kv_cache_dtype", TOP + "⟪kv_cache_dtype: half\n", "kv_cache_dtype", "quantization.kv_cache",
           "quantization: {kv_cache: float16}\n"),
    Seeded("TGI max_concurrent_requests", TOP + "limits: {⟪max_concurrent_requests: 9}\n",
           "limits.max_concurrent_requests", "max_running", "\0"),
    Seeded("TGI max_total_tokens", TOP + "⟪max_total_tokens: 32\n", "max_total_tokens", "model.max_context", "\0"),
    Seeded("TGI max_batch_prefill_tokens", TOP + "⟪max_batch_prefill_tokens: 64\n", "max_batch_prefill_tokens",
           "max_step_tokens", "engine: {scheduling: {max_step_tokens: 64}}\n"),
    Seeded("TGI max_stop_sequences", TOP + "limits: {⟪max_stop_sequences: 4}\n", "limits.max_stop_sequences",
           "the name here is limits.max_stop", "limits: {max_stop: 4}\n"),
    Seeded("SGLang mem_fraction_static", HARDWARE + "  ⟪mem_fraction_static: 0.8\n", "hardware.mem_fraction_static",
           "memory_share", "  memory_share: 0.8\n"),
    Seeded("SGLang context_length", MODEL + "  ⟪context_length: 32\n", "model.context_length", "model.max_context",
           "  max_context: 32\n"),
    Seeded("SGLang chunked_prefill_size", TOP + "⟪chunked_prefill_size: 64\n", "chunked_prefill_size",
           "max_step_tokens", "engine: {scheduling: {max_step_tokens: 64}}\n"),
    Seeded("SGLang max_running_requests", TOP + "⟪max_running_requests: 4\n", "max_running_requests", "max_running",
           "engine: {scheduling: {max_running: 4}}\n"),
    Seeded("SGLang page_size", TOP + "engine:\n  cache: {⟪page_size: 32}\n", "engine.cache.page_size", "block_tokens",
           "  cache: {block_tokens: 32}\n"),
    Seeded("llama.cpp n_ctx", MODEL + "  ⟪n_ctx: 32\n", "model.n_ctx", "model.max_context", "  max_context: 32\n"),
    Seeded("llama.cpp threads_batch", HARDWARE + "  ⟪n_threads: 2\n", "hardware.n_threads", "hardware.threads",
           "  threads: 2\n"),
    Seeded("llama.cpp cache_type_k", TOP + "⟪cache_type_k: f16\n", "cache_type_k", "quantization.kv_cache",
           "quantization: {kv_cache: float16}\n"),
    Seeded("NIM_SERVED_MODEL_NAME", MODEL + "  ⟪nim_served_model_name: x\n", "model.nim_served_model_name",
           "model.names", "  names: [x]\n"),
    Seeded("NIM_MAX_MODEL_LEN", TOP + "⟪nim_max_model_len: 32\n", "nim_max_model_len", "model.max_context", "\0"),
    Seeded("KServe kind", TOP + "⟪kind: InferenceService\n", "kind", "leave it out", "\0"),
    Seeded("KServe metadata", TOP + "⟪metadata:\n  name: x\n", "metadata", "leave it out", "\0"),
    Seeded("KServe minReplicas", TOP + "⟪minReplicas: 2\n", "minReplicas", "parallelism.data",
           "parallelism: {data: 2}\n"),
    Seeded("KServe containerConcurrency", TOP + "⟪containerConcurrency: 8\n", "containerConcurrency", "max_running",
           "engine: {scheduling: {max_running: 8}}\n"),
    Seeded("Docker ports", TOP + "endpoints: {⟪ports: 8000}\n", "endpoints.ports", "port?",
           "endpoints: {port: 8000}\n"),
    # missing
    Seeded("missing version", "⟪model: {source: {path: tiny}}\n", "apiVersion", "write apiVersion: slipway/v2",
           "apiVersion: slipway/v2\nmodel: {source: {path: tiny}}\n"),
    Seeded("missing source", "apiVersion: slipway/v2\n⟪model: {names: [a]}\n", "model.source", "a mapping with path,"),
    Seeded("a repository for the model", "apiVersion: slipway/v2\nmodel: ⟪org/name\n", "model",
           "write {source: {huggingface: {repo: org/name}}}"),
    Seeded("the path of version 1", "apiVersion: slipway/v2\nmodel:\n  ⟪path: tiny\n", "model.path",
           "it belongs to model.source: path", "model:\n  source: {path: tiny}\n"),
    Seeded("two kinds of source", "apiVersion: slipway/v2\nmodel: {source: ⟪{path: /m, vertex: {}}}\n",
           "model.source", "has path and vertex; it takes exactly one of path, huggingface, http"),
    # types, quotes, booleans
    Seeded("quoted number", TOP + "endpoints: {port: ⟪'8000'}\n", "endpoints.port", "without quotes",
           "endpoints: {port: 8000}\n"),
    Seeded("quoted boolean", TOP + 'endpoints: {docs: ⟪"true"}\n', "endpoints.docs", "without quotes",
           "endpoints: {docs: true}\n"),
    Seeded("one for true", TOP + "endpoints: {docs: ⟪1}\n", "endpoints.docs", "write true",
           "endpoints: {docs: true}\n"),
    Seeded("a float for a whole number", TOP + "limits: {max_stop: ⟪16.0}\n", "limits.max_stop", "write 16",
           "limits: {max_stop: 16}\n"),
    Seeded("a number for a text", TOP + "endpoints: {host: ⟪127}\n", "endpoints.host", 'write "127"',
           'endpoints: {host: "127"}\n'),
    Seeded("a list for a number", TOP + "limits: {max_stop: ⟪[4]}\n", "limits.max_stop", "without brackets",
           "limits: {max_stop: 4}\n"),
    Seeded("a text for a list", MODEL + "  names: ⟪demo\n", "model.names", "write [demo]", "  names: [demo]\n"),
    Seeded("a number in a list of texts", MODEL + "  names: [a, ⟪7]\n", "model.names[1]", 'write "7"',
           '  names: [a, "7"]\n'),
    Seeded("an empty section", TOP + "limits:⟪\n", "limits", "leave the key out", "\0"),
    Seeded("an empty value", TOP + "endpoints:\n  port:⟪\n  docs: true\n", "endpoints.port", "leave the key out",
           "  docs: true\n"),
    Seeded("a mapping for a value", TOP + "endpoints: {port: ⟪{number: 1}}\n", "endpoints.port", "a whole number"),
    Seeded("Norway in a list", MODEL + "  names: [⟪no]\n", "model.names[0]", 'write "no"', '  names: ["no"]\n'),
    Seeded("no for false", TOP + "endpoints: {docs: ⟪no}\n", "endpoints.docs", "write false",
           "endpoints: {docs: false}\n"),
    Seeded("On for true", TOP + "engine: {cache: {prefix: ⟪On}}\n", "engine.cache.prefix", "write true",
           "engine: {cache: {prefix: true}}\n"),
    Seeded("octal", TOP + "endpoints: {port: ⟪08000}\n", "endpoints.port", "write 8000", "endpoints: {port: 8000}\n"),
    Seeded("underscores in a number", TOP + "limits: {max_waiting: ⟪1_000}\n", "limits.max_waiting", "write 1000",
           "limits: {max_waiting: 1000}\n"),
    Seeded("an exponent", TOP + "limits: {max_waiting: ⟪1e3}\n", "limits.max_waiting", "write 1000",
           "limits: {max_waiting: 1000}\n"),
    # values
    Seeded("share in percent", HARDWARE + "  memory_share: ⟪90%\n", "hardware.memory_share", "write 0.9",
           "  memory_share: 0.9\n"),
    Seeded("share of ninety", HARDWARE + "  memory_share: ⟪90\n", "hardware.memory_share", "write 0.9",
           "  memory_share: 0.9\n"),
    Seeded("device gpu", "apiVersion: slipway/v2\nmodel: {source: {path: tiny}}\nhardware: {device: ⟪gpu}\n", "hardware.device",
           "did you mean cuda?"),
    Seeded("dtype bf16", MODEL + "  dtype: ⟪bf16\n", "model.dtype", "bfloat16?", "  dtype: bfloat16\n"),
    Seeded("4 bits in other words", TOP + "quantization: {weights: ⟪int3}\n", "quantization.weights",
           "did you mean int", "", certain=False),
    Seeded("log level warn", TOP + "observability: {log_level: ⟪warn}\n", "observability.log_level", "warning?",
           "observability: {log_level: warning}\n"),
    Seeded("typo in a word", TOP + "engine: {scheduling: {policy: ⟪priorty}}\n", "engine.scheduling.policy",
           "priority?", "engine: {scheduling: {policy: priority}}\n"),
    Seeded("size in Kubernetes' way", TOP + "limits: {max_body: ⟪8Mi}\n", "limits.max_body", "8MiB?",
           "limits: {max_body: 8MiB}\n"),
    Seeded("size in small letters", HARDWARE + "  kv_cache_memory: ⟪4gb\n", "hardware.kv_cache_memory", "4GB?",
           "  kv_cache_memory: 4GB\n"),
    Seeded("duration in words", TOP + "lifecycle: {drain: ⟪30 seconds}\n", "lifecycle.drain", "30s?",
           "lifecycle: {drain: 30s}\n"),
    Seeded("duration in days", TOP + "health: {startup_budget: ⟪1d}\n", "health.startup_budget", "24h?",
           "health: {startup_budget: 24h}\n"),
    Seeded("thousands with k", TOP + "engine: {scheduling: {max_step_tokens: ⟪8k}}\n",
           "engine.scheduling.max_step_tokens", "write 8192", "engine: {scheduling: {max_step_tokens: 8192}}\n"),
    Seeded("unlimited", TOP + "limits:\n  max_stop: 1\n  max_output_tokens: ⟪unlimited\n", "limits.max_output_tokens",
           "leave the key out", "\0"),
    Seeded("port too large", TOP + "endpoints: {port: ⟪80000}\n", "endpoints.port", "from 0 to 65535"),
    Seeded("too many at once", TOP + "engine: {scheduling: {max_running: ⟪5000}}\n", "engine.scheduling.max_running",
           "from 1 to 4096", "engine: {scheduling: {max_running: 4096}}\n", certain=False),
    Seeded("negative count", TOP + "limits: {max_stop: ⟪-1}\n", "limits.max_stop", "at least 1",
           "limits: {max_stop: 1}\n", certain=False),
    # secrets
    Seeded("literal secret", TOP + "secrets: {key: ⟪hunter2}\n", "secrets.key", "{env: NAME}"),
    Seeded("literal secret in a mapping", TOP + "secrets: {key: {⟪value: hunter2}}\n", "secrets.key.value",
           "{env: NAME}"),
    Seeded("literal key of the API",
           TOP + "endpoints: {api_keys: ⟪sk-abcdefgh12345678}\nsecrets: {keys: {file: keys.txt}}\n",
           "endpoints.api_keys", "secrets has keys"),
    Seeded("typo in the kind of secret", TOP + "secrets: {key: {⟪flie: keys.txt}}\n", "secrets.key.flie",
           "did you mean file?", "secrets: {key: {file: keys.txt}}\n"),
    Seeded("name of a secret that is near", TOP + "endpoints: {api_keys: ⟪key}\nsecrets: {keys: {file: keys.txt}}\n",
           "endpoints.api_keys", "did you mean keys?", "endpoints: {api_keys: keys}\n"),
    Seeded("name of a secret in capitals", TOP + "secrets: {⟪KEYS: {file: keys.txt}}\n", "secrets.KEYS",
           "did you mean keys?", "secrets: {keys: {file: keys.txt}}\n", certain=False),
    Seeded("variable that is not set", TOP + "secrets: {key: {env: ⟪API_KEY}}\n", "secrets.key.env",
           "did you mean API_KEYS?", "secrets: {key: {env: API_KEYS}}\n", variables={"API_KEYS": "x"}, certain=False),
    # files
    Seeded("typo in the checkpoint's folder", "apiVersion: slipway/v2\nmodel: {source: {path: ⟪tinny}}\n", "model.source.path",
           "did you mean tiny?", "model: {source: {path: tiny}}\n"),
    Seeded("another case in a folder's name", "apiVersion: slipway/v2\nmodel: {source: {path: ⟪Tiny}}\n", "model.source.path",
           "did you mean tiny?", "model: {source: {path: tiny}}\n"),
    Seeded("the folder above the checkpoint", "apiVersion: slipway/v2\nmodel: {source: {path: ⟪hub}}\n", "model.source.path",
           "did you mean hub/tiny?", "model: {source: {path: hub/tiny}}\n"),
    Seeded("a file of the checkpoint", "apiVersion: slipway/v2\nmodel: {source: {path: ⟪tiny/model.safetensors}}\n", "model.source.path",
           "did you mean tiny?", "model: {source: {path: tiny}}\n"),
    Seeded("a path from the current folder", "apiVersion: slipway/v2\nmodel: {source: {path: ⟪there/tiny}}\n", "model.source.path",
           "relative paths start at", "model: {source: {path: elsewhere/there/tiny}}\n"),
    Seeded("template with another ending", MODEL + "  chat_template: ⟪chat.jinj\n", "model.chat_template",
           "did you mean chat.jinja?", "  chat_template: chat.jinja\n"),
    Seeded("file of a secret that is not there", TOP + "secrets: {key: {file: ⟪keys.tx}}\n", "secrets.key.file",
           "did you mean keys.txt?", "secrets: {key: {file: keys.txt}}\n"),
    Seeded("folder of a recording", TOP + "engine: {record: ⟪log/steps.bin}\n", "engine.record", "did you mean logs?",
           "engine: {record: logs/steps.bin}\n"),
    # what this checkpoint or this machine cannot do
    Seeded("context beyond the model's", MODEL + "  max_context: ⟪4096\n", "model.max_context", "use at most 64",
           "  max_context: 64\n", certain=False),
    Seeded("more cache than memory", HARDWARE + "  kv_cache_memory: ⟪900GiB\n", "hardware.kv_cache_memory",
           "use at most"),
    Seeded("no GPU", "apiVersion: slipway/v2\nmodel: {source: {path: tiny}}\nhardware: {device: ⟪cuda}\n", "hardware.device",
           "use auto or cpu"),
    Seeded("pages of a GPU on a CPU", TOP + "quantization: {kv_cache: ⟪fp8}\n", "quantization.kv_cache", "use auto"),
    # the command line and the environment
    option("option without section", "port", "1", "endpoints: port"),
    option("typo in an option", "engine.cahce.prefix", "true", "did you mean cache?"),
    option("name of another server in an option", "gpu_memory_utilization", "0.9", "hardware.memory_share"),
    option("value of an option", "endpoints.docs", "maybe", "true or false"),
    option("percent in an option", "hardware.memory_share", "85%", "write 0.85"),
    variable("SLIPWAY__ENDPOINT__PORT", "1", "SLIPWAY__ENDPOINT__PORT", "did you mean SLIPWAY__ENDPOINTS__PORT?"),
    variable("SLIPWAY__MAX_MODEL_LEN", "64", "SLIPWAY__MAX_MODEL_LEN", "SLIPWAY__MODEL__MAX_CONTEXT?"),
    variable("SLIPWAY__ENDPOINTS__DOCS", "no", "endpoints.docs", "write false"),
    variable("SLIPWAY__LIMITS__MAX_BODY", "8Mi", "limits.max_body", "8MiB?"),
)  # fmt: skip
