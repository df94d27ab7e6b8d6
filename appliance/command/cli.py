"""The command `slipway`. Each command imports what it needs when it runs: `slipway --help` answers at once.

`--a-b` and `--a_b` are one option. Commands that read a manifest take a flag for each of its keys (flags.py). Exit
codes: appliance/exits.py.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from appliance import __version__, exits

DEFAULT_URL = "http://127.0.0.1:8000"


class _Parser(argparse.ArgumentParser):
    """Ends with the code of a wrong command line, and suggests the command or option that was meant."""

    command = ""

    def error(self, message: str) -> NoReturn:
        message = message.split(" (choose from", 1)[0]
        words = [quoted or option for quoted, option in re.findall(r"'([^']+)'|(--[\w.-]+)", message)]
        hint = next(filter(None, (_suggest(word, self.command) for word in words)), "")
        self.exit(exits.MANIFEST.number, f"{self.prog}: {message}{hint and '; '}{hint}\nSee {self.prog} --help.\n")


def _suggest(word: str, command: str) -> str:
    """A hint for a word that is no command and no option; "" where it is one, or where nothing is near."""
    options = _long_options(command)
    if word in options:
        return ""
    if word.startswith("--") and _reads_manifest(command):
        from appliance.command.flags import suggest_flag

        return suggest_flag(word, {option for option in options if "." not in option})
    close = difflib.get_close_matches(word, (*COMMANDS, *options), 1, 0.6)
    return f"did you mean {close[0]}?" if close and close[0] != word else ""


def _long_options(named: str) -> set[str]:
    """The long options of a command, of all commands if none is named: a misspelt one is reported without it."""
    every = argparse.ArgumentParser(conflict_handler="resolve")
    for name in [named] if named in COMMANDS else COMMANDS:
        _add_arguments(every, name, named=named, every=False)
    return {flag for flag in every._option_string_actions if flag.startswith("--")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    words = [_dashes(word) for word in given]
    options = parser("".join(words[:1]), every="--help-all" in words).parse_args(words)
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


def parser(named: str = "", *, every: bool = False) -> argparse.ArgumentParser:
    """`named` is the command that will run, which alone gets the flags of the manifest's keys: they need the schema.
    `every` makes its help list all of them."""
    top = _Parser(prog="slipway", description="One manifest in, one LLM service out.", allow_abbrev=False)
    top.command = named
    top.add_argument("--version", action="version", version=f"slipway {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    for name, (run, text, _) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.command = named
        command.set_defaults(run=run)
        _add_arguments(command, name, named=named, every=every)
    return top


def _add_arguments(command: argparse.ArgumentParser, name: str, *, named: str, every: bool) -> None:
    for add in COMMANDS[name][2]:
        add(command)
    if name == named and _reads_manifest(name):
        from appliance.command.flags import add_flags

        command.usage = f"slipway {name} [options] MANIFEST"
        add_flags(command, every=every)


def _reads_manifest(command: str) -> bool:
    return command in COMMANDS and _manifest in COMMANDS[command][2]


# -- arguments --------------------------------------------------------------------------------------------------------


def _manifest(command: argparse.ArgumentParser) -> None:
    command.add_argument("manifest", metavar="MANIFEST", type=Path, help="the manifest, a YAML file")


def _hardware(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--hardware",
        metavar="NAME",
        default=None,
        help="for this machine of the table of devices instead of the one at hand: h200x1, l4x2, cpu:16:64GiB",
    )


def _why(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--why",
        metavar="NUMBER",
        default=None,
        help="explain a number step by step: weights, kv, context, decode, any key of the manifest …",
    )


def _format(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--format",
        choices=("text", "json", "github", "sarif"),
        default="text",
        help="how problems of the manifest are told: text, json, github (lines of a workflow), sarif (code scanning)",
    )


def _fix(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--fix", action="store_true", help="correct in the file what leaves no doubt, say what was changed, then check"
    )


def _json(command: argparse.ArgumentParser) -> None:
    command.add_argument("-j", "--json", action="store_true", help="print JSON")


def _upgrade(command: argparse.ArgumentParser) -> None:
    command.add_argument("files", metavar="FILE", type=Path, nargs="+", help="a manifest, a YAML file")
    how = command.add_mutually_exclusive_group()
    how.add_argument("-w", "--write", action="store_true", help="rewrite the files")
    how.add_argument("--check", action="store_true", help="only name the files that would change")


def _url(command: argparse.ArgumentParser) -> None:
    command.add_argument("url", metavar="URL", nargs="?", default=None, help=f"the service; default {DEFAULT_URL}")


def _request(command: argparse.ArgumentParser) -> None:
    command.add_argument("request", metavar="ID", help="id of the reply (chatcmpl-…), or X-Request-Id")
    command.add_argument("--url", default=DEFAULT_URL, help=f"the service; default {DEFAULT_URL}")


def _api_key(command: argparse.ArgumentParser) -> None:
    command.add_argument("--api-key-env", default=None, metavar="NAME", help="environment variable with the API key")


def _chat_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("-m", "--model", default=None, help="served name; default is the first that the service lists")
    command.add_argument("--system", default=None, metavar="TEXT", help="system message of the conversation")


# -- commands ---------------------------------------------------------------------------------------------------------


def _prove(options: argparse.Namespace) -> Any:
    """The plan, or None after one message that says everything that is wrong."""
    from appliance.declare.settings import Given, environment
    from appliance.plan.prove import prove

    machine = None
    if getattr(options, "hardware", None):
        from appliance.plan.hardware import hardware

        machine = hardware(options.hardware)
    return prove(Given(options.manifest, options.options, environment(), tuple(options.overlays)), machine)


def _warn(plan: Any, options: argparse.Namespace, to: TextIO) -> None:
    from appliance.command.refusal import warn

    warn(plan.notices, options.format, to)


def _refusing(run: Callable[[argparse.Namespace], int], *, report: bool = False) -> Callable[[argparse.Namespace], int]:
    """A command that ends with one message and the code of its cause where the manifest is refused. `report`: what a
    program reads of it is its output, and no message beside it."""

    def refusing(options: argparse.Namespace) -> int:
        from appliance.declare.problems import Refused
        from appliance.plan.hardware import UnknownHardware

        try:
            return run(options)
        except UnknownHardware as error:
            print(f"--hardware {error}", file=sys.stderr)
            return exits.MANIFEST.number
        except Refused as refused:
            from appliance.command.refusal import tell

            form = getattr(options, "format", "text")
            tell(refused, options.manifest, form, sys.stdout if report and form != "text" else sys.stderr)
            return refused.cause.number

    return refusing


def check(options: argparse.Namespace) -> int:
    from appliance.plan.report import summary

    if options.fix:
        from appliance.command.refusal import mend

        mend(lambda: _prove(options))
    plan = _prove(options)
    if options.format in ("json", "sarif"):
        from appliance.command.formats import FORMATS
        from appliance.declare.findings import findings

        print(FORMATS[options.format](findings(plan.notices)))
    else:
        _warn(plan, options, sys.stderr if options.format == "text" else sys.stdout)
        print(f"{options.manifest}: ok, {summary(plan)}")
    return exits.OK.number


@_refusing
def show_plan(options: argparse.Namespace) -> int:
    from appliance.plan.report import as_json, as_text

    plan = _prove(options)
    _warn(plan, options, sys.stderr)
    if options.why:
        from appliance.plan.why import explain

        text, found = explain(plan, options.why)
        print(text, file=sys.stdout if found else sys.stderr)
        return (exits.OK if found else exits.MANIFEST).number
    print(as_json(plan) if options.json else as_text(plan))
    return exits.OK.number


@_refusing
def fetch(options: argparse.Namespace) -> int:
    from appliance.declare.settings import Given, environment
    from appliance.plan.prove import bring_whole
    from appliance.source.bring import ended_by_signals

    with ended_by_signals(exits.INTERNAL.number):
        print(bring_whole(Given(options.manifest, options.options, environment())))
    return exits.OK.number


@_refusing
def serve(options: argparse.Namespace) -> int:
    from appliance.declare.settings import Given, environment
    from appliance.plan.prove import NotPlanned, bring_for_a_start

    try:
        plan = _prove(options)
    except NotPlanned:
        from appliance.source.bring import ended_by_signals

        with ended_by_signals(exits.OK.number):
            bring_for_a_start(Given(options.manifest, options.options, environment()))
        plan = _prove(options)
    _warn(plan, options, sys.stderr)
    from appliance.launch.launch import serve as launch

    code: int = launch(plan)
    return code


def upgrade(options: argparse.Namespace) -> int:
    from appliance.command.upgrade import upgrade_files

    return upgrade_files(options.files, write=options.write, check=options.check)


def schema(options: argparse.Namespace) -> int:
    from appliance.declare.schema_file import schema_text

    print(schema_text(), end="")
    return exits.OK.number


def chat(options: argparse.Namespace) -> int:
    from appliance.command.chat import chat as talk

    return talk(options.url or DEFAULT_URL, model=options.model, system=options.system, api_key=_key(options))


def why(options: argparse.Namespace) -> int:
    from appliance.command.chat import ChatError
    from appliance.command.why import why as lines

    try:
        for line in lines(options.url, options.request, api_key=_key(options)):
            print(line)
    except ChatError as error:
        print(f"slipway why: {error}", file=sys.stderr)
        return exits.INTERNAL.number
    return exits.OK.number


def _key(options: argparse.Namespace) -> str | None:
    from appliance.declare.settings import environment

    return environment().get(options.api_key_env) if options.api_key_env else None


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
    "serve": (serve, "Check a manifest, then run its service in the foreground until SIGTERM.", (_manifest, _format)),
    "check": (
        _refusing(check, report=True),
        "Check a manifest, its checkpoint and this machine; start nothing.",
        (_manifest, _format, _fix, _hardware),
    ),
    "plan": (
        show_plan,
        "Print what would run: every value with its source, memory by part.",
        (_manifest, _json, _format, _hardware, _why),
    ),
    "fetch": (fetch, "Download what model.source names into the cache; start nothing.", (_manifest,)),
    "upgrade": (
        upgrade,
        "Rewrite manifests of an older apiVersion; without --write, show what would change.",
        (_upgrade,),
    ),
    "chat": (chat, "Talk to a running service in the terminal.", (_url, _chat_options, _api_key)),
    "why": (why, "Tell what happened to a request of a running service, and why.", (_request, _api_key)),
    "schema": (schema, "Print the manifest's JSON Schema, for editors.", ()),
    "healthcheck": (healthcheck, "Exit 0 if the service is ready, else 1.", (_url,)),
    "env": (environment_report, "Print versions and machine facts for a bug report.", (_json,)),
    "version": (version, "Print the version.", ()),
}
