"""Rules about the checkpoint alone, which no key of the manifest can satisfy."""

from appliance.constraints.rule import Rule

RULES = (
    Rule(
        name="projection-norm",
        keys=(),
        facts=("model.normed_together",),
        holds=lambda view: not view.facts.model.normed_together,
        text="only RMS norms can span all heads of a projection",
        because=lambda facts: (
            "the model has a layer norm over all heads of a projection, but only RMS norms are supported there"
        ),
    ),
    Rule(
        name="cross-alibi",
        keys=(),
        facts=("model.cross_alibi",),
        holds=lambda view: not view.facts.model.cross_alibi,
        text="cross-attention cannot have ALiBi",
        because=lambda facts: "the model has ALiBi in cross-attention, but only self-attention supports it",
    ),
    Rule(
        name="causal-chunks",
        keys=(),
        facts=("model.wrong_chunks",),
        holds=lambda view: not view.facts.model.wrong_chunks,
        text="attention in chunks or with scaled queries is causal self-attention, and chunks exclude a window",
        because=lambda facts: (
            "the model has chunks or scaled queries in bidirectional attention or cross-attention, or chunks with a "
            "window; only causal self-attention supports them, and chunks only without a window"
        ),
    ),
)
