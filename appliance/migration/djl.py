"""Options of DJL Serving and Amazon's LMI containers: `option.*` in serving.properties, or variables OPTION_*. Options
of vLLM are passed on to it, so its rules apply, too. Source: the LMI configuration reference."""

from appliance.migration.rules import Key, Keys, Missing, Rule, Server, Unneeded
from appliance.migration.values import source
from appliance.migration.vllm import DTYPES, QUANTIZE, VLLM

_ENGINE = "Slipway has its own engine"
_RULES: dict[str, Rule] = {
    "model-id": Keys(("model.source",), source),
    "engine": Unneeded(_ENGINE),
    "entryPoint": Unneeded(_ENGINE),
    "rolling-batch": Unneeded(_ENGINE),
    "mpi-mode": Unneeded(_ENGINE),
    "async-mode": Unneeded(_ENGINE),
    "s3url": Keys(("model.source",), source),
    "dtype": Key("model.dtype", DTYPES),
    "quantize": QUANTIZE,
    "tensor-parallel-degree": Key("parallelism.tensor", lambda text: "auto" if text == "max" else int(text)),
    "pipeline-parallel-degree": Missing("models are divided by tensor parallelism only", neutral=("1",)),
    "max-rolling-batch-size": Key("engine.scheduling.max_running"),
    "max-rolling-batch-prefill-tokens": Key("engine.scheduling.max_step_tokens"),
    "job-queue-size": Key("limits.max_waiting"),
    "batch-size": Missing("requests join the next step; max_rolling_batch_size is the limit", neutral=("1",)),
    "max-batch-delay": Missing("requests join the next step", neutral=("0",)),
    "load-on-devices": Missing("set CUDA_VISIBLE_DEVICES", neutral=("*",)),
    "minWorkers": Missing("set parallelism.data", neutral=("1",)),
    "maxWorkers": Missing("set parallelism.data", neutral=("1",)),
    "model-loading-timeout": Key("health.startup_budget"),
    "parallel-loading": Unneeded("weights are mapped from the files"),
    "output-formatter": Missing("replies have the formats of OpenAI's and Anthropic's APIs"),
    "predict-timeout": Missing("requests have no time limit; clients can send a deadline"),
    "enable-streaming": Unneeded("a request selects streaming"),
    "task": Missing("model.task detects the task", neutral=("text-generation",)),
}
DJL = Server(
    "DJL Serving",
    "DJL Serving",
    8080,
    _RULES,
    images=("djl-serving", "djl-inference", "djl-lmi"),
    env_prefix="OPTION_",
    base=VLLM,
)
