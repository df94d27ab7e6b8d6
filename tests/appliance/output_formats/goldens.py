"""Outputs of each model family, written by hand: one call, one without arguments, a hard one, two at once. The calls
are the same for all families: weather(city="Köln", days=3, metric=True), now(), and note with the arguments in HARD,
except for values that a syntax cannot express."""

from dataclasses import dataclass
from typing import Any

from appliance.output_formats.declaration import Function

FUNCTIONS = (
    Function(
        "weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "metric": {"type": "boolean"},
            },
            "required": ["city"],
        },
    ),
    Function("now", {"type": "object", "properties": {}}),
    Function(
        "note",
        {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "place": {"type": "object", "properties": {"rows": {"type": "array"}}},
                "ratio": {"type": ["number", "null"]},
                "id": {"type": "string"},
            },
        },
    ),
)
WEATHER: dict[str, Any] = {"city": "Köln", "days": 3, "metric": True}
TEXT = 'say "hi" \\ <b>&amp;</b>\n\nit\'s 中 😀 {[(,:='
HARD: dict[str, Any] = {
    "text": TEXT,
    "place": {"rows": [1, -2.5, None, True, {"a b": "}]"}]},
    "ratio": None,
    "id": "007",
}

_JSON_WEATHER = '{"city": "Köln", "days": 3, "metric": true}'
_JSON_TEXT = '"say \\"hi\\" \\\\ <b>&amp;</b>\\n\\nit\'s 中 \\ud83d\\ude00 {[(,:="'
_ROWS = '{"rows": [1, -2.5, null, true, {"a b": "}]"}]}'
_JSON_HARD = f'{{"text": {_JSON_TEXT}, "place": {_ROWS}, "ratio": null, "id": "007"}}'


@dataclass(frozen=True)
class Golden:
    """`text` replaces TEXT in the hard call of syntaxes that cannot express TEXT."""

    one: str
    none: str
    hard: str
    two: str
    text: str = TEXT


def _json(before: str, after: str, between: str, key: str = "arguments", name: str = "name") -> Golden:
    """Return outputs of formats with JSON objects: `before` and `after` all calls, `between` two."""

    def call(function: str, arguments: str) -> str:
        return f'{{"{name}": "{function}", "{key}": {arguments}}}'

    one, none, hard = call("weather", _JSON_WEATHER), call("now", "{}"), call("note", _JSON_HARD)
    return Golden(
        *(f"{before}{text}{after}" for text in (one, none, hard)),
        f"{before}{one}{between}{none}{after}",
    )


def _named(before: str, between: str, after: str, open: str = "", close: str = "", separator: str = "") -> Golden:
    """Return outputs of formats with a name and its JSON."""

    def call(function: str, arguments: str, index: int = 0) -> str:
        return f"{before}{function}{between.replace('N', str(index))}{arguments}{after}"

    one = call("weather", _JSON_WEATHER)
    return Golden(
        *(f"{open}{text}{close}" for text in (one, call("now", "{}"), call("note", _JSON_HARD))),
        f"{open}{one}{separator}{call('now', '{}', 1)}{close}",
    )


_CODER_ONE = """<function=weather>
<parameter=city>
Köln
</parameter>
<parameter=days>
3
</parameter>
<parameter=metric>
true
</parameter>
</function>"""
_CODER_HARD = f"""<function=note>
<parameter=text>
{TEXT}
</parameter>
<parameter=place>
{_ROWS}
</parameter>
<parameter=ratio>
null
</parameter>
<parameter=id>
007
</parameter>
</function>"""
_CODER_NONE = "<function=now>\n</function>"
_TIGHT_ONE = (
    "<function=weather>\n<parameter=city>Köln</parameter>\n<parameter=days>3</parameter>\n"
    "<parameter=metric>true</parameter>\n</function>"
)
_TIGHT_HARD = (
    f"<function=note>\n<parameter=text>{TEXT}</parameter>\n<parameter=place>{_ROWS}</parameter>\n"
    "<parameter=ratio>null</parameter>\n<parameter=id>007</parameter>\n</function>"
)


def _tight(tag: str) -> Golden:
    begin, end = f"<{tag}>\n", f"\n</{tag}>"
    one = f"{begin}{_TIGHT_ONE}{end}"
    none = f"{begin}{_CODER_NONE}{end}"
    return Golden(one, none, f"{begin}{_TIGHT_HARD}{end}", f"{one}\n{none}")


def _invoke(open: str, close: str, tag: str, attribute: bool = False, before: str = "", after: str = "") -> Golden:
    def argument(key: str, value: str, is_text: bool = False) -> str:
        kind = f' string="{"true" if is_text else "false"}"' if attribute else ""
        return f'<{tag}parameter name="{key}"{kind}>{value}</{tag}parameter>\n'

    def call(name: str, *arguments: str) -> str:
        return f'{before}<{tag}invoke name="{name}">\n{"".join(arguments)}</{tag}invoke>{after}'

    one = call("weather", argument("city", "Köln", True), argument("days", "3"), argument("metric", "true"))
    hard = call(
        "note",
        argument("text", TEXT, True),
        argument("place", _ROWS),
        argument("ratio", "null"),
        argument("id", "007", True),
    )
    none = call("now")
    return Golden(
        *(f"{open}\n{text}\n{close}" for text in (one, none, hard)),
        f"{open}\n{one}\n{none}\n{close}",
    )


def _glm(
    line: str, form: str = "<{}>", behind: str = "", separator: str | None = None, wrapped: bool = False
) -> Golden:
    """`form` is the pattern of a tag, `behind` the text after a name. With a `separator` all calls are wrapped."""

    def tag(name: str) -> str:
        return form.format(name) if not name.startswith("/") else "</" + form.format(name[1:])[1:]

    def argument(key: str, value: str) -> str:
        return f"{tag('arg_key')}{key}{tag('/arg_key')}{line}{tag('arg_value')}{value}{tag('/arg_value')}{line}"

    def call(name: str, *arguments: str) -> str:
        return f"{tag('tool_call')}{name}{behind}{line}{''.join(arguments)}{tag('/tool_call')}"

    open, close = (f"{tag('tool_calls')}\n", f"\n{tag('/tool_calls')}") if separator else ("", "")
    one = call("weather", argument("city", "Köln"), argument("days", "3"), argument("metric", "true"))
    texts = argument("text", TEXT), argument("place", _ROWS), argument("ratio", "null"), argument("id", "007")
    two = one + (separator or line) + call("now")
    return Golden(*(f"{open}{text}{close}" for text in (one, call("now"), call("note", *texts), two)))


def _minicpm(*, wrap: bool) -> Golden:
    def argument(key: str, value: str) -> str:
        return f'<param name="{key}">{f"<![CDATA[{value}]]>" if wrap else value}</param>'

    def call(name: str, *arguments: str) -> str:
        return f'<function name="{name}">{"".join(arguments)}</function>'

    one = call("weather", argument("city", "Köln"), argument("days", "3"), argument("metric", "true"))
    texts = argument("text", TEXT), argument("place", _ROWS), argument("ratio", "null"), argument("id", "007")
    return Golden(one, call("now"), call("note", *texts), one + call("now"))


def _minimax_m3(*, line: str = "") -> Golden:
    mark = "]<]minimax[>["

    def argument(key: str, value: str) -> str:
        return f"{line}{mark}<{key}>{value}{mark}</{key}>"

    def call(name: str, *arguments: str) -> str:
        return f'{mark}<invoke name="{name}">{"".join(arguments)}{line}{mark}</invoke>\n'

    one = call("weather", argument("city", "Köln"), argument("days", "3"), argument("metric", "true"))
    rows = argument("rows", _ROWS.removeprefix('{"rows": ').removesuffix("}")) + line
    texts = argument("text", TEXT), argument("place", rows), argument("ratio", "null"), argument("id", "007")
    calls = (one, call("now"), call("note", *texts), one + call("now"))
    return Golden(*(f"{mark}<tool_call>\n{text}{mark}</tool_call>" for text in calls))


def _kimi_k3() -> Golden:
    def argument(key: str, kind: str, value: str) -> str:
        return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'

    def call(name: str, *arguments: str, index: int = 1) -> str:
        return f'<|open|>call tool="{name}" index="{index}"<|sep|>{"".join(arguments)}<|close|>call<|sep|>'

    city, days = argument("city", "string", "Köln"), argument("days", "number", "3")
    one = call("weather", city, days, argument("metric", "boolean", "true"))
    hard = call(
        "note",
        argument("text", "string", TEXT),
        argument("place", "object", _ROWS),
        argument("ratio", "null", "null"),
        argument("id", "string", "007"),
    )
    texts = (one, call("now"), hard, one + call("now", index=2))
    return Golden(*(f"<|open|>tools<|sep|>{text}<|close|>tools<|sep|>" for text in texts))


def _plamo(name: str) -> str:
    return f"<|plamo:{name}:plamo|>"


_PYTHON_ONE = "weather(city='Köln', days=3, metric=True)"
_PYTHON_HARD = (
    "note(text='say \"hi\" \\\\ <b>&amp;</b>\\n\\nit\\'s 中 \\U0001F600 {[(,:=', "
    "place={'rows': [1, -2.5, None, True, {'a b': '}]'}]}, ratio=None, id=\"007\")"
)


def _python(before: str, after: str, separator: str) -> Golden:
    return Golden(
        *(f"{before}{text}{after}" for text in (_PYTHON_ONE, "now()", _PYTHON_HARD)),
        f"{before}{_PYTHON_ONE}{separator}now(){after}",
    )


def _gemma(begin: str, end: str, quote: str) -> Golden:
    def q(text: str) -> str:
        return f"{quote}{text}{quote}"

    one = f"{begin}call:weather{{city:{q('Köln')},days:3,metric:true}}{end}"
    none = f"{begin}call:now{{}}{end}"
    rows = f"{{rows:[1,-2.5,null,true,{{{q('a b')}:{q('}]')}}}]}}"
    hard = f"{begin}call:note{{text:{q(TEXT)},place:{rows},ratio:null,id:{q('007')}}}{end}"
    return Golden(one, none, hard, one + none)


def _harmony(name: str, arguments: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"


_TOOL_CALL = _json("<tool_call>\n", "\n</tool_call>", "\n</tool_call>\n<tool_call>\n")
_CODER = Golden(
    *(f"<tool_call>\n{text}\n</tool_call>" for text in (_CODER_ONE, _CODER_NONE, _CODER_HARD)),
    f"<tool_call>\n{_CODER_ONE}\n</tool_call>\n<tool_call>\n{_CODER_NONE}\n</tool_call>",
)
_APERTUS = Golden(
    f'<|tools_prefix|>[{{"weather": {_JSON_WEATHER}}}]<|tools_suffix|>',
    '<|tools_prefix|>[{"now": {}}]<|tools_suffix|>',
    f'<|tools_prefix|>[{{"note": {_JSON_HARD}}}]<|tools_suffix|>',
    f'<|tools_prefix|>[{{"weather": {_JSON_WEATHER}}}, {{"now": {{}}}}]<|tools_suffix|>',
)
_DSML = "｜DSML｜"
GOLDENS: dict[str, Golden] = {
    "hermes": _TOOL_CALL,
    "ernie45": _TOOL_CALL,
    "longcat": _json(
        "<longcat_tool_call>\n", "\n</longcat_tool_call>", "\n</longcat_tool_call>\n<longcat_tool_call>\n"
    ),
    "qwen3_coder": _CODER,
    "mimo": _tight("tool_call"),
    "seed_oss": _tight("seed:tool_call"),
    "minimax_m2": _invoke("<minimax:tool_call>", "</minimax:tool_call>", ""),
    "dots": _invoke("<dots_function_call>", "</dots_function_call>", ""),
    "step3": _invoke(
        "<｜tool_calls_begin｜>",
        "<｜tool_calls_end｜>",
        "steptml:",
        before="<｜tool_call_begin｜>function<｜tool_sep｜>",
        after="<｜tool_call_end｜>",
    ),
    "glm45": _glm("\n"),
    "glm47": _glm(""),
    "hy_v3": _glm("\n", behind="<tool_sep>", separator="\n"),
    "hy_v3_opensource": _glm("\n", "<{}:opensource>", behind="<tool_sep:opensource>", separator="\n"),
    "hy_v4": _glm("", "<{}:opensource>", separator="\n"),
    "k2_horizon": _glm("", "<ifm|{}>", separator="\n"),
    "minicpm5": _minicpm(wrap=False),
    "minimax_m3": _minimax_m3(),
    "kimi_k3": _kimi_k3(),
    "plamo3": _named(
        f"{_plamo('begin_tool_request')}{_plamo('begin_tool_name')}",
        f"{_plamo('end_tool_name')}{_plamo('begin_tool_arguments')}<|plamo:constrain|>json<|plamo:msg|>",
        f"{_plamo('end_tool_arguments')}{_plamo('end_tool_request')}",
        _plamo("begin_tool_requests"),
        _plamo("end_tool_requests"),
    ),
    "apertus": _APERTUS,
    "gigachat3": _json("function call<|role_sep|>\n", "", "\nfunction call<|role_sep|>\n"),
    "gigachat31": _json("<|function_call|>", "", "\n<|function_call|>"),
    "deepseek_v32": _invoke(f"<{_DSML}function_calls>", f"</{_DSML}function_calls>", _DSML, True),
    "deepseek_v4": _invoke(f"<{_DSML}tool_calls>", f"</{_DSML}tool_calls>", _DSML, True),
    "deepseek_v3": _named(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "\n",
    ),
    "deepseek_v31": _named(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": _named(
        "<|tool_call_begin|>functions.",
        ":N<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "mistral": _named("[TOOL_CALLS]", "[ARGS]", ""),
    "mistral_list": _json("[TOOL_CALLS] [", "]", ", "),
    "granite": _json("<|tool_call|>[", "]", ", "),
    "granite_20b_fc": _json("<function_call> ", "", " <function_call> "),
    "cohere": _json("<|START_ACTION|>[", "]<|END_ACTION|>", ",\n    ", "parameters", "tool_name"),
    "nemotron": _json("<TOOLCALL>[", "]</TOOLCALL>", ", "),
    "hunyuan_a13b": _json("<tool_calls>[", "]</tool_calls>", ", "),
    "jamba": _json("<tool_calls>[", "]</tool_calls>", ",\n    "),
    "internlm": _json(
        "<|action_start|><|plugin|>\n",
        "<|action_end|>",
        "<|action_end|><|action_start|><|plugin|>\n",
        "parameters",
    ),
    "phi4_mini": _json("functools[", "]", ", "),
    "xlam": _json("[", "]", ", "),
    "llama3_json": _json("", "", "; ", "parameters"),
    "llama4_pythonic": _python("[", "]", ", "),
    "pythonic": _python("[", "]", ", "),
    "lfm2": _python("<|tool_call_start|>[", "]<|tool_call_end|>", ", "),
    "olmo3": _python("<function_calls>\n", "\n</function_calls>", "\n"),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "harmony": Golden(
        _harmony("weather", _JSON_WEATHER),
        _harmony("now", "{}"),
        _harmony("note", _JSON_HARD),
        f"{_harmony('weather', _JSON_WEATHER)}<|start|>assistant{_harmony('now', '{}')}",
    ),
}

# Alternative spellings that models are known to write, each one call of `weather` with its arguments, or (second)
# another.
VARIANTS: list[tuple[str, str]] = [
    ("jamba", GOLDENS["jamba"].one.replace("[", "[\n    ").replace("]", "\n]")),
    ("mistral", f"[TOOL_CALLS]weather{_JSON_WEATHER}"),
    ("mistral", f"[TOOL_CALLS] weather[CALL_ID]abcdefghi[ARGS]{_JSON_WEATHER}"),
    ("mistral_list", f'[TOOL_CALLS][{{"name": "weather", "arguments": {_JSON_WEATHER}}}]'),
    ("mistral_list", f'[TOOL_CALLS]{{"arguments": {_JSON_WEATHER}, "name": "weather"}}'),
    ("llama3_json", f'<|python_tag|>{{"name": "weather", "parameters": {_JSON_WEATHER}}}'),
    ("llama3_json", f'{{"type": "function", "name": "weather", "arguments": {_JSON_WEATHER}}}'),
    ("llama3_json", f'{{"parameters": {_JSON_WEATHER}, "name": "weather"}}'),
    ("llama4_pythonic", f"<|python_start|>[{_PYTHON_ONE}]<|python_end|>"),
    ("pythonic", '\n[ weather( days=3,city="K\\u00f6ln" , metric=true,)]'),
    ("qwen3_coder", _CODER_ONE),
    ("qwen3_coder", f"<tool_call>{_CODER_ONE.replace('</function>', '')}</tool_call>"),
    ("qwen3_coder", f"<tool_call>\n{_TIGHT_ONE}\n</tool_call>"),
    ("glm45", GOLDENS["glm47"].one),
    ("glm47", GOLDENS["glm45"].one),
    ("granite", GOLDENS["granite"].one.replace("<|tool_call|>", "<tool_call>")),
    ("granite", GOLDENS["granite"].one.replace("[", "").replace("]", "")),
    ("xlam", f"```json\n{GOLDENS['xlam'].one}\n```"),
    ("xlam", f"[TOOL_CALLS]{GOLDENS['xlam'].one}"),
    ("xlam", f"<tool_call>{GOLDENS['xlam'].one}</tool_call>"),
    ("kimi_k2", GOLDENS["kimi_k2"].one.replace("functions.", "").replace(":0", "")),
    ("deepseek_v3", GOLDENS["deepseek_v3"].one.replace("\n", "")),
    ("hy_v3", GOLDENS["hy_v3"].one.replace("\n", "")),
    ("hy_v4", GOLDENS["hy_v4"].one.replace("><", ">\n<")),
    ("k2_horizon", GOLDENS["k2_horizon"].one.replace("><", ">\n<")),
    (
        "k2_horizon",
        GOLDENS["k2_horizon"].one.replace("<ifm|arg_value>3", "<ifm|arg_type>integer</ifm|arg_type>\n<ifm|arg_value>3"),
    ),
    ("minimax_m3", _minimax_m3(line="\n").one),
    ("minicpm5", _minicpm(wrap=True).one),
    ("minicpm5", GOLDENS["minicpm5"].one.replace("><", ">\n  <")),
    ("kimi_k3", GOLDENS["kimi_k3"].one.replace(' index="1"', "")),
    ("plamo3", GOLDENS["plamo3"].one.replace("<|plamo:constrain|>json", "")),
    ("apertus", GOLDENS["apertus"].one.replace("[", "[\n ").replace(": ", ":")),
    ("gigachat3", GOLDENS["gigachat31"].one),
    ("gigachat31", GOLDENS["gigachat3"].one),
    ("gemma4", GOLDENS["gemma4"].one.replace('<|"|>', '"')),
    ("functiongemma", GOLDENS["functiongemma"].one.replace("<escape>", "")),
    ("hermes", GOLDENS["hermes"].one.replace("\n", "  ")),
    ("harmony", f" to=functions.weather<|channel|>commentary json<|message|>{_JSON_WEATHER}<|call|>"),
    ("harmony", f"<|channel|>commentary to=functions.weather<|message|>{_JSON_WEATHER}"),
]
