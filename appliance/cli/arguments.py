"""Arguments of commands other than the flags of manifest keys. Each function adds one argument, or a few related ones,
to the parser of a command."""

import argparse
import re
from pathlib import Path

DEFAULT_URL = "http://127.0.0.1:8000"
MODEL = "a model: folder, .gguf file or hub ID (Qwen/Qwen3-0.6B)"


def manifest(command: argparse.ArgumentParser) -> None:
    command.add_argument("manifest", metavar="MANIFEST", type=Path, help=f"a YAML file, or {MODEL}")


def manifest_or_none(command: argparse.ArgumentParser) -> None:
    default = "default /manifest.yaml, else the hosting platform's model, else the demo"
    text = f"a YAML file, or {MODEL}; {default}"
    command.add_argument("manifest", metavar="MANIFEST", type=Path, nargs="?", default=None, help=text)


def two_manifests(command: argparse.ArgumentParser) -> None:
    command.add_argument("manifest", metavar="A", type=Path, help="the current manifest")
    command.add_argument(
        "other", metavar="B", type=Path, nargs="?", help="the new manifest; default: A with --set and --overlay applied"
    )
    command.add_argument("--format", choices=("text", "json"), default="text", help="text, or json for programs")
    command.epilog = (
        "Exits with 0 if nothing differs, 1 if something differs, 2 on an error. --set and --overlay apply to B."
    )


def model(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", nargs="?", default=None, help=MODEL)
    text = (
        "convert the command line of another server, such as 'vllm serve …' or 'docker run …', or its file: a "
        "Modelfile, serving.properties, a Docker Compose file; MODEL then replaces its model (docs/migration.md)"
    )
    command.add_argument("--from", dest="source", metavar="SOURCE", default=None, help=text)
    command.add_argument("--service", metavar="NAME", default="", help="service of a Docker Compose file to convert")
    text = "output file; default: the model's name with .yaml in this directory; - prints it"
    command.add_argument("-o", "--output", metavar="FILE", type=Path, default=None, help=text)
    command.add_argument("--force", action="store_true", help="overwrite an existing file")


TARGETS = (
    *("compose", "kubernetes", "helm", "kserve", "leaderworkerset", "ray"),
    *("sagemaker", "vertex", "azureml", "systemd"),
    *("prometheus-rules", "grafana"),
)


def target(command: argparse.ArgumentParser) -> None:
    command.add_argument("target", metavar="TARGET", choices=TARGETS, help=", ".join(TARGETS))
    command.add_argument("--image", default="", metavar="IMAGE", help="container image (slipway:latest)")
    command.add_argument("--name", default="", metavar="NAME", help="name of the service; default: the manifest's name")
    text = "write the files into this folder; default: print the file, if the target has one file"
    command.add_argument("-o", "--output", default=None, metavar="DIR", type=Path, help=text)
    text = "location of a local checkpoint in a bucket (sagemaker: s3://…, vertex: gs://…)"
    command.add_argument("--model-uri", default="", metavar="URI", help=text)
    command.add_argument("--role", default="", metavar="ARN", help="execution role (sagemaker)")
    text = "project and region (vertex): projects/PROJECT/locations/REGION"
    command.add_argument("--parent", default="", metavar="NAME", help=text)
    text = "machine type (sagemaker, vertex, azureml); default: the smallest that holds the plan"
    command.add_argument("--instance-type", default="", metavar="TYPE", help=text)
    text = "objective of alerts: seconds to the first token (2.5)"
    command.add_argument("--first-token", default=None, metavar="S", type=float, help=text)
    text = "objective of alerts: seconds between two tokens (0.1)"
    command.add_argument("--token", default=None, metavar="S", type=float, help=text)
    text = "objective of alerts: share of requests and tokens that must be as fast (0.99)"
    command.add_argument("--objective", default=None, metavar="SHARE", type=float, help=text)


def word(command: argparse.ArgumentParser) -> None:
    text = "a key or section (model.max_context), an exit code (11), an alert, a kind of problem, an API status (413)"
    command.add_argument("word", metavar="KEY|CODE", help=text)


def key_words(command: argparse.ArgumentParser) -> None:
    text = (
        "owner and limits of the key: name=alice requests_per_minute=60 tokens_per_minute=100000 share=2 priority=yes "
        "adapters=yes usage=yes profile=yes"
    )
    command.add_argument("words", metavar="NAME=VALUE", nargs="*", help=text)


def check_only(command: argparse.ArgumentParser) -> None:
    command.add_argument("--check", action="store_true", help="compare with the existing lock file; write nothing")


def hardware(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--hardware",
        metavar="NAME",
        default=None,
        help="plan for a machine from the device table instead of this one: h200x1, l4x2, cpu:16:64GiB",
    )


def why(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--why",
        metavar="NUMBER",
        default=None,
        help="explain a number step by step: weights, kv, context, decode, any key of the manifest …",
    )


def format(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--format",
        choices=("text", "json", "github", "sarif"),
        default="text",
        help="output format of problems: text, json, github (workflow annotations), sarif (code scanning)",
    )


def fix(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--fix", action="store_true", help="apply all unambiguous fixes to the file, print the changes, then check"
    )


def json(command: argparse.ArgumentParser) -> None:
    command.add_argument("-j", "--json", action="store_true", help="print JSON")


def upgrade(command: argparse.ArgumentParser) -> None:
    command.add_argument("files", metavar="FILE", type=Path, nargs="+", help="a manifest, a YAML file")
    how = command.add_mutually_exclusive_group()
    how.add_argument("-w", "--write", action="store_true", help="rewrite the files")
    how.add_argument("--check", action="store_true", help="only list the files that would change")


def url(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "url", metavar="URL", nargs="?", default=None, help=f"URL of the service; default {DEFAULT_URL}"
    )


def request(command: argparse.ArgumentParser) -> None:
    command.add_argument("request", metavar="ID", help="ID of the reply (chatcmpl-…) or X-Request-Id")
    command.add_argument("--url", default=DEFAULT_URL, help=f"URL of the service; default {DEFAULT_URL}")


def usage(command: argparse.ArgumentParser) -> None:
    command.add_argument("--url", default=DEFAULT_URL, help=f"URL of the service; default {DEFAULT_URL}")
    command.add_argument("--start", metavar="DATE", default=None, help="first day (UTC), such as 2026-11-01")
    command.add_argument("--end", metavar="DATE", default=None, help="last day (UTC)")
    command.add_argument("--format", choices=("text", "csv", "json"), default="text", help="form of the output")


def recording(command: argparse.ArgumentParser) -> None:
    command.add_argument("recording", metavar="FILE", help="a flight recording, written by engine.record")


def explain_one(command: argparse.ArgumentParser) -> None:
    command.add_argument("--explain", metavar="ID", help="print the timeline of this request")


def other_settings(command: argparse.ArgumentParser) -> None:
    command.add_argument("--set", action="append", metavar="KEY=VALUE", help="a key of scheduling, cache or context")
    command.add_argument("--rate", metavar="X", help="multiply the arrival rate by X")


def which(command: argparse.ArgumentParser) -> None:
    text = "manifest or URL of the service, if several run here"
    command.add_argument("which", metavar="MANIFEST|URL", nargs="?", default=None, help=text)
    command.epilog = (
        "Exits with 0 if all changes are in effect, 3 if some need a restart. If the manifest is rejected, nothing "
        "is changed and the code is that of the reason. Options of `slipway serve`, its overlays and its "
        "environment hold on. SIGHUP to `slipway serve` does the same."
    )


def restart(command: argparse.ArgumentParser) -> None:
    text = "restart the engines for changes that need only that; requests are queued and resume"
    command.add_argument("--restart", action="store_true", help=text)


def chaos(command: argparse.ArgumentParser) -> None:
    text = "manifest or URL of the service, if several run here"
    command.add_argument("which", metavar="MANIFEST|URL", nargs="?", default=None, help=text)
    command.add_argument("--scenario", default="", metavar="A,B", help="scenarios to run, or all; --list prints them")
    command.add_argument("--list", action="store_true", help="print each scenario with its expected behaviour")
    text = "duration in seconds of faults that restart nothing (5)"
    command.add_argument("--duration", type=float, default=5.0, metavar="S", help=text)
    text = "maximum seconds for a restart (default: 30, or 3 times the last start)"
    command.add_argument("--within", type=float, default=0.0, metavar="S", help=text)
    command.add_argument("--clients", type=int, default=2, metavar="N", help="probe clients of each of 3 kinds (2)")
    command.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (0)")
    command.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    command.epilog = (
        "Exits with 0 if all expectations were met, 1 if not, 2 if no fault was injected, 3 if a fault could not be "
        "rolled back. Requires lifecycle: {chaos: allowed} in the manifest."
    )


def api_key(command: argparse.ArgumentParser) -> None:
    command.add_argument("--api-key-env", default=None, metavar="NAME", help="environment variable with the API key")


def chat_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "-m", "--model", default=None, help="served name; default: the first name that the service lists"
    )
    command.add_argument("--system", default=None, metavar="TEXT", help="system message of the conversation")


def bench(command: argparse.ArgumentParser) -> None:
    text = f"URL of an endpoint; several are measured in alternation; default {DEFAULT_URL}"
    command.add_argument("url", metavar="URL", nargs="*", help=text)
    text = "name of the model, once for each URL; default: the first one that the endpoint lists"
    command.add_argument("-m", "--model", metavar="NAME", action="append", default=[], help=text)
    _bench_workload(command.add_argument_group("workload"))
    _bench_load(command.add_argument_group("load"))
    _bench_result(command.add_argument_group("result"))
    command.epilog = (
        "Exits with 1 if a request failed or fewer than --min-attainment of the requests met every --slo, with 2 for "
        "wrong options, an endpoint that does not answer, or a file that cannot be written."
    )


def offline(command: argparse.ArgumentParser) -> None:
    text = "download nothing: model.download.offline=true"
    command.add_argument("--offline", action="store_true", help=text)


def served_bundle(command: argparse.ArgumentParser) -> None:
    text = "verify and serve an archive of `slipway bundle`"
    command.add_argument("--bundle", metavar="FILE", type=Path, default=None, help=text)
    public_key(command)


def public_key(command: argparse.ArgumentParser) -> None:
    text = "require a bundle with a signature of this key"
    command.add_argument("--public-key", metavar="FILE", type=Path, default=None, help=text)


def new_bundle(command: argparse.ArgumentParser) -> None:
    text = "archive to write; default: the name of the manifest with .bundle.tar or .oci.tar in this directory"
    command.add_argument("-o", "--output", metavar="FILE", type=Path, default=None, help=text)
    text = "reference of the container image that serves it, such as registry/slipway@sha256:…"
    command.add_argument("--image", metavar="REFERENCE", default="", help=text)
    text = "archive of the image (`docker save`), which becomes a part of the bundle"
    command.add_argument("--image-archive", metavar="FILE", type=Path, default=None, help=text)
    text = "SBOM of the image (SPDX); default: an SBOM of this environment"
    command.add_argument("--sbom", metavar="FILE", type=Path, default=None, help=text)
    text = "write the archive of an OCI image, for registries and image volumes of Kubernetes"
    command.add_argument("--oci", action="store_true", help=text)
    text = "private Ed25519 key that signs the bundle (of `ssh-keygen -t ed25519`, or PEM)"
    command.add_argument("--sign", metavar="KEY", type=Path, default=None, help=text)


def bundle_file(command: argparse.ArgumentParser) -> None:
    command.add_argument("bundle", metavar="BUNDLE", type=Path, help="an archive of `slipway bundle`")
    text = "new folder; default: the name of the archive in this directory"
    command.add_argument("-o", "--output", metavar="DIR", type=Path, default=None, help=text)
    public_key(command)


def sbom_file(command: argparse.ArgumentParser) -> None:
    command.add_argument("-o", "--output", metavar="FILE", type=Path, default=None, help="file; default: print it")


def tune(command: argparse.ArgumentParser) -> None:
    _tune_search(command.add_argument_group("search"))
    _bench_workload(command.add_argument_group("workload"))
    _bench_load(command.add_argument_group("load"))
    text = "overlay to write; default: the name of the manifest with .tuned.yaml in this directory"
    command.add_argument("-o", "--output", metavar="FILE", type=Path, default=None, help=text)
    text = "file to which each result is appended; an interrupted run with the same options continues from it"
    command.add_argument("--results", metavar="FILE", type=Path, default=None, help=text)
    command.epilog = (
        "Exits with 1 if no candidate meets the limits, with 2 for wrong options or a manifest that cannot be "
        "measured. With --hardware nothing is run."
    )


def _tune_search(group: argparse._ArgumentGroup) -> None:
    names = ("throughput", "latency", "memory")
    text = "throughput (tokens per second), latency (mean time of a request) or memory (planned bytes) (throughput)"
    group.add_argument("--objective", choices=names, default="throughput", help=text)
    text = "limit of a latency: ttft, tpot or request, such as ttft=500ms; repeatable"
    group.add_argument("--slo", metavar="NAME=LIMIT", action="append", default=[], help=text)
    text = "share of the requests that must keep every limit (0.95)"
    group.add_argument("--min-attainment", metavar="X", type=float, default=0.0, help=text)
    text = "values to try of a key, such as engine.cache.block_tokens=16,32; repeatable"
    group.add_argument("--key", metavar="KEY=A,B", action="append", default=[], help=text)
    group.add_argument("--only-keys", action="store_true", help="search only the keys of --key")
    text = "maximum number of candidates that are simulated (24)"
    group.add_argument("--candidates", metavar="N", type=int, default=24, help=text)
    text = "number of candidates that are run, besides the manifest; 0: predict from the roofline, run nothing (3)"
    group.add_argument("--runs", metavar="N", type=int, default=3, help=text)
    text = "seconds after which nothing new is started (600)"
    group.add_argument("--budget", metavar="S", type=float, default=600.0, help=text)


def _bench_workload(group: argparse._ArgumentGroup) -> None:
    text = (
        "random, prefix (shared prefixes), conversations (several turns), images, audio (noise), audio:FOLDER (WAV "
        "files), sharegpt:FILE or jsonl:FILE (random)"
    )
    group.add_argument("--dataset", metavar="NAME", default="random", help=text)
    text = "number of requests, or of conversations (100)"
    group.add_argument("-n", "--requests", metavar="N", type=int, default=100, help=text)
    text = "seed of texts, lengths and arrivals; default: a new one, so that no run finds prompts of another in a cache"
    group.add_argument("--seed", metavar="N", type=int, default=None, help=text)
    group.add_argument("--input-tokens", metavar="N", type=float, default=100.0, help="median prompt length (100)")
    text = "standard deviation of its logarithm; 0 makes all prompts equally long (1.2)"
    group.add_argument("--input-spread", metavar="X", type=float, default=1.2, help=text)
    group.add_argument("--output-tokens", metavar="N", type=float, default=180.0, help="median reply length (180)")
    group.add_argument("--output-spread", metavar="X", type=float, default=0.9, help="as --input-spread (0.9)")
    text = "longest prompt, and longest reply (1024)"
    group.add_argument("--limit-tokens", metavar="N", type=int, default=1024, help=text)
    group.add_argument("--prefixes", metavar="N", type=int, default=4, help="number of shared prefixes (4)")
    text = "length of a shared prefix, or of the system message of conversations (512)"
    group.add_argument("--prefix-tokens", metavar="N", type=int, default=512, help=text)
    group.add_argument("--turns", metavar="N", type=int, default=4, help="turns of a conversation (4)")
    group.add_argument("--images", metavar="N", type=int, default=1, help="images of a request of `images` (1)")
    text = "width and height of an image in pixels (448x448)"
    group.add_argument("--image-size", metavar="WxH", default="448x448", help=text)
    text = "median duration of generated recordings in seconds (8); the longest has 30 s"
    group.add_argument("--audio-seconds", metavar="S", type=float, default=8.0, help=text)
    text = "shortest and longest recording of a folder that is used, in seconds, such as 1..30"
    group.add_argument("--audio-range", metavar="A..B", default=None, help=text)
    text = "seconds between a reply and the next turn (0)"
    group.add_argument("--pause", metavar="S", type=float, default=0.0, help=text)


def _bench_load(group: argparse._ArgumentGroup) -> None:
    loop = group.add_mutually_exclusive_group()
    loop.add_argument("-C", "--concurrency", metavar="N", type=int, default=8, help="closed loop: clients (8)")
    loop.add_argument("--rate", metavar="R", help="open loop: requests per second, or A..B for a ramp")
    text = "shape of the gamma distribution of the intervals; 1 is a Poisson process, inf is regular (1)"
    group.add_argument("--burstiness", metavar="X", type=float, default=1.0, help=text)
    text = "open loop: maximum number of requests at the same time"
    group.add_argument("--max-concurrency", metavar="N", type=int, default=None, help=text)
    text = "rounds, each with its own prompts; endpoints alternate in each (1)"
    group.add_argument("--rounds", metavar="N", type=int, default=1, help=text)
    group.add_argument("--warmup", metavar="N", type=int, default=0, help="requests before each round (0)")
    group.add_argument("--api", choices=("chat", "completions"), default="chat", help="route (chat)")
    text = "JSON object with fields that are added to each request"
    group.add_argument("--body", metavar="JSON", default="{}", help=text)
    group.add_argument("--timeout", metavar="S", type=float, default=600.0, help="longest pause of a reply (600)")


def _bench_result(group: argparse._ArgumentGroup) -> None:
    text = "service level objective: ttft, tpot or request with a limit, such as ttft=500ms; repeatable"
    group.add_argument("--slo", metavar="NAME=LIMIT", action="append", default=[], help=text)
    text = "share of the requests that must meet every --slo (0)"
    group.add_argument("--min-attainment", metavar="X", type=float, default=0.0, help=text)
    group.add_argument("-o", "--output", metavar="FILE", type=Path, default=None, help="write the result as JSON")
    group.add_argument("--details", action="store_true", help="with each request in the file")
    group.add_argument("--html", metavar="FILE", type=Path, default=None, help="write a report with plots")


def convert(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", type=Path, help="folder of a checkpoint in Hugging Face's layout")
    command.add_argument("target", metavar="FOLDER", type=Path, help="folder to make")
    formats = ("int4", "int8", "stored")
    text = "format of the matrices; default int4"
    command.add_argument("--weights", choices=formats, default="int4", help=text)
    text = "format of the head; default: int8"
    command.add_argument("--head", choices=("auto", *formats), default="auto", help=text)
    text = "inputs that share a scale: 32, 64 or 128; default: 32 with int4, 128 with int8"
    command.add_argument("--group-size", type=int, choices=(32, 64, 128), default=0, help=text)
    text = "file of `slipway quantize --mix` with a format for each layer"
    command.add_argument("--mix", metavar="FILE", type=Path, default=None, help=text)
    text = "most bytes of the tensors in a weight file, such as 4GiB or 600MB; default 4GiB"
    command.add_argument("--shard-size", metavar="BYTES", type=_bytes, default=4 << 30, help=text)
    _trusted(command)


def quantize(command: argparse.ArgumentParser) -> None:
    text = "folder of a checkpoint in Hugging Face's layout, or a .gguf file"
    command.add_argument("model", metavar="MODEL", type=Path, help=text)
    text = "text to measure with, such as what the service will read and write"
    command.add_argument("--evaluate", metavar="TEXT", type=Path, required=True, help=text)
    text = "tokens that are read from the text; default 1024"
    command.add_argument("--tokens", metavar="N", type=_above_0, default=1024, help=text)
    text = "bytes for the matrices of all layers, such as 4GiB or 600MB: proposes a format for each layer"
    command.add_argument("--budget", metavar="BYTES", type=_bytes, default=0, help=text)
    text = "write the proposal to a file for `slipway convert --mix`"
    command.add_argument("--mix", metavar="FILE", type=Path, default=None, help=text)
    command.add_argument("--json", action="store_true", help="print JSON")
    _trusted(command)


def _trusted(command: argparse.ArgumentParser) -> None:
    text = "run the checkpoint's slipway_model.py if it has an unknown architecture"
    command.add_argument("--trust-remote-code", action="store_true", help=text)


def _bytes(text: str) -> int:
    """Return a number of bytes, such as 4G, 4GiB or 600MB. K, M and G without B are powers of 1024. Raises
    ArgumentTypeError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:([KMG])(iB|B)?|B)?", text, re.IGNORECASE)
    if match:
        base = 1000 if (match[3] or "").upper() == "B" else 1024
        found = float(match[1]) * base ** " KMG".index((match[2] or " ").upper())
        if 1 <= found < 1 << 60:
            return int(found)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, such as 4GiB or 600MB")


def _above_0(text: str) -> int:
    if text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")


def evaluation(command: argparse.ArgumentParser) -> None:
    text = f"URL of an endpoint, or a manifest, whose tasks are run against its running service; default {DEFAULT_URL}"
    command.add_argument("which", metavar="URL|MANIFEST", nargs="?", default=None, help=text)
    command.add_argument("--url", metavar="URL", default=None, help="endpoint for the tasks of a manifest")
    text = "start the service of the manifest for the tasks, within its health.startup_budget, and stop it afterwards"
    command.add_argument("--start", action="store_true", help=text)
    text = "name of the model; default: the first one that the endpoint lists"
    command.add_argument("-m", "--model", metavar="NAME", default=None, help=text)
    _evaluation_tasks(command.add_argument_group("tasks"))
    _evaluation_requests(command.add_argument_group("requests"))
    _evaluation_result(command.add_argument_group("result"))
    command.epilog = (
        "Exits with 1 if a request failed, an accuracy is below its minimum, a perplexity is above its maximum or a "
        "comparison is significantly worse, with 2 for wrong options or files, or an endpoint that does not answer."
    )


def _evaluation_tasks(group: argparse._ArgumentGroup) -> None:
    text = (
        "gsm8k, multiple_choice, multiple_choice_logprobs, continuation_logprobs, exact_match or perplexity with a "
        "file, or the name of a task of the manifest; repeatable; default: all tasks of the manifest"
    )
    group.add_argument("--task", metavar="KIND:FILE|NAME", action="append", default=[], help=text)
    group.add_argument("--limit", metavar="N", type=int, default=None, help="samples of each task, drawn (all)")
    group.add_argument("--shots", metavar="N", type=int, default=None, help="solved examples before each question (0)")
    text = "file of the examples; default: the first lines of the task's file, which are then not measured"
    group.add_argument("--shots-file", metavar="FILE", default=None, help=text)
    text = "exact_match: regular expression whose last match, or its first group, is the answer"
    group.add_argument("--extract", metavar="REGEX", default=None, help=text)
    group.add_argument("--minimum", metavar="X", type=float, default=None, help="minimum accuracy, from 0 to 1")
    group.add_argument("--maximum", metavar="X", type=float, default=None, help="maximum perplexity")


def _evaluation_requests(group: argparse._ArgumentGroup) -> None:
    text = "route of generated answers (chat)"
    group.add_argument("--api", choices=("chat", "completions"), default=None, help=text)
    group.add_argument("--max-tokens", metavar="N", type=int, default=None, help="longest generated answer (512)")
    group.add_argument("-C", "--concurrency", metavar="N", type=int, default=8, help="requests at the same time (8)")
    text = "seed of the drawn samples, of requests and of bootstrap intervals (0)"
    group.add_argument("--seed", metavar="N", type=int, default=0, help=text)
    text = "JSON object with fields that are added to each request"
    group.add_argument("--body", metavar="JSON", default="{}", help=text)
    group.add_argument("--timeout", metavar="S", type=float, default=600.0, help="longest wait for a reply (600)")


def _evaluation_result(group: argparse._ArgumentGroup) -> None:
    group.add_argument("-o", "--output", metavar="FILE", type=Path, default=None, help="write the result as JSON")
    text = "write prompt, reply and decision of each sample, as JSON lines"
    group.add_argument("--samples", metavar="FILE", type=Path, default=None, help=text)
    text = "earlier result with which each task is compared, sample by sample"
    group.add_argument("--compare", metavar="FILE", type=Path, default=None, help=text)
    text = "p-value below which a difference is significant (0.05)"
    group.add_argument("--significance", metavar="P", type=float, default=0.05, help=text)
