# ruff: noqa: E501
"""Seeded mistakes: each is refused at the marked position, with a suggestion. `⟪` marks the position that the message
must name; it is removed before the manifest is read, so line and column follow from the text alone."""

from pathlib import Path

import pytest

from appliance.config.problems import Refused
from appliance.config.settings import Given, load

MARK = "⟪"
HEAD = "apiVersion: slipway/v2\nmodel: {source: {path: /m}}\n"

# name, manifest, key in the message, suggestion or explanation in the message
MISTAKES: list[tuple[str, str, str, str]] = [
    # keys
    ("typo in a key", HEAD + "endpoints:\n  ⟪prot: 1", "endpoints.prot", "did you mean port?"),
    ("typo in a section", HEAD + "⟪endpoint: {port: 1}", "endpoint", "did you mean endpoints?"),
    ("typo deep inside", HEAD + "engine:\n  cache:\n    ⟪block_token: 16", "engine.cache.block_token", "block_tokens?"),
    ("camel case", HEAD + "engine: {scheduling: {⟪maxRunning: 4}}", "engine.scheduling.maxRunning", "max_running?"),
    ("hyphens", HEAD + "limits: {⟪max-body: 1MiB}", "limits.max-body", "did you mean max_body?"),
    ("capital letters", HEAD + "⟪Endpoints: {}", "Endpoints", "endpoints?"),
    ("api version in snake case", "⟪api_version: slipway/v2\napiVersion: slipway/v2\nmodel: {source: {path: /m}}", "api_version",
     "did you mean apiVersion?"),
    ("key of another section", HEAD + "⟪max_running: 4", "max_running", "engine.scheduling: max_running"),
    ("key one level too high", HEAD + "engine:\n  ⟪block_tokens: 32", "engine.block_tokens",
     "engine.cache: block_tokens"),
    ("section in the wrong place", HEAD + "engine: {⟪hardware: {}}", "engine.hardware", "the top level"),
    ("name of vLLM: max_model_len", "apiVersion: slipway/v2\nmodel:\n  source: {path: /m}\n  ⟪max_model_len: 4096",
     "model.max_model_len", "model.max_context"),
    ("name of vLLM: gpu_memory_utilization", HEAD + "hardware: {⟪gpu_memory_utilization: 0.9}",
     "hardware.gpu_memory_utilization", "hardware.memory_share"),
    ("name of vLLM: max_num_seqs", HEAD + "engine: {⟪max_num_seqs: 8}", "engine.max_num_seqs", "max_running"),
    ("name of vLLM: served_model_name", "apiVersion: slipway/v2\nmodel: {source: {path: /m}, ⟪served_model_name: x}",
     "model.served_model_name", "model.names"),
    ("name instead of names", "apiVersion: slipway/v2\nmodel: {source: {path: /m}, ⟪name: x}", "model.name", "names"),
    ("kubernetes habit", HEAD + "⟪kind: LLMService", "kind", "leave it out"),
    ("an invented key", HEAD + "⟪zzz: 1", "zzz", "the manifest has apiVersion, model"),
    ("duplicate key", HEAD + "limits: {max_stop: 1, ⟪max_stop: 2}", "limits.max_stop", "it is already set in line 3"),
    ("duplicate section", HEAD + "limits: {max_stop: 1}\n⟪limits: {max_stop: 2}", "limits", "it is already set in line 3"),
    ("missing section", "⟪apiVersion: slipway/v2\n", "model", "missing"),
    ("missing version", "⟪model: {source: {path: /m}}\n", "apiVersion", "missing; must be slipway/v2"),
    ("missing source", "apiVersion: slipway/v2\n⟪model: {names: [a]}", "model.source", "missing; must be a mapping with path"),
    ("misspelt mandatory section", "apiVersion: slipway/v2\n⟪modle: {source: {path: /m}}", "modle", "did you mean model?"),
    # types
    ("text for a number", HEAD + "endpoints: {port: ⟪http}", "endpoints.port", "a whole number from 0 to 65535"),
    ("quoted number", HEAD + "endpoints: {port: ⟪'8000'}", "endpoints.port", "write 8000, without quotes"),
    ("quoted bool", HEAD + 'endpoints: {docs: ⟪"true"}', "endpoints.docs", "write true, without quotes"),
    ("quoted no", HEAD + 'endpoints: {docs: ⟪"no"}', "endpoints.docs", "write false, without quotes"),
    ("number for a bool", HEAD + "endpoints: {docs: ⟪1}", "endpoints.docs", "true or false"),
    ("float for a whole number", HEAD + "limits: {max_stop: ⟪16.0}", "limits.max_stop", "write 16"),
    ("number for a text", HEAD + "endpoints: {host: ⟪127}", "endpoints.host", 'write "127"'),
    ("one text for a list", "apiVersion: slipway/v2\nmodel: {source: {path: /m}, names: ⟪demo}", "model.names", "write [demo]"),
    ("list for one text", "apiVersion: slipway/v2\nmodel: {source: {path: ⟪[/m]}}", "model.source.path", "write /m, without brackets"),
    ("number in a list of texts", "apiVersion: slipway/v2\nmodel:\n  source: {path: /m}\n  names: [a, ⟪7]", "model.names[1]",
     'write "7"'),
    ("text for a section", "apiVersion: slipway/v2\nmodel: ⟪/m", "model", "write {source: {path: /m}}"),
    ("address for a section", "apiVersion: slipway/v2\nmodel: {source: ⟪az://c/x}", "model.source",
     'write {az: {uri: "az://c/x"}}'),
    ("list for a section", HEAD + "limits: ⟪[max_stop]", "limits", "must be a mapping with max_waiting"),
    ("empty section", HEAD + "limits:⟪\n", "limits", "leave the key out"),
    ("mapping for a value", HEAD + "endpoints: {port: ⟪{number: 1}}", "endpoints.port", "a whole number"),
    # values
    ("port too large", HEAD + "endpoints: {port: ⟪80000}", "endpoints.port", "from 0 to 65535"),
    ("negative count", HEAD + "limits: {max_stop: ⟪-1}", "limits.max_stop", "at least 1"),
    ("share over one", HEAD + "hardware: {memory_share: ⟪90}", "hardware.memory_share", "write 0.9"),
    ("share in percent", HEAD + "hardware: {memory_share: ⟪90%}", "hardware.memory_share", "write 0.9"),
    ("share of zero", HEAD + "hardware: {memory_share: ⟪0}", "hardware.memory_share", "above 0 and at most 1"),
    ("device gpu", HEAD + "hardware: {device: ⟪gpu}", "hardware.device", "did you mean cuda?"),
    ("device in capitals", HEAD + "hardware: {device: ⟪CPU}", "hardware.device", "did you mean cpu?"),
    ("dtype bf16", "apiVersion: slipway/v2\nmodel: {source: {path: /m}, dtype: ⟪bf16}", "model.dtype", "did you mean bfloat16?"),
    ("dtype half", "apiVersion: slipway/v2\nmodel: {source: {path: /m}, dtype: ⟪half}", "model.dtype", "did you mean float16?"),
    ("typo in a word", HEAD + "engine: {scheduling: {policy: ⟪prioritty}}", "engine.scheduling.policy", "priority?"),
    ("fifo", HEAD + "engine: {scheduling: {policy: ⟪fifo}}", "engine.scheduling.policy", "did you mean fcfs?"),
    ("log level warn", HEAD + "observability: {log_level: ⟪warn}", "observability.log_level", "did you mean warning?"),
    ("version v1", "apiVersion: ⟪v1\nmodel: {source: {path: /m}}", "apiVersion", "did you mean slipway/v2?"),
    ("a later version", "apiVersion: ⟪slipway/v3\nmodel: {source: {path: /m}}", "apiVersion", "did you mean slipway/v2?"),
    ("size without B", HEAD + "limits: {max_body: ⟪8Mi}", "limits.max_body", "did you mean 8MiB?"),
    ("size of one letter", HEAD + "hardware: {kv_cache_memory: ⟪4G}", "hardware.kv_cache_memory", "did you mean 4GiB?"),
    ("size in small letters", HEAD + "hardware: {kv_cache_memory: ⟪4gb}", "hardware.kv_cache_memory", "mean 4GB?"),
    ("size of zero", HEAD + "hardware: {kv_cache_memory: ⟪0}", "hardware.kv_cache_memory", "a size such as 8GiB"),
    ("negative size", HEAD + "hardware: {kv_cache_memory: ⟪-4}", "hardware.kv_cache_memory", "a size such as 8GiB"),
    ("duration in words", HEAD + "lifecycle: {drain: ⟪30 seconds}", "lifecycle.drain", "did you mean 30s?"),
    ("duration in min", HEAD + "health: {startup_budget: ⟪5min}", "health.startup_budget", "did you mean 5m?"),
    ("duration without unit in quotes", HEAD + "lifecycle: {drain: ⟪'30'}", "lifecycle.drain", "did you mean 30s?"),
    ("negative duration", HEAD + "lifecycle: {drain: ⟪-1}", "lifecycle.drain", "a duration such as 30s"),
    ("thousands with k", HEAD + "engine: {scheduling: {max_step_tokens: ⟪8k}}", "engine.scheduling.max_step_tokens",
     "write 8192"),
    ("thousands with a comma", "apiVersion: slipway/v2\nmodel: {source: {path: /m}, max_context: ⟪'8,192'}", "model.max_context",
     "write 8192"),
    ("unlimited", HEAD + "limits: {max_output_tokens: ⟪unlimited}", "limits.max_output_tokens", "leave the key out"),
    # traps of YAML
    ("no for a bool", HEAD + "endpoints: {docs: ⟪no}", "endpoints.docs", "write false"),
    ("on for a bool", HEAD + "endpoints:\n  docs: ⟪on", "endpoints.docs", "write true"),
    ("Yes for a bool", HEAD + "engine: {cache: {prefix: ⟪Yes}}", "engine.cache.prefix", "write true"),
    ("no for a name", "apiVersion: slipway/v2\nmodel: {source: {path: /m}, names: [⟪no]}", "model.names[0]", 'write "no"'),
    ("n for a path", "apiVersion: slipway/v2\nmodel: {source: {path: ⟪n}}", "model.source.path", 'write "n"'),
    ("off for a number", HEAD + "limits: {max_stop: ⟪off}", "limits.max_stop", "must be a whole number of at least 1"),
    ("octal", HEAD + "endpoints: {port: ⟪0777}", "endpoints.port", "write 777"),
    ("hexadecimal", HEAD + "endpoints: {port: ⟪0x1F90}", "endpoints.port", "write 8080"),
    ("underscores", HEAD + "limits: {max_waiting: ⟪1_000}", "limits.max_waiting", "write 1000"),
    ("exponent", HEAD + "limits: {max_waiting: ⟪1e3}", "limits.max_waiting", "write 1000"),
    ("sexagesimal", HEAD + "lifecycle: {drain: ⟪1:30}", "lifecycle.drain", "did you mean 90s?"),
    ("date", "apiVersion: slipway/v2\nmodel: {source: {path: ⟪2026-01-31}}", "model.source.path", 'write "2026-01-31"'),
    ("not a number", HEAD + "engine: {sampling: {repetition_penalty: ⟪.nan}}", "engine.sampling.repetition_penalty",
     "no key accepts infinity"),
    ("infinity", HEAD + "engine: {sampling: {repetition_penalty: ⟪.inf}}", "engine.sampling.repetition_penalty",
     "a number from 0.0001 to 10000"),
    ("key on", HEAD + "endpoints: {⟪on: 1}", "endpoints.on", 'write "on":'),
    ("numeric key", HEAD + "⟪8000: 1", "8000", "it is not text"),
    ("list as key", HEAD + "? ⟪[a]\n: 1", "", "keys are plain words"),
    ("anchor", "apiVersion: slipway/v2\nmodel: ⟪&m {path: /m}", "model", "repeat the value"),
    ("alias", "apiVersion: slipway/v2\nmodel: {source: {path: /m}, names: [⟪*x]}", "model.names[0]", "repeat the value"),
    ("merge key", HEAD + "limits:\n  ⟪<<: {max_stop: 1}", "limits", "merge keys are not allowed"),
    ("tag", HEAD + "endpoints: {port: ⟪!!str 80}", "endpoints.port", "tags are not allowed"),
    # files
    ("tab as indentation", HEAD + "limits:\n⟪\tmax_stop: 1", "", "indent with spaces"),
    ("tab after spaces", HEAD + "limits:\n ⟪\tmax_stop: 1", "", "indent with spaces"),
    ("no space after a colon", HEAD + "endpoints:\n  host: x\n  ⟪port:8000\n", "", "port: 8000"),
    ("no space after the only colon", HEAD + "endpoints:\n  ⟪port:8000\n", "endpoints", "port: 8000"),
    ("unclosed bracket", "apiVersion: slipway/v2\nmodel: {source: {path: /m}\n⟪limits: {}\n", "", "is not closed"),
    ("unclosed quote", "apiVersion: slipway/v2\nmodel: {source: {path: ⟪'/m}}\n", "", "is not closed"),
    ("text that begins with @", "apiVersion: slipway/v2\nmodel: {source: {path: ⟪@m}}", "", "in quotes"),
    ("colon within a text", "apiVersion: slipway/v2\nmodel:\n  source:\n    path: a⟪: b", "", "quote a text"),
    ("crooked indentation", HEAD + "limits:\n  max_stop: 1\n ⟪max_body: 1MiB", "", "check the indentation"),
    ("second document", HEAD + "⟪---\nx: 1", "", "one file is one service"),
    ("empty file", "⟪", "", "apiVersion: slipway/v2"),
    ("only comments", "⟪# nothing\n", "", "apiVersion: slipway/v2"),
    ("list at the root", "⟪- model\n", "", "it must be a mapping"),
    ("text at the root", "⟪model\n", "", "it must be a mapping"),
    ("control character", HEAD + "limits: {max_stop: ⟪\x07}", "", "U+0007"),
    # sources
    ("two kinds of source", "apiVersion: slipway/v2\nmodel: {source: ⟪{path: /m, vertex: {}}}", "model.source",
     "has path and vertex; it takes exactly one of path, huggingface"),
    ("no kind of source", "apiVersion: slipway/v2\nmodel: {source: ⟪{}}", "model.source", "has no kind"),
    ("empty kind of source", "apiVersion: slipway/v2\nmodel:\n  source:\n    sagemaker:⟪\n", "model.source.sagemaker",
     "write sagemaker: {}"),
    ("the path of version 1", "apiVersion: slipway/v2\nmodel: {⟪path: /m}", "model.path",
     "it belongs to model.source: path"),
    ("a typo in a kind", "apiVersion: slipway/v2\nmodel: {source: {⟪hugging_face: {repo: a/b}}}",
     "model.source.hugging_face", "did you mean huggingface?"),
    ("repository without its owner", "apiVersion: slipway/v2\nmodel: {source: {huggingface: {repo: ⟪bert}}}",
     "model.source.huggingface.repo", "text such as Qwen/Qwen3-0.6B"),
    ("address of no archive", "apiVersion: slipway/v2\nmodel: {source: {http: {url: ⟪'https://h/x.rar'}}}",
     "model.source.http.url", "text such as https://"),
    ("s3 with the other scheme", "apiVersion: slipway/v2\nmodel: {source: {s3: {uri: ⟪'gs://b/x'}}}",
     "model.source.s3.uri", "text such as s3://"),
    ("unknown credentials", HEAD.replace("}}", "}, credentials: ⟪keys}") + "secrets: {key: {file: a}}",
     "model.credentials", "secrets has key"),
    # secrets
    ("literal secret", HEAD + "secrets: {key: ⟪hunter2}", "secrets.key", "never the value itself"),
    ("literal secret in a mapping", HEAD + "secrets: {key: {⟪value: hunter2}}", "secrets.key.value", "never the value"),
    ("secret in the name of a variable", HEAD + "secrets: {key: {env: ⟪hunter-2}}", "secrets.key.env", "not shown"),
    ("both kinds of secret", HEAD + "secrets: {⟪key: {file: a, env: B}}", "secrets.key", "both file and env"),
    ("empty secret", HEAD + "secrets: {⟪key: {}}", "secrets.key", "{file: path} or {env: NAME}"),
    ("name of a secret in capitals", HEAD + "secrets: {⟪KEY: {file: a}}", "secrets.KEY", "must match"),
    ("unknown secret", HEAD + "endpoints: {api_keys: ⟪keys}\nsecrets: {key: {file: a}}", "endpoints.api_keys",
     "secrets has key"),
]  # fmt: skip


def marked(text: str) -> tuple[str, int, int]:
    before, _, after = text.partition(MARK)
    return before + after, before.count("\n") + 1, len(before) - before.rfind("\n")


def refused(path: Path, text: str) -> Refused:
    path.write_text(text)
    with pytest.raises(Refused) as caught:
        load(Given(path))
    return caught.value


def test_there_are_at_least_sixty_seeded_mistakes_with_names_of_their_own() -> None:
    assert len({name for name, *_ in MISTAKES}) == len(MISTAKES) >= 60


@pytest.mark.parametrize(("name", "text", "key", "words"), MISTAKES, ids=[mistake[0] for mistake in MISTAKES])
def test_a_mistake_is_refused_at_its_place_with_a_suggestion(
    tmp_path: Path, name: str, text: str, key: str, words: str
) -> None:
    path = tmp_path / "m.yaml"
    plain, line, column = marked(text)
    problems = refused(path, plain).problems
    at = [problem for problem in problems if (problem.place.line, problem.place.column) == (line, column)]
    assert at, f"expected {line}:{column}, got {[str(problem) for problem in problems]}"
    assert any(problem.key == key and words in problem.message for problem in at), [str(problem) for problem in at]
    assert str(at[0]).startswith(f"{path}:{line}:{column}: ")


@pytest.mark.parametrize(("name", "text", "key", "words"), MISTAKES, ids=[mistake[0] for mistake in MISTAKES])
def test_a_mistake_without_the_marked_part_is_the_only_problem(
    tmp_path: Path, name: str, text: str, key: str, words: str
) -> None:
    """One mistake makes one message."""
    assert len(refused(tmp_path / "m.yaml", marked(text)[0]).problems) == 1


def test_no_message_repeats_values_under_secrets(tmp_path: Path) -> None:
    for text in (
        "secrets: {key: hunter2}",
        "secrets: {key: {value: hunter2}}",
        "secrets: {key: {env: hunter2-}}",
        "secrets: {key: [hunter2]}",
        "secrets: {key: {file: {hunter2: hunter2}}}",
        "secrets: hunter2",
        "secrets: {key: 0x68756e74657232}",
        "secrets: {key: {file: 0x68756e74657232}}",
    ):
        message = str(refused(tmp_path / "m.yaml", HEAD + text))
        assert "hunter2" not in message and "68756e74657232" not in message, message


def test_all_mistakes_of_a_file_come_together_and_in_its_order(tmp_path: Path) -> None:
    text = "apiVersion: slipway/v2\nmodel:\n  pth: /m\nendpoints:\n  port: no\n  docs: 010\n"
    text += "limits: {max_body: 1XB}\nzzz: 1\n"
    lines = [problem.place.line for problem in refused(tmp_path / "m.yaml", text).problems]
    assert lines == [3, 5, 6, 7, 8]


def test_one_text_block_contains_all_problems(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    text = "apiVersion: slipway/v2\nmodel: {source: {path: /m}, dtype: fp16}\nendpoints:\n  prot: 8000\n  docs: yes\n"
    golden = f"""\
{path}:2:36: model.dtype: "fp16"; must be one of auto, float32, bfloat16, float16; did you mean float16?
{path}:4:3: endpoints.prot: unknown key; did you mean port?
{path}:5:9: endpoints.docs: yes: YAML 1.1 reads an unquoted yes as true, YAML 1.2 as text; write true"""
    assert str(refused(path, text)) == golden


@pytest.mark.parametrize(
    "data", [b"\xff\xfea\x00p\x00", b"\xfe\xff\x00a", b"apiVersion: slipway/v2\nmodel: {source: {path: caf}\xe9}\n"]
)
def test_a_file_that_is_not_utf8_is_refused_with_the_way_to_save_it(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.yaml"
    path.write_bytes(data)
    with pytest.raises(Refused, match="save .* as UTF-8"):
        load(Given(path))


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_bytes(b"\xef\xbb\xbfapiVersion: slipway/v2\r\nmodel: {source: {path: /m}}\r\n")
    assert load(Given(path)).manifest.model.source.path == "/m"


@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_a_manifest_that_cannot_be_opened_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m.yaml"
    if kind == "folder":
        path.mkdir()
    with pytest.raises(Refused, match=f"^{path}: (no such file|is a directory)$"):
        load(Given(path))


def test_a_deeply_nested_file_is_refused_and_does_not_exhaust_the_stack(tmp_path: Path) -> None:
    assert "nested deeper" in str(refused(tmp_path / "m.yaml", "a: " + "[" * 10_000))


def test_the_word_off_is_plain_where_it_is_one_of_the_values(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(HEAD + "observability: {log_outputs: off}\n")
    assert load(Given(path)).manifest.observability.log_outputs == "off"
