"""The plot of an experiment as SVG: speed and draft length over time, means over the seeds."""

from collections.abc import Sequence

import numpy as np

from cluster.simulate.experiment import CLAIRVOYANT, OURS, PER_REPLICA, STATIC, Experiment

_WIDTH, _HEIGHT, _MARGIN, _GAP = 900, 520, 56, 36
_COLOURS = {STATIC: "#b9770e", PER_REPLICA: "#8e44ad", OURS: "#1b6ca8", CLAIRVOYANT: "#27864a"}
_MAX_POINTS = 240


def draw(experiment: Experiment, title: str) -> str:
    """An SVG of two panels: tokens a second and row, and mean K."""
    panel = (_HEIGHT - 2 * _MARGIN - _GAP) / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_MARGIN}" y="20">{_escaped(title)}</text>',
    ]
    for index, (policy, colour) in enumerate(_COLOURS.items()):
        parts.append(f'<text x="{_MARGIN + 130 * index}" y="40" fill="{colour}">{policy}</text>')
    seconds = len(experiment.of(OURS)[0].curve_speed) * experiment.slice_s
    for number, (name, label) in enumerate((("curve_speed", "tokens/s and row"), ("curve_draft_len", "mean K"))):
        top = _MARGIN + number * (panel + _GAP)
        curves = {
            policy: _thinned(np.mean([getattr(o, name) for o in experiment.of(policy)], axis=0)) for policy in _COLOURS
        }
        highest = max(float(curve.max()) for curve in curves.values()) * 1.05 or 1.0
        parts += _frame(top, panel, highest, label)
        for policy, curve in curves.items():
            parts.append(_line(curve, top, panel, highest, _COLOURS[policy]))
    for fraction in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = _MARGIN + (_WIDTH - 2 * _MARGIN) * fraction
        parts.append(f'<text x="{x - 12:.0f}" y="{_HEIGHT - _MARGIN + 20}">{seconds * fraction:.0f} s</text>')
    return "\n".join([*parts, "</svg>\n"])


def _thinned(curve: np.ndarray) -> np.ndarray:
    """Neighbouring points averaged until a screen can show them."""
    group = -(-len(curve) // _MAX_POINTS)
    kept = len(curve) // group * group
    return curve[:kept].reshape(-1, group).mean(axis=1)


def _frame(top: float, height: float, highest: float, label: str) -> Sequence[str]:
    lines = [f'<text x="{_MARGIN}" y="{top - 6:.0f}" fill="#555555">{label}</text>']
    for fraction in (0.0, 0.5, 1.0):
        y = top + height * (1 - fraction)
        lines.append(f'<path d="M{_MARGIN} {y:.1f}H{_WIDTH - _MARGIN}" stroke="#dddddd"/>')
        lines.append(f'<text x="6" y="{y + 4:.1f}">{highest * fraction:.3g}</text>')
    return lines


def _line(curve: np.ndarray, top: float, height: float, highest: float, colour: str) -> str:
    xs = _MARGIN + (_WIDTH - 2 * _MARGIN) * (np.arange(len(curve)) + 0.5) / len(curve)
    ys = top + height * (1 - curve / highest)
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
    return f'<polyline points="{points}" stroke="{colour}" stroke-width="1.5" fill="none"/>'


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
