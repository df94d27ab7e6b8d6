"""Rules about weights: what may be rounded, and what multiplies by it."""

from appliance.rules.rule import Rule, View, is_compiled


def _roundable(view: View) -> bool:
    model = view.facts.model
    return view.weights == "stored" or not model.quantized or (model.method == "gguf" and model.restored > 0)


RULES = (
    Rule(
        name="rounded",
        keys=("weights", "kernels"),
        holds=lambda view: view.weights == "stored" or is_compiled(view.kernels),
        text="only compiled kernels of a CPU multiply by weights that are rounded at load",
    ),
    Rule(
        name="rounded-twice",
        keys=("weights",),
        facts=("model.quantized", "model.method", "model.restored"),
        holds=_roundable,
        text="a checkpoint that is quantized already is not rounded again, but for what a GGUF file has in other types",
        because=lambda facts: (
            f"the checkpoint is quantized already, in {facts.model.quantized}: round the one that it was made from"
        ),
        chosen=True,
    ),
)
