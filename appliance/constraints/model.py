"""Rules about the checkpoint alone, which no key of the manifest can satisfy."""

from appliance.constraints.rule import Rule

RULES = (
    Rule(
        name="projection-norm",
        keys=(),
        facts=("model.normed_together",),
        holds=lambda view: not view.facts.model.normed_together,
        text="only root mean square norms span all heads of a projection",
        because=lambda facts: (
            "the model declares a layer norm over all heads of a projection, and only root mean square norms span them"
        ),
    ),
    Rule(
        name="equal-pages",
        keys=(),
        facts=("model.pages",),
        holds=lambda view: len(view.facts.model.pages) == 1,
        text="all layers with attention have as many KV heads, of the same size",
        because=lambda facts: (
            "all layers with attention must have as many KV heads, of the same size, and the model has "
            + (" and ".join(f"{count} of {size}" for count, size in facts.model.pages) or "none")
        ),
    ),
)
