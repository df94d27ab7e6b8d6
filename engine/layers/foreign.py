"""A decoder computed by the modelling code of transformers, with keys and values in Slipway's pages.

Each row of a step is one call of that code, as in transformers' own generation: the call gets a cache whose layers
write the new keys and values to the pages of the row and return all of them. Masks, positions and everything else are
transformers'. Rows do not share matrix products, so several rows take several times as long as one.
"""

from collections.abc import Callable
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
from engine.models.parts import Model

TESTED_TOKENS = 12  # tokens of the comparison with transformers' own cache when a model is loaded
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}  # of these logits, relative to the largest


@dataclass
class RowPages:
    """Pages of one row of a step."""

    pages: Tensor  # [blocks, layers_per_block, 2, block_tokens, kv_heads, head_dim]
    layers: tuple[KVLayer, ...]
    tables: tuple[Tensor, ...]  # per group: [blocks] int64
    writes: tuple[Tensor, ...]  # per group: [tokens] int64, block · block_tokens + offset of each new token
    first: int  # position of the first new token

    def exchange(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of the new tokens, each [1, kv_heads, tokens, width]. Return the keys and values of
        all tokens so far with the same layout. Their width may be smaller than the width of the pages."""
        place = self.layers[layer]
        block_tokens, end = self.pages.shape[3], self.first + keys.shape[2]
        block, offset = self.writes[place.group] // block_tokens, self.writes[place.group] % block_tokens
        read = self.tables[place.group][: -(-end // block_tokens)]
        found = []
        for kind, new in enumerate((keys, values)):
            heads, width = new.shape[1], new.shape[3]
            self.pages[block, place.layer, kind, offset, :heads, :width] = new[0].transpose(0, 1).to(self.pages.dtype)
            stored = self.pages[read, place.layer, kind].flatten(0, 1)[:end, :heads, :width]
            found.append(stored.transpose(0, 1).unsqueeze(0).to(new.dtype))
        return found[0], found[1]


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
        self._code: Any = None

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
        self._decoder = getattr(self._code, self._code.base_model_prefix)
        if self.compiler is not None:
            self.compiler.compile_modules(self._decoder)
        compute = self._decoder.forward

        def forward(*arguments: Any, **options: Any) -> Any:
            from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

            if self._given is None:
                return compute(*arguments, **options)
            return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self._given.unsqueeze(0))

        self._decoder.forward = forward
        self._check()

    def _check(self) -> None:
        """Compare the logits of a few tokens, in chunks through pages, with those of transformers alone."""
        vocab, tokens = self.model.embed.vocab, min(TESTED_TOKENS, self.model.max_context)
        ids = (torch.arange(tokens, device=self.device) * 7 + 3) % vocab
        expected = self._code(ids.unsqueeze(0), use_cache=False).logits[0].float()
        blocks = self.layout.blocks_of(tokens)
        each = blocks // len(self.layout.groups)
        size = (blocks, self.layout.layers_per_block, 2, self.layout.block_tokens)
        pages = torch.zeros(*size, self.layout.kv_heads, self.layout.head_dim, dtype=self.dtype, device=self.device)
        tables = tuple(torch.arange(blocks, device=self.device).view(-1, each))
        found = []
        try:
            for first, end in ((0, tokens - 2), (tokens - 2, tokens - 1), (tokens - 1, tokens)):
                if end > first:
                    at = torch.arange(first, end, device=self.device)
                    writes = tuple(
                        table[at // self.layout.block_tokens] * self.layout.block_tokens + at % self.layout.block_tokens
                        for table in tables
                    )
                    row = RowPages(pages, self._layers, tables, writes, first)
                    found.append(self.logits(self._row(ids[first:end], at, row)))
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError) as error:
            raise self._unsupported(f"{type(error).__name__}: {error}") from error
        difference = (torch.cat(found) - expected).abs().max().item()
        if not difference <= TOLERANCE[self.dtype] * max(1.0, expected.abs().max().item()):
            raise self._unsupported(f"logits differ by {difference:.3g} from those of a prompt without pages")

    def _unsupported(self, why: str) -> CheckpointError:
        name = "" if self.model.foreign is None else self.model.foreign.architecture
        return CheckpointError(f"{name}: transformers' code does not work with paged keys and values: {why}")

    def _row(self, ids: Tensor, positions: Tensor, row: RowPages) -> Tensor:
        """Return the hidden states of one row, [tokens, hidden]."""
        found = self._decoder(
            input_ids=ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            past_key_values=paged_cache(row),
            use_cache=True,
        )
        hidden: Tensor = found[0][0]
        return hidden

    @torch.inference_mode()
    def forward(self, batch: Batch, pages: Tensor, states: LayerStates = ()) -> Tensor:
        """Return the hidden states after the final norm, [tokens, hidden]. Writes keys and values to the pages.
        states: none, because recurrent models are not served in this way."""
        starts = batch.query_start.tolist()
        found = []
        for number, first in enumerate(batch.first):
            tokens = slice(starts[number], starts[number + 1])
            row = RowPages(
                pages,
                self._layers,
                tuple(table[number] for table in batch.tables),
                tuple(writes[tokens] for writes in batch.slot_mapping),
                first,
            )
            found.append(self._row(batch.ids[tokens], batch.positions[tokens], row))
        return torch.cat(found)

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


def paged_cache(row: RowPages) -> Any:
    """Return transformers' cache for one call, whose layers are in the pages of a row."""
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
            self.row, self.number, self.seen = row, number, row.first

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            self.seen = self.row.first + key_states.shape[2]
            return self.row.exchange(self.number, key_states, value_states)

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.row.first + int(query_length), 0

        def get_seq_length(self) -> int:
            return self.seen

        def get_max_length(self) -> int:
            return -1

    return Cache, PagedLayer
