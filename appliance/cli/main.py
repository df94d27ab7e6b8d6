"""The command `slipway`. Each command imports what it needs when it runs, so that `slipway --help` responds at once.

`--a-b` and `--a_b` are the same option. Commands that read a manifest have a flag for each of its keys (flags.py). Exit
codes are in appliance/config/exits.py.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from appliance.cli import arguments
from appliance.cli.first_argument import names_manifest
from appliance.config import exits
from appliance.config.version import __version__


class _Parser(argparse.ArgumentParser):
    """Parser that exits with the code of a wrong command line and suggests a similar command or option."""

    command = ""

    def error(self, message: str) -> NoReturn:
        if self.command == "serve":
            from appliance.supervisor import reason

            reason.refused(message, exits.MANIFEST)
        message = message.split(" (choose from", 1)[0]
        words = [quoted or option for quoted, option in re.findall(r"'([^']+)'|(--[\w.-]+)", message)]
        hint = next(filter(None, (_suggest(word, self.command) for word in words)), "")
        self.exit(exits.MANIFEST.number, f"{self.prog}: {message}{hint and '; '}{hint}\nSee {self.prog} --help.\n")


def _suggest(word: str, command: str) -> str:
    """Return a suggestion for a word that is neither a command nor an option; "" if it is one, or if none is
    similar."""
    options = _long_options(command)
    if word in options:
        return ""
    if word.startswith("--") and _reads_manifest(command):
        from appliance.cli.flags import suggest_flag

        return suggest_flag(word, {option for option in options if "." not in option})
    close = difflib.get_close_matches(word, (*COMMANDS, *options), 1, 0.6)
    return f"did you mean {close[0]}?" if close and close[0] != word else ""


def _long_options(named: str) -> set[str]:
    """Return the long options of a command, or of all commands if none is named: the report of a misspelt command does
    not name one."""
    every = argparse.ArgumentParser(conflict_handler="resolve")
    for name in [named] if named in COMMANDS else COMMANDS:
        _add_arguments(every, name, named=named, every=False)
    return {flag for flag in every._option_string_actions if flag.startswith("--")}


def main(given: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = with_command([_dashes(word) for word in (sys.argv[1:] if given is None else given)])
    options = parser("".join(words[:1]), every="--help-all" in words).parse_args(words)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `slipway plan m.yaml | head`: the reader has exited
        sys.stderr.close()
        return 0


def with_command(words: list[str]) -> list[str]:
    """Put `serve` before a manifest or model without a command: `slipway m.yaml` is `slipway serve m.yaml`. A word is a
    manifest or model if it is a path or has such a suffix; any other unknown word is reported as a misspelt command."""
    first = words[0] if words else "--help"
    if first in COMMANDS or first.startswith("-"):
        return words
    if names_manifest(first) or Path(first).exists():
        return ["serve", *words]
    return words


def _dashes(word: str) -> str:
    """Replace underscores in the name of an option: `--a_b=x_y` → `--a-b=x_y`."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def parser(named: str = "", *, every: bool = False) -> argparse.ArgumentParser:
    """Return the parser. Only the command `named`, which will run, gets the flags of the manifest's keys, because they
    need the schema. With `every` its help lists all of them."""
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
        from appliance.cli.flags import add_flags

        named = next(words for reader, words in _READERS.items() if reader in COMMANDS[name][2])
        command.usage = f"slipway {name} [options] {named}"
        add_flags(command, every=every)


def _reads_manifest(command: str) -> bool:
    return command in COMMANDS and not _READERS.keys().isdisjoint(COMMANDS[command][2])


# Manifests of a command in its usage line.
_READERS: dict[Callable[[argparse.ArgumentParser], None], str] = {
    arguments.manifest: "MANIFEST",
    arguments.manifest_or_none: "[MANIFEST]",
    arguments.two_manifests: "A [B]",
}


def _given(options: argparse.Namespace, manifest: Path | None = None) -> Any:
    from appliance.config.environment import environment
    from appliance.config.settings import Given, Option

    if getattr(options, "offline", False):
        options.options = (*options.options, Option("--offline", "model.download.offline", "true"))
        options.offline = False
    found: Given | None = getattr(options, "given", None)
    if found is not None:
        return found
    file = manifest or options.manifest
    if (model := _named(file)) is not None:
        return Given(model.manifest, options.options, environment(), tuple(options.overlays), text=model.text)
    return Given(file, options.options, environment(), tuple(options.overlays))


def _named(word: Path) -> Any:
    """Return the model that is named in place of a manifest, or None."""
    from appliance.cli.model_argument import named_model

    return named_model(str(word))


def _machine(options: argparse.Namespace) -> Any:
    """Return the machine that --hardware describes, None for this machine."""
    if not getattr(options, "hardware", None):
        return None
    from appliance.hardware.described import hardware

    return hardware(options.hardware)


def _validate(options: argparse.Namespace, *, hash_contents: bool = False, assume: bool = False) -> tuple[Any, Any]:
    """Return the plan, and the guard that compared the checkpoint with its lock. Raise Refused with all problems."""
    from appliance.lockfile.verify import LockVerifier
    from appliance.planning.validate import validate

    guard = LockVerifier(hash_contents=hash_contents)
    plan = validate(_given(options), _machine(options), verify=guard, assume=assume)
    for line in guard.notes(plan):
        print(line, file=sys.stderr)
    return plan, guard


def _warn(plan: Any, options: argparse.Namespace, to: TextIO) -> None:
    from appliance.cli.refusal import warn

    warn(plan.notices, options.format, to)


def _refusing(run: Callable[[argparse.Namespace], int], *, report: bool = False) -> Callable[[argparse.Namespace], int]:
    """Return a command that prints one message and returns the code of its cause if the manifest is refused. With
    `report` machine-readable problems are the command's output, without another message."""

    def refusing(options: argparse.Namespace) -> int:
        from appliance.config.problems import Refused
        from appliance.hardware.described import UnknownHardware

        try:
            return run(options)
        except UnknownHardware as error:
            print(f"--hardware {error}", file=sys.stderr)
            return exits.MANIFEST.number
        except Refused as refused:
            from appliance.cli.refusal import print_problems

            form = getattr(options, "format", "text")
            print_problems(refused, options.manifest, form, sys.stdout if report and form != "text" else sys.stderr)
            archive = getattr(options, "bundle", None) or getattr(options, "public_key", None)
            if form == "text" and archive is None and getattr(options, "manifest", None) is not None:
                from appliance.cli.model_argument import explain_missing

                if missing := explain_missing(str(options.manifest)):
                    print(missing, file=sys.stderr)
            return refused.cause.number

    return refusing


def check(options: argparse.Namespace) -> int:
    from appliance.planning.report import storage, summary, unchecked

    if options.fix and _named(options.manifest) is None:
        from appliance.cli.refusal import apply_fixes
        from appliance.planning.validate import validate

        apply_fixes(lambda: validate(_given(options), _machine(options), assume=True))
    plan, guard = _validate(options, assume=True)
    if options.format in ("json", "sarif"):
        from appliance.cli.formats import FORMATS
        from appliance.config.findings import findings

        print(FORMATS[options.format](findings(plan.notices)))
        if guard.summary():
            print(guard.summary(), file=sys.stderr)
    else:
        _warn(plan, options, sys.stderr if options.format == "text" else sys.stdout)
        lines = (f"{options.manifest}: ok, {summary(plan)}", unchecked(plan), guard.summary(), storage(plan))
        print("\n".join(filter(None, lines)))
    return exits.OK.number


@_refusing
def show_plan(options: argparse.Namespace) -> int:
    from appliance.planning.report import as_json, as_text

    plan, _ = _validate(options, assume=True)
    _warn(plan, options, sys.stderr)
    if options.why:
        from appliance.planning.why import explain

        text, found = explain(plan, options.why)
        print(text, file=sys.stdout if found else sys.stderr)
        return (exits.OK if found else exits.MANIFEST).number
    print(as_json(plan) if options.json else as_text(plan))
    return exits.OK.number


@_refusing
def render(options: argparse.Namespace) -> int:
    from appliance.cli.render import render as text

    plan, _ = _validate(options, assume=True)
    _warn(plan, options, sys.stderr)
    print(text(options, _given(options), plan), end="")
    return exits.OK.number


@_refusing
def bundle(options: argparse.Namespace) -> int:
    from appliance.cli.bundle import bundle as write

    plan, _ = _validate(options)
    return write(options, _given(options), plan)


def unpack(options: argparse.Namespace) -> int:
    from appliance.cli.bundle import unpack_into

    return unpack_into(options)


def sbom(options: argparse.Namespace) -> int:
    from appliance.cli.bundle import print_sbom

    return print_sbom(options)


def key(options: argparse.Namespace) -> int:
    from appliance.cli.key import key as make

    return make(options.words)


@_refusing
def fetch(options: argparse.Namespace) -> int:
    from appliance.checkpoints.download import exit_on_signals
    from appliance.planning.validate import download_missing

    with exit_on_signals(exits.INTERNAL.number):
        print(download_missing(_given(options)))
    return exits.OK.number


def convert(options: argparse.Namespace) -> int:
    from appliance.cli.convert import convert as run

    return run(options)


def quantize(options: argparse.Namespace) -> int:
    from appliance.cli.convert import quantize as run

    return run(options)


@_refusing
def serve(options: argparse.Namespace) -> int:
    from appliance.supervisor.reason import record_failure

    with record_failure():
        plan = _proven_for_a_start(options)
    _warn(plan, options, sys.stderr)
    from appliance.supervisor.launch import serve as launch

    code: int = launch(plan, _given(options))
    return code


def _proven_for_a_start(options: argparse.Namespace) -> Any:
    from appliance.planning.validate import NotPlanned, download_before_start

    if options.bundle is not None or options.public_key is not None:
        _unpack_bundle(options)
    elif options.manifest is None:
        _find_manifest(options)
    elif (model := _named(options.manifest)) is not None:
        from appliance.cli.model_argument import notes

        print(*(f"slipway serve: {line}" for line in notes(model)), sep="\n", file=sys.stderr)
    try:
        plan, _ = _validate(options, hash_contents=True)
    except NotPlanned:
        from appliance.checkpoints.download import exit_on_signals

        with exit_on_signals(exits.OK.number):
            download_before_start(_given(options))
        plan, _ = _validate(options, hash_contents=True)
    return plan


def _unpack_bundle(options: argparse.Namespace) -> None:
    """Choose the manifest of the bundle."""
    from appliance.cli.bundle import unpacked
    from appliance.config.problems import Problem, Refused
    from appliance.config.yaml_loader import Place

    if options.bundle is None:
        options.manifest = options.manifest or options.public_key  # the subject of the message
        raise Refused([Problem(Place("--public-key"), "", "has no effect without --bundle, which names the bundle")])
    manifest, options.manifest = options.manifest, options.bundle
    if manifest is not None:
        raise Refused([Problem(Place("--bundle"), "", f"has a manifest of its own; leave out {manifest}")])
    options.manifest = unpacked(options.bundle, options.public_key)


def _find_manifest(options: argparse.Namespace) -> None:
    """Choose what `serve` without MANIFEST serves, and print the reason."""
    from appliance.cli.default_manifest import MOUNTED, find
    from appliance.config.environment import environment

    options.manifest = Path("/") / MOUNTED  # named in the message if the search is refused
    found = find(environment(), options.options, tuple(options.overlays), Path("/"))
    options.given, options.manifest = found.given, found.given.manifest
    for line in found.notes:
        print(f"slipway serve: {line}", file=sys.stderr)


@_refusing
def lock(options: argparse.Namespace) -> int:
    from appliance.cli import lock as command

    return (command.verify if options.check else command.write)(_given(options), _machine(options))


@_refusing
def selftest(options: argparse.Namespace) -> int:
    from appliance.cli.selftest import selftest as run

    return run(_given(options))


@_refusing
def diff(options: argparse.Namespace) -> int:
    from appliance.cli.diff import diff as run

    return run(options, _machine(options))


def upgrade(options: argparse.Namespace) -> int:
    from appliance.cli.upgrade import upgrade_files

    return upgrade_files(options.files, write=options.write, check=options.check)


def schema(options: argparse.Namespace) -> int:
    from appliance.config.schema_file import schema_text

    print(schema_text(), end="")
    return exits.OK.number


@_refusing
def init(options: argparse.Namespace) -> int:
    if options.source is not None:
        from appliance.cli.init_from import init_from

        return init_from(options.source, options.model, options.output, service=options.service, force=options.force)
    if options.model is None:
        print("slipway init: name a MODEL, or another server's command line with --from SOURCE", file=sys.stderr)
        return exits.MANIFEST.number
    from appliance.cli.init import init as write

    return write(options.model, options.output, force=options.force, machine=_machine(options))


def explain(options: argparse.Namespace) -> int:
    from appliance.cli.explain import explain as say

    return say(options.word)


def chat(options: argparse.Namespace) -> int:
    from appliance.cli.chat import chat as talk

    return talk(options.url or arguments.DEFAULT_URL, model=options.model, system=options.system, api_key=_key(options))


def bench(options: argparse.Namespace) -> int:
    from appliance.cli.bench import run

    return run(options, arguments.DEFAULT_URL, _key(options))


@_refusing
def tune(options: argparse.Namespace) -> int:
    from appliance.cli.tune import tune as run

    return run(options, _given(options), _machine(options), _key(options))


@_refusing
def evaluate(options: argparse.Namespace) -> int:
    from appliance.cli.evaluation import run

    return run(options, arguments.DEFAULT_URL, _key(options))


def why(options: argparse.Namespace) -> int:
    from appliance.cli.chat import ChatError
    from appliance.cli.why import why as lines

    try:
        for line in lines(options.url, options.request, api_key=_key(options)):
            print(line)
    except ChatError as error:
        print(f"slipway why: {error}", file=sys.stderr)
        return exits.INTERNAL.number
    return exits.OK.number


def usage(options: argparse.Namespace) -> int:
    from appliance.cli.chat import ChatError
    from appliance.cli.usage import usage as lines

    try:
        for line in lines(options.url, options.format, start=options.start, end=options.end, api_key=_key(options)):
            print(line)
    except ChatError as error:
        print(f"slipway usage: {error}", file=sys.stderr)
        return exits.INTERNAL.number
    return exits.OK.number


def _of_engine(module: str, *names: str) -> Callable[[argparse.Namespace], int]:
    """Return a command that runs a module of the engine with the options of these names, without importing the
    engine."""

    def run(options: argparse.Namespace) -> int:
        import subprocess

        given = []
        for name in names:
            value = getattr(options, name)
            values = value if isinstance(value, list) else [value] * (value not in (None, False))
            given += [part for each in values for part in ([f"--{name}"] if each is True else [f"--{name}", each])]
        return subprocess.call([sys.executable, "-P", "-m", module, options.recording, *given])

    return run


def _key(options: argparse.Namespace) -> str | None:
    from appliance.config.environment import environment

    return environment().get(options.api_key_env) if options.api_key_env else None


def reload(options: argparse.Namespace) -> int:
    from appliance.cli.reload import reload as run

    return run(options.which, restart=options.restart)


def chaos(options: argparse.Namespace) -> int:
    from appliance.chaos.run import Options
    from appliance.cli.chaos import chaos as run

    given = Options(options.duration, options.clients, options.seed, options.within)
    answers = {"lists": options.list, "yes": options.yes, "json": options.json}
    return run(options.which, options.scenario, given, **answers, key=_key(options) or "")


def healthcheck(options: argparse.Namespace) -> int:
    from appliance.supervisor.healthcheck import main as probe

    return probe(options.url)


def version(options: argparse.Namespace) -> int:
    print(f"slipway {__version__}")
    return exits.OK.number


def environment_report(options: argparse.Namespace) -> int:
    from appliance.cli.environment import as_json, as_text, collect

    facts = collect()
    print(as_json(facts) if options.json else as_text(facts))
    return exits.OK.number


Run = Callable[[argparse.Namespace], int]
Command = tuple[Run, str, tuple[Callable[[argparse.ArgumentParser], None], ...]]
COMMANDS: dict[str, Command] = {
    "serve": (
        serve,
        "Check a manifest or model, then serve it until SIGTERM.",
        (arguments.manifest_or_none, arguments.served_bundle, arguments.offline, arguments.format),
    ),
    "check": (
        _refusing(check, report=True),
        "Check a manifest, its checkpoint and this machine; start nothing.",
        (arguments.manifest, arguments.format, arguments.fix, arguments.hardware),
    ),
    "plan": (
        show_plan,
        "Print the deployment plan: every value with its origin, and memory by part.",
        (arguments.manifest, arguments.json, arguments.format, arguments.hardware, arguments.why),
    ),
    "init": (
        init,
        "Write a commented manifest for a model and this machine, or convert another server's command line.",
        (arguments.model, arguments.hardware),
    ),
    "render": (
        render,
        "Print or write deployment files that follow from the plan, for Kubernetes, a hosting platform or systemd.",
        (arguments.target, arguments.manifest, arguments.hardware, arguments.format),
    ),
    "bundle": (
        bundle,
        "Write manifest, weights, lock and SBOM into one archive for machines without a network.",
        (arguments.manifest, arguments.new_bundle, arguments.format),
    ),
    "unpack": (unpack, "Verify every digest of a bundle and unpack it.", (arguments.bundle_file,)),
    "sbom": (sbom, "Print the software bill of materials (SPDX) of this environment.", (arguments.sbom_file,)),
    "diff": (
        diff,
        "Show the effects of replacing manifest A by B: restarts, outputs, caches, memory, clients.",
        (arguments.two_manifests, arguments.hardware),
    ),
    "lock": (
        lock,
        "Write a lock file with the SHA-256 of every checkpoint file and reference outputs; `serve` verifies it.",
        (arguments.manifest, arguments.check_only, arguments.hardware),
    ),
    "selftest": (
        selftest,
        "Compute the golden prompts of the lock file with an engine and report differences.",
        (arguments.manifest,),
    ),
    "reload": (
        reload,
        "Apply the changed manifest to a running service; report changes that need a restart.",
        (arguments.which, arguments.restart),
    ),
    "key": (
        key,
        "Create an API key and its line for the list of keys, which contains only the hash.",
        (arguments.key_words,),
    ),
    "chaos": (
        chaos,
        "Inject faults into a running service and check that it recovers as documented.",
        (arguments.chaos, arguments.json, arguments.api_key),
    ),
    "fetch": (fetch, "Download the checkpoint of model.source into the cache; start nothing.", (arguments.manifest,)),
    "convert": (
        convert,
        "Write a checkpoint in 4 or 8 bits, in a format that other engines read too.",
        (arguments.convert,),
    ),
    "quantize": (
        quantize,
        "Measure on a text what 4 and 8 bits cost each layer; propose a format for each within a budget of bytes.",
        (arguments.quantize,),
    ),
    "upgrade": (
        upgrade,
        "Rewrite manifests of an older apiVersion; without --write, show what would change.",
        (arguments.upgrade,),
    ),
    "chat": (
        chat,
        "Talk to a running service in the terminal.",
        (arguments.url, arguments.chat_options, arguments.api_key),
    ),
    "bench": (
        bench,
        "Measure throughput and latency of an endpoint, or of several in alternation.",
        (arguments.bench, arguments.json, arguments.api_key),
    ),
    "tune": (
        tune,
        "Search for the settings of a manifest that serve a workload best, and write them as an overlay.",
        (arguments.manifest, arguments.tune, arguments.hardware, arguments.json, arguments.api_key),
    ),
    "eval": (
        evaluate,
        "Measure accuracy of an endpoint on local files, and compare it with another result.",
        (arguments.evaluation, arguments.json, arguments.api_key),
    ),
    "why": (
        why,
        "Show the timeline of a request of a running service.",
        (arguments.request, arguments.api_key),
    ),
    "usage": (
        usage,
        "Show sequences and tokens of a running service by day, API key and model.",
        (arguments.usage, arguments.api_key),
    ),
    "replay": (
        _of_engine("engine.core.replay", "explain"),
        "Repeat every scheduling decision of a flight recording and compare; --explain ID shows one request.",
        (arguments.recording, arguments.explain_one),
    ),
    "whatif": (
        _of_engine("engine.core.whatif", "set", "rate", "json"),
        "Predict throughput and latency of recorded traffic under other settings.",
        (arguments.recording, arguments.other_settings, arguments.json),
    ),
    "schema": (schema, "Print the manifest's JSON Schema, for editors.", ()),
    "explain": (explain, "Explain a key, an exit code or an API error.", (arguments.word,)),
    "healthcheck": (healthcheck, "Exit 0 if the service is ready, else 1.", (arguments.url,)),
    "env": (environment_report, "Print versions and machine facts for a bug report.", (arguments.json,)),
    "version": (version, "Print the version.", ()),
}
