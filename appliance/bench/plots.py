"""Line plots as inline SVG, for the report. Colours follow the theme of the reader."""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 20, 12, 40
_TICKS = 5
_POINTS = 400  # points of a line at most
_COLOURS = 4  # of the style sheet of the report

Place = Callable[[float, float], tuple[float, float]]
"""Function from the values of a point to its place in the figure."""


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]


def cumulative(name: str, values: Sequence[float]) -> Line:
    """Return the share of values up to each value, in percent."""
    ordered = sorted(values)
    count = len(ordered)
    places = range(count) if count <= _POINTS else [round(i * (count - 1) / (_POINTS - 1)) for i in range(_POINTS)]
    return Line(name, [(ordered[place], 100.0 * (place + 1) / count) for place in places])


def plot(title: str, x_label: str, y_label: str, lines: Sequence[Line]) -> str:
    """Return an SVG figure; without points a sentence."""
    points = [point for line in lines for point in line.points]
    if not points:
        return f"<figure><figcaption>{html.escape(title)}</figcaption><p>No data.</p></figure>"
    x_step, y_step = _step(max(x for x, _ in points)), _step(max(y for _, y in points))
    x_end, y_end = _end(max(x for x, _ in points), x_step), _end(max(y for _, y in points), y_step)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + x / x_end * (WIDTH - _LEFT - _RIGHT),
            HEIGHT - _BOTTOM - y / y_end * (HEIGHT - _TOP - _BOTTOM),
        )

    parts = [*_grid(x_end, x_step, y_end, y_step, place), *_labels(x_label, y_label)]
    for number, line in enumerate(lines):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line.points))
        parts.append(f'<polyline class="line c{number % _COLOURS}" points="{path}"/>')
    legend = "".join(
        f'<span class="key"><i class="c{number % _COLOURS}"></i>{html.escape(line.name)}</span>'
        for number, line in enumerate(lines)
    )
    figure = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{figure}<div>{legend}</div></figure>"


def _step(largest: float) -> float:
    """Return the distance of ticks: 1, 2 or 5 times a power of ten."""
    rough = (largest or 1.0) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def _end(largest: float, step: float) -> float:
    return max(1, math.ceil(largest / step - 1e-9)) * step


def _grid(x_end: float, x_step: float, y_end: float, y_step: float, place: Place) -> list[str]:
    parts = []
    for number in range(round(x_end / x_step) + 1):
        x, y = place(number * x_step, 0)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 15:.1f}" text-anchor="middle">{number * x_step:g}</text>')
    for number in range(round(y_end / y_step) + 1):
        x, y = place(0, number * y_step)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{number * y_step:g}</text>')
    return parts


def _labels(x_label: str, y_label: str) -> list[str]:
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    return [
        f'<text x="{(_LEFT + WIDTH - _RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{html.escape(x_label)}</text>',
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{html.escape(y_label)}</text>',
    ]
