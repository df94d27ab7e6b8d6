"""Reading of the sources: a command line, a Modelfile, serving.properties or a Docker Compose file."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from appliance.migration.container import RUNTIMES, docker, server_of_image, service, variables
from appliance.migration.djl import DJL
from appliance.migration.llama_cpp import LLAMA_CPP
from appliance.migration.ollama import OLLAMA
from appliance.migration.options import CONTAINER, Setting, options, plain, setting
from appliance.migration.rules import Missing, Server, Unneeded
from appliance.migration.sglang import SGLANG
from appliance.migration.tgi import TGI
from appliance.migration.vllm import VLLM
from appliance.migration.words import Unreadable, Word, split

MODULES = {
    "vllm.entrypoints.openai.api_server": VLLM,
    "vllm.entrypoints.api_server": VLLM,
    "sglang.launch_server": SGLANG,
}
PROGRAMS = {"text-generation-launcher": TGI, "llama-server": LLAMA_CPP, "llama-server.exe": LLAMA_CPP}
SUBCOMMANDS = {("vllm", "serve"): VLLM, ("sglang", "serve"): SGLANG}
_WRAPPERS = ("sudo", "nohup", "exec", "env", "time")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_MOST_BYTES = 2**20


@dataclass(frozen=True)
class Source:
    """Options of another server, from one source."""

    server: Server
    kind: str
    """Kind of the source, such as "a command line of vLLM"."""
    settings: tuple[Setting, ...]
    folder: Path
    """Folder at which relative paths start."""
    contained: bool = False
    """The server ran in its container image."""


def read(text: str, wanted: str = "") -> Source:
    """Read the argument of --from: a path, or a command line. wanted: name of a service, or "".

    Raise Unreadable with the position of a mistake.
    """
    path = Path(text)
    if "\n" in text or not (_is_file(path) or _is_named_like_a_file(path)):
        if wanted:
            raise Unreadable("--service: names a service of a Docker Compose file; --from is a command line")
        return _command_line(split(text))
    content = _content(path)
    if path.suffix in (".yaml", ".yml"):
        return _compose(content, path, wanted)
    if wanted:
        raise Unreadable(f"--service: names a service of a Docker Compose file; --from is {path}")
    if path.suffix == ".properties":
        return Source(DJL, f"{path.name} of DJL Serving", tuple(_properties(content, path)), path.parent)
    if re.search(r"^\s*FROM\s", content, re.MULTILINE | re.IGNORECASE):
        return Source(OLLAMA, f"{path.name} of Ollama", tuple(_modelfile(content, path)), path.parent)
    raise Unreadable(f"{path}: must be a Modelfile (with FROM), serving.properties or a Docker Compose file (.yaml)")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a command line that is too long for a path
        return False


def _is_named_like_a_file(path: Path) -> bool:
    text = str(path)
    return not re.search(r"\s", text) and (
        path.suffix in (".yaml", ".yml", ".properties") or "modelfile" in path.name.lower()
    )


def _content(path: Path) -> str:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise Unreadable(f"{path}: has more than {_MOST_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise Unreadable(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise Unreadable(f"{path}: byte {error.start + 1} is not UTF-8") from error


def _command_line(words: Sequence[Word]) -> Source:
    environment, rest = _without_wrappers(words)
    if rest and PurePosixPath(rest[0].text).name in RUNTIMES:
        return _docker(rest, environment)
    found = program(rest)
    if found is None:
        raise Unreadable(_unknown(rest))
    server, arguments = found
    settings = [*variables(server, environment), *options(server, arguments)]
    return Source(server, f"a command line of {server.name}", tuple(settings), Path())


def _unknown(words: Sequence[Word]) -> str:
    named = ", ".join((*map(" ".join, SUBCOMMANDS), *(f"python -m {name}" for name in MODULES), *list(PROGRAMS)[:2]))
    if not words:
        return f"the command line names no server; known are {named}, docker run, and files"
    return (
        f"{words[0].place}: {words[0].text} is no command of a known server; known are {named}, docker run, and files"
    )


def _without_wrappers(words: Sequence[Word]) -> tuple[list[tuple[Word, str]], list[Word]]:
    """Return the variables that precede a command, and the words from the command on."""
    environment, rest = [], list(words)
    if [word.text for word in rest[:2]] == ["uv", "run"]:
        del rest[:2]
    while rest and (_ASSIGNMENT.match(rest[0].text) or rest[0].text in _WRAPPERS):
        word = rest.pop(0)
        name, equals, value = word.text.partition("=")
        if equals:
            environment.append((Word(name, word.place), value))
    return environment, rest


def program(words: Sequence[Word]) -> tuple[Server, list[Word]] | None:
    """Return the server of a command and its arguments, or None for another command."""
    names = [PurePosixPath(word.text).name for word in words]
    if names and names[0] in PROGRAMS:
        return PROGRAMS[names[0]], list(words[1:])
    if tuple(names[:2]) in SUBCOMMANDS:
        return SUBCOMMANDS[names[0], names[1]], list(words[2:])
    if "-m" in names[1:4]:  # of Python, whose path may be a variable
        at = names.index("-m") + 1
        if at < len(words) and words[at].text in MODULES:
            return MODULES[words[at].text], list(words[at + 1 :])
    return None


def _docker(words: Sequence[Word], before: Sequence[tuple[Word, str]]) -> Source:
    run = next((index for index, word in enumerate(words) if word.text == "run"), None)
    if run is None or run > 2:
        raise Unreadable(f"{words[0].place}: {words[0].text} must be followed by run")
    kept, environment, image, entrypoint, arguments = docker(words[run + 1 :])
    if entrypoint:
        arguments = [Word(entrypoint, image.place), *arguments]
    server, settings = _image(image.text, image.place, arguments, [*before, *environment])
    return Source(server, f"a container of {server.name}", (*kept, *settings), Path("/"), contained=True)


def _image(
    image: str, place: str, words: Sequence[Word], environment: Sequence[tuple[Word, str]]
) -> tuple[Server, list[Setting]]:
    """Return the server of a container and its settings. Its words may begin with a command."""
    more, rest = _without_wrappers(words)
    found = program(rest)
    server = found[0] if found else server_of_image(image)
    if server is None:
        raise Unreadable(f"{place}: {image} is no image of a known server")
    arguments = found[1] if found else rest
    return server, [*variables(server, [*environment, *more]), *options(server, arguments)]


def _compose(content: str, path: Path, wanted: str) -> Source:
    try:
        document = yaml.safe_load(content)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise Unreadable(f"{where}: is not YAML: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(document, dict):
        raise Unreadable(f"{path}: must be a Docker Compose file with services")
    name, content_of = service(document, wanted, str(path))
    at = f"{path}: services.{name}"
    one = {key: _interpolated(value) for key, value in content_of.items()}
    words = [*_command(one.get("entrypoint"), f"{at}.entrypoint"), *_command(one.get("command"), f"{at}.command")]
    image = str(one.get("image", ""))
    server, settings = _image(image, f"{at}.image", words, list(_environment(one.get("environment"), at)))
    ignored = ("image", "command", "entrypoint", "environment")
    kept = [plain(f"services.{name}.{key}", at, Missing(CONTAINER)) for key in one if key not in ignored]
    kind = f"service {name} of {path.name}, {server.name}"
    return Source(server, kind, (*kept, *settings), path.parent, contained=True)


def _interpolated(value: Any) -> Any:
    """Replace `${NAME:-default}` by its default and `$$` by `$`, as Docker Compose does without variables."""
    if isinstance(value, str):
        return re.sub(r"\$\{[A-Za-z_]\w*:?-([^}]*)\}", r"\1", value).replace("$$", "$")
    if isinstance(value, list):
        return [_interpolated(one) for one in value]
    if isinstance(value, dict):
        return {key: _interpolated(one) for key, one in value.items()}
    return value


def _command(value: Any, at: str) -> list[Word]:
    """Return the words of a command, which is text or a list. A shell with -c is replaced by its script."""
    if value is None:
        return []
    if isinstance(value, str):
        words = split(value, f"{at}: ")
    elif isinstance(value, list):
        words = [Word(_scalar(one), f"{at}[{index}]") for index, one in enumerate(value)]
    else:
        raise Unreadable(f"{at}: must be text or a list")
    if len(words) == 3 and PurePosixPath(words[0].text).name in ("sh", "bash") and words[1].text.endswith("c"):
        return split(words[2].text, f"{words[2].place}: ")
    return words


def _scalar(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _environment(value: Any, at: str) -> Iterator[tuple[Word, str]]:
    if isinstance(value, Mapping):
        for name, text in value.items():
            yield Word(str(name), f"{at}.environment.{name}"), "" if text is None else _scalar(text)
    elif isinstance(value, list):
        for index, one in enumerate(value):
            name, _, text = str(one).partition("=")
            yield Word(name, f"{at}.environment[{index}]"), text
    elif value is not None:
        raise Unreadable(f"{at}.environment: must be a mapping or a list")


def _properties(content: str, path: Path) -> Iterator[Setting]:
    """Yield the options of serving.properties."""
    lines = re.sub(r"\\\n[ \t]*", "", content).splitlines()
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line or line[0] in "#!":
            continue
        match = re.fullmatch(r"([^=:\s]+)\s*[=:]\s*(.*)", line)
        if match is None:
            raise Unreadable(f"{path}:{number}: must be NAME=VALUE")
        name, value = match[1], match[2].strip()
        rule = DJL.rule(name.removeprefix("option."))
        text = re.sub(r"\$\{env\.", "${", value)
        if rule is not None and _is_off(rule, value):
            yield plain(f"{name}={value}", f"{path}:{number}", Unneeded("disabled"))
        else:
            found = setting(DJL, name, name.removeprefix("option."), [text], f"{path}:{number}")
            yield replace(found, shown=found.shown.replace(" ", "=", 1))


def _is_off(rule: Any, value: str) -> bool:
    return isinstance(rule, Missing) and rule.flag and value.lower() == "false"


def _modelfile(content: str, path: Path) -> Iterator[Setting]:
    """Yield the instructions of a Modelfile."""
    lines = content.splitlines()
    number = 0
    while number < len(lines):
        line, start = lines[number].strip(), number + 1
        number += 1
        if not line or line.startswith("#"):
            continue
        name, _, value = line.partition(" ")
        value = value.strip()
        while value.count('"""') == 1:
            if number == len(lines):
                raise Unreadable(f'{path}:{start}: {name}: the quote """ is not closed')
            value += "\n" + lines[number]
            number += 1
        yield _instruction(name.upper(), value, f"{path}:{start}")


def _instruction(name: str, value: str, place: str) -> Setting:
    if name == "PARAMETER":
        parameter, _, value = value.partition(" ")
        value = value.strip()
        if not value.startswith('"'):
            value = re.sub(r"\s#.*", "", value)
        if not value:
            raise Unreadable(f"{place}: PARAMETER needs a name and a value")
        return setting(OLLAMA, f"PARAMETER {parameter}", parameter, [value.strip().strip('"')], place)
    if name not in OLLAMA.rules or name != name.upper():
        raise Unreadable(f"{place}: {name} is no instruction of a Modelfile")
    if not value:
        raise Unreadable(f"{place}: {name} has no value")
    return setting(OLLAMA, name, name, [value.removeprefix('"""').removesuffix('"""').strip().strip('"')], place)
