"""`slipway convert` and `slipway quantize`: programs of the engine that need torch run as processes of their own."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from appliance.config import exits
from appliance.config.environment import environment
from appliance.runtime.processes import exit_with_parent


def convert(options: argparse.Namespace) -> int:
    """Write a checkpoint in 4 or 8 bits. Return the exit code."""
    try:
        mix = {} if options.mix is None else _mix(options.mix)
    except OSError as error:
        return _wrong("convert", f"{options.mix}: {(error.strerror or str(error)).lower()}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return _wrong("convert", f"{options.mix}: is not a file of `slipway quantize --mix`: {error}")
    job = {
        "source": str(options.model),
        "target": str(options.target),
        "weights": options.weights,
        "head": options.head,
        "group_size": options.group_size,
        "layers": mix,
        "shard_bytes": options.shard_size,
        "trust_remote_code": options.trust_remote_code,
    }
    report = _run("engine.convert", job)
    if report is None:
        return exits.CHECKPOINT.number
    share = report["bytes"] / max(report["source_bytes"], 1)
    matrices = ", ".join(f"{count} matrices in {format}" for format, count in report["matrices"].items())
    print(f"{options.target}: {_size(report['bytes'])}, {100 * share:.0f} % of the source; {matrices}")
    print(f"  {report['files']} files with checksums: cd {options.target} && sha256sum -c SHA256SUMS")
    return exits.OK.number


def quantize(options: argparse.Namespace) -> int:
    """Report what rounding costs, by layer. Return the exit code."""
    if options.mix is not None and not options.budget:
        return _wrong("quantize", "--mix: has no effect without --budget")
    try:  # before a measurement that may take hours
        options.evaluate.read_text(encoding="utf-8")
    except OSError as error:
        return _wrong("quantize", f"{error.filename}: {(error.strerror or str(error)).lower()}")
    except UnicodeDecodeError:
        return _wrong("quantize", f"{options.evaluate}: is not a text in UTF-8")
    if options.mix is not None and not options.mix.parent.is_dir():
        return _wrong("quantize", f"{options.mix.parent}: no such directory")
    job = {
        "model": str(options.model),
        "text": str(options.evaluate),
        "tokens": options.tokens,
        "budget": options.budget,
        "is_applied": options.mix is not None,
        "trust_remote_code": options.trust_remote_code,
    }
    report = _run("engine.quantization_report", job)
    if report is None:
        return exits.CHECKPOINT.number
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report, options)
    if options.mix is not None and report["mix"]:
        try:
            options.mix.write_text(json.dumps({"layers": _entries(report["mix"])}, indent=2) + "\n")
        except OSError as error:
            return _wrong("quantize", f"{error.filename}: {(error.strerror or str(error)).lower()}")
        print(f"{options.mix}: written; slipway convert {options.model} FOLDER --mix {options.mix}", file=sys.stderr)
    return exits.OK.number


def _wrong(command: str, message: str) -> int:
    """Print what is wrong with the command line, and return the exit code."""
    print(f"slipway {command}: {message}", file=sys.stderr)
    return exits.MANIFEST.number


def _run(module: str, job: dict[str, Any]) -> Any:
    """Return the report of a program, or None if it failed; it prints its progress and errors."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "job.json")
        file.write_text(json.dumps(job))
        command = [sys.executable, "-P", "-m", module, str(file)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, env=environment(), check=False, preexec_fn=exit_with_parent
        )
    return json.loads(done.stdout) if done.returncode == 0 else None


def _mix(path: Path) -> dict[str, str]:
    """Return the format of each layer. Raises OSError, ValueError, KeyError, TypeError or AttributeError."""
    found = {str(entry): str(format) for entry, format in json.loads(path.read_text())["layers"].items()}
    unknown = next((format for format in found.values() if format not in ("int4", "int8", "stored")), None)
    if unknown is not None:
        raise ValueError(f"unknown format {unknown}")
    return found


def _entries(mix: dict[str, str]) -> dict[str, str]:
    """Return regular expressions of paths for the layers of a mix."""
    return {name.replace(".", r"\.") + r"(\..*)?": format for name, format in mix.items()}


def _print(report: Any, options: argparse.Namespace) -> None:
    print(f"{report['tokens']} tokens of {options.evaluate}; perplexity in float32: {report['perplexity']:.4g}")
    print(f"{'':<28} {'int4':>10} {'KL':>9} {'int8':>10} {'KL':>9} {'stored':>10}  {'format' if report['mix'] else ''}")
    for layer in report["layers"]:
        four, eight, stored = (_size(layer["bytes"][format]) for format in ("int4", "int8", "stored"))
        costs = (layer["costs"][format]["kl"] for format in ("int4", "int8"))
        sizes = f"{four:>10} {next(costs):>9.2e} {eight:>10} {next(costs):>9.2e} {stored:>10}"
        print(f"{layer['name']:<28} {sizes}  {report['mix'].get(layer['name'], '')}".rstrip())
    for format, cost in report["all"].items():
        print(f"all in {format}: {_size(report['all_bytes'][format])}, {_shown(cost)}")
    print(f"as stored: {_size(report['all_bytes']['stored'])}")
    if report["mix_cost"] is not None:
        print(f"proposed mix: {_size(report['mix_bytes'])}, {_shown(report['mix_cost'])}")
    print(f"not included: {_size(report['other_bytes'])} of other tensors, such as the embedding, the head and norms")


def _shown(cost: Any) -> str:
    same = f"{100 * cost['same_top']:.1f} % of positions keep their most likely token"
    return f"KL {cost['kl']:.2e}, perplexity {cost['perplexity']:.4g} ({100 * cost['change']:+.2f} %), {same}"


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
