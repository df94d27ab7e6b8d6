"""Rules for speculative decoding."""

from appliance.constraints.rule import TRITON, Facts, Rule

OFF, MODELS = "off", ("draft", "mtp")


def _why(facts: Facts) -> str:
    return (
        f"the model has {facts.model.stateful} layers with recurrent state, which cannot be rolled back to before a "
        "rejected draft"
    )


RULES = (
    Rule(
        name="speculation-recurrent",
        keys=("speculation",),
        facts=("model.stateful",),
        holds=lambda view: view.speculation == OFF or not view.facts.model.stateful,
        text="models with recurrent layers have no speculative decoding, because their state cannot be rolled back",
        because=_why,
    ),
    Rule(
        name="speculation-pools",
        keys=("speculation",),
        facts=("model.pools",),
        holds=lambda view: view.speculation == OFF or not view.facts.model.pools,
        text="pooling models have no speculative decoding, because they generate no tokens",
    ),
    Rule(
        name="speculation-draft",
        keys=("kernels", "speculation"),
        holds=lambda view: view.speculation not in MODELS or view.kernels != TRITON,
        text="Triton kernels do not support draft models and prediction heads: set hardware.kernels to torch, or "
        "hardware.device to cpu",
    ),
)
