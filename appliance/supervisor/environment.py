"""Environment of engines: only variables that the engine, its libraries or the loader read.

An engine runs code that a checkpoint asks for, so it gets no credentials: no API keys, no HF_TOKEN, no cloud keys.
"""

from collections.abc import Mapping

from appliance.supervisor.exec_program import select_variables

ENGINE_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TZ", "LANG", "LANGUAGE", "LC_*"),
    *("TMPDIR", "TEMP", "TMP", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_*", "PYTHON*", "VIRTUAL_ENV"),
    *("CUDA_*", "NVIDIA_*", "NCCL_*", "GLOO_*", "CUBLAS_*", "CUDNN_*"),
    *("HIP_*", "HSA_*", "ROCR_*", "ROCM_*", "RCCL_*", "ROCBLAS_*", "HIPBLASLT_*", "MIOPEN_*"),
    *("TORCH_*", "TORCHINDUCTOR_*", "PYTORCH_*", "TRITON_*", "CC", "CXX"),
    *("OMP_*", "MKL_*", "OPENBLAS_*", "GOMP_*", "KMP_*", "DNNL_*", "ONEDNN_*", "ATEN_*"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM"),
)


def engine_environment(environment: Mapping[str, str], *names: str) -> dict[str, str]:
    """Return the variables for an engine from this environment; `names` are patterns of further variables."""
    return select_variables(environment, (*ENGINE_VARIABLES, *names))
