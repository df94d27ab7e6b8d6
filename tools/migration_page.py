"""Write docs/migration.md from the tables in appliance/migration: options of other servers and their keys."""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from appliance.migration.convert import migrate  # noqa: E402
from appliance.migration.read import read  # noqa: E402
from appliance.migration.rules import Key, Keys, Missing, Rule, Server, Unneeded, table  # noqa: E402
from appliance.migration.servers import SERVERS  # noqa: E402
from appliance.migration.write import manifest  # noqa: E402
from tools.pages import write_pages  # noqa: E402

HEAD = """# Migration from other servers

<!-- made by tools/migration_page.py from appliance/migration; a test keeps it so -->

Convert the command line or the file of another server to a manifest:

```sh
slipway init --from 'vllm serve Qwen/Qwen3-8B -tp 2' -o chat.yaml
slipway init --from Modelfile                          # also serving.properties, a Docker Compose file
slipway init --from compose.yaml --service llm         # one of several services
slipway init /models/Qwen3-8B --from start.properties  # another model than the one in the source
slipway check chat.yaml
```

Quote the command line, so that it is one argument. `-o -` prints the manifest, `--force` replaces a file. Nothing is
downloaded, and the model need not exist on this machine: `slipway check` examines both.

- Every option of the source is in the result. It sets a key, or it is listed with a reason under *No equivalent* or
  *Nothing to set*, on the terminal and in comments of the manifest. Unknown options are under *No equivalent*.
- A value that cannot be read is an error with its position; so is a source without a model.
- Values that are the default of a key are not written, but listed.
- Port and address come from the source, or are the defaults of its server. The name of the model is the complete name
  if the server uses it. With vLLM, `endpoints.compat` is `vllm`, so that replies have its fields.
- API keys are not copied. The manifest names an environment variable or a file that contains them.
- Relative paths are rewritten for the folder of the manifest. Paths in a container are kept.
- Options of `docker run`, and keys of a Compose service such as `ports` and `volumes`, apply to Slipway's image, too.

## Sources

| source | recognised by |
|---|---|
| vLLM | `vllm serve`, `python -m vllm.entrypoints.openai.api_server`, an image of vLLM |
| SGLang | `python -m sglang.launch_server`, `sglang serve`, an image of SGLang |
| TGI | `text-generation-launcher`, an image of text-generation-inference; its variables, such as `MAX_TOTAL_TOKENS` |
| llama.cpp | `llama-server`, an image of llama.cpp; its variables `LLAMA_ARG_…` |
| Ollama | a file with `FROM` |
| DJL Serving, Amazon's LMI | a file `*.properties`, an image of it; its variables `OPTION_…`, and options of vLLM |
| Docker Compose | a file `*.yaml` with a service of one of these servers |

Words before the command, such as `CUDA_VISIBLE_DEVICES=0` and `sudo`, are accepted. Redirections of the output and a
`&` at the end are ignored. `--name value`, `--name=value`,
`--a_b` and short forms are the same. Sizes such as `8k` (8000) and `8K` (8192) have the meaning of vLLM.

## Examples
"""

COMMANDS = {
    "vLLM": "vllm serve Qwen/Qwen3-8B --max-model-len 8k --gpu-memory-utilization 0.92 -tp 2 --kv-cache-dtype fp8_e4m3 "
    "--served-model-name assistant --api-key $VLLM_KEY --tool-call-parser hermes --reasoning-parser qwen3 "
    "--enable-auto-tool-choice --enable-prefix-caching --swap-space 4",
    "vLLM in a container": "docker run --gpus all --ipc=host -p 8000:8000 -e HF_TOKEN=$HF_TOKEN "
    "vllm/vllm-openai:latest --model mistralai/Mistral-7B-Instruct-v0.3 --max-num-seqs 64 --dtype half",
    "SGLang": "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B-Instruct --tp 2 "
    "--mem-fraction-static 0.88 --context-length 16384 --schedule-policy lpm --enable-torch-compile",
    "TGI": "docker run --gpus all --shm-size 1g -p 8080:80 -e MAX_TOTAL_TOKENS=4096 "
    "ghcr.io/huggingface/text-generation-inference:3.3.5 --model-id HuggingFaceH4/zephyr-7b-beta --num-shard 2 "
    "--max-concurrent-requests 200 --max-input-tokens 3000",
    "llama.cpp": "llama-server -m /models/qwen.gguf -c 16384 -np 4 -ngl 99 -fa on -ctk q8_0 -ctv q8_0 --temp 0.6",
}
FILES = {
    "Ollama": (
        "Modelfile",
        "FROM /models/llama.gguf\nPARAMETER temperature 0.7\nPARAMETER num_ctx 4096\n"
        'PARAMETER stop "<|im_end|>"\nSYSTEM You answer briefly.\n',
    ),
    "DJL Serving": (
        "serving.properties",
        "engine=Python\noption.model_id=s3://models/llama/\noption.rolling_batch=vllm\n"
        "option.tensor_parallel_degree=max\noption.max_rolling_batch_size=32\noption.max_model_len=8192\n",
    ),
    "Docker Compose": (
        "compose.yaml",
        "services:\n  proxy: {image: nginx}\n  llm:\n    image: vllm/vllm-openai:${TAG:-latest}\n"
        "    command: --model Qwen/Qwen3-0.6B --max-model-len 4096\n"
        '    environment: {HF_TOKEN: "${HF_TOKEN:-}"}\n    ports: ["8000:8000"]\n',
    ),
}


def migration_page() -> str:
    lines = [HEAD]
    for title, command in COMMANDS.items():
        lines += [f"### {title}\n", "```sh", _broken(command), "```\n", *_converted(command), ""]
    with tempfile.TemporaryDirectory() as folder:
        for title, (name, text) in FILES.items():
            path = Path(folder) / name
            path.write_text(text)
            lines += [f"### {title}\n", f"`{name}`:\n", f"```{_language(name)}", text.rstrip(), "```\n"]
            lines += [*_converted(str(path)), ""]
    lines += [
        "## Options\n",
        "An empty last column means that the value is converted. Other spellings are in brackets.\n",
    ]
    for server in SERVERS:
        lines += [f"### Options of {server.name}\n", "| option | key | difference or reason |", "|---|---|---|"]
        lines += sorted(_row(server, name, rule) for name, rule in table(server).items())
        if server.base:
            lines.append(f"\nOptions of {server.base.name} are accepted, too.")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _language(name: str) -> str:
    return "text" if name.endswith(".yaml") else "properties" if name.endswith(".properties") else "dockerfile"


def _converted(source: str) -> list[str]:
    return ["The result:", "", "```yaml", manifest(migrate(read(source), Path(source).parent), None).rstrip(), "```"]


def _broken(command: str) -> str:
    """Divide a command line into lines of at most 110 characters."""
    lines, line = [], ""
    for word in command.split():
        if line and len(line) + len(word) > 110:
            lines.append(f"{line} \\")
            line = "   "
        line = f"{line} {word}" if line else word
    return "\n".join([*lines, line])


def _row(server: Server, name: str, rule: Rule) -> str:
    others = [short for short, long in server.short.items() if long == name]
    shown = f"`{name}`" + (f" ({', '.join(f'`{one}`' for one in others)})" if others else "")
    match rule:
        case Key(key=key, note=note):
            return f"| {shown} | `{key}` | {note} |"
        case Keys(keys=keys):
            return f"| {shown} | {', '.join(f'`{key}`' for key in keys)} |  |"
        case Missing(reason=reason):
            return f"| {shown} | no equivalent | {reason} |"
        case Unneeded(reason=reason):
            return f"| {shown} | nothing to set | {reason} |"


if __name__ == "__main__":
    write_pages(__doc__, {"migration.md": migration_page})
