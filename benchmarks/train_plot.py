"""Draws a training log: acceptance length of the held-out sets, and accepted drafts per anchor, over steps; as SVG.

python benchmarks/train_plot.py run/log.jsonl training.svg
"""

import json
import sys
from pathlib import Path

_WIDTH, _HEIGHT, _MARGIN = 760, 400, 50
_CHAR_WIDTH = 7  # of the legend's font, about
_COLOURS = ("#1b6ca8", "#c0392b", "#27864a", "#8e44ad", "#b9770e", "#555555")
Series = dict[str, list[tuple[float, float]]]


def read(path: Path) -> Series:
    """Points of every curve. Accepted drafts per anchor are shown plus one, comparable with an acceptance length."""
    series: Series = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        for name, value in record.get("acceptance_length", {}).items():
            series.setdefault(name, []).append((record["step"], value))
        if "accepted_per_anchor" in record and record["step"] % 100 == 0:
            points = series.setdefault("training batches, any anchor", [])
            points.append((record["step"], 1.0 + record["accepted_per_anchor"]))
    return series


def draw(series: Series) -> str:
    last = max(step for points in series.values() for step, _ in points)
    top = max(value for points in series.values() for _, value in points) * 1.05
    inner_w, inner_h = _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN

    def place(step: float, value: float) -> str:
        return f"{_MARGIN + inner_w * step / last:.1f},{_HEIGHT - _MARGIN - inner_h * (value - 1) / (top - 1):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for value in range(1, int(top) + 1):
        left, right = place(0, value), place(last, value)
        parts.append(f'<polyline points="{left} {right}" stroke="#dddddd" fill="none"/>')
        x, y = left.split(",")
        parts.append(f'<text x="{float(x) - 18}" y="{float(y) + 4}">{value}</text>')
    for fraction in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = place(last * fraction, 1).split(",")
        parts.append(f'<text x="{float(x) - 14}" y="{float(y) + 18}">{round(last * fraction)}</text>')
    parts.append(f'<text x="{_WIDTH / 2 - 20}" y="{_HEIGHT - 10}">steps</text>')
    parts.append(f'<text x="{_MARGIN}" y="{_MARGIN - 24}">acceptance length, greedy, 15 drafts</text>')
    legend_x = _MARGIN + 8
    for index, (name, points) in enumerate(series.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        line = " ".join(place(step, value) for step, value in points)
        parts.append(f'<polyline points="{line}" stroke="{colour}" stroke-width="1.8" fill="none"/>')
        parts.append(f'<text x="{legend_x}" y="{_MARGIN - 6}" fill="{colour}">{name}</text>')
        legend_x += _CHAR_WIDTH * len(name) + 20
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(draw(read(Path(sys.argv[1]))))
