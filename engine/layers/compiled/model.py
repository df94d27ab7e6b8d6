"""Executor of a program on a CPU: the list of operations becomes structures for the compiled kernels, and a step is a
single call. Every operation reads and writes rows of a few buffers that all layers share."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.kv.layout import Layout
from engine.layers.batch import Batch, EncoderInputs
from engine.layers.compiled.build import CompiledOps, Region, TorchOp, regions
from engine.layers.compiled.functions import structures
from engine.layers.kv import group_pages, kv_layers
from engine.layers.loaded import LoadedWeights
from engine.layers.lora import NO_ADAPTERS, LoadedAdapters
from engine.layers.rope import Rotation
from engine.layers.states import LayerStates
from engine.layers.step import rope_positions
from engine.layers.vocabulary import Vocabulary
from engine.lowering.operations import Embed, EmbedAudio, LookUp, LookUpPositions, Recurrence
from engine.lowering.program import Op, Program
from kernels.cpu import program as cpu
from kernels.cpu.packing import Packed
from kernels.cpu.program import Program as CompiledProgram
from kernels.cpu.program import StepData, Team
from kernels.cpu.shm_collective import ShmCollective

MIN_TOKENS = 64


class CompiledModel(CompiledOps):
    vocabulary: Vocabulary
    computed_tokens = 0  # of the last step

    def __init__(
        self,
        program: Program,
        weights: LoadedWeights,
        vocabulary: Vocabulary,
        layout: Layout,
        team: Team,
        collective: ShmCollective | None = None,
        adapters: LoadedAdapters = NO_ADAPTERS,
    ) -> None:
        """collective: shared memory of the ranks, if there are several."""
        super().__init__(program, weights, kv_layers(layout), team, collective, adapters)
        self.vocabulary, self._layout = vocabulary, layout
        self.rotations = [Rotation(rope, torch.device("cpu")) for rope in program.ropes]
        self.is_recurrent = any(isinstance(op, Recurrence) for op in self.ops)
        self.logit_rows = torch.empty(0, vocabulary.num_logits)
        self._fit(MIN_TOKENS)

    def forward(self, batch: Batch, pages: Tensor, states: LayerStates = ()) -> Tensor:
        """Implement `TextModel.forward`."""
        inputs = batch.encoder_inputs if self.encoder_ops else None
        tokens = max(batch.tokens, 0 if inputs is None else len(inputs.ids))
        if tokens > self.tokens or states is not self.states:
            self.states = states
            self._fit(max(tokens, 2 * self.tokens) if tokens > self.tokens else self.tokens)
        if inputs is not None:
            self._encode(inputs, pages)
        tables, slot_mapping = batch.tables, batch.slot_mapping
        if self.whole is not None and not self.encoder_ops:
            tables, slot_mapping, pages = self.whole.placed(torch.tensor(batch.count), batch.positions)
        self._embed_sums(self.ops[0], batch.ids, batch.positions, batch.segments)
        self._look_up(batch)
        if batch.states is not None:
            self.read_states = batch.states, (batch.positions == 0).nonzero()[:, 0]
        self.media, positions = batch.media, rope_positions(batch, self.program.rope_axes)
        angles = [rotation.angles(positions, batch.rope_lengths) for rotation in self.rotations]
        first, count = torch.tensor(batch.first), torch.tensor(batch.count)
        own_pages = (self.whole is None or bool(self.encoder_ops)) and bool(self._layout.groups)
        viewed = group_pages(self._layout, pages) if own_pages else (pages,)
        parts = self.regions if self.media is None else self.media_regions
        data = {
            group: StepData(
                batch.tokens,
                ids=batch.ids,
                first=first,
                count=count,
                slots=batch.slots,
                adapters=batch.adapters,
                starts=None if batch.decoder_starts is None else torch.tensor(batch.decoder_starts),
                spans=None if self._is_causal(group) else batch.spans,
                angles=angles,
                tables=tables,
                slot_mapping=slot_mapping,
                pages=viewed[group],
            )
            for group in sorted({part.group for part in parts if isinstance(part, Region)})
        }
        self._run(parts, data, batch.tokens)
        self.computed_tokens = batch.tokens
        return self.buffers[self.program.out][: batch.tokens]

    def _is_causal(self, group: int) -> bool:
        """Return whether the layers of a group do not read spans."""
        groups = self._layout.groups
        return self.program.windowed_spans and bool(groups) and groups[group].window is None

    @property
    def kept_states(self) -> Tensor | None:
        """Implement `TextModel.kept_states`."""
        kept = self.program.kept
        return None if kept is None else self.buffers[kept][: self.computed_tokens]

    @property
    def queries(self) -> Tensor | None:
        """Implement `TextModel.queries`."""
        kept = self.program.queries
        return None if kept is None else self.buffers[kept][: self.computed_tokens]

    def routes(self, tokens: int) -> Tensor:
        """Return the selected experts of all layers in the last step, [tokens, experts]."""
        return torch.cat([self.buffers[value][:tokens].view(torch.int32) for value in self.program.routes], 1)

    def _encode(self, inputs: EncoderInputs, pages: Tensor) -> None:
        """Compute encoder inputs, and write their keys and values for cross-attention to the pages."""
        assert self.whole is not None, "an encoder has bidirectional attention"
        count = torch.tensor(inputs.count)
        tables, slot_mapping, own = self.whole.placed(count, inputs.positions)
        embed = self.encoder_ops[0]
        if isinstance(embed, EmbedAudio):
            assert inputs.spectrograms is not None, "the encoder inputs are audio"
            rows = self.weights.audio(embed.weight).embed(inputs.spectrograms, torch.float32)
            self.buffers[embed.y][: len(inputs.ids)] = rows
        else:
            self._embed_sums(embed, inputs.ids, inputs.positions, None)
        data = StepData(
            len(inputs.ids),
            ids=inputs.ids,
            first=torch.zeros_like(count),
            count=count,
            angles=[rotation.angles(inputs.positions, inputs.positions + 1) for rotation in self.rotations],
            tables=tables,
            slot_mapping=slot_mapping,
            pages=own,
        )
        self._run(self.encoder_regions, {0: data}, len(inputs.ids))
        # This program writes pages and reads none, so its block tables are placeholders.
        unread = tuple(torch.zeros((len(count), 1), dtype=torch.int64) for _ in inputs.slot_mapping)
        data = StepData(
            len(inputs.ids),
            first=torch.zeros_like(count),
            count=count,
            tables=unread,
            slot_mapping=inputs.slot_mapping,
            pages=pages,
        )
        self._run(self.cross_regions, {0: data}, len(inputs.ids))

    def _run(self, parts: Sequence[Region | TorchOp], data: Mapping[int, StepData], tokens: int) -> None:
        for part in parts:
            if isinstance(part, Region):
                self.team.run(part.program, data[part.group])
            else:
                part.compute(tokens)

    def _look_up(self, batch: Batch) -> None:
        """Look up rows that the kernels do not: of positions alone, and of tables that lack some tokens."""
        for op in self.ops:
            if isinstance(op, LookUpPositions):
                rows = self.vocabulary.position(batch.positions, torch.float32)
                self.buffers[op.y][: batch.tokens] = rows
            if isinstance(op, LookUp) and op.partial:
                rows = self.weights.token_rows(op.weight).look_up(batch.ids, torch.float32)
                self.buffers[op.y][: batch.tokens] = rows

    def _embed_sums(self, op: Op, ids: Tensor, positions: Tensor, segments: Tensor | None) -> None:
        """Compute an embedding with positions or segments, whose small tables torch adds."""
        assert isinstance(op, Embed), "a program begins with its embedding"
        if op.weight.embed.is_sum:
            rows = self.weights.tables(op.weight).summed(ids, positions, segments, torch.float32)
            self.buffers[op.y][: len(ids)] = rows

    def logits(self, hidden: Tensor) -> Tensor:
        """Implement `TextModel.logits`. The result is valid until the next call."""
        hidden = hidden.contiguous()
        if len(hidden) > len(self.logit_rows):
            # Kept: new memory for 16 rows of 152k logits costs 2 ms of page faults per step.
            self.logit_rows = torch.empty(len(hidden), self.vocabulary.num_logits)
        y = self.logit_rows[: len(hidden)]
        head = self.vocabulary.head
        assert isinstance(head, Packed), "a pooling model has no logits"
        if self.collective is not None:
            own = torch.empty(len(hidden), head.outputs)
            self.team.run(
                CompiledProgram([cpu.linear(head, self.vocabulary.bias, hidden, own)], (hidden, own)),
                StepData(len(hidden)),
            )
            return self._gather_logits(own, y, self.collective)
        ops: list[cpu.Op] = [cpu.linear(head, self.vocabulary.bias, hidden, y), *self._caps(y)]
        self.team.run(CompiledProgram(ops, (hidden, y)), StepData(len(hidden)))
        return y

    def _gather_logits(self, own: Tensor, y: Tensor, collective: ShmCollective) -> Tensor:
        """Gather the logits of all ranks into y, in pieces that fit into the shared memory."""
        rows = max(1, collective.floats // self.vocabulary.most)
        for part, whole in zip(own.split(rows), y.split(rows), strict=True):
            ops = [cpu.all_reduce(collective, part, whole, gathers=True), *self._caps(whole)]
            self.team.run(CompiledProgram(ops, (part, whole)), StepData(len(part)))
        return y

    def _caps(self, y: Tensor) -> list[cpu.Op]:
        part = self.vocabulary.out
        assert part is not None, "only models with a head have logits"
        if part.scale == 1.0 and part.softcap is None:
            return []
        cap = part.softcap or 0.0
        return [cpu.Cap(x=y.data_ptr(), stride=y.stride(0), size=y.shape[1], scale=part.scale, cap=cap)]

    def reserve(self, tokens: int, rows: int) -> None:
        """Allocate buffers for the largest step once. Their pages are not touched before they are used."""
        self._fit(max(tokens, self.tokens))
        if self.vocabulary.head is not None:
            self.logit_rows = torch.empty(rows, self.vocabulary.num_logits)
        if self.whole is not None:
            self.whole.reserve(tokens, rows)

    @property
    def buffer_bytes(self) -> int:
        """Size of the buffers of a step, without logits."""
        return sum(room.nbytes for room in self.buffers.tensors.values()) + (self.whole.nbytes if self.whole else 0)

    def _fit(self, tokens: int) -> None:
        """Allocate buffers for this many tokens, and rebuild the operations that point to them. Old buffers are freed
        first."""
        self.tokens = tokens
        self.regions: list[Region | TorchOp] = []
        self.encoder_regions: list[Region | TorchOp] = []
        self.cross_regions: list[Region | TorchOp] = []
        self.media_regions: list[Region | TorchOp] = []  # of a step with media
        self.buffers.make(tokens)
        if self.is_recurrent and not self.states:
            return  # the first step brings the states
        kept = tuple(self.buffers.tensors.values())
        ops, encoder_ops, cross_ops = (
            [made for op in group for made in structures(op, self)]
            for group in (self.ops, self.encoder_ops, self.cross_ops)
        )
        without_media = [op for op in ops if not (isinstance(op, TorchOp) and op.media)]
        self.regions = regions(without_media, kept, self._layout)
        self.media_regions = self.regions if len(without_media) == len(ops) else regions(ops, kept, self._layout)
        self.encoder_regions, self.cross_regions = regions(encoder_ops, kept), regions(cross_ops, kept)
