"""Chat templates against transformers' apply_chat_template of the same checkpoint directories."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from appliance.chat_templates.template import ChatTemplate, TemplateError, load_template
from engine.api.errors import CheckpointError, RequestError
from engine.text import Tokenizer
from engine.text.templates import template_file

TEMPLATES = {
    "chatml": "{% for m in messages %}\n<|im_start|>{{ m.role }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "blocks": "{%- set ns = namespace(last=none) %}\n  {% for m in messages %}\n    {% if m.role == 'system' %}\n"
    "      {% continue %}\n    {% endif %}\n    {% set ns.last = m.content %}\n    [{{ loop.index }}:{{ m.content }}]\n"
    "  {% endfor %}\n{{ bos_token }}{{ ns.last }}{{ eos_token }}",
    "tools": "{% if tools %}{{ tools | tojson(indent=2) }}{{ tools[0] | tojson }}{% endif %}{{ messages | length }}"
    "{{ messages[-1].content }}{{ documents }}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}"
    + "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content | upper }}{% endif %}"
    + "{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}",
    # Features of templates of well-known families, in self-written excerpts.
    "dates": "{{- bos_token }}{%- if date_string is not defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}{%- endif %}Today: {{ date_string }}\n"
    "{%- for m in messages %}{{- '<|start|>' + m['role'] + '<|end|>\\n\\n' + m['content'] | trim }}{%- endfor %}",
    "alternating": "{%- if messages[0]['role'] == 'system' %}{%- set rest = messages[1:] %}"
    "{%- else %}{%- set rest = messages %}{%- endif %}{%- set ns = namespace(index=0) %}{%- for m in rest %}"
    "{%- if (m['role'] == 'user') != (ns.index % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{%- set ns.index = ns.index + 1 %}[{{ m.content | trim }}]{%- endfor %}",
    "macros": "{%- macro typed(spec, depth=0) -%}{%- for name, value in spec.items() | sort -%}"
    "{{ '  ' * depth }}{{ name }}: {% if value is mapping %}\n{{ typed(value, depth + 1) }}"
    "{%- elif value is string %}{{ value | replace('f', 'F') }}\n{% else %}?\n{% endif %}{%- endfor -%}{%- endmacro %}"
    "{% for t in tools or [] %}{{ typed(t) }}{% endfor %}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "json": "{{ tools | tojson(ensure_ascii=True, sort_keys=True, separators=(',', ':')) }}"
    "{{ messages | map(attribute='content') | join('|') }}{{ messages[1].content.split('\"')[1] }}"
    "{{ messages[::-1][0].role ~ messages[-1:] | length }}",
    "looking around": "{%- for m in messages %}{{ loop.previtem.role if loop.previtem is defined else 'start' }}>"
    "{{ m.role }}{{ ' last' if loop.last }}"
    "{%- if not loop.first and m.role == 'user' %}{% break %}{% endif %}{%- endfor %}",
    "variables": "{{ enable_thinking | default('unset') }} {{ messages[0].content }} {{ dict(a=1) | tojson }}",
}
MESSAGES = [
    {"role": "system", "content": " be <brief> & 'kind' "},
    {"role": "user", "content": 'hé \u2028 "quoted"'},
    {"role": "assistant", "content": "  spaced  "},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"ü": "<&'>"}}}]


def checkpoint(directory: Path, template: Any) -> Path:
    backend = Backend(models.BPE(vocab={chr(code): code - 32 for code in range(32, 127)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return directory


def copied() -> list[dict[str, Any]]:
    return [dict(message) for message in MESSAGES]


def ours(directory: Path, **options: Any) -> str:
    template = load_template(Tokenizer(directory), None)
    assert template is not None
    return template.render(copied(), **options)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("generation", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.sampled(2)
def test_rendered_text_equals_transformers(tmp_path: Path, name: str, generation: bool, tools: Any) -> None:
    oracle = AutoTokenizer.from_pretrained(checkpoint(tmp_path, TEMPLATES[name]))
    for variables in ({}, {"enable_thinking": False}):
        expected = oracle.apply_chat_template(
            MESSAGES, tools=tools, add_generation_prompt=generation, tokenize=False, **variables
        )
        assert ours(tmp_path, tools=tools, add_generation_prompt=generation, variables=variables) == expected


@pytest.mark.parametrize("name", ["chatml", "blocks", "generation"])
def test_a_continued_message_ends_where_transformers_ends_it(tmp_path: Path, name: str) -> None:
    oracle = AutoTokenizer.from_pretrained(checkpoint(tmp_path, TEMPLATES[name]))
    messages = copied()[1:]
    expected = oracle.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    template = load_template(Tokenizer(tmp_path), None)
    assert template is not None
    found = template.render(
        [dict(message) for message in messages], continue_final_message=True, add_generation_prompt=False
    )
    assert found == expected


def test_one_of_several_templates_is_chosen_as_by_transformers(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    oracle = AutoTokenizer.from_pretrained(checkpoint(tmp_path, named))
    for tools in (None, TOOLS):
        assert ours(tmp_path, tools=tools) == oracle.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
    assert ours(tmp_path, template="tool_use") == "tools"
    lone = ChatTemplate({"rag": "x"}, {})
    with pytest.raises(RequestError, match="'default'; it has rag"):
        lone.render(copied())


def test_templates_lie_in_files_of_several_names(tmp_path: Path) -> None:
    """Each file overrides the previous ones."""
    (tmp_path / "tokenizer.json").write_text((checkpoint(tmp_path, None) / "tokenizer.json").read_text())
    assert load_template(Tokenizer(tmp_path), None) is None and template_file(tmp_path) == ""
    (tmp_path / "chat_template.json").write_text('{"chat_template": "of a processor"}')
    assert ours(tmp_path) == "of a processor" and template_file(tmp_path) == "chat_template.json"
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "of the tokenizer"}')
    assert ours(tmp_path) == "of the tokenizer" and template_file(tmp_path) == "tokenizer_config.json"
    (tmp_path / "chat_template.jinja").write_text("of a file")
    assert ours(tmp_path) == "of a file" and template_file(tmp_path) == "chat_template.jinja"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("with documents")
    assert ours(tmp_path) == "of a file" and ours(tmp_path, template="rag") == "with documents"


@pytest.mark.parametrize("template", [7, [{"name": "x"}], ["x"]])
def test_a_template_that_is_none_is_an_error_of_the_checkpoint(tmp_path: Path, template: Any) -> None:
    with pytest.raises(CheckpointError, match="chat_template"):
        Tokenizer(checkpoint(tmp_path, template))


def test_a_file_replaces_the_checkpoints_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer(checkpoint(tmp_path, "own"))
    file = tmp_path / "other.jinja"
    file.write_text("other")
    template = load_template(tokenizer, str(file))
    assert template is not None and template.render(copied()) == "other"
    with pytest.raises(CheckpointError, match=r"model\.chat_template"):
        load_template(tokenizer, str(tmp_path / "missing.jinja"))


@pytest.mark.parametrize(
    "source,message",
    [
        ("{% for %}", r"not valid Jinja \(line 1\)"),
        ("\n\n{{ messages[9].content.x }}", r"fails on this conversation \(UndefinedError in line 3\)"),
        ("{{ messages[0].nothing.more }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{% for i in range(10**9) %}{% endfor %}", "exceeds a limit"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ lipsum.__globals__.os }}", "SecurityError"),
        ("{{ strftime_now(3) }}", "TypeError"),
        ("{{ messages | tojson(indent='x', separators=3) }}", "TypeError"),
        ("{% include 'x' %}", "TypeError"),
    ],
)
def test_a_failure_of_the_models_template_is_an_error_of_the_operator(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(source, {}).render(copied())
    with pytest.raises(RequestError, match=message) as raised:
        ChatTemplate("own", {}).render(copied(), template=source)
    assert raised.value.param == "chat_template"


def test_a_template_that_raises_an_exception_refuses_the_request() -> None:
    with pytest.raises(RequestError, match="refuses the conversation: not this role") as raised:
        ChatTemplate("{{ raise_exception('not this role') }}", {}).render(copied())
    assert raised.value.param == "messages"


@pytest.mark.parametrize("source", ["{{ messages[0].role }}", "{{ messages[-1].content[:2] }}"])
def test_a_last_message_that_the_template_changes_cannot_be_continued(source: str) -> None:
    with pytest.raises(RequestError, match="continue_final_message"):
        ChatTemplate(source, {}).render(copied(), continue_final_message=True)
