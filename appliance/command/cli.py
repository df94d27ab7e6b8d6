"""The command `slipway`. Each command imports what it needs when it runs: `slipway --help` answers at once.

`--a-b` and `--a_b` are one option. Exit codes: appliance/exits.py.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from appliance import __version__, exits

DEFAULT_URL = "http://127.0.0.1:8000"


class _Parser(argparse.ArgumentParser):
    """Ends with the code of a wrong command line, and suggests the command or option that was meant."""

    def error(self, message: str) -> NoReturn:
        message = message.split(" (choose from", 1)[0]
        words = [quoted or option for quoted, option in re.findall(r"'([^']+)'|(--[\w-]+)", message)]
        known = (*COMMANDS, *_long_options())
        close = [match for word in words for match in difflib.get_close_matches(word, known, 1, 0.6) if match != word]
        hint = f"; did you mean {close[0]}?" if close else ""
        self.exit(exits.MANIFEST.number, f"{self.prog}: {message}{hint}\nSee {self.prog} --help.\n")


def _long_options() -> set[str]:
    """All long options of all commands: a misspelt one is reported without its command."""
    every = argparse.ArgumentParser(conflict_handler="resolve")
    for _, _, arguments in COMMANDS.values():
        for add in arguments:
            add(every)
    return {flag for flag in every._option_string_actions if flag.startswith("--")}


class _Set(argparse.Action):
    """Collects --set, --host and --port in their order, so that of two for one key the later wins."""

    def __call__(self, parser: argparse.ArgumentParser, space: Any, values: Any, option: str | None = None) -> None:
        from appliance.declare.settings import Option

        key, equals, text = (self.const or "", "=", values) if self.const else str(values).partition("=")
        if not equals:
            parser.error(f"argument --set: {values} has no '='; write --set key=value")
        flag = f"--{key.rpartition('.')[2]}" if self.const else f"--set {key}"
        setattr(space, self.dest, (*getattr(space, self.dest), Option(flag, key.strip(), text)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args([_dashes(word) for word in given])
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `slipway plan m.yaml | head`: nobody reads on
        sys.stderr.close()
        return 0


def _dashes(word: str) -> str:
    """`--a_b=x_y` → `--a-b=x_y`"""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def parser() -> argparse.ArgumentParser:
    top = _Parser(prog="slipway", description="One manifest in, one LLM service out.", allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"slipway {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    for name, (run, text, arguments) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(run=run)
        for add in arguments:
            add(command)
    return top


# -- arguments --------------------------------------------------------------------------------------------------------


def _manifest(command: argparse.ArgumentParser) -> None:
    command.add_argument("manifest", metavar="MANIFEST", type=Path, help="the manifest, a YAML file")
    command.add_argument(
        "-s",
        "--set",
        dest="options",
        default=(),
        action=_Set,
        metavar="KEY=VALUE",
        help="set one key over environment and manifest, such as endpoints.port=9000; repeatable",
    )


def _address(command: argparse.ArgumentParser) -> None:
    for short, long, what in (
        ("-p", "--port", "port to listen on, 0 for a free one"),
        ("-H", "--host", "address to listen on"),
    ):
        command.add_argument(
            short,
            long,
            dest="options",
            default=(),
            action=_Set,
            const=f"endpoints.{long[2:]}",
            metavar=long[2:].upper(),
            help=f"{what}; the same as --set endpoints.{long[2:]}=…",
        )


def _json(command: argparse.ArgumentParser) -> None:
    command.add_argument("-j", "--json", action="store_true", help="print JSON")


def _url(command: argparse.ArgumentParser) -> None:
    command.add_argument("url", metavar="URL", nargs="?", default=None, help=f"the service; default {DEFAULT_URL}")


def _chat_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("-m", "--model", default=None, help="served name; default is the first that the service lists")
    command.add_argument("--system", default=None, metavar="TEXT", help="system message of the conversation")
    command.add_argument("--api-key-env", default=None, metavar="NAME", help="environment variable with the API key")


# -- commands ---------------------------------------------------------------------------------------------------------


def _prove(options: argparse.Namespace) -> Any:
    """The plan, or None after one message that says everything that is wrong."""
    from appliance.declare.settings import Given, environment
    from appliance.plan.prove import prove

    return prove(Given(options.manifest, options.options, environment()))


def _refusing(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """A command that ends with one message and the code of its cause where the manifest is refused."""

    def refusing(options: argparse.Namespace) -> int:
        from appliance.declare.problems import Refused

        try:
            return run(options)
        except Refused as refused:
            count = len(refused.problems)
            print(f"{refused}\n{options.manifest}: {count} problem{'s' * (count > 1)}", file=sys.stderr)
            return refused.cause.number

    return refusing


@_refusing
def check(options: argparse.Namespace) -> int:
    from appliance.plan.report import summary

    print(f"{options.manifest}: ok, {summary(_prove(options))}")
    return exits.OK.number


@_refusing
def show_plan(options: argparse.Namespace) -> int:
    from appliance.plan.report import as_json, as_text

    plan = _prove(options)
    print(as_json(plan) if options.json else as_text(plan))
    return exits.OK.number


@_refusing
def serve(options: argparse.Namespace) -> int:
    plan = _prove(options)
    from appliance.launch.launch import serve as launch

    code: int = launch(plan)
    return code


def schema(options: argparse.Namespace) -> int:
    from appliance.declare.schema_file import schema_text

    print(schema_text(), end="")
    return exits.OK.number


def chat(options: argparse.Namespace) -> int:
    from appliance.command.chat import chat as talk
    from appliance.declare.settings import environment

    key = environment().get(options.api_key_env) if options.api_key_env else None
    return talk(options.url or DEFAULT_URL, model=options.model, system=options.system, api_key=key)


def healthcheck(options: argparse.Namespace) -> int:
    from appliance.launch.healthcheck import main as probe

    return probe(options.url)


def version(options: argparse.Namespace) -> int:
    print(f"slipway {__version__}")
    return exits.OK.number


def environment_report(options: argparse.Namespace) -> int:
    from appliance.command.environment import as_json, as_text, collect

    facts = collect()
    print(as_json(facts) if options.json else as_text(facts))
    return exits.OK.number


Run = Callable[[argparse.Namespace], int]
Command = tuple[Run, str, tuple[Callable[[argparse.ArgumentParser], None], ...]]
COMMANDS: dict[str, Command] = {
    "serve": (serve, "Check a manifest, then run its service in the foreground until SIGTERM.", (_manifest, _address)),
    "check": (check, "Check a manifest, its checkpoint and this machine; start nothing.", (_manifest,)),
    "plan": (
        show_plan,
        "Print what would run: every value with its source, memory by part.",
        (_manifest, _address, _json),
    ),
    "chat": (chat, "Talk to a running service in the terminal.", (_url, _chat_options)),
    "schema": (schema, "Print the manifest's JSON Schema, for editors.", ()),
    "healthcheck": (healthcheck, "Exit 0 if the service is ready, else 1.", (_url,)),
    "env": (environment_report, "Print versions and machine facts for a bug report.", (_json,)),
    "version": (version, "Print the version.", ()),
}
