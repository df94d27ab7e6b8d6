"""Components of a draft model or prediction head, before and after it is loaded."""

from dataclasses import dataclass

import torch

from engine.api.config import EngineConfig
from engine.kv.layout import Layout, layout, page_sizes, shared_group
from engine.layers.model import TextModel, make_pages
from engine.models.checkpoint import Checkpoint
from engine.models.draft import with_drafts
from engine.sampling.noise import Noise
from engine.worker.drafting import Drafter, DraftModel, FusedDraft, Passes, PredictionHead
from engine.worker.media import MediaStore
from engine.worker.table import RequestTable


@dataclass(frozen=True)
class DraftParts:
    checkpoint: Checkpoint
    form: Layout  # of its pages
    page_dtype: torch.dtype
    group: int  # number of the target's block table that it uses
    is_head: bool  # of the target: it reads the target's hidden states

    def drafter(self, model: TextModel, table: RequestTable, blocks: int, media: MediaStore | None) -> Drafter:
        """Allocate the pages of the loaded model, for as many blocks as the target has. media: of the target."""
        vocab = table.columns.vocab
        passes = Passes(
            model if model.target.executor != "triton" else FusedDraft(model),
            make_pages(self.form, blocks * len(self.form.groups), self.page_dtype, model.device),
            table,
            Noise(vocab, model.device, model.target.team),
            group=self.group,
            vocab=vocab,
            ahead=1 if self.is_head else 0,
        )
        if not self.is_head:
            return DraftModel(passes)
        return PredictionHead(passes, media if self.checkpoint.model.reads_media else None)


def read_draft_parts(
    config: EngineConfig, target: Checkpoint, form: Layout, page_dtype: torch.dtype
) -> tuple[Checkpoint, DraftParts | None]:
    """Read the draft model or head of the configuration, if it has one. Return the target with the layers that a head
    reads. Raises CheckpointError or ConfigError if it does not suit the target, whose pages have the layout `form`."""
    speculation = config.speculation
    if not speculation.has_model:
        return target, None
    target = with_drafts(target, speculation.method, speculation.model, config.model.max_context)
    checkpoint = target.draft
    assert checkpoint is not None, "the method has a model"
    own = layout(
        checkpoint.model,
        block_tokens=config.cache.block_tokens,
        **page_sizes(config.quantization.kv_cache),
    )
    group = shared_group(form.groups, own.groups)
    return target, DraftParts(checkpoint, own, page_dtype, group, speculation.method != "draft")
