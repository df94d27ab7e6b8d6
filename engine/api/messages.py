"""Messages between gateway and engine. Times are seconds of the sender's monotonic clock unless stated otherwise.

To the engine: Submit, Abort, Control, LoadAdapter, UnloadAdapter, Profile. From the engine: Loading, Ready, Output (one
frame per step for all requests), Failed, Stats, AdapterChanged, Profiled, TimelineEvents (engine/api/events.py).
"""

from typing import Literal

import msgspec

from engine.api.events import Finish as Finish
from engine.api.events import TimelineEvents
from engine.api.golden import Against
from engine.api.media import MediaItem


class SpeechRules(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whisper's rules for the tokens of a transcript (engine/sampling/speech.py)."""

    begin: tuple[tuple[int, ...], ...] = ()  # tokens allowed at the first positions of the reply: language, task, …
    timestamps: int | None = None  # id of the timestamp 0; higher ids are later times. None: text without timestamps
    no_timestamps: int | None = None  # id of the token that selects text without timestamps
    latest_first: int | None = None  # largest number of the first timestamp
    end: int = 0  # id of the end token; ids below it are text
    suppressed: tuple[int, ...] = ()  # never sampled
    suppressed_first: tuple[int, ...] = ()  # nor as the first token after `begin`


class AlignmentOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """Alignment of the prompt of a speech model with its audio."""

    first: int  # number of the first token of the decoder's prompt that is aligned
    positions: int  # positions of the encoder input that are audio; the others are silence that fills the window


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling parameters. The gateway resolves defaults and the seed, so every value is final.

    Noise is keyed by (seed, position), so a token depends neither on the batch nor on a restart.
    """

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences
    min_tokens: int = 0  # end and stop tokens are masked until the reply has this many tokens
    logprobs: int | None = None  # None: off; k: the sampled token and the k most likely; -1: the entire vocabulary
    prompt_logprobs: int | None = None  # likewise for prompt tokens
    logprobs_mode: Literal["raw", "processed"] = "raw"
    logprob_ids: tuple[int, ...] = ()  # with logprobs: these tokens in this order instead of the most likely ones
    speech: SpeechRules | None = None
    alignment: AlignmentOptions | None = None  # of a speech model: align the prompt with the audio
    return_routed_experts: bool = False  # return the experts of each computed token


class Grammar(msgspec.Struct, frozen=True):
    """Constraint on the reply."""

    kind: Literal["json_schema", "regex", "lark"]  # syntax of `text`
    text: str


PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]


class Pooling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Pooling parameters: vectors of the entire prompt (`embed`, `classify`) or of each token of it."""

    task: PoolingTask
    dimensions: int | None = None  # truncate vectors to this length before normalisation
    activate: bool | None = None  # False: skip the model's activation (unit length, softmax or sigmoid)


class Thinking(msgspec.Struct, frozen=True, omit_defaults=True):
    """Limit on reasoning tokens. After `budget` of them, the tokens of `close` are forced one by one."""

    budget: int
    close: tuple[int, ...]
    starts: tuple[str, ...]  # start markers
    ends: tuple[str, ...]  # end markers
    begun: bool = False  # reasoning begins with the reply, without a start marker in it
    open: bool = False  # with `begun`: the prompt contains the start marker; else one in the reply is not counted
    again: bool = False  # reasoning may begin anywhere and repeatedly, each time with the full budget


class Submit(msgspec.Struct, frozen=True, tag="submit", omit_defaults=True):
    """A request for one sequence.

    With `pooling` nothing is sampled: `max_tokens` is 0, and the only delta has `pooled`. Deadlines are times of the
    machine's monotonic clock, which gateway and engines share.
    """

    id: str
    prompt: tuple[int, ...]  # token ids
    sampling: Sampling
    max_tokens: int  # including `emitted`
    emitted: tuple[int, ...] = ()  # reply tokens of an earlier engine, which are not sent again
    eos_token_ids: tuple[int, ...] = ()  # end the reply unless `ignore_eos`
    stop_token_ids: tuple[int, ...] = ()  # end the reply
    ignore_eos: bool = False
    priority: int = 0  # lower is scheduled first
    salt: str = ""  # separates prefix caches
    grammar: Grammar | None = None
    thinking: Thinking | None = None
    owner: str = ""  # whose share of the engine it uses (policy "fair")
    share: float = 1.0  # weight of that share
    ttft_deadline: float | None = None  # the request is ended if it has no token by then
    deadline: float | None = None  # the request is ended by then
    pooling: Pooling | None = None
    segments: tuple[int, ...] = ()  # lengths of the prompt's segments, with token types 0, 1, …; empty: one segment
    source: int = 0  # leading prompt tokens that the encoder reads (encoder-decoder); the others begin the reply
    adapter: str = ""  # name of the LoRA adapter; empty: the base model
    media: tuple[MediaItem, ...] = ()  # in the order of their spans


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop these requests and free their memory. Unknown ids are ignored, because they may have just finished."""

    ids: tuple[str, ...]


class Control(msgspec.Struct, frozen=True, tag="control"):
    """Command to the engine."""

    verb: Literal["stats", "reset_prefix_cache", "drain"]
    """stats: send Stats now. reset_prefix_cache: drop all cached blocks. drain: finish open requests, then exit 0."""


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter", omit_defaults=True):
    """Load a LoRA adapter. The answer is AdapterChanged; requests with its name that follow wait for the result."""

    name: str
    path: str
    replace: bool = False  # read the files again if an adapter with this name and path is loaded


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter"):
    """Remove a LoRA adapter. Open requests with it are completed. The answer is AdapterChanged."""

    name: str


class Profile(msgspec.Struct, frozen=True, tag="profile"):
    """Start or stop the profiler. The answer is Profiled."""

    verb: Literal["start", "stop"]


ToEngine = Submit | Abort | Control | LoadAdapter | UnloadAdapter | Profile


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one position."""

    token: int
    logprob: float
    rank: int  # of the token in the entire vocabulary; 1 is the most likely
    top_ids: tuple[int, ...] = ()  # most likely tokens in descending order; may include `token`
    top_logprobs: tuple[float, ...] = ()


class Timing(msgspec.Struct, frozen=True, omit_defaults=True):
    """Timing and cost of one request. Times are those of the engine's monotonic clock, 0.0 if not reached;
    `arrived` <= `scheduled` <= `first_token` <= `last_token`."""

    arrived: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    cached_tokens: int = 0  # prompt tokens from the prefix cache, when first scheduled
    preemptions: int = 0
    written_tokens: int = 0  # prompt tokens that it added to the prefix cache, in full blocks
    accepted_tokens: int = 0  # draft tokens that became reply tokens
    rejected_tokens: int = 0  # other draft tokens


class Pooled(msgspec.Struct, frozen=True):
    """Result of pooling a prompt."""

    shape: tuple[int, ...]  # [size] for the entire prompt, [tokens, size] for its tokens
    values: bytes  # little-endian float32


class Alignment(msgspec.Struct, frozen=True):
    """Attention of the tokens of a prompt to positions of audio, from the alignment heads: normalised over the tokens,
    filtered, and averaged over the heads."""

    shape: tuple[int, int]  # [tokens, positions]
    values: bytes  # little-endian float32


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """Output of one request in one step."""

    id: str
    ids: tuple[int, ...] = ()  # new tokens
    logprobs: tuple[Logprob, ...] = ()  # one for each new token
    prompt_logprobs: tuple[Logprob | None, ...] | None = None  # all with the first delta; None for the first token
    routes: tuple[bytes, ...] = ()
    """Experts of the tokens that were computed since the last delta: the prompt with the first one, then the token
    before each new one. Each token has the little-endian uint16 numbers of all layers with experts, one after another.
    Empty unless the request has `return_routed_experts`."""
    finish: Finish | None = None  # set on the last delta
    stop_reason: int | None = None  # stop token id that ended it; None for an end token or a length
    timing: Timing | None = None
    alignment: Alignment | None = None  # of a prompt with `Sampling.alignment`, with its last delta
    pooled: Pooled | None = None  # with the only delta of a pooling request, which has finish "stop"


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Progress of the start."""

    phase: str  # such as "loading" or "warming"
    fraction: float  # 0..1
    detail: str = ""  # further text for people


class PhaseMemory(msgspec.Struct, frozen=True):
    """Change of the device's memory in a phase of the start, in bytes. On a CPU this includes pages of mapped files."""

    device: str
    kept: int  # change from the beginning to the end of the phase; negative if memory was freed
    peak: int  # largest increase within the phase


class RankMemory(msgspec.Struct, frozen=True):
    """Memory of one rank, in bytes."""

    held: dict[str, int]
    """Size of the tensors by part: the parts of the weights (embedding, attention, mlp, experts, norms, head), kv,
    tables, buffers, and self_test (pages of golden prompts)."""
    mapped: int = 0  # weights that are used directly in the mapped checkpoint file
    planned: dict[str, int] = {}  # planned size by part
    taken: dict[str, PhaseMemory] = {}
    """Measured change by phase of the start. Phase "starting" is the process before the model is loaded. On a CPU,
    pages
    count once they are written."""


class SelfTestResult(msgspec.Struct, frozen=True):
    """Result of the self-test at the start."""

    prompts: int = 0  # golden prompts that were run
    seconds: float = 0.0
    skipped: int = 0  # prompts for which there was no time or memory
    against: Against = "itself"  # reference: the lock file, or this engine's first run
    band: str = ""  # required agreement, as text
    differs: str = ""  # deviation that does not prevent serving


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is ready to serve. Sizes are those allocated, as sums over all ranks."""

    max_context: int
    kv_blocks: int
    block_tokens: int
    kv_tokens: int
    weight_bytes: int
    kv_bytes: int
    seconds: dict[str, float]  # by phase of the start
    pid: int
    memory: tuple[RankMemory, ...] = ()  # of each rank
    self_test: SelfTestResult | None = None  # None: there was none


class Output(msgspec.Struct, frozen=True, tag="output"):
    """Outputs of one step, for all requests that have any."""

    step: int
    deltas: tuple[Delta, ...]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A request failed, or the engine cannot continue."""

    id: str | None  # None: the engine
    code: str
    message: str
    param: str | None = None


class AdapterChanged(msgspec.Struct, frozen=True, tag="adapter_changed", omit_defaults=True):
    """A LoRA adapter was loaded or unloaded, or could not be loaded."""

    name: str
    loaded: bool = True  # False: unloaded
    error: str = ""  # reason why it could not be loaded; an adapter that was loaded before is kept
    seconds: float = 0.0  # from the message to the answer


class Profiled(msgspec.Struct, frozen=True, tag="profiled", omit_defaults=True):
    """The profiler was started, or has written its files."""

    files: tuple[str, ...] = ()  # after a stop
    error: str = ""


class Stats(msgspec.Struct, frozen=True, tag="stats", omit_defaults=True):
    """Gauges, and counters since the engine's start. Sent when a step ends, at most ten times per second, and when the
    engine becomes idle."""

    step: int = 0
    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0  # tokens
    preemptions: int = 0
    step_tokens: tuple[int, ...] = ()  # sizes of the steps since the last Stats
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0  # draft tokens that were accepted
    accepted_at: tuple[int, ...] = ()  # accepted tokens by position in their draft
    drafting_seconds: float = 0.0  # time to search drafts
    self_tests: int = 0  # golden prompts that were run
    self_test_yields: int = 0  # golden prompts that were cancelled in favour of requests
    self_test_s: float = 0.0  # duration of the last golden prompt
    grammars_compiled: int = 0
    grammars_cached: int = 0
    grammar_seconds: float = 0.0
    masks: int = 0  # rows
    mask_seconds: float = 0.0
    media_encoded: int = 0  # items that the tower computed
    media_cached: int = 0  # items whose embeddings were cached
    media_seconds: float = 0.0  # time of the tower
    adapters_loaded: int = 0  # LoRA adapters that requests may select
    adapters_active: int = 0  # of them, on the device
    adapter_evictions: int = 0
    adapter_waiting: int = 0  # requests that wait for an adapter or a slot for it
    adapter_loads: int = 0  # adapters that were read since the start
    adapter_load_seconds: float = 0.0
    flops: float = 0.0  # floating-point operations of steps, if they are counted
    read_bytes: float = 0.0  # memory traffic of steps, if it is counted
    step_seconds: float = 0.0  # time in which steps ran


FromEngine = Loading | Ready | Output | Failed | Stats | AdapterChanged | Profiled | TimelineEvents
