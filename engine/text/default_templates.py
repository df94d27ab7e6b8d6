"""Chat templates for architectures whose checkpoints have none, because their prompts are made by code.

DeepSeek-V3.2: encoding/encoding_dsv32.py of the checkpoint deepseek-ai/DeepSeek-V3.2 (MIT license). Tools are
described after the first system message. An empty line before calls belongs to them. A turn begins with `<think>` if
the variable `thinking` or `enable_thinking` is true, else with `</think>`. The reasoning of earlier turns is left out.

Mistral's tekken.json, versions 7, 11 and 13: instruct tokenizers of mistral_common 1.13. Versions differ in the message
that tools precede, and in the text of calls and of their results.
"""

from collections.abc import Callable, Mapping
from typing import Any

_DEEPSEEK_V32 = """\
{%- set dsml = '｜DSML｜' -%}
{%- set thinks = (thinking is defined and thinking) or (enable_thinking is defined and enable_thinking) -%}
{%- set last = namespace(user=-1, calls=0, results=0) -%}
{%- for message in messages -%}
  {%- if message.role in ['user', 'developer'] -%}{%- set last.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- macro text(content) -%}
  {%- if content is string -%}{{- content -}}
  {%- elif content -%}{%- for part in content -%}{{- part.text or '' -}}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- macro start(index, shown) -%}
  {%- if shown -%}
    {{- '<｜Assistant｜>' -}}{{- '<think>' if thinks and index == last.user else '</think>' -}}
  {%- endif -%}
{%- endmacro -%}
{%- macro described() -%}
{{- '\\n\\n' -}}
## Tools

You have access to a set of tools you can use to answer the user's question.
{{ 'You can invoke functions by writing a "<' ~ dsml ~ 'function_calls>" block like the following as part of your \
reply to the user:' }}
{{ '<' ~ dsml ~ 'function_calls>' }}
{{ '<' ~ dsml ~ 'invoke name="$FUNCTION_NAME">' }}
{{ '<' ~ dsml ~ 'parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</' ~ dsml ~ 'parameter>' }}
...
{{ '</' ~ dsml ~ 'invoke>' }}
{{ '<' ~ dsml ~ 'invoke name="$FUNCTION_NAME2">' }}
...
{{ '</' ~ dsml ~ 'invoke>' }}
{{ '</' ~ dsml ~ 'function_calls>' }}

{{ 'String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects \
should use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for \
other types (numbers, booleans, arrays, objects).' }}

{{ 'If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking \
block. Here is an example:' }}

{{ '<' ~ dsml ~ 'function_calls>' }}
...
{{ '</' ~ dsml ~ 'function_calls>' }}

<function_results>
...
</function_results>

{{ '<think>...thinking about results</think>' }}

Here are the functions available in JSONSchema format:
<functions>
{% for tool in tools %}
{{ tool.function | tojson }}
{% endfor %}
</functions>
{% endmacro -%}
{{- bos_token -}}
{%- if tools and (not messages or messages[0].role != 'system') -%}{{- described() -}}{%- endif -%}
{%- for message in messages -%}
  {%- set index = loop.index0 -%}
  {%- set shown = not loop.last or add_generation_prompt -%}
  {%- if message.role == 'system' -%}
    {{- text(message.content) -}}
    {%- if tools and loop.first -%}{{- described() -}}{%- endif -%}
  {%- elif message.role in ['user', 'developer'] -%}
    {{- '<｜User｜>' -}}
    {%- if message.role == 'developer' -%}{{- "\\n\\n# The user's message is: " -}}{%- endif -%}
    {{- text(message.content) -}}{{- start(index, shown) -}}
  {%- elif message.role == 'assistant' -%}
    {%- if thinks and index > last.user -%}
      {{- message.reasoning_content or message.reasoning or '' -}}{{- '</think>' -}}
    {%- endif -%}
    {%- set said = text(message.content) -%}
    {{- said[:-2] if message.tool_calls and said.endswith('\\n\\n') else said -}}
    {%- set last.calls = (message.tool_calls or []) | length -%}{%- set last.results = 0 -%}
    {%- if message.tool_calls -%}
      {{- '\\n\\n<' ~ dsml ~ 'function_calls>\\n' -}}
      {%- for call in message.tool_calls -%}
        {{- '<' ~ dsml ~ 'invoke name="' ~ call.function.name ~ '">\\n' -}}
        {%- for name, value in call.function.arguments.items() -%}
          {{- '<' ~ dsml ~ 'parameter name="' ~ name ~ '" string="' -}}
          {%- if value is string -%}{{- 'true">' ~ value -}}{%- else -%}{{- 'false">' ~ value | tojson -}}{%- endif -%}
          {{- '</' ~ dsml ~ 'parameter>' -}}{%- if not loop.last -%}{{- '\\n' -}}{%- endif -%}
        {%- endfor -%}
        {{- '\\n</' ~ dsml ~ 'invoke>\\n' -}}
      {%- endfor -%}
      {{- '</' ~ dsml ~ 'function_calls>' -}}
    {%- endif -%}
    {{- eos_token -}}
  {%- elif message.role == 'tool' -%}
    {%- set last.results = last.results + 1 -%}
    {%- if last.results > last.calls -%}
      {{- raise_exception('A result of a tool needs a call before it.') -}}
    {%- endif -%}
    {%- if last.results == 1 -%}{{- '\\n\\n<function_results>' -}}{%- endif -%}
    {{- '\\n<result>' -}}{{- text(message.content) -}}{{- '</result>' -}}
    {%- if last.results == last.calls -%}
      {{- '\\n</function_results>\\n\\n' -}}{{- '<think>' if thinks and index >= last.user else '</think>' -}}
    {%- endif -%}
  {%- else -%}
    {{- raise_exception('The role ' ~ message.role ~ ' is unknown.') -}}
  {%- endif -%}
{%- endfor -%}
"""

_MISTRAL = """\
{%- macro text(content) -%}
  {%- if content is string -%}{{- content -}}
  {%- elif content -%}{%- for part in content -%}{{- part.text or '' -}}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- set users = namespace(first=-1, last=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {%- if users.first < 0 -%}{%- set users.first = loop.index0 -%}{%- endif -%}
    {%- set users.last = loop.index0 -%}
  {%- endif -%}
{%- endfor -%}
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message.role == 'system' -%}
    {{- '[SYSTEM_PROMPT]' -}}{{- text(message.content) -}}{{- '[/SYSTEM_PROMPT]' -}}
  {%- elif message.role == 'user' -%}
    {%- if tools and loop.index0 == users.POSITION -%}
      {{- '[AVAILABLE_TOOLS][' -}}
      {%- for tool in tools -%}
        {%- set described = {'name': tool.function.name, 'description': tool.function.description or '',
                             'parameters': tool.function.parameters or {}} -%}
        {{- {'type': 'function', 'function': described} | tojson -}}{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}
      {%- endfor -%}
      {{- '][/AVAILABLE_TOOLS]' -}}
    {%- endif -%}
    {{- '[INST]' -}}{{- text(message.content) -}}{{- '[/INST]' -}}
  {%- elif message.role == 'assistant' -%}
    THOUGHT{{- text(message.content) -}}
    {%- if message.tool_calls -%}CALLS{%- endif -%}
    {{- eos_token -}}
  {%- elif message.role == 'tool' -%}
    {{- '[TOOL_RESULTS]' -}}RESULT{{- text(message.content) -}}{{- '[/TOOL_RESULTS]' -}}
  {%- else -%}
    {{- raise_exception('The role ' ~ message.role ~ ' is unknown.') -}}
  {%- endif -%}
{%- endfor -%}
"""
_LISTED = """\
{{- '[TOOL_CALLS][' -}}{%- for call in message.tool_calls -%}
{{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson -}}
{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}{%- endfor -%}{{- ']' -}}"""
_EACH = """\
{%- for call in message.tool_calls -%}
{{- '[TOOL_CALLS]' ~ call.function.name -}}ID{{- '[ARGS]' ~ call.function.arguments | tojson -}}
{%- endfor -%}"""
_THOUGHT = "{%- if message.reasoning -%}{{- '[THINK]' ~ message.reasoning ~ '[/THINK]' -}}{%- endif -%}"
_CALL_ID = "{{- message.tool_call_id ~ '[TOOL_CONTENT]' -}}"


def _mistral(position: str, thought: str, calls: str, result: str) -> str:
    found = _MISTRAL.replace("POSITION", position).replace("THOUGHT", thought)
    return found.replace("CALLS{%", f"{calls}{{%").replace("RESULT{{", f"{result}{{{{")


MISTRAL = {
    "v7": _mistral("last", "", _LISTED, _CALL_ID),
    "v11": _mistral("last", "", _EACH.replace("ID", "{{- '[CALL_ID]' ~ call.id -}}"), _CALL_ID),
    "v13": _mistral("first", _THOUGHT, _EACH.replace("ID", ""), ""),
}
"""Version of tekken.json → template."""
TEMPLATES = {"DeepseekV32ForCausalLM": _DEEPSEEK_V32}


def default_template(config: Mapping[str, Any], tekken: Callable[[], str | None]) -> str | None:
    """Return the template for a checkpoint without one: by the architecture in its config.json, or by the version of
    its tekken.json."""
    names = config.get("architectures")
    own = TEMPLATES.get(str(names[0])) if isinstance(names, list) and names else None
    return own or MISTRAL.get(tekken() or "")
