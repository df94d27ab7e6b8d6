"""Where there is no GPU, kernels run in Triton's interpreter, which must be said before they are imported.

What hypothesis tries is the same in every run; `pytest --hypothesis-profile=default` looks for new examples.
"""

import os

import torch
from hypothesis import settings

settings.register_profile("same", derandomize=True)
settings.load_profile("same")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
