"""Rules for weights: which weights can be quantized, and which kernels multiply by them."""

from appliance.constraints.rule import TRITON, Rule, View, is_compiled

ON_CPU = ("int8", "int4")  # types that compiled kernels multiply by after quantization at load time


def _roundable(view: View) -> bool:
    model = view.facts.model
    others = model.quantizable and model.restored > 0 and view.weights != "fp8"
    return view.weights == "stored" or not model.quantized or others


RULES = (
    Rule(
        name="rounded",
        keys=("weights", "kernels"),
        holds=lambda view: view.weights not in ON_CPU or is_compiled(view.kernels),
        text="only compiled CPU kernels support weights that are quantized to int8 or int4",
    ),
    Rule(
        name="rounded-fp8",
        keys=("weights", "kernels"),
        holds=lambda view: view.weights != "fp8" or view.kernels == TRITON,
        text="only Triton kernels support weights that are quantized to fp8",
    ),
    Rule(
        name="rounded-experts",
        keys=("weights",),
        facts=("model.experts",),
        holds=lambda view: view.weights != "fp8" or not view.facts.model.experts,
        text="models with experts are not quantized to fp8",
        because=lambda facts: "the model has experts, which Triton kernels multiply in the type of the activations",
        chosen=True,
    ),
    Rule(
        name="rounded-twice",
        keys=("weights",),
        facts=("model.quantized", "model.quantizable", "model.restored"),
        holds=_roundable,
        text="a quantized checkpoint is not quantized again, except GGUF weights of other types",
        because=lambda facts: (
            f"the checkpoint is already quantized ({facts.model.quantized}); quantize the original checkpoint instead"
        ),
        chosen=True,
    ),
)
