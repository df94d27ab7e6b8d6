"""Rules for weights: which weights can be quantized, and which kernels multiply by them."""

from appliance.constraints.rule import TRITON, Rule, View, is_compiled
from engine.formats.load_time import load_formats

INTEGERS = load_formats("compiled")  # formats of weights that are quantized while they are loaded
ON_GPU = tuple(name for name in load_formats("triton") if name not in INTEGERS)  # only Triton has these
ON_CPU = tuple(name for name in INTEGERS if name not in load_formats("triton"))  # only compiled kernels have these
_ON_BOTH = tuple(name for name in INTEGERS if name not in ON_CPU)


def _roundable(view: View) -> bool:
    model = view.facts.model
    others = model.quantizable and model.restored > 0 and view.weights not in ON_GPU
    return view.weights == "stored" or not model.quantized or others


RULES = (
    Rule(
        name="rounded",
        keys=("weights", "kernels"),
        holds=lambda view: view.weights not in _ON_BOTH or view.kernels == TRITON or is_compiled(view.kernels),
        text=f"only compiled CPU kernels and Triton kernels support weights that are quantized to "
        f"{' or '.join(_ON_BOTH)}",
    ),
    Rule(
        name="rounded-blocks",
        keys=("weights", "kernels"),
        holds=lambda view: view.weights not in ON_CPU or is_compiled(view.kernels),
        text=f"only compiled CPU kernels support weights that are quantized to {' or '.join(ON_CPU)}",
    ),
    Rule(
        name="rounded-fp8",
        keys=("weights", "kernels"),
        holds=lambda view: view.weights not in ON_GPU or view.kernels == TRITON,
        text=f"only Triton kernels support weights that are quantized to {' or '.join(ON_GPU)}",
    ),
    Rule(
        name="rounded-twice",
        keys=("weights",),
        facts=("model.quantized", "model.quantizable", "model.restored"),
        holds=_roundable,
        text="a quantized checkpoint is not quantized again, except weights in formats that no kernel multiplies by",
        because=lambda facts: (
            f"the checkpoint is already quantized ({facts.model.quantized}); quantize the original checkpoint instead"
        ),
        chosen=True,
    ),
)
