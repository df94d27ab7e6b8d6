"""Formats of model families whose tool calls have one tag per argument."""

from dataclasses import replace

from appliance.output_formats.declaration import Calls
from appliance.output_formats.tags import Tags

_QWEN_TAGS = Tags(("<function=", ">"), ("<parameter=", ">"), "</parameter>", "</function>", trim="\n")
QWEN3_CODER = Calls(
    "qwen3_coder",
    _QWEN_TAGS,
    begin="<tool_call>\n",
    end="\n</tool_call>",
    starts=("<function=",),
    recognised_by=("<tool_call>", "<function=", "<parameter="),
)
MIMO = replace(QWEN3_CODER, name="mimo", body=replace(_QWEN_TAGS, trim=""), model_types=("mimo",))
SEED_OSS = Calls(
    "seed_oss",
    replace(_QWEN_TAGS, trim=""),
    begin="<seed:tool_call>\n",
    end="\n</seed:tool_call>",
    recognised_by=("<seed:tool_call>",),
)
_INVOKE = Tags(('<invoke name="', '">'), ('<parameter name="', '">'), "</parameter>", "</invoke>")
MINIMAX_M2 = Calls(
    "minimax_m2",
    _INVOKE,
    open="<minimax:tool_call>\n",
    close="\n</minimax:tool_call>",
    recognised_by=("<minimax:tool_call>",),
)
_MARK = "]<]minimax[>["
MINIMAX_M3 = Calls(
    "minimax_m3",
    Tags(
        (f'{_MARK}<invoke name="', '">'),
        (f"{_MARK}<", ">"),
        f"{_MARK}</{{}}>",
        f"{_MARK}</invoke>",
        nested=_MARK,
        line="",
    ),
    open=f"{_MARK}<tool_call>\n",
    close=f"\n{_MARK}</tool_call>",
    recognised_by=(_MARK,),
)
DOTS = Calls(
    "dots",
    _INVOKE,
    open="<dots_function_call>\n",
    close="\n</dots_function_call>",
    recognised_by=("<dots_function_call>",),
)
STEP3 = Calls(
    "step3",
    Tags(
        ('function<｜tool_sep｜><steptml:invoke name="', '">'),
        ('<steptml:parameter name="', '">'),
        "</steptml:parameter>",
        "</steptml:invoke>",
    ),
    open="<｜tool_calls_begin｜>\n",
    close="\n<｜tool_calls_end｜>",
    begin="<｜tool_call_begin｜>",
    end="<｜tool_call_end｜>",
    recognised_by=("<｜tool_calls_begin｜>", "steptml:invoke"),
)
GLM47 = Calls(
    "glm47",
    Tags(("", ""), ("<arg_key>", "</arg_key>"), "</arg_value>", before_value="<arg_value>", line=""),
    begin="<tool_call>",
    end="</tool_call>",
    separator="",
    recognised_by=("{function-name}<arg_key>",),
)
GLM45 = Calls(
    "glm45",
    Tags(("", ""), ("<arg_key>", "</arg_key>"), "</arg_value>", before_value="\n<arg_value>"),
    begin="<tool_call>",
    end="</tool_call>",
    recognised_by=("<tool_call>", "<arg_key>"),
)
# Hunyuan 3 and 4 and K2 Horizon have tags of the same shape, each with a suffix or a prefix.
HY_V3 = Calls(
    "hy_v3",
    Tags(("", "<tool_sep>"), ("<arg_key>", "</arg_key>"), "</arg_value>", before_value="\n<arg_value>"),
    open="<tool_calls>\n",
    close="\n</tool_calls>",
    begin="<tool_call>",
    end="</tool_call>",
    recognised_by=("<tool_sep>", "<arg_key>"),
)
_OPENSOURCE = ("<arg_key:opensource>", "</arg_key:opensource>")
HY_V3_OPENSOURCE = Calls(
    "hy_v3_opensource",
    Tags(
        ("", "<tool_sep:opensource>"), _OPENSOURCE, "</arg_value:opensource>", before_value="\n<arg_value:opensource>"
    ),
    open="<tool_calls:opensource>\n",
    close="\n</tool_calls:opensource>",
    begin="<tool_call:opensource>",
    end="</tool_call:opensource>",
    recognised_by=("<tool_sep:opensource>", "<arg_key:opensource>"),
)
HY_V4 = replace(
    HY_V3_OPENSOURCE,
    name="hy_v4",
    body=Tags(("", ""), _OPENSOURCE, "</arg_value:opensource>", before_value="<arg_value:opensource>", line=""),
    recognised_by=("<tool_call:opensource>", "<arg_key:opensource>"),
)
K2_HORIZON = Calls(
    "k2_horizon",
    Tags(
        ("", ""),
        ("<ifm|arg_key>", "</ifm|arg_key>"),
        "</ifm|arg_value>",
        before_value="<ifm|arg_value>",
        kind=("<ifm|arg_type>", "</ifm|arg_type>"),
        line="",
    ),
    open="<ifm|tool_calls>\n",
    close="\n</ifm|tool_calls>",
    begin="<ifm|tool_call>",
    end="</ifm|tool_call>",
    recognised_by=("<ifm|tool_call",),
)
# The first tag is not wrapped.
MINICPM5 = Calls(
    "minicpm5",
    Tags(("", '">'), ('<param name="', '">'), "</param>", wrap=("<![CDATA[", "]]>"), line=""),
    begin='<function name="',
    end="</function>",
    separator="",
    recognised_by=('<function name="', '<param name="'),
)
KIMI_K3 = Calls(
    "kimi_k3",
    Tags(
        ('<|open|>call tool="', '"'),
        ('<|open|>argument key="', '"'),
        "<|close|>argument<|sep|>",
        "<|close|>call<|sep|>",
        attribute="type",
        attribute_end="<|sep|>",
        typed=True,
        number=" index=",
        after_name="<|sep|>",
        escaped=True,
        line="",
    ),
    open="<|open|>tools<|sep|>",
    close="<|close|>tools<|sep|>",
    separator="",
    recognised_by=("<|open|>", "<|close|>", "<|sep|>"),
)
_DSML = Tags(
    ('<｜DSML｜invoke name="', '">'),
    ('<｜DSML｜parameter name="', '"'),
    "</｜DSML｜parameter>",
    "</｜DSML｜invoke>",
    attribute="string",
)
DEEPSEEK_V4 = Calls(
    "deepseek_v4",
    _DSML,
    open="<｜DSML｜tool_calls>\n",
    close="\n</｜DSML｜tool_calls>",
    recognised_by=("｜DSML｜", "tool_calls>"),
)
DEEPSEEK_V32 = Calls(
    "deepseek_v32",
    _DSML,
    open="<｜DSML｜function_calls>\n",
    close="\n</｜DSML｜function_calls>",
    recognised_by=("｜DSML｜", "function_calls>"),
)
