"""Recognition of formats from chat templates, model types and names."""

import pytest

from appliance.output_formats.declaration import OutputFormat
from appliance.output_formats.formats import CALLS, HARMONY, HERMES, PLAIN, REASONINGS, THINK, chosen, names, recognise

# Excerpts that identify a family by its published template, in the template's own quoting: the code that renders a call
# or asks for one, without the words in between.
TEMPLATES: dict[str, tuple[str, str, str]] = {
    # name: (excerpt, calls, reasoning)
    "qwen 2.5": (
        '{{- "<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>" }}',
        "hermes",
        "",
    ),
    "qwen 3": (
        "{{- '<tool_call>\\n{\"name\": \"' }}{{- '\", \"arguments\": ' }}{%- set x = content.split('</think>') %}",
        "hermes",
        "think",
    ),
    "qwen 3 coder": (
        "{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}{{- '<parameter=' }}",
        "qwen3_coder",
        "",
    ),
    "llama 3.1": (
        '{{- \'Respond in the format {"name": function name, "parameters": dictionary of argument name}.\' }}'
        "{{- '<|python_tag|>' }}",
        "llama3_json",
        "",
    ),
    "pythonic of llama 4": (
        "<|header_start|>assistant [func_name1(params_name1=params_value1)]",
        "llama4_pythonic",
        "",
    ),
    "pythonic of gemma 3": ("<start_of_turn>model [func_name1(params_name1=params_value1)]", "pythonic", ""),
    "mistral 7b": ('{{- "[TOOL_CALLS] [" }}{{- \'"name": \' }}', "mistral_list", ""),
    "magistral": ("{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}{{- '[THINK]' }}", "mistral", "mistral"),
    "deepseek v3": (
        "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + '<｜tool▁sep｜>' + name + '\\n' + '```json'}}",
        "deepseek_v3",
        "",
    ),
    "deepseek v3.1": (
        "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>' + arguments}}{{'</think>'}}",
        "deepseek_v31",
        "think",
    ),
    "deepseek v3.2": ("{%- set dsml = '｜DSML｜' %}<{{ dsml }}function_calls></think>", "deepseek_v32", "think"),
    "glm 4.5": ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>{{ '</think>' }}", "glm45", "glm45"),
    "glm 4.7": ("<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>{{ '</think>' }}", "glm47", "glm45"),
    "kimi k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{{ arguments }}",
        "kimi_k2",
        "",
    ),
    "minimax m2": (
        "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}{{ '</think>' }}",
        "minimax_m2",
        "minimax_m2",
    ),
    "gpt-oss": ('{{- "<|start|>assistant<|channel|>final<|message|>" }}', "harmony", "harmony"),
    "granite 3.2": (
        "{{- '<|start_of_role|>' }}<|tool_call|> Here is my thought process: Here is my response:",
        "granite",
        "granite",
    ),
    "functiongemma": ("<start_function_call>call:", "functiongemma", ""),
    "gemma 4": ("{{- '<|tool_call>call:' }}{{- '<|channel>thought' }}", "gemma4", "gemma4"),
    "nemotron": ("<TOOLCALL>[{{ calls }}]</TOOLCALL>", "nemotron", ""),
    "olmo 3": ("<function_calls></function_calls>", "olmo3", ""),
    "step 3": ("<｜tool_calls_begin｜><steptml:invoke", "step3", ""),
    "internlm": ("<|action_start|><|plugin|>", "internlm", ""),
    "jamba": ("<tool_calls>[\n</tool_calls>", "jamba", ""),
    "hunyuan": ("<tool_calls>[</tool_calls></think><answer>", "hunyuan_a13b", "hunyuan_a13b"),
    "seed oss": ("<seed:tool_call><function=<parameter=<seed:think>", "seed_oss", "seed_oss"),
    "ernie 4.5": ('<tool_call>{"name": "arguments"</think><response>', "ernie45", "ernie45"),
    "cohere": ("<|START_ACTION|><|START_THINKING|>", "cohere", "cohere"),
    "lfm 2": ("<|tool_call_start|>[", "lfm2", ""),
    "hunyuan 3 preview": (
        "<tool_calls>\n<tool_call>{{ name }}<tool_sep>\n<arg_key>{{ key }}</arg_key>\n<arg_value>{{ '</think>' }}",
        "hy_v3",
        "hy_v3",
    ),
    "hunyuan 3": (
        "<tool_call:opensource>{{ name }}<tool_sep:opensource>\n<arg_key:opensource></think:opensource>",
        "hy_v3_opensource",
        "hy_v4",
    ),
    "hunyuan 4": ("<tool_call:opensource>{{ name }}<arg_key:opensource></think:opensource>", "hy_v4", "hy_v4"),
    "minimax m3": (
        "{%- set ns_token = ']<]minimax[>[' -%}{{ ns_token ~ '<tool_call>' }}{{ '<mm:think>' ~ '</mm:think>' }}",
        "minimax_m3",
        "minimax_m3",
    ),
    "k2 horizon": (
        "{{ '<ifm|tool_calls>\n<ifm|tool_call>' + name }}<ifm|arg_key>{{ '</' + tag }}{{ '<ifm|think_fast>' }}",
        "k2_horizon",
        "k2_horizon",
    ),
    "minicpm 5": (
        "{{- '<function name=\"' ~ call.name ~ '\">' }}{{- '<param name=\"' ~ key ~ '\">' }}{{ '</think>' }}",
        "minicpm5",
        "think",
    ),
    "kimi k3": (
        "{{- '<|open|>' + tag -}}{{- '<|sep|>' -}}{{- '<|close|>' + tag + '<|sep|>' -}}{{ open_tag('tools') }}",
        "kimi_k3",
        "kimi_k3",
    ),
    "plamo 3": (
        "{{ '<|plamo:begin_' ~ 'tool_requests' ~ ':plamo|>' }}{{ '<|plamo:begin_think:plamo|>' }}",
        "plamo3",
        "plamo3",
    ),
    "apertus": (
        "{%- set inner_token = '<|inner_prefix|>' -%}{%- set outer_token = '<|inner_suffix|>' -%}"
        "{%- set tool_calls_token = '<|tools_prefix|>' -%}{%- set end_tool_calls_token = '<|tools_suffix|>' -%}",
        "apertus",
        "apertus",
    ),
    "gigachat 3": (
        "{{ {'role': 'function call'} }}{%- set add_tokens = namespace(role_sep=\"<|role_sep|>\\n\") -%}",
        "gigachat3",
        "",
    ),
    "gigachat 3.1": ("{{ 'function call' }}<|role_sep|><|function_call|>", "gigachat31", ""),
    "chatml alone": ("{{ '<|im_start|>' + message.role }}", "", ""),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_tell_their_family(name: str) -> None:
    excerpt, calls, reasoning = TEMPLATES[name]
    found = recognise(excerpt)
    assert (found.calls.name if found.calls else "", found.reasoning.name if found.reasoning else "") == (
        calls,
        reasoning,
    )


def test_the_model_type_decides_if_templates_are_ambiguous() -> None:
    coder, tool = TEMPLATES["qwen 3 coder"][0], "<|tool|>{{ tools }}<|/tool|>"
    assert recognise(coder, "mimo").name == "mimo"
    assert recognise(coder, "qwen3_moe").name == "qwen3_coder"
    assert recognise(tool, "phi3").name == "phi4_mini"
    assert recognise(tool, "other") == PLAIN


def test_names_choose() -> None:
    found = OutputFormat(THINK, HERMES)
    assert chosen("auto", found) is found
    assert chosen("qwen3_coder", found).name == "qwen3_coder + think"
    assert chosen("deepseek_r1", found).name == "hermes + deepseek_r1"
    assert chosen("pythonic+deepseek_r1", found).name == "pythonic + deepseek_r1"
    assert chosen("glm45", PLAIN).name == "glm45", "both ways"
    assert chosen("plain", found).name == "think"
    assert chosen("plain+identity", found) == PLAIN
    assert chosen("harmony", found) is HARMONY
    assert chosen("hermes", HARMONY) == OutputFormat(None, HERMES), "no half of a format of channels"
    with pytest.raises(KeyError, match="hermse"):
        chosen("hermse", found)


def test_every_name_is_known_once() -> None:
    assert len(names()) == len(set(names()))
    for parts in (CALLS, REASONINGS):
        assert len({part.name for part in parts}) == len(parts)


SWITCHED = [
    # thinking, enable_thinking → glm45 and holo2, deepseek_v3
    (None, None, True, False),
    (True, None, True, True),
    (None, True, True, True),
    (False, None, False, False),
    (None, False, False, False),
    (True, False, False, True),
    (False, True, False, True),
    (True, True, True, True),
    (False, False, False, False),
]


@pytest.mark.parametrize(("thinking", "enable", "both", "either"), SWITCHED)
def test_switches_of_the_template_tell_whether_a_model_reasons(
    thinking: bool | None, enable: bool | None, both: bool, either: bool
) -> None:
    """On where all are on, or off unless one is on."""
    variables = {"thinking": thinking, "enable_thinking": enable}
    by_name = {reasoning.name: reasoning for reasoning in REASONINGS}
    assert by_name["glm45"].switched_on(variables) == by_name["holo2"].switched_on(variables) == both
    assert by_name["deepseek_v3"].switched_on(variables) == either
    assert by_name["deepseek_r1"].switched_on(variables)
    assert variables == {"thinking": thinking, "enable_thinking": enable}
