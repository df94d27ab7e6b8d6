"""Reasoning formats of model families. Formats with more specific markers come before less specific ones."""

from dataclasses import replace

from appliance.output_formats.declaration import Reasoning

_SWITCHES = ("thinking", "enable_thinking")

# Explicit tags, or a prompt that opens them: Qwen 3, Kimi K2, Olmo 3, Nemotron and most others.
THINK = Reasoning("think", start="<think>", end="</think>", recognised_by=("</think>",))
QWEN3 = replace(THINK, name="qwen3", recognised_by=())
NEMOTRON = replace(QWEN3, name="nemotron")
OLMO3 = replace(QWEN3, name="olmo3")
KIMI_K2 = replace(QWEN3, name="kimi_k2", switches=_SWITCHES)

# Models that may omit the start marker: everything is reasoning until the end marker.
DEEPSEEK_R1 = replace(QWEN3, name="deepseek_r1", implicit=True)
DEEPSEEK_V3 = replace(DEEPSEEK_R1, name="deepseek_v3", switches=_SWITCHES, default=False)
HOLO2 = replace(DEEPSEEK_R1, name="holo2", switches=_SWITCHES)
GLM45 = replace(HOLO2, name="glm45", recognised_by=("</think>", "<arg_key>"))
MINIMAX_M2 = replace(DEEPSEEK_R1, name="minimax_m2", recognised_by=("</think>", "<minimax:tool_call>"))
STEP3 = replace(DEEPSEEK_R1, name="step3", recognised_by=("</think>", "steptml:"), model_types=("step3",))

# Answers in separate markers.
ERNIE45 = replace(THINK, name="ernie45", answer=("<response>", "</response>"), recognised_by=("</think>", "<response>"))
HUNYUAN_A13B = replace(
    THINK, name="hunyuan_a13b", answer=("<answer>", "</answer>"), recognised_by=("</think>", "<answer>")
)
COHERE = Reasoning(
    "cohere",
    start="<|START_THINKING|>",
    end="<|END_THINKING|>",
    answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    recognised_by=("<|START_THINKING|>",),
)

# Other markers.
MISTRAL = Reasoning("mistral", start="[THINK]", end="[/THINK]", recognised_by=("[THINK]",))
SEED_OSS = Reasoning("seed_oss", start="<seed:think>", end="</seed:think>", recognised_by=("<seed:think>",))
GEMMA4 = Reasoning("gemma4", start="<|channel>thought\n", end="<channel|>", recognised_by=("<|channel>",))
APERTUS = Reasoning(
    "apertus", start="<|inner_prefix|>", end="<|inner_suffix|>", recognised_by=("<|inner_prefix|>", "<|inner_suffix|>")
)
HY_V4 = Reasoning(
    "hy_v4", start="<think:opensource>", end="</think:opensource>", recognised_by=("</think:opensource>",)
)
K2_HORIZON = Reasoning(
    "k2_horizon",
    start="<ifm|think>",
    end="</ifm|think>",
    others=(("<ifm|think_fast>", "</ifm|think_fast>"), ("<ifm|think_faster>", "</ifm|think_faster>")),
    recognised_by=("<ifm|think",),
)
PLAMO3 = Reasoning(
    "plamo3",
    start="<|plamo:begin_think:plamo|>",
    end="<|plamo:end_think:plamo|>",
    recognised_by=("<|plamo:begin_", "think"),
)
# Each part of a reply has its own tags; the prompt may have opened those of the answer.
KIMI_K3 = Reasoning(
    "kimi_k3",
    start="<|open|>think<|sep|>",
    end="<|close|>think<|sep|>",
    dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    recognised_by=("<|open|>", "<|close|>", "<|sep|>"),
)
HY_V3 = replace(QWEN3, name="hy_v3", recognised_by=("</think>", "<tool_sep>"))
MINIMAX_M3 = Reasoning("minimax_m3", start="<mm:think>", end="</mm:think>", recognised_by=("</mm:think>",))
GRANITE = Reasoning(
    "granite",
    start="Here is my thought process:",
    end="Here is my response:",
    trim="\n ",
    others=(("Here's my thought process:", "Here's my response:"),),
    recognised_by=("Here is my thought process:",),
)

REASONINGS = (
    *(COHERE, SEED_OSS, MISTRAL, GEMMA4, APERTUS, HY_V4, K2_HORIZON, PLAMO3, KIMI_K3, MINIMAX_M3, HY_V3),
    *(GRANITE, HUNYUAN_A13B, ERNIE45, GLM45, MINIMAX_M2, STEP3, THINK),
    *(QWEN3, DEEPSEEK_R1, DEEPSEEK_V3, HOLO2, KIMI_K2, NEMOTRON, OLMO3),
)
