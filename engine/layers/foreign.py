"""A decoder computed by the modelling code of transformers, with keys and values in Slipway's pages.

Rows of a step with equal numbers of tokens are one call of that code, as in transformers' own generation of a batch:
the call gets a cache whose layers write the new keys and values to the pages of the rows and return all of them, padded
on the left. Masks, positions and everything else are transformers'.

Code that keeps something else than keys and values, such as recurrent states, gets complete sequences without a cache
in each step. The pages then have the ids of the tokens.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.api.errors import CheckpointError
from engine.kv.layout import Layout
from engine.kv.states import state_layout
from engine.layers.batch import Batch
from engine.layers.kv import KVLayer, kv_layers
from engine.layers.linear import Target
from engine.layers.lora import NO_ADAPTERS, LoadedAdapters
from engine.layers.memory_usage import MemoryUsage
from engine.layers.states import LayerStates
from engine.layers.torch_compile import ModuleCompiler
from engine.lowering.lower import lower
from engine.models.checkpoint import Checkpoint
from engine.models.foreign import ID_WIDTH
from engine.models.parts import Model

JOINED_POSITIONS = 8192  # of the rows of a call
TESTED_TOKENS = 12  # tokens of the comparison with transformers' own cache when a model is loaded
_FAILURES = (
    *(RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError, NotImplementedError),
)
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}  # of these logits, relative to the largest


LOG = logging.getLogger(__name__)


@dataclass
class RowPages:
    """Pages of several rows of a step, each with the same number of new tokens. Sequences end in the same column;
    `pads` columns before the shorter ones have unused values."""

    pages: Tensor  # [blocks, layers_per_block, 2, block_tokens, kv_heads, head_dim]
    layers: tuple[KVLayer, ...]
    tables: tuple[Tensor, ...]  # per group: [rows, blocks] int64
    writes: tuple[Tensor, ...]  # per group: [rows, tokens] int64, block · block_tokens + offset of each new token
    first: tuple[int, ...]  # position of the first new token of each row
    tokens: int

    def __post_init__(self) -> None:
        block_tokens, self.length = self.pages.shape[3], max(self.first) + self.tokens
        columns = torch.arange(self.length, device=self.pages.device)
        ends = torch.tensor(self.first, device=self.pages.device) + self.tokens
        at = (columns - (self.length - ends).unsqueeze(1)).clamp(min=0)  # positions: [rows, length]
        self.pads = None if int(ends.min()) == self.length else self.length - ends
        self.read = tuple((table.gather(1, at // block_tokens), at % block_tokens) for table in self.tables)

    @property
    def mask(self) -> Tensor | None:
        """Return [rows, length] int64, 1 for the columns of tokens; None if there are no others."""
        if self.pads is None:
            return None
        return (torch.arange(self.length, device=self.pads.device) >= self.pads.unsqueeze(1)).long()

    def exchange(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of the new tokens, each [rows, kv_heads, tokens, width]. Return the keys and values
        of all tokens so far with the same layout. Their width may be smaller than the width of the pages."""
        place = self.layers[layer]
        return self._exchange(place, 0, keys), self._exchange(place, 1, values)

    def _exchange(self, place: KVLayer, kind: int, new: Tensor) -> Tensor:
        block_tokens, (heads, width) = self.pages.shape[3], (new.shape[1], new.shape[3])
        writes, (block, offset) = self.writes[place.group], self.read[place.group]
        into = writes // block_tokens, place.layer, kind, writes % block_tokens, slice(heads), slice(width)
        self.pages[into] = new.transpose(1, 2).to(self.pages.dtype)
        found: Tensor = self.pages[block, place.layer, kind, offset, :heads, :width]
        return found.transpose(1, 2).to(new.dtype)

    def exchange_ids(self, ids: Tensor) -> Tensor:
        """Store the ids of the new tokens, [rows, tokens]. Return those of all tokens so far, [rows, length] int64."""
        shifts = 4 * torch.arange(2 * ID_WIDTH, device=ids.device)
        parts = (ids.unsqueeze(-1) >> shifts & 15).unsqueeze(1)  # [rows, 1, tokens, elements]
        found = torch.cat(self.exchange(0, *parts.chunk(2, -1)), -1)
        return (found.squeeze(1) << shifts).sum(-1)


@dataclass
class ForeignModel:
    """Has the interface of `TextModel` that the host's runner and the worker use."""

    model: Model
    layout: Layout
    dtype: torch.dtype
    device: torch.device
    memory_usage: MemoryUsage = field(default_factory=lambda: MemoryUsage({}, 0))
    pooler: None = None
    compiled: None = None
    kept_states: None = None
    buffer_bytes: int = 0
    adapters: LoadedAdapters = NO_ADAPTERS
    compiler: ModuleCompiler | None = None  # compiles the modules without keys and values

    def __post_init__(self) -> None:
        self.program = lower(self.model)
        self.target = Target(self.dtype, self.device)
        self.states = state_layout(self.model, 1)
        self._layers = tuple(kv_layers(self.layout))
        self._given: Tensor | None = None  # hidden states, the input of the head
        self._output: Any = None  # last output of the decoder
        self._code: Any = None
        self._recomputes = self.model.foreign is not None and self.model.foreign.recomputes
        self._joins_rows = True

    @property
    def weight_bytes(self) -> int:
        """Size of all allocated weights."""
        return self.memory_usage.total

    def routes_of_step(self, tokens: int) -> None:
        """Return None: transformers' code does not return selected experts."""

    def reserve(self, tokens: int, rows: int) -> None:
        """Do nothing: transformers' code allocates its buffers in each step."""

    @torch.inference_mode()
    def load(
        self, checkpoint: Checkpoint, progress: Callable[[float], None] = lambda fraction: None, known: None = None
    ) -> None:
        """Load the model with transformers and compare its logits with and without pages. Raises CheckpointError if
        weights are missing, or if transformers' code does not compute the same with Slipway's pages."""
        from transformers import AutoModelForCausalLM

        try:
            code, found = AutoModelForCausalLM.from_pretrained(
                str(checkpoint.path),
                dtype=self.dtype,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                trust_remote_code=False,
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"{checkpoint.path}: transformers cannot load it: {error}") from error
        if missing := sorted(found["missing_keys"]):
            raise CheckpointError(f"{checkpoint.path}: lacks {', '.join(missing[:3])}, which transformers needs")
        self._use(code)
        progress(1.0)

    @torch.inference_mode()
    def fill_random(self, checkpoint: Checkpoint) -> None:
        """Give the model random weights."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(str(checkpoint.path), local_files_only=True)
        self._use(AutoModelForCausalLM.from_config(config, dtype=self.dtype))

    def _use(self, code: Any) -> None:
        self._code = code.to(self.device).eval()
        weights = {tensor.data_ptr(): tensor.nbytes for tensor in self._code.parameters()}
        self.memory_usage = MemoryUsage({"model": sum(weights.values())}, 0)
        self._decoder = _first_called(self._code)
        self._takes_positions = _takes(self._decoder.forward, "position_ids")
        if self.compiler is not None:
            self.compiler.compile_modules(self._decoder)
        compute = self._decoder.forward

        def forward(*arguments: Any, **options: Any) -> Any:
            if self._given is None:
                self._output = compute(*arguments, **options)
                return self._output
            fields = {**self._output, "last_hidden_state": self._given.unsqueeze(0)}
            return type(self._output)(**fields)

        self._decoder.forward = forward
        self._check()

    def _check(self) -> None:
        """Select how the code is called. Compare the logits of a prompt in chunks, and beside a shorter sequence, with
        those of one call. Rows alone are the second attempt. The next one passes no position ids, which begin at
        another number than 0 in RoBERTa. The last one computes complete sequences."""
        vocab, tokens = self.model.embed.vocab, min(TESTED_TOKENS, self.model.max_context)
        ids = (torch.arange(tokens, device=self.device) * 7 + 3) % vocab
        expected = self._code(ids.unsqueeze(0), use_cache=False).logits[0].float()
        expected = torch.cat((expected, expected[tokens // 3 :][:1]))
        given = self._takes_positions
        ways = [(False, True, given), (False, False, given), *[(False, False, False)][:given], (True, False, False)]
        problems, ways = [], ways[-1:] if self._recomputes else ways
        for self._recomputes, self._joins_rows, self._takes_positions in ways:
            try:
                difference = (self._tested(ids) - expected).abs().max().item()
            except _FAILURES as error:
                problems.append(f"{type(error).__name__}: {error}")
                continue
            if difference <= TOLERANCE[self.dtype] * max(1.0, expected.abs().max().item()):
                if problems:
                    how = "complete sequences in each step" if self._recomputes else "each row of a step alone"
                    LOG.warning("%s: transformers' code computes %s: %s", self._name, how, problems[0])
                return
            problems.append(f"logits differ by {difference:.3g} from those of a prompt without pages")
        raise CheckpointError(
            f"{self._name}: transformers' code does not work with paged keys and values: {problems[0]}"
        )

    def _tested(self, ids: Tensor) -> Tensor:
        """Return the logits of a sequence that is computed in three steps, and those after a third of it: the last step
        has another row, in which the sequence ends there."""
        tokens, block_tokens, groups = len(ids), self.layout.block_tokens, len(self.layout.groups)
        blocks = 2 * self.layout.blocks_of(tokens)
        size = (blocks, self.layout.layers_per_block, 2, block_tokens, self.layout.kv_heads, self.layout.head_dim)
        pages = torch.zeros(size, dtype=self.dtype, device=self.device)
        tables = torch.arange(blocks, device=self.device).view(groups, 2, -1)
        third, last = tokens // 3, tokens - 1
        # Rows of a step, the first position of each, and the number of tokens.
        steps = [(slice(0, 1), (0,), third), (slice(0, 1), (third,), last - third), (slice(1, 2), (0,), third)]
        found = []
        for rows, first, count in [*steps, (slice(0, 2), (last, third), 1)]:
            if count == 0:
                continue
            at = torch.tensor(first, device=self.device).unsqueeze(1) + torch.arange(count, device=self.device)
            own = tuple(table[rows] for table in tables)
            writes = tuple(table.gather(1, at // block_tokens) * block_tokens + at % block_tokens for table in own)
            found.append([self.logits(row) for row in self._rows(ids[at], at, pages, own, writes, first)])
        *_, (end, other) = found
        return torch.cat([*(rows[0] for rows in found[: 2 if third else 0]), end, other])

    @property
    def _name(self) -> str:
        return "" if self.model.foreign is None else self.model.foreign.architecture

    def _rows(
        self,
        ids: Tensor,
        positions: Tensor,
        pages: Tensor,
        tables: tuple[Tensor, ...],
        writes: tuple[Tensor, ...],
        first: tuple[int, ...],
    ) -> Tensor:
        """Return the hidden states of rows with equal numbers of tokens, [rows, tokens, hidden]. ids, positions: [rows,
        tokens]; the rest as in RowPages."""
        if len(ids) > 1 and not self._joins_rows:
            alone = [slice(row, row + 1) for row in range(len(ids))]
            return torch.cat([
                self._rows(ids[row], positions[row], pages, tuple(table[row] for table in tables),
                           tuple(write[row] for write in writes), first[row])
                for row in alone
            ])  # fmt: skip
        rows = RowPages(pages, self._layers, tables, writes, first, ids.shape[1])
        if self._recomputes:
            return self._recomputed(rows, ids)
        options = {} if rows.mask is None else {"attention_mask": rows.mask}
        if self._takes_positions:
            options["position_ids"] = positions
        found = self._decoder(input_ids=ids, past_key_values=paged_cache(rows), use_cache=True, **options)
        hidden: Tensor = found[0]
        return hidden

    def _recomputed(self, rows: RowPages, ids: Tensor) -> Tensor:
        """Return the hidden states of the new tokens of a single row."""
        hidden: Tensor = self._decoder(input_ids=rows.exchange_ids(ids), use_cache=False)[0]
        return hidden[:, -rows.tokens :]

    @torch.inference_mode()
    def forward(self, batch: Batch, pages: Tensor, states: LayerStates = ()) -> Tensor:
        """Return the hidden states after the final norm, [tokens, hidden]. Writes keys and values to the pages.
        states: none; recurrent states are not kept."""
        starts = batch.query_start.tolist()
        counts = [end - start for start, end in zip(starts[:-1], starts[1:], strict=True)]
        found: dict[int, Tensor] = {}
        for rows in _calls(counts, batch.first):
            count = counts[rows[0]]
            at = torch.tensor(rows, device=self.device)
            tokens = batch.query_start[at].unsqueeze(1) + torch.arange(count, device=self.device)
            made = self._rows(
                batch.ids[tokens],
                batch.positions[tokens],
                pages,
                tuple(table[at] for table in batch.tables),
                tuple(writes[tokens] for writes in batch.slot_mapping),
                tuple(batch.first[row] for row in rows),
            )
            found |= dict(zip(rows, made, strict=True))
        return torch.cat([found[row] for row in range(batch.rows)])

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits: [rows, hidden] → [rows, vocab] fp32, by the head of transformers' code."""
        if hidden.shape[0] == 0:
            return torch.empty((0, self.model.embed.vocab), device=self.device)
        self._given = hidden
        try:
            ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=self.device)
            logits: Tensor = self._code(input_ids=ids, use_cache=False).logits[0]
        finally:
            self._given = None
        return logits.float()


def _calls(counts: Sequence[int], first: Sequence[int]) -> Iterator[list[int]]:
    """Yield the rows of each call: those with equal numbers of tokens, and few enough that the copies of their keys and
    values have up to JOINED_POSITIONS positions."""
    for count in sorted(set(counts)):
        rows = [row for row, own in enumerate(counts) if own == count]
        most = max(1, JOINED_POSITIONS // (count + max(first[row] for row in rows)))
        yield from (rows[at : at + most] for at in range(0, len(rows), most))


def _first_called(code: Any) -> Any:
    """Return the module that a model's code calls first: its decoder without the head."""
    called: list[Any] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, arguments: called.append(module))
        for module in code.modules()
        if module is not code
    ]
    try:
        code(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=code.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return called[0]


def _takes(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has an argument of this name, or any."""
    given = inspect.signature(function).parameters
    return name in given or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in given.values())


def paged_cache(row: RowPages) -> Any:
    """Return transformers' cache for one call, whose layers are in the pages of its rows."""
    cache, layer = _cache_types()
    return cache(layers=[layer(row, number) for number in range(len(row.layers))])


@cache
def _cache_types() -> tuple[Any, Any]:
    """Return transformers' class of a cache and our class of a layer. The import takes seconds, so other models do
    without."""
    from transformers.cache_utils import Cache, CacheLayerMixin

    class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
        is_sliding = False

        def __init__(self, row: RowPages, number: int) -> None:
            super().__init__()
            self.row, self.number, self.seen = row, number, row.length - row.tokens

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            self.seen = self.row.length
            return self.row.exchange(self.number, key_states, value_states)

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.row.length, 0

        def get_seq_length(self) -> int:
            return self.seen

        def get_max_length(self) -> int:
            return -1

    return Cache, PagedLayer
