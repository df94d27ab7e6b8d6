"""Tool-call formats of model families. Formats with more specific markers come before less specific ones."""

from dataclasses import replace

from appliance.output_formats.declaration import Calls
from appliance.output_formats.json_call import JsonCall
from appliance.output_formats.keyed_json import KeyedJson
from appliance.output_formats.loose import Syntax
from appliance.output_formats.loose_call import LooseCall
from appliance.output_formats.named_json import NamedJson
from appliance.output_formats.tag_families import (
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    DOTS,
    GLM45,
    GLM47,
    HY_V3,
    HY_V3_OPENSOURCE,
    HY_V4,
    K2_HORIZON,
    KIMI_K3,
    MIMO,
    MINICPM5,
    MINIMAX_M2,
    MINIMAX_M3,
    QWEN3_CODER,
    SEED_OSS,
    STEP3,
)

_PARAMETERS_FIRST = ("parameters", "arguments")

# Hermes 2 Pro, Qwen 2.5 and Qwen 3, Granite 4, Holo 2: one JSON object between tags, repeated.
HERMES = Calls(
    "hermes",
    JsonCall(),
    begin="<tool_call>\n",
    end="\n</tool_call>",
    recognised_by=("<tool_call>", '"arguments"', '"name"'),
)
ERNIE45 = replace(HERMES, name="ernie45", recognised_by=(*HERMES.recognised_by, "<response>"))
LONGCAT = Calls(
    "longcat",
    JsonCall(),
    begin="<longcat_tool_call>\n",
    end="\n</longcat_tool_call>",
    recognised_by=("<longcat_tool_call>",),
)

# A name, then its arguments as JSON.
_DEEPSEEK = Calls(
    "deepseek_v31",
    NamedJson(between="<｜tool▁sep｜>"),
    open="<｜tool▁calls▁begin｜>",
    close="<｜tool▁calls▁end｜>",
    begin="<｜tool▁call▁begin｜>",
    end="<｜tool▁call▁end｜>",
    separator="",
    recognised_by=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
)
DEEPSEEK_V31 = _DEEPSEEK
DEEPSEEK_V3 = replace(
    _DEEPSEEK,
    name="deepseek_v3",
    body=NamedJson(before="function<｜tool▁sep｜>", between="\n```json\n", after="\n```"),
    separator="\n",
    recognised_by=(*_DEEPSEEK.recognised_by, "```json"),
)
KIMI_K2 = Calls(
    "kimi_k2",
    NamedJson(between="<|tool_call_argument_begin|>", prefix="functions.", numbered=True),
    open="<|tool_calls_section_begin|>",
    close="<|tool_calls_section_end|>",
    begin="<|tool_call_begin|>",
    end="<|tool_call_end|>",
    separator="",
    ids="functions",
    recognised_by=("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
)
PLAMO3 = Calls(
    "plamo3",
    NamedJson(
        before="<|plamo:begin_tool_name:plamo|>",
        between="<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>",
        after="<|plamo:end_tool_arguments:plamo|>",
        others=("<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:msg|>",),
    ),
    open="<|plamo:begin_tool_requests:plamo|>",
    close="<|plamo:end_tool_requests:plamo|>",
    begin="<|plamo:begin_tool_request:plamo|>",
    end="<|plamo:end_tool_request:plamo|>",
    separator="",
    recognised_by=("<|plamo:begin_", "tool_requests"),
)
MISTRAL = Calls(
    "mistral",
    NamedJson(between="[ARGS]", id_mark="[CALL_ID]"),
    begin="[TOOL_CALLS]",
    separator="",
    ids="short",
    recognised_by=("[TOOL_CALLS]", "[ARGS]"),
)

# Lists of JSON objects.
MISTRAL_LIST = Calls(
    "mistral_list", JsonCall(), open="[TOOL_CALLS] ", listed=True, ids="short", recognised_by=("[TOOL_CALLS]",)
)
GRANITE = Calls(
    "granite",
    JsonCall(),
    open="<|tool_call|>",
    listed=True,
    also=(("<tool_call>", ""),),
    recognised_by=("<|tool_call|>", "<|start_of_role|>"),
)
GRANITE_20B = Calls(
    "granite_20b_fc", JsonCall(), begin="<function_call> ", separator=" ", recognised_by=("<function_call>",)
)
HUNYUAN_A13B = Calls(
    "hunyuan_a13b",
    JsonCall(),
    open="<tool_calls>",
    close="</tool_calls>",
    listed=True,
    recognised_by=("<tool_calls>", "<answer>"),
)
JAMBA = replace(HUNYUAN_A13B, name="jamba", recognised_by=("<tool_calls>", "</tool_calls>"))
NEMOTRON = replace(JAMBA, name="nemotron", open="<TOOLCALL>", close="</TOOLCALL>", recognised_by=("<TOOLCALL>",))
COHERE = Calls(
    "cohere",
    JsonCall("tool_name", ("parameters",)),
    open="<|START_ACTION|>",
    close="<|END_ACTION|>",
    listed=True,
    recognised_by=("<|START_ACTION|>",),
)
APERTUS = Calls(
    "apertus",
    KeyedJson(),
    open="<|tools_prefix|>",
    close="<|tools_suffix|>",
    listed=True,
    recognised_by=("<|tools_prefix|>", "<|tools_suffix|>"),
)
GIGACHAT3 = Calls(
    "gigachat3",
    JsonCall(),
    begin="function call<|role_sep|>\n",
    also=(("<|function_call|>", ""),),
    recognised_by=("function call", "<|role_sep|>"),
)
GIGACHAT31 = replace(
    GIGACHAT3,
    name="gigachat31",
    begin="<|function_call|>",
    also=(("function call<|role_sep|>", ""),),
    recognised_by=("<|function_call|>", "<|role_sep|>"),
)
PHI4_MINI = Calls(
    "phi4_mini",
    JsonCall(),
    open="functools[",
    close="]",
    separator=", ",
    recognised_by=("<|tool|>",),
    model_types=("phi3", "phi4"),
)
XLAM = Calls(
    "xlam",
    JsonCall(waits=True),
    listed=True,
    bare=True,
    also=(("```json", "```"), ("[TOOL_CALLS]", ""), ("<tool_call>", "</tool_call>")),
)
INTERNLM = Calls(
    "internlm",
    JsonCall(argument_keys=_PARAMETERS_FIRST),
    begin="<|action_start|><|plugin|>\n",
    end="<|action_end|>",
    recognised_by=("<|action_start|>", "<|plugin|>"),
)
LLAMA3_JSON = Calls(
    "llama3_json",
    JsonCall(argument_keys=_PARAMETERS_FIRST, waits=True),
    open="<|python_tag|>",
    separator="; ",
    bare=True,
    recognised_by=('"name": function name, "parameters":',),
)

# Calls in Python syntax, and Gemma's syntax.
LLAMA4_PYTHONIC = Calls(
    "llama4_pythonic",
    LooseCall(),
    open="<|python_start|>",
    close="<|python_end|>",
    listed=True,
    bare=True,
    recognised_by=("func_name1(", "<|header_start|>"),
)
LFM2 = Calls(
    "lfm2",
    LooseCall(),
    open="<|tool_call_start|>",
    close="<|tool_call_end|>",
    listed=True,
    recognised_by=("<|tool_call_start|>",),
)
OLMO3 = Calls(
    "olmo3",
    LooseCall(),
    open="<function_calls>\n",
    close="\n</function_calls>",
    recognised_by=("<function_calls>",),
)
PYTHONIC = Calls("pythonic", LooseCall(), listed=True, bare=True, recognised_by=("func_name1(",))
FUNCTIONGEMMA = Calls(
    "functiongemma",
    LooseCall(Syntax({"<escape>": False, '"': True}, ":", "}", bare=True), "call:", ","),
    begin="<start_function_call>",
    end="<end_function_call>",
    separator="",
    recognised_by=("<start_function_call>",),
)
GEMMA4 = Calls(
    "gemma4",
    LooseCall(Syntax({'<|"|>': False, '"': True}, ":", "}", bare=True), "call:", ","),
    begin="<|tool_call>",
    end="<tool_call|>",
    separator="",
    recognised_by=("<|tool_call>",),
)

CALLS = (
    *(MIMO, QWEN3_CODER, SEED_OSS, MINIMAX_M2, MINIMAX_M3, DOTS, STEP3, HY_V3, HY_V3_OPENSOURCE, HY_V4),
    *(K2_HORIZON, MINICPM5, GLM47, GLM45, DEEPSEEK_V32, DEEPSEEK_V4, KIMI_K3, PLAMO3, APERTUS, GIGACHAT31, GIGACHAT3),
    *(DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2, MISTRAL, MISTRAL_LIST, GRANITE, COHERE, NEMOTRON, HUNYUAN_A13B, JAMBA),
    *(INTERNLM, LONGCAT, LFM2, FUNCTIONGEMMA, GEMMA4, OLMO3, LLAMA4_PYTHONIC, PYTHONIC, LLAMA3_JSON, PHI4_MINI),
    *(ERNIE45, HERMES, GRANITE_20B, XLAM),
)
