"""Command lines of container runtimes, and services of Docker Compose files, with the server in their image."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from appliance.config.variables import VARIABLES
from appliance.migration.options import CONTAINER, Setting, plain, setting
from appliance.migration.rules import Keys, Missing, Rule, Server, Unneeded
from appliance.migration.servers import SERVERS
from appliance.migration.words import Unreadable, Word

RUNTIMES = ("docker", "podman", "nerdctl")
_WITHOUT_VALUE = (
    *("--detach", "--interactive", "--tty", "--rm", "--init", "--privileged", "--read-only", "--no-healthcheck"),
    *("--publish-all", "--oom-kill-disable", "--sig-proxy", "--help"),
)
_SAME_NAME = Unneeded("Slipway reads the same variable")
_NOT_READ = Missing("a variable that Slipway does not read")
_OTHER: dict[str, Rule] = {
    "CUDA_VISIBLE_DEVICES": Unneeded("Slipway uses the GPUs that the same variable leaves visible"),
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": Missing(
        "set adapter_loading.max_active, and adapter_loading.folders to the folders from which adapters may be loaded"
    ),
}


def server_of_image(image: str) -> Server | None:
    """Return the server of a container image."""
    return next((server for server in SERVERS if any(part in image for part in server.images)), None)


def docker(words: Sequence[Word]) -> tuple[list[Setting], list[tuple[Word, str]], Word, str, list[Word]]:
    """Divide the words after `docker run`.

    Return the options of the runtime, the environment (NAME and value), the image, the entrypoint and the arguments.
    Raise Unreadable if there is no image.
    """
    kept: list[Setting] = []
    environment: list[tuple[Word, str]] = []
    entrypoint = ""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.text.startswith("-"):
            return kept, environment, word, entrypoint, rest
        name, equals, value = word.text.partition("=")
        flag = name in _WITHOUT_VALUE or (not name.startswith("--") and set(name[1:]) <= set("ditP"))
        if not equals and not flag:
            if not rest:
                raise Unreadable(f"{word.place}: {name} has no value")
            value = rest.pop(0).text
        if name in ("-e", "--env"):
            variable, _, text = value.partition("=")
            environment.append((Word(variable, word.place), text))
        elif name == "--entrypoint":
            entrypoint = value
        else:
            kept.append(plain(f"{name} {value}".strip(), word.place, Missing(CONTAINER)))
    raise Unreadable("the command names no image")


def variables(server: Server, environment: Sequence[tuple[Word, str]]) -> Iterator[Setting]:
    """Yield the settings of environment variables."""
    shared = {variable.name for variable in VARIABLES}
    for name, value in environment:
        option = name.text.removeprefix(server.env_prefix) if server.env_prefix else ""
        if server.env_prefix and name.text.startswith(server.env_prefix) and value:
            yield _variable(server, name, option.lower(), value)
        elif server.env_options and value and server.rule(name.text) is not None:
            yield _variable(server, name, name.text.lower(), value)
        elif name.text == "HF_MODEL_ID" and value and server.rule("model-id") is not None:
            yield _variable(server, name, "model-id", value)
        elif name.text in ("VLLM_API_KEY", "LLAMA_API_KEY"):
            yield _variable(server, name, "api-key", value)
        elif name.text in shared:
            yield plain(name.text, name.place, _SAME_NAME)
        else:
            yield plain(name.text, name.place, _OTHER.get(name.text, _NOT_READ))


def _variable(server: Server, name: Word, option: str, value: str) -> Setting:
    rule = server.rule(option)
    if isinstance(rule, Keys) and rule.secret:
        value = f"${name.text}"  # the manifest names the same variable
    return setting(server, name.text, option, [value], name.place)


def service(document: Mapping[str, Any], wanted: str, file: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the content of the service of another server in a Compose file.

    wanted: its name, or "" for the only one. Raise Unreadable if it is not there, or if several could be meant.
    """
    services = document.get("services")
    if not isinstance(services, dict) or not all(isinstance(one, dict) for one in services.values()):
        raise Unreadable(f"{file}: services: must be a mapping of services")
    if wanted:
        if wanted not in services:
            raise Unreadable(f"{file}: services: has no {wanted}; it has {', '.join(services)}")
        return wanted, services[wanted]
    known = [name for name, one in services.items() if _is_known(one)]
    if len(known) != 1:
        found = (
            f"several services can be converted: {', '.join(known)}" if known else "has no service of a known server"
        )
        raise Unreadable(f"{file}: services: {found}; name one with --service, of {', '.join(services)}")
    return known[0], services[known[0]]


def _is_known(one: Mapping[str, Any]) -> bool:
    words = f"{one.get('command', '')} {one.get('entrypoint', '')}"
    names = ("vllm", "sglang", "text-generation-launcher", "llama-server")
    return server_of_image(str(one.get("image", ""))) is not None or any(name in words for name in names)
