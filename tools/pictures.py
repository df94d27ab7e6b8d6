"""Write docs/pictures/*.svg: plots of benchmarks/results, drawings of the architecture, a recording of `slipway plan`.

    python -m tools.pictures [--out DIR]

The screenshot page.png is made with `chromium --headless --window-size=1100,760 --screenshot=FILE URL`.
"""

import argparse
import contextlib
import html
import io
import json
import os
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.cli.main import main as slipway

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
RESULTS = ROOT / "benchmarks" / "results"

INK, PAPER, GRID, OURS, OTHERS, FILL = "#1f2328", "#ffffff", "#d0d7de", "#0969da", "#8c959f", "#eef4fb"
SANS, MONO = (
    "ui-sans-serif, system-ui, Segoe UI, Helvetica, Arial, sans-serif",
    "ui-monospace, Menlo, Consolas, monospace",
)


def text(
    x: float, y: float, words: str, *, size: int = 13, anchor: str = "start", colour: str = INK, bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}'
    return f'<text x="{x:g}" y="{y:g}" {style}>{html.escape(words)}</text>'


def picture(width: int, height: int, title: str, parts: Sequence[str], *, paper: str = PAPER, font: str = SANS) -> str:
    """Return an SVG file with its own background, so that it is legible on dark pages too."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    label = f'role="img" aria-label="{html.escape(title)}" font-family="{font}"'
    paper_rect = f'<rect width="{width}" height="{height}" rx="8" fill="{paper}"/>'
    return "\n".join([f"{head} {label}>", paper_rect, *parts, "</svg>"]) + "\n"


# Plots


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    ours: bool
    shown: str


def bars(title: str, note: str, panels: Mapping[str, Sequence[Bar]]) -> str:
    """Return panels of horizontal bars, each with its own scale from zero."""
    width, left, row, parts, y = 760, 320, 24, [text(20, 30, title, size=16, bold=True)], 52
    parts.append(text(20, y, note, size=12, colour="#57606a"))
    for name, content in panels.items():
        y += 34
        parts.append(text(20, y, name, bold=True))
        y += 10
        most = max(bar.value for bar in content)
        for bar in content:
            length = (width - left - 110) * bar.value / most
            parts.append(text(left - 10, y + 16, bar.name, anchor="end", bold=bar.ours))
            colour = OURS if bar.ours else OTHERS
            parts.append(
                f'<rect x="{left}" y="{y + 3}" width="{length:.1f}" height="{row - 7}" rx="3" fill="{colour}"/>'
            )
            parts.append(text(left + length + 8, y + 16, bar.shown, bold=bar.ours))
            y += row
    return picture(width, y + 20, title, parts)


NAMES = {
    "slipway:int8": "Slipway int8",
    "llama.cpp@avx512:Q8_0": "llama.cpp Q8_0",
    "ik_llama.cpp@avx512:Q8_0": "ik_llama.cpp Q8_0",
    "openvino:int8": "OpenVINO int8",
}


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def cpu() -> str:
    measured = result("cpu-qwen2.5-0.5b-int8")["tokens_per_s"]
    titles = {"decode:1:64": "decode, 1 row", "decode:8:64": "decode, 8 rows", "prefill:512": "prompt of 512 tokens"}
    panels = {
        title: [
            Bar(
                NAMES[engine],
                value := statistics.median(measured[case][engine]),
                engine.startswith("slipway"),
                f"{value:,.0f}",
            )
            for engine in NAMES
        ]
        for case, title in titles.items()
    }
    note = "Shape of Qwen2.5-0.5B, 8-bit weights, 2 threads of a Xeon (AVX-512, AMX); medians of 3 rounds"
    return bars("Tokens per second on a CPU", note, panels)


def gpu() -> str:
    found = result("gpu-h100")
    rows = [
        (name, goal, value) for name, goal, value, _ in found["table"] if "share of" in name and value.endswith("%")
    ]
    content = [Bar(name.split(": ")[0], float(value.rstrip("%")), True, value) for name, _, value in rows]
    note = (
        f"{found['limits']['device']}, Triton {found['limits']['triton']}; 100 %: the rate of plain copies or products"
    )
    return bars("Share of the hardware's limit", note, {"": content})


def versus() -> str:
    found = result("versus-transformers-qwen2.5-0.5b-mixed")["tokens_per_s"]
    medians = {name: statistics.median(values) for name, values in found.items()}
    order = sorted(medians, key=medians.__getitem__, reverse=True)
    content = [
        Bar(name.replace("slipway", "Slipway"), medians[name], "transformers" not in name, f"{medians[name]:,.1f}")
        for name in order
    ]
    return bars(
        "Slipway and transformers, batched",
        "New tokens per second, 32 requests of mixed lengths, float32, 2 threads",
        {"": content},
    )


# Drawings


def box(
    x: float, y: float, width: float, height: float, title: str, lines: Sequence[str] = (), *, fill: str = FILL
) -> str:
    parts = [f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="{OURS}"/>']
    parts.append(text(x + width / 2, y + 22, title, anchor="middle", bold=True))
    parts += [text(x + width / 2, y + 41 + 17 * n, line, size=12, anchor="middle") for n, line in enumerate(lines)]
    return "".join(parts)


def arrow(x1: float, y1: float, x2: float, y2: float, label: str = "", *, both: bool = False) -> str:
    start = ' marker-start="url(#tip)"' if both else ""
    line = f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}" marker-end="url(#tip)"{start}/>'
    beside = x1 == x2
    where = (x1 + 8, (y1 + y2) / 2 + 4, "start") if beside else ((x1 + x2) / 2, (y1 + y2) / 2 - 7, "middle")
    return line + (text(where[0], where[1], label, size=12, anchor=where[2], colour="#57606a") if label else "")


TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"'
    f' orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>'
)


def processes() -> str:
    parts = [
        TIP,
        box(20, 20, 200, 76, "clients", ("OpenAI, Anthropic, Cohere", "KServe, SageMaker, Vertex")),
        box(300, 20, 220, 76, "gateway (no torch)", ("sockets, templates, tokens", "tools, journal, metrics")),
        box(620, 0 + 20, 200, 76, "engine-0", ("loop: scheduler, KV blocks", "worker: kernels")),
        box(620, 120, 200, 60, "engine-1 …", ("parallelism.data",)),
        box(900, 20, 160, 76, "rank 1 … T−1", ("parallelism.tensor", "same plans, own share")),
        arrow(220, 58, 300, 58, "HTTP", both=True),
        arrow(520, 58, 620, 58, "MessagePack", both=True),
        arrow(520, 80, 620, 140, both=True),
        arrow(820, 58, 900, 58, "plans", both=True),
        box(300, 220, 220, 76, "slipway serve (PID 1)", ("manifest → check → plan", "signals, progress, exit codes")),
        box(620, 220, 200, 76, "supervisord", ("starts and restarts programs",)),
        box(900, 220, 160, 76, "monitor", ("hangs, restart limit", "crash causes")),
        arrow(520, 258, 620, 258, "configures"),
        arrow(820, 258, 900, 258, "events", both=True),
        arrow(690, 220, 690, 180, "starts programs"),
        arrow(410, 220, 410, 96, "opens the listening socket"),
    ]
    return picture(1080, 316, "Processes of Slipway", parts)


def request() -> str:
    stages = (
        ("parse", "body → request"),
        ("render", "template → tokens"),
        ("admit", "limits, deadlines"),
        ("route", "engine, quarantine"),
        ("schedule", "rows of a step"),
        ("compute", "kernels, sampling"),
        ("stream", "deltas → text"),
        ("format", "events of the API"),
    )
    parts, width = [TIP], 132
    for number, (title, line) in enumerate(stages):
        x = 20 + number * (width + 16)
        parts.append(box(x, 40, width, 60, title, (line,), fill="#fff8e6" if 4 <= number <= 5 else FILL))
        if number:
            parts.append(arrow(x - 16, 70, x, 70))
    parts.append(text(20, 26, "gateway", size=12, colour="#57606a"))
    parts.append(text(20 + 4 * (width + 16), 26, "engine: plans step n+1 while step n runs", size=12, colour="#57606a"))
    parts.append(text(20 + 6 * (width + 16), 26, "gateway", size=12, colour="#57606a"))
    return picture(20 + 8 * (width + 16), 120, "The path of a request", parts)


# Recording

COMMAND = "slipway plan manifests/demo.yaml --hardware avx512:8:14GiB"
SHOWN, LINE, COLUMNS, SECONDS = 24, 18, 112, 14


def recording() -> str:
    """Return the output of COMMAND as a terminal that scrolls from the resolved keys to memory and speed."""
    lines = [f"$ {COMMAND}", *printed(COMMAND)]
    shift = max(0, len(lines) - SHOWN) * LINE
    rows = []
    for number, line in enumerate(lines):
        colour = "#7ee787" if number == 0 else "#79c0ff" if line in ("memory", "expect") else "#e6edf3"
        rows.append(
            f'<text x="16" y="{24 + number * LINE}" fill="{colour}" xml:space="preserve">{html.escape(line)}</text>'
        )
    steps = f"@keyframes s{{0%,12%{{transform:translateY(0)}}75%,100%{{transform:translateY(-{shift}px)}}}}"
    style = f"<style>.s{{animation:s {SECONDS}s linear infinite}}{steps}</style>"
    height = SHOWN * LINE + 20
    clip = f'<defs><clipPath id="c"><rect x="0" y="6" width="900" height="{height - 12}"/></clipPath></defs>'
    body = f'<g clip-path="url(#c)"><g class="s" font-size="12">{"".join(rows)}</g></g>'
    return picture(860, height, COMMAND, [style, clip, body], paper="#0d1117", font=MONO)


def printed(command: str) -> list[str]:
    out, folder = io.StringIO(), Path.cwd()
    os.chdir(ROOT)
    try:
        with contextlib.redirect_stdout(out):
            assert slipway(command.split()[1:]) == 0, command
    finally:
        os.chdir(folder)
    lines = out.getvalue().replace(f"{ROOT}/", "").splitlines()
    return [
        part
        for line in lines
        for part in (textwrap.wrap(line, COLUMNS, subsequent_indent="    ", drop_whitespace=False) or [""])
    ]


ALL = {"cpu": cpu, "gpu": gpu, "versus": versus, "processes": processes, "request": request, "plan": recording}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the pictures of docs/pictures.")
    parser.add_argument("--out", type=Path, default=PICTURES, metavar="DIR", help="folder (docs/pictures)")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in ALL.items():
        (out / f"{name}.svg").write_text(draw())
        print(out / f"{name}.svg")


if __name__ == "__main__":
    main()
