"""Did-you-mean: from what was written to what was probably meant, for keys and for values."""

import difflib
import re
from typing import Any

from appliance.declare.keys import Key, children, keys
from appliance.declare.locate import Path

# What other servers and other parts of this manifest call it → the key here.
FOREIGN_KEYS = {
    "kind": "",
    "metadata": "",
    "address": "endpoints.host",
    "apikey": "endpoints.api_keys",
    "auth": "endpoints.api_keys",
    "batchsize": "engine.scheduling.max_running",
    "bind": "endpoints.host",
    "blocksize": "engine.cache.block_tokens",
    "contextlength": "model.max_context",
    "corsallowedorigins": "endpoints.cors_origins",
    "ctxsize": "model.max_context",
    "dataparallelsize": "parallelism.data",
    "enableprefixcaching": "engine.cache.prefix",
    "gpumemoryutilization": "hardware.memory_share",
    "gracefulshutdown": "lifecycle.drain",
    "kvcachedtype": "quantization.kv_cache",
    "kvcachespace": "hardware.kv_cache_memory",
    "listen": "endpoints.host",
    "loglevel": "observability.log_level",
    "logging": "observability",
    "logs": "observability",
    "maxbatchsize": "engine.scheduling.max_running",
    "maxconcurrency": "engine.scheduling.max_running",
    "maxmodellen": "model.max_context",
    "maxnumbatchedtokens": "engine.scheduling.max_step_tokens",
    "maxnumqueuedreqs": "limits.max_waiting",
    "maxnumqueuedtokens": "limits.max_waiting_tokens",
    "maxnumseqs": "engine.scheduling.max_running",
    "maxqueue": "limits.max_waiting",
    "hfmodelid": "model.source.huggingface.repo",
    "modelid": "model.source.huggingface.repo",
    "modelpath": "model.source.path",
    "name": "model.names",
    "nthreads": "hardware.threads",
    "prefixcaching": "engine.cache.prefix",
    "replicas": "parallelism.data",
    "schedulingpolicy": "engine.scheduling.policy",
    "server": "endpoints",
    "servedmodelname": "model.names",
    "servednames": "model.names",
    "shutdowntimeout": "lifecycle.drain",
    "repository": "model.source.huggingface.repo",
    "storageuri": "model.source.gs.uri",
    "startuptimeout": "health.startup_budget",
    "utilization": "hardware.memory_share",
    "workers": "parallelism.data",
}
FOREIGN_WORDS = {
    "gpu": "cuda",
    "nvidia": "cuda",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "warn": "warning",
    "err": "error",
    "trace": "debug",
    "fifo": "fcfs",
    "plain": "text",
    "none": "off",
    "false": "off",
    "v1": "slipway/v2",
    "v2": "slipway/v2",
}
SECTION_TEXT = {"model": "write {{source: {{path: {}}}}}", "model.source": "write {{path: {}}}"}
_UNITS = {
    "size": {"b": "B", "k": "KiB", "m": "MiB", "g": "GiB", "t": "TiB", "kb": "KB", "mb": "MB", "gb": "GB", "tb": "TB"}
    | {f"{u}i": f"{u.upper()}iB" for u in "kmgt"}
    | {f"{u}ib": f"{u.upper()}iB" for u in "kmgt"},
    "duration": dict.fromkeys(("", "s", "sec", "secs", "second", "seconds"), "s")
    | dict.fromkeys(("m", "min", "mins", "minute", "minutes"), "m")
    | dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), "h")
    | dict.fromkeys(("ms", "msec", "millis"), "ms"),
}


def flat(name: str) -> str:
    """A name without the marks that spellings differ in: maxRunning, max-running and max_running are one."""
    return re.sub(r"[-_ ]", "", name).lower()


def suggest_key(path: Path) -> tuple[str, tuple[Path, ...]]:
    """A hint for an unknown key, and the keys it may stand for: the same word here, elsewhere, in other servers, or a
    similar word here, elsewhere."""
    above, name = path[:-1], str(path[-1])
    here = children(above)
    word = flat(name)
    for known in here:
        if flat(known) == word:
            return f"did you mean {known}?", ((*above, known),)
    if elsewhere := [key for key in keys().values() if flat(key.path[-1]) == word and "*" not in key.path]:
        return f"it belongs to {' or '.join(_section(key) for key in elsewhere)}", tuple(k.path for k in elsewhere)
    if (target := FOREIGN_KEYS.get(word)) is not None:
        if not target:
            return "leave it out", ()
        return f"here this is {target}", (tuple(target.split(".")),)
    if close := difflib.get_close_matches(name.lower(), here, 1, 0.6):
        return f"did you mean {close[0]}?", ((*above, close[0]),)
    table = {flat(key.path[-1]): key for key in keys().values() if "*" not in key.path}
    if close := difflib.get_close_matches(word, table, 1, 0.75):
        return f"did you mean {table[close[0]].name}?", (table[close[0]].path,)
    return "", ()


def _section(key: Key) -> str:
    return ".".join(key.path[:-1]) + f": {key.path[-1]}" if len(key.path) > 1 else "the top level"


def suggest_value(key: Key, value: Any, item: bool = False) -> str:
    """A hint for a value that its key does not take; "" where nothing is near."""
    if item:
        return f'write "{_plain(value)}"' if isinstance(value, int | float) else ""
    if isinstance(value, str):
        return _suggest_text(key, value.strip())
    if isinstance(value, bool):
        if "off" in key.choices and not value:
            return "did you mean off?"
        return f'write "{_plain(value)}"' if key.types == {"string"} and not key.choices else ""
    if isinstance(value, float) and value.is_integer() and "integer" in key.types and "number" not in key.types:
        return f"write {int(value)}"
    if isinstance(value, int | float):
        if key.allowed.startswith("a number") and "at most 1" in key.allowed and 1 < value <= 100:
            return f"write {value / 100:g} for {value:g} %"
        return f'write "{_plain(value)}"' if "string" in key.types and not key.choices and not key.form else ""
    if (
        isinstance(value, list)
        and "array" not in key.types
        and len(value) == 1
        and not isinstance(value[0], list | dict)
    ):
        return f"write {_plain(value[0])}, without brackets"
    if value is None and "object" in key.types:
        return "leave the key out, or write keys below it"
    return ""


def _plain(value: Any) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


def _suggest_text(key: Key, text: str) -> str:
    if key.kind == "section":
        if match := re.match(r"([A-Za-z_]\w*):(\S.*)", text):
            return f"a space must follow the colon: {match[1]}: {match[2]}"
        return SECTION_TEXT[key.name].format(text) if key.name in SECTION_TEXT else ""
    if "array" in key.types:
        return f"write [{text}]"
    if key.choices and (near := _word(key.choices, text)):
        return f"did you mean {near}?"
    if key.form and (near := _quantity(key.form, text)):
        return f"did you mean {near}?"
    if "boolean" in key.types:
        if text.lower() in ("true", "yes", "on", "1", "enabled"):
            return "write true, without quotes"
        if text.lower() in ("false", "no", "off", "0", "disabled", "none"):
            return "write false, without quotes"
        return ""
    if match := re.fullmatch(r"([\d.]+)\s*%", text):
        return f"write {float(match[1]) / 100:g}" if "number" in key.types else ""
    if {"integer", "number"} & key.types:
        if re.fullmatch(r"-?\d+(\.\d+)?", text):
            return f"write {text}, without quotes"
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmM])", text):
            return f"write {int(float(match[1]) * (1024 if match[2] in 'kK' else 1024**2))}"
        if re.fullmatch(r"\d{1,3}([, ]\d{3})+", text):
            return f"write {re.sub('[, ]', '', text)}"
        if "null" in key.types and text.lower() in ("none", "off", "auto", "default", "unlimited"):
            return "leave the key out"
    return ""


def _word(choices: tuple[str, ...], text: str) -> str:
    lowered = text.lower()
    if lowered in choices:
        return lowered
    if FOREIGN_WORDS.get(lowered) in choices:
        return FOREIGN_WORDS[lowered]
    close = difflib.get_close_matches(lowered, choices, 1, 0.6)
    return close[0] if close else ""


def _quantity(form: str, text: str) -> str:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    unit = _UNITS[form].get(match[2].lower()) if match else None
    if match and form == "duration" and match[2].lower() in ("d", "day", "days"):
        return f"{float(match[1]) * 24:g}h"
    return f"{match[1]}{unit}" if match and unit else ""
