"""Conversion of the values of options to values of the manifest."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

from appliance.config.files import HUB_ID
from appliance.config.keys import Key, find, takes
from appliance.migration.rules import NoEquivalent, NothingToSet, Values
from appliance.output_formats.formats import CALLS, REASONINGS, names

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG]i?)?")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
CALL_PART, REASONING_PART = "model.format:calls", "model.format:reasoning"
"""Parts of model.format, which two options set."""
SOURCE_PATH = "model.source.path"
REPOSITORY = "model.source.huggingface.repo"
_LOCAL = ("/", "./", "../", "~")
_FORMAT_NAMES = {  # parsers of vLLM and SGLang by other names
    "mistral_tokens": "mistral",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "pythonic": "pythonic",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_xml": "qwen3_coder",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "deepseek-r1": "deepseek_r1",
    "deepseek-v3": "deepseek_v3",
    "glm": "glm45",
    "gpt-oss": "harmony",
    "openai": "harmony",
    "openai_gptoss": "harmony",
    "GptOss": "harmony",
    "minimax-m2": "minimax_m2",
    "phi4_mini_json": "phi4_mini",
    "qwen3-thinking": "qwen3",
}


def count(text: str) -> int:
    """Return a count as vLLM reads it: 8k is 8000, 8K is 8192, 1.5k is 1500."""
    match = _COUNT.fullmatch(text.strip())
    number = float(match[1]) * _UNITS[(match[2] or "").removesuffix("i")] if match else 0.5
    if not number.is_integer():
        raise ValueError("must be a whole number, such as 8192 or 8k")
    return int(number)


def switch(text: str) -> bool:
    word = text.strip().lower()
    if word not in (*_TRUE, *_FALSE):
        raise ValueError("must be true or false")
    return word in _TRUE


def inverted(text: str) -> bool:
    return not switch(text)


def by_type(key: Key) -> Callable[[str], Any]:
    """Return the conversion of a text for the type of a key."""

    def convert(text: str) -> Any:
        if text in key.choices:
            return text
        if "array" in key.types:
            return listed(text)
        if key.types <= {"boolean", "null"}:
            return switch(text)
        if key.form == "size":
            return count(text)
        if key.form == "duration":
            return _number(text)
        if "integer" in key.types:
            return -1 if text == "-1" and key.least == -1 else count(text)
        if "number" in key.types:
            return _number(text)
        if key.choices and key.types == {"string"}:
            raise NoEquivalent(f"{key.name} is {key.allowed}")
        return text

    return convert


def accepted(name: str, value: Any) -> Any:
    """Return the value if the key accepts it. Raise ValueError with the allowed values."""
    key = find(tuple(name.split(".")))
    assert key is not None, name
    if not takes(key.path, value):
        raise ValueError(f"{key.name} takes {key.allowed}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("must be a number") from None


def listed(text: str) -> list[str]:
    """Return a list that is written as JSON, with commas, or as several values."""
    if text.startswith("["):
        found = _json(text)
        if isinstance(found, list):
            return [str(one) for one in found]
    return [one.strip() for one in re.split(r"[\n,]", text) if one.strip()]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"must be JSON: {error}") from None


def words(**known: str) -> Callable[[str], str]:
    """Return a conversion of fixed words. Other words have no equivalent."""

    def convert(text: str) -> str:
        if text.lower() not in known:
            raise NoEquivalent(f"the equivalents are those of {', '.join(known)}")
        return known[text.lower()]

    return convert


def mapped(known: Mapping[str, str], reason: str) -> Callable[[str], str]:
    """Return a conversion of fixed words. Other words have no equivalent, for this reason."""

    def convert(text: str) -> str:
        if text.lower() not in known:
            raise NoEquivalent(reason)
        return known[text.lower()]

    return convert


def source(text: str) -> Values:
    """Return model.source for a folder, a .gguf file, a repository of the hub or a bucket."""
    text = re.sub(r"^(https?://)?(huggingface\.co|hf\.co)/", "", text).rstrip("/") or text
    scheme = text.partition("://")[0]
    if scheme in ("s3", "gs", "az") and "://" in text:
        key = f"model.source.{scheme}.uri"
        return {key: accepted(key, text)}
    if text.startswith(_LOCAL) or text.endswith(".gguf"):
        return {SOURCE_PATH: text}
    if HUB_ID.fullmatch(text):
        return {REPOSITORY: text}
    raise ValueError("must be a folder (./NAME or /PATH), a .gguf file, ORG/NAME on the hub, s3://…, gs://… or az://…")


def gguf_repository(text: str) -> Values:
    """Return the source of `-hf ORG/NAME:QUANT` of llama.cpp, and of `FROM hf.co/ORG/NAME:QUANT` of Ollama."""
    name, _, quantization = re.sub(r"^(https?://)?(huggingface\.co|hf\.co)/", "", text).partition(":")
    if not HUB_ID.fullmatch(name):
        raise ValueError("must be ORG/NAME or ORG/NAME:QUANTIZATION")
    return {REPOSITORY: name, "model.source.huggingface.files": [f"*{quantization or 'Q4_K_M'}*.gguf"]}


def template(text: str) -> str:
    """Return the file of a chat template. Templates in the text and built-in names have no equivalent."""
    if "{" in text or "\n" in text:
        raise NoEquivalent("a template in the command line; save it in a file and set model.chat_template")
    if "/" not in text and PurePosixPath(text).suffix not in (".jinja", ".jinja2", ".j2"):
        raise NoEquivalent("a built-in template of that server; the template of the checkpoint is used")
    return text


def calls(text: str) -> Values:
    """Return the part of model.format for tool calls."""
    return {CALL_PART: _format(text, {one.name for one in CALLS} | {"harmony"})}


def reasoning(text: str) -> Values:
    """Return the part of model.format for reasoning."""
    return {REASONING_PART: _format(text, {one.name for one in REASONINGS} | {"harmony"})}


def _format(text: str, known: set[str]) -> str:
    name = next((one for one in (text, _FORMAT_NAMES.get(text, ""), text.replace("-", "_")) if one in known), "")
    if not name:
        other = " (a format of the other kind)" if text in names() else ""
        raise NoEquivalent(f"no format of this name{other}; model.format: auto detects it from the chat template")
    return name


def sampling(text: str) -> Values:
    """Return the sampling defaults in a JSON object of a generation configuration."""
    given = _json(text)
    if not isinstance(given, dict):
        raise ValueError('must be a JSON object, such as {"temperature": 0.7}')
    found = {}
    for name, value in given.items():
        key = "limits.max_output_tokens" if name == "max_new_tokens" else f"engine.sampling.{name}"
        if find(tuple(key.split("."))) is None:
            raise NoEquivalent(f"{name} has no default here; clients send it")
        found[key] = accepted(key, float(value) if isinstance(value, int) and name == "temperature" else value)
    return found


def media_counts(text: str) -> Values:
    """Return the items per prompt of a JSON object with counts by modality, or of image=COUNT."""
    given = _json(text) if text.lstrip().startswith("{") else dict([text.strip().split("=", 1)])
    values: dict[str, Any] = {}
    for kind in ("image", "video", "audio"):
        found = given.get(kind) if isinstance(given, dict) else None
        if isinstance(found, dict):
            found = found.get("count")
        if found is not None:
            key = f"limits.media.{kind}s"
            values[key] = accepted(key, int(found))
    if not values:
        raise NothingToSet("only images, videos and audio are accepted")
    return values


def gibibytes(text: str) -> str:
    """Return a size in bytes of a number of GiB."""
    size = round(_number(text) * 2**30)
    if size < 1:
        raise NoEquivalent("the cache of images cannot be turned off")
    return f"{size}B"


NO_GGUF_ADAPTER = "adapters in GGUF files are not read; name a folder that PEFT has saved in `adapters`"


def adapters(text: str) -> Values:
    """Return the adapters of NAME=PATH, of a path, or of an object with name and path; several are divided by line
    breaks or commas."""
    texts = text.splitlines() if text.lstrip().startswith("{") else re.split(r"[\n,]", text)
    return {"adapters": [_adapter(one.strip()) for one in texts if one.strip()]}


def _adapter(text: str) -> dict[str, str]:
    if text.startswith("{"):
        try:
            given = json.loads(text)
            name, path = str(given["name"]), str(given["path"])
        except (ValueError, KeyError, TypeError):
            raise NoEquivalent("write the adapter as NAME=PATH") from None
    else:
        name, _, path = text.partition("=") if "=" in text else ("", "", text)
    return {"name": name or PurePosixPath(path).name, "path": path}


SPECULATION_METHODS = {
    **{"ngram": "ngram", "suffix": "suffix", "draft_model": "draft", "mtp": "mtp"},
    **{"eagle": "eagle", "eagle3": "eagle3"},
    **dict.fromkeys(("deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "ernie_mtp", "qwen3_next_mtp"), "mtp"),
    **dict.fromkeys(("qwen3_5_mtp", "mimo_mtp", "mimo_v2_mtp", "longcat_flash_mtp"), "mtp"),
}
"""Methods of vLLM -> of speculation.method."""


def speculation(text: str) -> Values:
    """Return the keys for a JSON object of vLLM's --speculative-config."""
    given = _json(text)
    if not isinstance(given, dict):
        raise ValueError('must be a JSON object, such as {"method": "ngram", "num_speculative_tokens": 4}')
    names = {
        "num_speculative_tokens": "speculation.tokens",
        "prompt_lookup_min": "speculation.ngram_min",
        "model": "speculation.model",
    }
    method = given.get("method", "draft_model")
    if method not in SPECULATION_METHODS:
        known = ", ".join(SPECULATION_METHODS)
        raise NoEquivalent(f"{method} is not supported; supported methods are {known}")
    found: dict[str, Any] = {"speculation.method": SPECULATION_METHODS[method]}
    for name, value in given.items():
        if name in names:
            found[names[name]] = accepted(names[name], value)
        elif name not in ("method", "prompt_lookup_max"):  # a longer match is preferred without a limit to set
            raise NoEquivalent(f"{name} has no equivalent; remove it")
    return found


def lookup_tokens(text: str) -> Values:
    """Return the keys for a number of draft tokens, of which 0 disables drafts."""
    tokens = count(text)
    if not tokens:
        raise NothingToSet("speculative decoding is off by default")
    return {"speculation.method": "ngram", "speculation.tokens": accepted("speculation.tokens", tokens)}


def secret(variable: str) -> Callable[[str], Values]:
    """Return a conversion of an API key: the manifest names the environment variable that contains it."""

    def convert(text: str) -> Values:
        named = re.fullmatch(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?", text)
        return {"endpoints.api_keys": "clients", "secrets.clients.env": named[1] if named else variable}

    return convert


def key_file(text: str) -> Values:
    """Return the reference to a file with API keys."""
    return {"endpoints.api_keys": "clients", "secrets.clients.file": text}
