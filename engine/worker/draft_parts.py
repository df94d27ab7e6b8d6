"""Components of a draft model or prediction head, before and after it is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.api.config import EngineConfig
from engine.kv.layout import Layout, layout, page_sizes, shared_group
from engine.layers.model import TextModel, make_pages
from engine.models.checkpoint import Checkpoint
from engine.models.draft import with_drafts
from engine.sampling.noise import Noise
from engine.worker.drafting import Drafter, DraftModel, FusedDraft, Passes, PredictionHeads
from engine.worker.media import MediaStore
from engine.worker.table import RequestTable


@dataclass(frozen=True)
class DraftParts:
    """A draft model, or heads of the target."""

    checkpoints: tuple[Checkpoint, ...]
    forms: tuple[Layout, ...]  # of their pages
    page_dtype: torch.dtype
    group: int  # number of the target's block table that they use
    is_head: bool  # of the target: it reads the target's hidden states
    of_target: bool  # later heads read the hidden states of the target, too

    def drafter(
        self, models: Sequence[TextModel], table: RequestTable, blocks: int, media: MediaStore | None
    ) -> Drafter:
        """Allocate the pages of the loaded models, for as many blocks as the target has. media: of the target."""
        passes = [self._passes(number, model, table, blocks) for number, model in enumerate(models)]
        if not self.is_head:
            return DraftModel(passes[0])
        reads_media = self.checkpoints[0].model.reads_media
        return PredictionHeads(passes, media if reads_media else None, of_target=self.of_target)

    def _passes(self, number: int, model: TextModel, table: RequestTable, blocks: int) -> Passes:
        vocab, form = table.columns.vocab, self.forms[number]
        return Passes(
            model if model.target.executor != "triton" else FusedDraft(model),
            make_pages(form, blocks * len(form.groups), self.page_dtype, model.device),
            table,
            Noise(vocab, model.device, model.target.team),
            group=self.group,
            vocab=vocab,
            ahead=1 + number if self.is_head else 0,
        )


def read_draft_parts(
    config: EngineConfig, target: Checkpoint, form: Layout, page_dtype: torch.dtype
) -> tuple[Checkpoint, DraftParts | None]:
    """Read the draft model or heads of the configuration, if it has some. Return the target with the layers that a head
    reads. Raises CheckpointError or ConfigError if it does not suit the target, whose pages have the layout `form`."""
    speculation = config.speculation
    if not speculation.has_model:
        return target, None
    target = with_drafts(
        target, speculation.method, speculation.model, config.model.max_context, tokens=speculation.tokens
    )
    predictor = target.model.predictor if speculation.method == "mtp" else None
    pages = page_sizes(config.quantization.kv_cache)
    forms = tuple(layout(one.model, block_tokens=config.cache.block_tokens, **pages) for one in target.drafts)
    return target, DraftParts(
        target.drafts,
        forms,
        page_dtype,
        shared_group(form.groups, [group for own in forms for group in own.groups]),
        is_head=speculation.method != "draft",
        of_target=predictor is not None and predictor.further_states == "model",
    )
