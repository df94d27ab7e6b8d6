"""Rules about the checkpoint alone: what no choice of the manifest can mend."""

from appliance.rules.rule import Rule

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
)
