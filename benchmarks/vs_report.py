"""What the rows of gpu_vs_vllm.py say: medians and ratios, the best draft length of each side, bars, and a curve.

A row has `side` ("ours" or "vllm"), `workload`, what engine_load.py put into it, and `block_width`, the rows of the
drafter's block at that draft length (0 without drafts); ours say their `drafter_weights` as well. The sides are
compared at draft lengths that both were measured at; a bar whose rows are not there is in the report too, with `ok`
null and what lacks. Bars of arrivals take this engine as it is by default; where that misses one, with the first
inter-token target that misses none, which their names then tell.
"""

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from engine_load import bootstrap

Row = dict[str, Any]
Groups = dict[tuple[tuple[str, Any], ...], dict[str, list[Row]]]  # fields of a group -> side -> its rows
SIDES = ("ours", "vllm")
MEASURED = ("speed", "first", "context", "poisson", "accept")
MEDIANS = (
    "tokens_per_s", "tokens_per_s_per_user", "first_token_ms", "step_ms", "gap_p50_ms", "gap_p99_ms", "token_p99_ms",
    "acceptance_length",
)  # fmt: skip
TOLERANCE = 0.97  # of the peer's speed at any number of requests
SHORT_CONTEXT = 1024  # whose K/V is left out of what a step must read
SAME_RATE = 0.02  # arrivals a second, or this share of them, that rounding may move a rate by
# Of arrivals: field and share of the peer's value; below 1 the least, else the most.
ARRIVALS = (
    ("p99 of a token's time", "token_p99_ms", 1.0),
    ("p99 between outputs", "gap_p99_ms", 1.0),
    ("tokens/s", "tokens_per_s", TOLERANCE),
)
HOLD, FAIL, NOT_MEASURED = 0, 1, 3  # exit codes; 2 is argparse's
_COLOURS = {"ours": "#1b6ca8", "vllm": "#b9770e"}


def report(rows: Sequence[Row], asked: Iterable[tuple[str, str, int]] = ()) -> dict[str, Any]:
    """Everything that can be said from these rows. asked: (workload, part, draft length) that should have some."""
    found: dict[str, Any] = {
        "starts": [row for row in rows if row["part"] in ("start", "tokens", "counters", "error", "versions")]
    }
    found["block_widths"] = block_widths(rows)
    ours = [row for row in rows if row["side"] == "ours" and row["part"] in MEASURED and row["draft_len"]]
    found["drafter_weights"] = sorted({row["drafter_weights"] for row in ours if "drafter_weights" in row})
    found["cut"] = [row for row in rows if "cut_after_s" in row]
    speed = by(rows, "speed", ("workload", "set", "concurrency", "draft_len"))
    found["speed"] = [compared(key, sides, "tokens_per_s") for key, sides in speed.items()]
    found["best"] = best(found["speed"])
    first = by(rows, "first", ("workload", "prompt", "draft_len"))
    found["first"] = [compared(key, sides, "first_token_ms") for key, sides in first.items()]
    context = by(rows, "context", ("workload", "context", "draft_len"))
    found["context"] = [compared(key, sides, "step_ms") for key, sides in context.items()]
    add_floors(found["context"], rows)
    found["poisson"] = poisson(rows)
    found["accept"] = acceptance(rows)
    found["curve"] = curve(found["best"])
    begun = [(row["workload"], row["part"], row["draft_len"]) for row in rows if row["part"] in MEASURED]
    found["bars"] = bars(found, dict.fromkeys([*asked, *begun]))
    return found


def block_widths(rows: Iterable[Row]) -> list[Row]:
    """Per workload and draft length, the width of the drafter's block on each side, where rows tell it."""
    found: dict[tuple[str, int], Row] = {}
    for row in rows:
        if row["part"] in MEASURED and "block_width" in row:
            key = row["workload"], row["draft_len"]
            entry = found.setdefault(key, dict(zip(("workload", "draft_len"), key, strict=True)))
            entry[row["side"]] = row["block_width"]
    return list(found.values())


def by(rows: Iterable[Row], part: str, names: tuple[str, ...]) -> Groups:
    """Measured rows of a part by these fields, then by side."""
    found: Groups = {}
    for row in rows:
        if row["part"] == part and "cut_after_s" not in row:
            key = tuple((name, row[name]) for name in names)
            found.setdefault(key, {}).setdefault(row["side"], []).append(row)
    return found


def compared(key: tuple[tuple[str, Any], ...], sides: dict[str, list[Row]], field: str) -> Row:
    """Medians of both sides; ratio: ours over the peer's of `field`."""
    row: Row = dict(key)
    for side, found in sides.items():
        row[side] = {}
        for name in MEDIANS:
            values = [f[name] for f in found if f.get(name) is not None]
            if values:
                row[side][name] = round(statistics.median(values), 4)
        row[side]["all"] = [f[field] for f in found]
        if "block_width" in found[0]:
            row[side]["block_width"] = found[0]["block_width"]
    if len(sides) == len(SIDES):
        row["ratio"] = round(row["ours"][field] / row["vllm"][field], 3)
    return row


def add_floors(context: Sequence[Row], rows: Sequence[Row]) -> None:
    """To steps behind a context: what reading weights and K/V takes at the measured bandwidth, and our multiple. Up to
    `SHORT_CONTEXT` tokens it is of the weights alone.

    over_floor is of the median gap between outputs. mean_over_floor is of `step_ms`, in which the first of some 15 gaps
    counts as well: behind it the prompt's context is still written for the drafter.
    """
    floors: dict[str, Row] = {}
    for row in rows:
        if row["part"] == "floor":  # an engine without a drafter tells only what goes without one
            floors[row["workload"]] = floors.get(row["workload"], {}) | row
    for row in context:
        floor, kind = floors.get(row["workload"], {}), "_with_drafts" if row["draft_len"] else ""
        if "weights" + kind in floor and "ours" in row:
            kv_tokens = row["context"] if row["context"] > SHORT_CONTEXT else 0
            num_bytes = floor["weights" + kind] + floor["kv_per_token" + kind] * kv_tokens
            row["floor_ms"] = round(1e3 * num_bytes / floor["bytes_per_s"], 4)
            row["ours"]["over_floor"] = round(row["ours"]["gap_p50_ms"] / row["floor_ms"], 3)
            row["ours"]["mean_over_floor"] = round(row["ours"]["step_ms"] / row["floor_ms"], 3)


def best(speed: Sequence[Row]) -> list[Row]:
    """Per set and number of requests: each side at the draft length where it is fastest.

    draft_lens: what each side was measured at. `ratio` is over the lengths that both have, each side at its best of
    these (`best_common`); there is none without such a length. ratio_of_all: each side's best of all it has, where the
    two have not the same.
    """
    places: dict[tuple[str, str, int], list[Row]] = {}
    for row in speed:
        places.setdefault((row["workload"], row["set"], row["concurrency"]), []).append(row)
    found = []
    for place, rows in places.items():
        entry: Row = dict(zip(("workload", "set", "concurrency"), place, strict=True))
        lens = {side: sorted(row["draft_len"] for row in rows if side in row) for side in SIDES}
        entry["draft_lens"] = lens
        for side in SIDES:
            if lens[side]:
                entry[side] = fastest(rows, side, lens[side])
        common = sorted(set(lens["ours"]) & set(lens["vllm"]))
        if common:
            top = {side: fastest(rows, side, common) for side in SIDES}
            entry["best_common"] = {side: top[side]["draft_len"] for side in SIDES}
            entry["ratio"] = round(top["ours"]["tokens_per_s"] / top["vllm"]["tokens_per_s"], 3)
        if all(lens.values()) and lens["ours"] != lens["vllm"]:
            entry["ratio_of_all"] = round(entry["ours"]["tokens_per_s"] / entry["vllm"]["tokens_per_s"], 3)
        found.append(entry)
    return found


def fastest(rows: Sequence[Row], side: str, draft_lens: Collection[int]) -> Row:
    """A side's medians at the one of these draft lengths that gives most tokens/s."""
    top = max((r for r in rows if r["draft_len"] in draft_lens), key=lambda r: r[side]["tokens_per_s"])
    return {"draft_len": top["draft_len"], **top[side]}


def poisson(rows: Sequence[Row]) -> list[Row]:
    """Arrivals of each side; the draft length that served most at saturation is its best one.

    Where a side was put under a given rate, it is the best of the lengths that were."""
    found = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        mine = [r for r in rows if r["part"] == "poisson" and r["workload"] == workload and "cut_after_s" not in r]
        for side in SIDES:
            saturated = {r["draft_len"]: r["requests_per_s"] for r in mine if r["side"] == side and r.get("saturated")}
            if not saturated:
                continue
            given = {r["draft_len"] for r in mine if r["side"] == side and r.get("rate") == "given"}
            top = max(given & set(saturated) or saturated, key=lambda k: saturated[k])
            entry: Row = {"workload": workload, "side": side, "draft_len": top, "saturated_requests_per_s": saturated}
            for name in ("own", "given"):
                entry[name] = [r for r in mine if r["side"] == side and r["draft_len"] == top and r.get("rate") == name]
            found.append(entry)
    return found


def peer_rates(rows: Sequence[Row], workload: str, share: float) -> list[float]:
    """The load that our side is also put under: that share of the most the peer served."""
    served = [
        row["requests_per_s"]
        for row in rows
        if row["part"] == "poisson" and row.get("saturated") and (row["side"], row["workload"]) == ("vllm", workload)
    ]
    return [round(share * max(served), 3)] if served else []


def acceptance(rows: Sequence[Row]) -> list[Row]:
    """Tokens per step of each set, and over all, with intervals; overlap: whether the two intervals touch."""
    groups = by(rows, "accept", ("workload", "draft_len"))
    found = []
    for key, sides in groups.items():
        names = dict.fromkeys(row["set"] for found_rows in sides.values() for row in found_rows)
        for name in [*names, "all"]:
            entry: Row = dict(key) | {"set": name}
            for side, mine in sides.items():
                prompts: dict[tuple[str, int], list[int]] = {}
                for row in mine:
                    for place, (steps, tokens) in enumerate(row["pairs"]):
                        if name in ("all", row["set"]):  # one prompt's texts stay together
                            sums = prompts.setdefault((row["set"], place), [0, 0])
                            sums[0], sums[1] = sums[0] + steps, sums[1] + tokens
                if prompts:
                    entry[side] = bootstrap(list(prompts.values()))
            if all(side in entry for side in SIDES):
                entry["overlap"] = max(entry[s]["low"] for s in SIDES) <= min(entry[s]["high"] for s in SIDES)
            found.append(entry)
    return found


def curve(fastest: Sequence[Row]) -> list[Row]:
    """Points of each side at its best draft length: tokens/s of a user against tokens/s of the GPU."""
    points = []
    for side in SIDES:
        for row in fastest:
            if side in row and row[side].get("tokens_per_s_per_user"):
                points.append(
                    {
                        "side": side,
                        "workload": row["workload"],
                        "set": row["set"],
                        "concurrency": row["concurrency"],
                        "draft_len": row[side]["draft_len"],
                        "user": row[side]["tokens_per_s_per_user"],
                        "gpu": row[side]["tokens_per_s"],
                    }
                )
    return points


def bars(found: dict[str, Any], due: Iterable[tuple[str, str, int]]) -> list[Row]:
    """What is to be shown. ok: None where rows lack, then `lacks` says whose. due: (workload, part, draft length)."""
    checks: list[Row] = []

    def least(value: float, limit: float) -> bool:
        return value >= limit

    def most(value: float, limit: float) -> bool:
        return value <= limit

    def check(name: str, value: Any, limit: Any, holds: Callable[[Any, Any], bool], lacks: Sequence[str]) -> None:
        if value is None or limit is None:
            checks.append({"bar": name, "value": value, "limit": limit, "ok": None, "lacks": list(lacks)})
        else:
            checks.append({"bar": name, "value": value, "limit": limit, "ok": holds(value, limit)})

    def absent(row: Row) -> list[str]:
        return [side for side in SIDES if side not in row]

    for row in found["best"]:
        common = sorted(set(row["draft_lens"]["ours"]) & set(row["draft_lens"]["vllm"]))
        place = f"{row['workload']} {row['set']}, {row['concurrency']} at once"
        which = f"best of K = {', '.join(map(str, common))} each" if common else "best K of each"
        limit = {"smol": 2.0, "q8": 1.05}[row["workload"]] if row["concurrency"] == 1 else TOLERANCE
        lacks = absent(row) or ["a draft length that both have"]
        check(f"{place}: tokens/s over vLLM's, {which}", row.get("ratio"), limit, least, lacks)
    for row in found["speed"]:
        if row["draft_len"] in (0, 15):
            place = f"{row['workload']} {row['set']}, {row['concurrency']} at once, K = {row['draft_len']}"
            check(f"{place}: tokens/s over vLLM's", row.get("ratio"), TOLERANCE, least, absent(row))
        if row["workload"] == "smol" and row["concurrency"] == 1 and row["draft_len"] == 15:
            step = row.get("ours", {}).get("step_ms")
            check(f"smol {row['set']}, 1 at once, K = 15: ms a step", step, 1.0, most, ["ours"])
    for row in found["first"]:
        place = f"{row['workload']}, {row['prompt']} prompt tokens, K = {row['draft_len']}"
        check(f"{place}: first token over vLLM's", row.get("ratio"), 1.0, most, absent(row))
    for row in found["context"]:
        place = f"{row['workload']}, context {row['context']}, K = {row['draft_len']}"
        check(f"{place}: step over vLLM's", row.get("ratio"), 1.03, most, absent(row))
        if row["workload"] == "q8" and row["draft_len"]:
            over, limit = row.get("ours", {}).get("over_floor"), 1.25 if row["context"] <= SHORT_CONTEXT else 1.35
            lacks = ["the floor" if "ours" in row else "ours"]
            check(f"{place}: step over what reading takes", over, limit, most, lacks)
    for row in found["accept"]:
        if row["set"] == "all":
            name = f"{row['workload']}, K = {row['draft_len']}: intervals of acceptance touch"
            check(name, row.get("overlap"), True, least, absent(row))
    due = list(due)
    by_side = {(row["workload"], row["side"]): row for row in found["poisson"]}
    for workload in dict.fromkeys(workload for workload, part, _ in due if part == "poisson"):
        theirs = at_rate(by_side.get((workload, "vllm")), "own")
        mine = at_rate(by_side.get((workload, "ours")), "given", theirs)
        lacks = [name for name, row in (("ours at vLLM's rate", mine), ("vllm at its own", theirs)) if not row]
        target_ms = mine.get("inter_token_target_ms")
        place = f"{workload}, arrivals" + ("" if target_ms is None else f", inter_token_target_ms {target_ms:g}")
        for name, field, share in ARRIVALS:
            limit = share * theirs[field] if theirs else None
            check(f"{place}: {name}", mine.get(field), limit, least if share < 1 else most, lacks)
    for workload, part, draft_len in due:
        if part != "poisson" and not any((r["workload"], r["draft_len"]) == (workload, draft_len) for r in found[part]):
            check(f"{workload}, K = {draft_len}: the part {part}", None, None, least, SIDES)
    return checks


def at_rate(entry: Row | None, name: str, peer: Row | None = None) -> Row:
    """The row of an entry of `poisson` under this rate; empty without one.

    peer: a row whose arrivals it must have had. Then without an inter-token target; where that misses a bar against
    the peer, at the first target that misses none.
    """
    rows = sorted(entry[name] if entry else [], key=lambda row: "inter_token_target_ms" in row)
    if not peer:
        return rows[0] if rows else {}
    rate = peer["requests_per_s"]
    same = [row for row in rows if math.isclose(row["requests_per_s"], rate, rel_tol=SAME_RATE, abs_tol=SAME_RATE)]

    def holds(row: Row) -> bool:
        limits = [(row[field], share * peer[field], share) for _, field, share in ARRIVALS]
        return all(value >= limit if share < 1 else value <= limit for value, limit, share in limits)

    return next((row for row in same if holds(row)), same[0] if same else {})


def exit_code(checks: Sequence[Row]) -> int:
    """FAIL if a bar does not hold, else NOT_MEASURED if one has no rows, else HOLD."""
    if any(bar["ok"] is False for bar in checks):
        return FAIL
    return NOT_MEASURED if any(bar["ok"] is None for bar in checks) else HOLD


def draw(points: Sequence[Row], workload: str) -> str:
    """An SVG of the curve, "all" sets, both axes logarithmic in base 2 steps."""

    chosen = [
        p for p in points if p["workload"] == workload and (p["set"] in ("all", "random") or p["concurrency"] == 1)
    ]
    width, height, edge = 720, 460, 60
    logs = [(math.log2(p["gpu"]), math.log2(p["user"])) for p in chosen]
    low_x, high_x = math.floor(min(x for x, _ in logs)), math.ceil(max(x for x, _ in logs))
    low_y, high_y = math.floor(min(y for _, y in logs)), math.ceil(max(y for _, y in logs))

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            edge + (width - 2 * edge) * (x - low_x) / max(1, high_x - low_x),
            height - edge - (height - 2 * edge) * (y - low_y) / max(1, high_y - low_y),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{edge}" y="20">tokens/s of a request against tokens/s of the GPU, each at its best K</text>',
    ]
    for index, (side, colour) in enumerate(_COLOURS.items()):
        parts.append(f'<text x="{edge + 90 * index}" y="38" fill="{colour}">{side}</text>')
    for x in range(low_x, high_x + 1):
        at = place(x, low_y)[0]
        parts.append(f'<path d="M{at:.1f} {edge}V{height - edge}" stroke="#dddddd"/>')
        parts.append(f'<text x="{at - 14:.1f}" y="{height - edge + 18}">{2**x:,}</text>')
    for y in range(low_y, high_y + 1):
        at = place(low_x, y)[1]
        parts.append(f'<path d="M{edge} {at:.1f}H{width - edge}" stroke="#dddddd"/>')
        parts.append(f'<text x="8" y="{at + 4:.1f}">{2**y:,}</text>')
    for side, colour in _COLOURS.items():
        mine = sorted((p["concurrency"], p) for p in chosen if p["side"] == side and p["set"] in ("all", "random"))
        spots = [place(math.log2(p["gpu"]), math.log2(p["user"])) for _, p in mine]
        parts.append(
            f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in spots)}" stroke="{colour}" fill="none"/>'
        )
        for point in (p for p in chosen if p["side"] == side):
            x, y = place(math.log2(point["gpu"]), math.log2(point["user"]))
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
            parts.append(f'<text x="{x + 5:.1f}" y="{y - 5:.1f}" fill="{colour}">{point["concurrency"]}</text>')
    return "\n".join([*parts, "</svg>\n"])
