"""fbgemm_fp8: fp8 (e4m3) with a scale for each output. The upper bound of the activations' scales is not used.

Source: transformers quantizers/quantizer_fbgemm_fp8.py.
"""

from dataclasses import dataclass

from engine.formats.format import SCALES, Method, Settings, Stored
from engine.formats.fp8 import Fp8
from engine.formats.native import E4M3


@dataclass(frozen=True)
class Fbgemm(Fp8):
    def tensors(self, rows: int, inputs: int) -> dict[str, Stored]:
        return super().tensors(rows, inputs) | {"input_scale_ub": Stored((1,), SCALES, optional=True)}


def _format(settings: Settings, group: str) -> Fbgemm:
    return Fbgemm(E4M3("channel", "dynamic"))


METHOD = Method(
    name="fbgemm_fp8",
    format=_format,
    table=(("fbgemm_fp8", "scales per output, dynamic activations", "fp8"),),
)
