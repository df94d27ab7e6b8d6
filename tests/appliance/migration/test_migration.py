"""Command lines and files of other servers, as in their documentation, and the manifests that they become."""

from pathlib import Path
from typing import Any

import pytest

from appliance.cli.init import SCHEMA
from appliance.cli.main import main
from appliance.config import exits
from appliance.config.keys import find
from appliance.config.settings import Given, load
from appliance.migration.convert import UNKNOWN, Migration, migrate
from appliance.migration.options import CONTAINER
from appliance.migration.read import read
from appliance.migration.rules import Key, Keys, Missing, Server, Unneeded, table
from appliance.migration.servers import SERVERS
from appliance.migration.words import Unreadable, split
from appliance.migration.write import manifest

DEMO = Path(__file__).resolve().parents[3] / "manifests" / "demo"
DOCKER = (
    "docker run --runtime nvidia --gpus all -v ~/.cache/huggingface:/root/.cache/huggingface -p 8000:8000 --ipc=host"
)
COMPOSE = """
services:
  proxy: {image: nginx}
  vllm:
    image: vllm/vllm-openai:${TAG:-latest}
    command: >
      --model Qwen/Qwen3-0.6B --max-model-len ${LENGTH:-4096}
      --tensor-parallel-size 1
    environment: [HF_TOKEN=hf_secret, VLLM_API_KEY=sk-secret, NAME=x]
    ports: ["8000:8000"]
  tgi:
    image: ghcr.io/huggingface/text-generation-inference:3.3.5
    environment: {MODEL_ID: a/b, NUM_SHARD: 2, QUANTIZE: awq}
  shell:
    image: registry.example/own
    command: ["bash", "-c", "exec python3 -m sglang.launch_server --model-path /m --tp 4"]
"""
MODELFILE = '''# comment
FROM ./llama.gguf
PARAMETER temperature 1
parameter num_ctx 4096
PARAMETER stop "<|im_end|>"
TEMPLATE """{{ .Prompt }}
more"""
SYSTEM You are Mario.
'''
PROPERTIES = """engine=Python
option.model_id=s3://models/llama
option.tensor_parallel_degree=max
option.max_rolling_batch_size: 32
option.gpu_memory_utilization=0.7
option.enable_lora=false
option.enable_prefix_caching=false
option.foo=bar
"""


def made(text: str, model: str = "", service: str = "") -> Migration:
    """The conversion, after a check that its manifest is accepted."""
    found = migrate(read(text, service), Path(), model)
    load(Given(Path("m.yaml"), (), {}, text=manifest(found, None)))
    return found


def values(found: Migration) -> dict[str, Any]:
    return {key: one.value for key, one in found.values.items()}


@pytest.mark.parametrize("count", [1, 2, 5])
def test_long_values_are_written_completely(count: int) -> None:
    modules = [f"adapter-{number}=/models/adapters/adapter-{number}" for number in range(count)]
    found = made(f"vllm serve m/x --enable-lora --lora-modules {' '.join(modules)}")
    written = load(Given(Path("m.yaml"), (), {}, text=manifest(found, None))).manifest
    assert [f"{one.name}={one.path}" for one in written.adapters] == modules


@pytest.mark.parametrize(
    "line",
    [
        'vllm serve m/x --port 9 > "$LOG" 2>&1 &',
        'nohup "$PY" -m vllm.entrypoints.openai.api_server --model m/x --port 9 >>log 2>err &',
        "uv run vllm serve m/x --port 9 &>log",
    ],
)
def test_redirections_and_wrappers_are_ignored(line: str) -> None:
    found = made(line)
    assert values(found)["endpoints.port"] == 9 and not found.missing


def test_comments_after_parameters_of_a_modelfile_are_ignored(tmp_path: Path) -> None:
    lines = [
        "FROM ./m.gguf",
        "PARAMETER temperature 0.2   # low",
        "PARAMETER num_ctx 4096 # long",
        'PARAMETER stop "# a"',
        "PARAMETER stop   ### Human:",
    ]
    (tmp_path / "Modelfile").write_text("\n".join(lines))
    found = migrate(read(str(tmp_path / "Modelfile")), Path(), "")
    assert (values(found)["model.max_context"], values(found)["engine.sampling.temperature"]) == (4096, 0.2)
    assert [name for name, _ in found.missing] == ["PARAMETER stop # a", "PARAMETER stop ### Human:"]


HUB = "model.source.huggingface.repo"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "CUDA_VISIBLE_DEVICES=0,1 vllm serve Qwen/Qwen3-8B --max-model-len 8k --kv-cache-dtype fp8_e4m3 -tp 2 "
            "--gpu-memory-utilization 0.92 --served-model-name a b --max-num-seqs=64 --max_num_batched_tokens 4K "
            "--tool-call-parser hermes --reasoning-parser deepseek_r1 --no-enable-prefix-caching --max-logprobs -1",
            {
                **{HUB: "Qwen/Qwen3-8B", "model.max_context": 8000, "quantization.kv_cache": "fp8"},
                **{"parallelism.tensor": 2, "hardware.memory_share": 0.92, "model.names": ["a", "b"]},
                **{"engine.scheduling.max_running": 64, "engine.scheduling.max_step_tokens": 4096},
                **{"model.format": "hermes+deepseek_r1", "engine.cache.prefix": False, "limits.max_logprobs": -1},
                "endpoints.compat": "vllm",
            },
        ),
        (
            "python3 -m vllm.entrypoints.openai.api_server --model /models/x --host 127.0.0.1 --port 9000 --dtype half "
            '--enforce-eager --override-generation-config \'{"temperature": 1, "top_p": 0.5}\' --enable-log-requests',
            {
                **{"model.source.path": "/models/x", "model.names": ["/models/x"], "endpoints.host": "127.0.0.1"},
                **{"endpoints.port": 9000, "model.dtype": "float16", "hardware.graphs": False},
                **{"engine.sampling.temperature": 1.0, "engine.sampling.top_p": 0.5, "endpoints.compat": "vllm"},
                "observability.log_requests": True,
            },
        ),
        (
            'vllm serve /m/vl --limit-mm-per-prompt \'{"image": 4, "video": 0}\' --allowed-local-media-path /images '
            "--allowed-media-domains a.example.com b.example.com --mm-processor-cache-gb 0.5",
            {
                **{"model.source.path": "/m/vl", "model.names": ["/m/vl"], "endpoints.compat": "vllm"},
                **{"limits.media.images": 4, "limits.media.videos": 0, "limits.media.folders": ["/images"]},
                **{"limits.media.hosts": ["a.example.com", "b.example.com"], "limits.media.cache": "536870912B"},
            },
        ),
        (
            """vllm serve /m -sc '{"method": "suffix", "num_speculative_tokens": 8}'""",
            {
                **{"model.source.path": "/m", "model.names": ["/m"], "endpoints.compat": "vllm"},
                **{"speculation.method": "suffix", "speculation.tokens": 8},
            },
        ),
        (
            f"{DOCKER} --env 'HUGGING_FACE_HUB_TOKEN=hf_x' vllm/vllm-openai:latest --model mistralai/Mistral-7B-v0.1",
            {
                HUB: "mistralai/Mistral-7B-v0.1",
                "model.names": ["mistralai/Mistral-7B-v0.1"],
                "endpoints.compat": "vllm",
            },
        ),
        (
            "python -m sglang.launch_server --model-path meta-llama/Llama-3-8B --tp 2 --mem-fraction-static 0.9 "
            "--schedule-policy lpm --disable-radix-cache --context-length 8192 --api-key sk-secret",
            {
                **{HUB: "meta-llama/Llama-3-8B", "model.names": ["meta-llama/Llama-3-8B"], "parallelism.tensor": 2},
                **{"hardware.memory_share": 0.9, "engine.cache.prefix": False, "model.max_context": 8192},
                **{"endpoints.host": "127.0.0.1", "endpoints.port": 30000},
                **{"endpoints.api_keys": "clients", "secrets.clients.env": "API_KEYS"},
            },
        ),
        (
            "docker run --gpus all --shm-size 1g -p 8080:80 -v $PWD/data:/data -e MAX_TOTAL_TOKENS=4096 "
            "-e API_KEY=sk-secret ghcr.io/huggingface/text-generation-inference:3.3.5 "
            "--model-id HuggingFaceH4/zephyr-7b-beta --num-shard 2",
            {
                **{HUB: "HuggingFaceH4/zephyr-7b-beta", "parallelism.tensor": 2, "model.max_context": 4096},
                **{"endpoints.port": 80, "endpoints.api_keys": "clients", "secrets.clients.env": "API_KEY"},
            },
        ),
        (
            "text-generation-launcher --model-id a/b --max-concurrent-requests 200 --cuda-graphs 0 "
            "--sharded false -p 80",
            {HUB: "a/b", "limits.max_waiting": 200, "hardware.graphs": False, "endpoints.port": 80},
        ),
        (
            "llama-server -m /models/qwen.gguf -c 16384 -np 4 -ngl 99 -fa --port 8081 -ctk q8_0 -ctv q8_0 --jinja "
            "-t -1",
            {
                **{
                    "model.source.path": "/models/qwen.gguf",
                    "model.max_context": 4096,
                    "quantization.kv_cache": "int8",
                },
                **{"engine.scheduling.max_running": 4, "endpoints.port": 8081, "endpoints.host": "127.0.0.1"},
            },
        ),
        (
            "llama-server -hf ggml-org/gemma-3-1b-it-GGUF:Q8_0 -ngl 0 --host 0.0.0.0 -fa on",
            {
                **{HUB: "ggml-org/gemma-3-1b-it-GGUF", "model.source.huggingface.files": ["*Q8_0*.gguf"]},
                **{"hardware.device": "cpu", "endpoints.port": 8080},
            },
        ),
    ],
)
def test_command_lines_set_keys(text: str, expected: dict[str, Any]) -> None:
    assert values(made(text)) == expected


def test_files_set_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("Modelfile", MODELFILE), ("serving.properties", PROPERTIES), ("compose.yaml", COMPOSE)):
        (tmp_path / name).write_text(text)
    modelfile = made("Modelfile")
    assert values(modelfile) == {
        **{"model.source.path": "llama.gguf", "engine.sampling.temperature": 1.0, "model.max_context": 4096},
        **{"endpoints.host": "127.0.0.1", "endpoints.port": 11434},
    }
    assert [shown.split()[0] for shown, _ in modelfile.missing] == ["PARAMETER", "TEMPLATE", "SYSTEM"]
    properties = made("serving.properties")
    assert values(properties) == {
        **{"model.source.s3.uri": "s3://models/llama", "parallelism.tensor": "auto", "hardware.memory_share": 0.7},
        **{"engine.scheduling.max_running": 32, "engine.cache.prefix": False, "endpoints.port": 8080},
    }
    assert properties.missing == [("option.foo=bar", UNKNOWN)]
    assert values(made("compose.yaml", service="tgi")) == {HUB: "a/b", "parallelism.tensor": 2, "endpoints.port": 80}
    assert values(made("compose.yaml", service="shell"))["parallelism.tensor"] == 4
    vllm = made("compose.yaml", service="vllm")
    assert values(vllm) == {
        **{HUB: "Qwen/Qwen3-0.6B", "model.names": ["Qwen/Qwen3-0.6B"], "model.max_context": 4096},
        **{"endpoints.compat": "vllm", "endpoints.api_keys": "clients", "secrets.clients.env": "VLLM_API_KEY"},
    }
    assert [shown for shown, _ in vllm.missing] == ["services.vllm.ports", "NAME"]
    assert "secret" not in manifest(vllm, None).replace("secrets:", "")


def test_every_option_is_in_the_result_and_secrets_are_not() -> None:
    words = "--swap-space 4 --quantization awq --enable-prefix-caching --frobnicate 3 --hf-token hf_secret"
    more = "--api-key sk-secret --no-enable-chunked-prefill stray"
    found = made(f"{DOCKER} -e MY_TOKEN=t-secret vllm/vllm-openai --model m/x {words} {more}")
    volume = "-v ~/.cache/huggingface:/root/.cache/huggingface"
    kept = ("--runtime nvidia", "--gpus all", volume, "-p 8000:8000", "--ipc host")
    assert dict(found.missing) == dict.fromkeys(kept, CONTAINER) | {
        "MY_TOKEN": "a variable that Slipway does not read",
        "--swap-space 4": "preempted requests are computed again, not swapped to the host",
        "--frobnicate 3": UNKNOWN,
        "stray": UNKNOWN,
        "--no-enable-chunked-prefill": "prompts longer than a step are always divided",
    }
    assert dict(found.unneeded) == {
        "--quantization awq": "the checkpoint declares how its weights are stored",
        "--enable-prefix-caching": "the default of engine.cache.prefix",
        "--hf-token •••": "Slipway reads the environment variable HF_TOKEN",
    }
    assert values(found)["secrets.clients.env"] == "API_KEYS"
    assert "-secret" not in manifest(found, None) and "hf_secret" not in manifest(found, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vllm serve 'a b", "character 12: the quote ' is not closed"),
        ("vllm serve m/x --port abc", "character 16: --port abc: must be a whole number, such as 8192 or 8k"),
        ("vllm serve m/x --max-model-len 1.5", "character 16: --max-model-len 1.5: must be a whole number"),
        ("vllm serve m/x --max-num-seqs 9999", "engine.scheduling.max_running takes a whole number from 1 to 4096"),
        ("vllm serve m/x --port", "character 16: --port has no value"),
        ("vllm serve m/x & echo", "character 16: & is an operator of the shell"),
        ("vllm serve m/x && echo", "character 16: && is an operator of the shell"),
        ("vllm serve $MODEL", "character 12: MODEL $MODEL: contains a variable of the shell"),
        ("vllm serve gpt2", "character 12: MODEL gpt2: must be a folder"),
        ("vllm serve --port 1", "names no model; name it: slipway init MODEL --from"),
        ("uvicorn app:app", "character 1: uvicorn is no command of a known server"),
        ("docker run -p 80:80", "the command names no image"),
        ("docker run nginx", "character 12: nginx is no image of a known server"),
        ("llama-server -mu http://x/y.gguf", "character 14: -mu http://x/y.gguf: single files are not downloaded"),
        ("absent.yaml", "absent.yaml: no such file or directory"),
    ],
)
def test_mistakes_are_reported_with_their_position(text: str, message: str) -> None:
    with pytest.raises(Unreadable) as error:
        made(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("Modelfile", "FROM llama3.2\n", "Modelfile:1: FROM llama3.2: is a model of Ollama's library"),
        ("Modelfile", "FROM ./x.gguf\nSISTEM 1\n", "Modelfile:2: SISTEM is no instruction"),
        ("Modelfile", 'FROM ./x.gguf\nTEMPLATE """x\n', 'Modelfile:2: TEMPLATE: the quote """ is not closed'),
        (
            "Modelfile",
            "FROM ./x.gguf\nPARAMETER num_ctx many\n",
            "Modelfile:2: PARAMETER num_ctx many: must be a whole",
        ),
        ("serving.properties", "engine=Python\n\nmodel\n", "serving.properties:3: must be NAME=VALUE"),
        ("compose.yaml", "services: [", "compose.yaml:1:12: is not YAML"),
        ("compose.yaml", COMPOSE, "several services can be converted: vllm, tgi, shell; name one with --service"),
        (
            "compose.yaml",
            "services: {a: {image: vllm/vllm-openai, command: [--model, m/x, --port, x]}}",
            "command[2]: --port x",
        ),
        ("notes.txt", "text", "must be a Modelfile"),
    ],
)
def test_mistakes_in_files_are_reported_with_their_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(Unreadable) as error:
        made(str(tmp_path / name))
    assert message in str(error.value)


def test_a_model_replaces_the_one_of_the_source(tmp_path: Path) -> None:
    (tmp_path / "Modelfile").write_text("FROM llama3.2\nPARAMETER temperature 1\n")
    found = made(str(tmp_path / "Modelfile"), "org/name")
    assert values(found)[HUB] == "org/name" and found.unneeded == [("FROM llama3.2", "replaced by MODEL, org/name")]


def test_words_are_divided_as_a_shell_does() -> None:
    line = """a 'b c' "d \\"e\\" \\$f" g\\ h \\\n  --x=1 '' # comment\n i"""
    assert [word.text for word in split(line)] == ["a", "b c", 'd "e" $f', "g h", "--x=1", "", "i"]
    assert [word.place for word in split("ab 'c'")] == ["character 1", "character 4"]


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.name)
def test_tables_name_keys_and_reasons(server: Server) -> None:
    rules = table(server)
    assert len(rules) > 20
    for name, rule in rules.items():
        match rule:
            case Key(key=key):
                found = find(tuple(key.split(".")))
                assert found is not None and found.kind == "value", name
            case Keys(keys=keys):
                assert keys and all(find(tuple(key.split("."))) for key in keys), name
            case Missing(reason=reason) | Unneeded(reason=reason):
                assert reason, name
    for spelling, long in server.short.items():
        assert server.rule(long) is not None, f"{spelling} is {long}, which has no rule"


def test_command_writes_the_manifest_and_lists_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = "vllm serve org/tiny --max-model-len 64 --swap-space 4 --port 8000"
    assert main(["init", "--from", command]) == 0
    output = capsys.readouterr().out
    listed = "  --swap-space 4: preempted requests are computed again, not swapped to the host\n"
    assert f"No equivalent:\n{listed}" in output and "  --port 8000: the default of endpoints.port\n" in output
    text = (tmp_path / "tiny.yaml").read_text()
    assert f"# {listed}" in text and "max_context: 64" in text and (tmp_path / SCHEMA).exists()
    assert main(["init", "--from", command]) == exits.MANIFEST.number
    assert "tiny.yaml: already exists" in capsys.readouterr().err
    assert main(["init", "--from", "vllm serve x", "-o", "-"]) == exits.MANIFEST.number
    assert "slipway init --from: character 12: MODEL x: must be" in capsys.readouterr().err
    assert main(["init"]) == exits.MANIFEST.number and "name a MODEL" in capsys.readouterr().err


def test_check_accepts_the_manifest_of_an_existing_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(DEMO.parent)
    target, command = (
        tmp_path / "m.yaml",
        "vllm serve ./demo --max-model-len 64 --served-model-name a b --max-num-seqs 4",
    )
    assert main(["init", "--from", command, "-o", str(target)]) == 0
    assert main(["check", str(target)]) == 0, capsys.readouterr().err
    assert main(["init", str(DEMO), "--from", "vllm serve org/absent", "-o", str(target), "--force"]) == 0
    assert main(["check", str(target)]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve /m/base --enable-lora --lora-modules sql=/m/sql chat=/m/chat --max-loras 2 --max-lora-rank 32",
        """vllm serve /m/base --lora-modules '{"name": "sql", "path": "/m/sql"}' chat=/m/chat""",
        "python -m sglang.launch_server --model-path /m/base --lora-paths sql=/m/sql /m/chat",
        "text-generation-launcher --model-id /m/base --lora-adapters sql=/m/sql,/m/chat",
    ],
)
def test_adapters_of_other_servers_become_adapters_of_the_manifest(command: str) -> None:
    found = load(Given(Path("m.yaml"), (), {}, text=manifest(made(command), None))).manifest
    assert [(one.name, one.path) for one in found.adapters] == [("sql", "/m/sql"), ("chat", "/m/chat")]
    slots = (2, 32) if "--max-loras" in command else (None, 16)
    assert (found.adapter_loading.max_active, found.adapter_loading.max_rank) == slots


def test_run_time_updates_of_vllm_name_the_key_for_folders() -> None:
    command = "docker run -e VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm/vllm-openai --model /m/base --enable-lora"
    assert "adapter_loading.folders" in manifest(made(command), None)
