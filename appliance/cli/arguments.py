"""Arguments of commands other than the flags of manifest keys. Each function adds one argument, or a few related ones,
to the parser of a command."""

import argparse
from pathlib import Path

DEFAULT_URL = "http://127.0.0.1:8000"
MODEL = "a model: folder, .gguf file or hub id (Qwen/Qwen3-0.6B)"


def manifest(command: argparse.ArgumentParser) -> None:
    command.add_argument("manifest", metavar="MANIFEST", type=Path, help=f"a YAML file, or {MODEL}")


def manifest_or_none(command: argparse.ArgumentParser) -> None:
    default = "default /manifest.yaml, else the hosting platform's model, else the demo"
    text = f"a YAML file, or {MODEL}; {default}"
    command.add_argument("manifest", metavar="MANIFEST", type=Path, nargs="?", default=None, help=text)


def two_manifests(command: argparse.ArgumentParser) -> None:
    command.add_argument("manifest", metavar="A", type=Path, help="the manifest as it is")
    command.add_argument("other", metavar="B", type=Path, nargs="?", help="the one to come; default A with what is set")
    command.add_argument("--format", choices=("text", "json"), default="text", help="text, or json for programs")
    command.epilog = (
        "Ends with 0 if nothing differs, 1 if something does, 2 if one is wrong. --set and --overlay go to B."
    )


def model(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help=MODEL)
    text = "the file to write; default is the model's name with .yaml, here; - prints it"
    command.add_argument("-o", "--output", metavar="FILE", type=Path, default=None, help=text)
    command.add_argument("--force", action="store_true", help="write over a file that is there")


def word(command: argparse.ArgumentParser) -> None:
    text = (
        "a key or section (model.max_context), an exit code (11, memory), a kind of problem, a status of the API (413)"
    )
    command.add_argument("word", metavar="KEY|CODE", help=text)


def key_words(command: argparse.ArgumentParser) -> None:
    text = (
        "whose it is and what it may: name=alice requests_per_minute=60 tokens_per_minute=100000 share=2 priority=yes"
    )
    command.add_argument("words", metavar="NAME=VALUE", nargs="*", help=text)


def check_only(command: argparse.ArgumentParser) -> None:
    command.add_argument("--check", action="store_true", help="compare with the lock that is there; write nothing")


def hardware(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--hardware",
        metavar="NAME",
        default=None,
        help="for this machine of the table of devices instead of the one at hand: h200x1, l4x2, cpu:16:64GiB",
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
        help="how problems of the manifest are told: text, json, github (lines of a workflow), sarif (code scanning)",
    )


def fix(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--fix", action="store_true", help="correct in the file what leaves no doubt, say what was changed, then check"
    )


def json(command: argparse.ArgumentParser) -> None:
    command.add_argument("-j", "--json", action="store_true", help="print JSON")


def upgrade(command: argparse.ArgumentParser) -> None:
    command.add_argument("files", metavar="FILE", type=Path, nargs="+", help="a manifest, a YAML file")
    how = command.add_mutually_exclusive_group()
    how.add_argument("-w", "--write", action="store_true", help="rewrite the files")
    how.add_argument("--check", action="store_true", help="only name the files that would change")


def url(command: argparse.ArgumentParser) -> None:
    command.add_argument("url", metavar="URL", nargs="?", default=None, help=f"the service; default {DEFAULT_URL}")


def request(command: argparse.ArgumentParser) -> None:
    command.add_argument("request", metavar="ID", help="id of the reply (chatcmpl-…), or X-Request-Id")
    command.add_argument("--url", default=DEFAULT_URL, help=f"the service; default {DEFAULT_URL}")


def recording(command: argparse.ArgumentParser) -> None:
    command.add_argument("recording", metavar="FILE", help="a flight recording, which engine.record names")


def explain_one(command: argparse.ArgumentParser) -> None:
    command.add_argument("--explain", metavar="ID", help="print what happened to this request")


def other_settings(command: argparse.ArgumentParser) -> None:
    command.add_argument("--set", action="append", metavar="KEY=VALUE", help="a key of scheduling, cache or context")
    command.add_argument("--rate", metavar="X", help="requests come X times as fast")


def which(command: argparse.ArgumentParser) -> None:
    text = "which one, where several run here: its manifest, or its URL"
    command.add_argument("which", metavar="MANIFEST|URL", nargs="?", default=None, help=text)
    command.epilog = (
        "Ends with 0 if all is in effect, 3 if something waits for a restart; where it is refused, nothing is changed "
        "and the code is that of the reason. Options of `slipway serve`, its overlays and its environment hold on. "
        "SIGHUP to `slipway serve` does the same."
    )


def restart(command: argparse.ArgumentParser) -> None:
    text = "swap the engines, for what they alone need: requests wait and go on with the new ones"
    command.add_argument("--restart", action="store_true", help=text)


def chaos(command: argparse.ArgumentParser) -> None:
    text = "which one, where several run here: its manifest, or its URL"
    command.add_argument("which", metavar="MANIFEST|URL", nargs="?", default=None, help=text)
    command.add_argument("--scenario", default="", metavar="A,B", help="which faults, or all; --list names them")
    command.add_argument("--list", action="store_true", help="say what each scenario does and what is promised")
    text = "seconds for which faults that restart nothing are held (5)"
    command.add_argument("--duration", type=float, default=5.0, metavar="S", help=text)
    text = "seconds that a restart may take (30, and 3 times what the last start took)"
    command.add_argument("--within", type=float, default=0.0, metavar="S", help=text)
    command.add_argument("--clients", type=int, default=2, metavar="N", help="probing clients of each of 3 kinds (2)")
    command.add_argument("--seed", type=int, default=0, metavar="N", help="of what is chosen by chance (0)")
    command.add_argument("--yes", action="store_true", help="do not ask before")
    command.epilog = (
        "Ends with 0 if the appliance did as it promises, 1 if not, 2 if nothing was made, 3 if a fault could not be "
        "taken back. The manifest must say lifecycle: {chaos: allowed}."
    )


def api_key(command: argparse.ArgumentParser) -> None:
    command.add_argument("--api-key-env", default=None, metavar="NAME", help="environment variable with the API key")


def chat_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("-m", "--model", default=None, help="served name; default is the first that the service lists")
    command.add_argument("--system", default=None, metavar="TEXT", help="system message of the conversation")
