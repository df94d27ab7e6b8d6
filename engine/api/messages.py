"""Messages between gateway and engine. Times are seconds of the sender's monotonic clock unless said otherwise.

To the engine: Submit, Abort, Control. From it: Loading, Ready, Output (one frame a step for all requests), Failed,
Stats, Told (engine/api/events.py).
"""

from typing import Literal

import msgspec

from engine.api.events import Finish as Finish
from engine.api.events import Told
from engine.api.golden import Against


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen. Every field is final: defaults are resolved and the seed is fixed by the gateway.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0 are off. `logprobs`: None asks for none, k for the
    sampled token and the k most likely, -1 for the whole vocabulary; `prompt_logprobs` likewise for prompt tokens.
    `logprob_ids`: where logprobs are asked for, these tokens in this order instead of the most likely ones.
    `bad_words` are token sequences. `min_tokens` masks end and stop tokens until that many tokens are out.
    Noise is keyed by (seed, position), so a token depends neither on the batch nor on a restart.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"
    logprob_ids: tuple[int, ...] = ()


class Grammar(msgspec.Struct, frozen=True):
    """A language the reply must stay in. `kind` says how `text` reads: a JSON schema, a regular expression or Lark."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str


PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]


class Pooling(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is wanted of a prompt instead of tokens: numbers of the whole (`embed`, `classify`) or of each token of it.

    `dimensions`: the first so many of a vector, cut before it is normalised; None for all. `activate`: None and True as
    the model declares it (unit length, softmax or sigmoid), False for the numbers before that."""

    task: PoolingTask
    dimensions: int | None = None
    activate: bool | None = None


class Thinking(msgspec.Struct, frozen=True, omit_defaults=True):
    """A limit on reasoning: behind `budget` tokens of it the tokens `close` are forced one by one. Reasoning begins
    with one of the texts `starts` at the beginning of the reply, or before it (`begun`: `open` means that the prompt
    wrote the start marker; else the reply may still write it, which does not count). One of the texts `ends` ends it.
    `again`: it may begin anywhere and several times, each with the whole budget."""

    budget: int
    close: tuple[int, ...]
    starts: tuple[str, ...]
    ends: tuple[str, ...]
    begun: bool = False
    open: bool = False
    again: bool = False


class Submit(msgspec.Struct, frozen=True, tag="submit", omit_defaults=True):
    """One sequence to generate. `prompt` and `emitted` are token ids; `emitted` is what an earlier engine already gave
    of this very request (it is not sent again). `stop_token_ids` and `eos_token_ids` end it; `ignore_eos` mutes the
    latter. `max_tokens` counts emitted ones too. `salt` separates prefix caches. `priority`: lower goes first.
    `owner` names whose share of the engine it uses, and `share` how large that is beside others. It is ended at
    `deadline`, and at `ttft_deadline` if it has no token by then: times of the machine's monotonic clock, which gateway
    and engines share.

    With `pooling` nothing is sampled: `max_tokens` is 0 and the one delta has `pooled`. `segments` are the tokens of
    each segment of the prompt, whose token types are 0, 1, …; empty: one segment.

    An encoder-decoder model reads the first `source` tokens of the prompt; the others begin the reply."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    emitted: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: int = 0
    salt: str = ""
    grammar: Grammar | None = None
    thinking: Thinking | None = None
    owner: str = ""
    share: float = 1.0
    ttft_deadline: float | None = None
    deadline: float | None = None
    pooling: Pooling | None = None
    segments: tuple[int, ...] = ()
    source: int = 0


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop these requests and free what they hold; unknown ids are ignored (they just finished)."""

    ids: tuple[str, ...]


class Control(msgspec.Struct, frozen=True, tag="control"):
    """`stats`: send Stats now. `reset_prefix_cache`: forget cached blocks. `drain`: finish what runs, then exit 0."""

    verb: Literal["stats", "reset_prefix_cache", "drain"]


ToEngine = Submit | Abort | Control


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """One position: the token itself first, then the most likely ones in descending order (the token may be among
    them again). `rank` is 1-based over the whole vocabulary."""

    token: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class Timing(msgspec.Struct, frozen=True, omit_defaults=True):
    """Times of one request on the engine's monotonic clock (seconds), and what its prompt cost.

    `arrived` <= `scheduled` <= `first_token` <= `last_token`; 0.0: not reached. `cached_tokens` of the prompt came from
    the prefix cache, at its first scheduling, and `written_tokens` of it, in whole blocks, it brought there."""

    arrived: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    cached_tokens: int = 0
    preemptions: int = 0
    written_tokens: int = 0


class Pooled(msgspec.Struct, frozen=True):
    """What a prompt was pooled to: little-endian float32 `values` of `shape`, which is [size] for a whole prompt and
    [tokens, size] for its tokens."""

    shape: tuple[int, ...]
    values: bytes


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one request gained in one step. `finish` is set on its last delta, together with its last ids; `stop_reason`
    is the stop token id that ended it (None for an end token or a length). `prompt_logprobs` come once, complete, with
    the first delta: one entry a prompt token, None for the first. `pooled` comes with the only delta, which finishes
    with "stop"."""

    id: str
    ids: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob | None, ...] | None = None
    finish: Finish | None = None
    stop_reason: int | None = None
    timing: Timing | None = None
    pooled: Pooled | None = None


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Progress of a start. `phase` is a word such as "loading" or "warming"; `fraction` is 0..1; `detail` is more about
    it, for people."""

    phase: str
    fraction: float
    detail: str = ""


class Taken(msgspec.Struct, frozen=True):
    """What a phase of the start took of the device's memory, in bytes over what was in use before it: `kept` at its
    end, `peak` at most within it, on a CPU with pages of mapped files. `kept` is negative where memory was given back.
    """

    device: str
    kept: int
    peak: int


class RankMemory(msgspec.Struct, frozen=True):
    """`held`: bytes by part, counted on the tensors themselves: those of the weights (embedding, attention, mlp,
    experts, norms, head), kv, tables, buffers, self_test (pages of golden prompts); `planned`: what the plan counted
    on. `mapped`: weights read in their file. `taken`: by phase of the start, as it was measured (on a CPU pages count
    once they are written); its phase "starting" is the process before the model."""

    held: dict[str, int]
    mapped: int = 0
    planned: dict[str, int] = {}
    taken: dict[str, Taken] = {}


class Tested(msgspec.Struct, frozen=True):
    """The self-test of a start: golden prompts that were computed, in how long, and those for which there was no time
    or no room. `against`: the lock's, or those of this very engine, which later ones are compared with; `band` is how
    well they had to agree, in words. `differs`: what did not, where that is no reason not to serve."""

    prompts: int = 0
    seconds: float = 0.0
    skipped: int = 0
    against: Against = "itself"
    band: str = ""
    differs: str = ""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine serves. Sizes as really allocated, of all ranks together and in `memory` of each; `seconds` by phase
    of the start; `self_test` is None where there was none."""

    max_context: int
    kv_blocks: int
    block_tokens: int
    kv_tokens: int
    weight_bytes: int
    kv_bytes: int
    seconds: dict[str, float]
    pid: int
    memory: tuple[RankMemory, ...] = ()
    self_test: Tested | None = None


class Output(msgspec.Struct, frozen=True, tag="output"):
    """What one step gave, for all requests that gained something."""

    step: int
    deltas: tuple[Delta, ...]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A request ended by an error of its own (`id`), or the engine cannot go on (`id` None)."""

    id: str | None
    code: str
    message: str
    param: str | None = None


class Stats(msgspec.Struct, frozen=True, tag="stats", omit_defaults=True):
    """Gauges now, counters since the engine's start; sent with every step that ends, at most ten times a second, and
    once when the engine goes idle. Token counters are in tokens; `step_tokens` holds the sizes of the steps since the
    last Stats. `self_tests` golden prompts were computed, the last one in `self_test_s` seconds, and `self_test_yields`
    left off for requests. Grammars are counted as compiled or found compiled, masks by rows."""

    step: int = 0
    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    step_tokens: tuple[int, ...] = ()
    self_tests: int = 0
    self_test_yields: int = 0
    self_test_s: float = 0.0
    grammars_compiled: int = 0
    grammars_cached: int = 0
    grammar_seconds: float = 0.0
    masks: int = 0
    mask_seconds: float = 0.0


FromEngine = Loading | Ready | Output | Failed | Stats | Told
