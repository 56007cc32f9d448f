"""The two parts of a program of `engine.kernels.stream_head`, from its source, on modelled barriers and copies."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.modelled_warps import Barrier, Cells, Turns, Whatever, definitions

SOURCE = Path(__file__).parents[2] / "engine" / "kernels" / "stream_head.py"
PARTS = ("_place", "_compare", "_bring_weights", "_bring_rows", "_announce", "_bring")
BOX, TILE, ROWS, SLOW = 64, 64, 16, 60
FIRST_FILL = "            if number >= STAGES:\n"
# (steps, stages, whether all of x is held, staggered): every cut that the benchmark or a test on a GPU has.
CUTS = [
    (16, 3, True, False),
    (16, 5, False, False),
    (16, 3, True, True),
    (16, 5, False, True),
    (32, 6, False, False),
    (32, 6, True, False),
    (16, 4, False, False),
    (16, 5, True, False),
    (16, 6, False, False),
    (32, 5, False, False),
    (32, 4, False, False),
    (16, 6, True, True),
    (8, 5, True, False),
    (5, 5, True, False),
    (8, 8, False, True),
]


class Cell:
    """A piece of a tile, or the number of a tile."""

    def __init__(self) -> None:
        self.holds: Any = None

    def store(self, value: Any) -> None:
        self.holds = value

    def load(self, _: Any) -> Any:
        return self.holds


class Machine:
    """Programs of one launch. finished: (tile, what was summed) as they were written."""

    def __init__(self, seed: int, programs: int, source: str) -> None:
        self.turns, self.programs = Turns(seed), programs
        self.finished: list[tuple[int, list[tuple[int, int]]]] = []
        self.count = [0]
        self.code = definitions(source, PARTS)

    def functions(self, program: int) -> dict[str, Any]:
        turns, whatever = self.turns, Whatever()

        def copy(desc: str, at: list[int], barrier: Barrier, cell: Cell) -> None:
            def land() -> None:
                cell.holds = (desc, *at)
                barrier.missing -= (TILE if desc == "w" else ROWS) * BOX * 2
                barrier.settle()

            cell.holds = None
            turns.coming.append((turns.now + turns.rng.choice((1, 3, 10, SLOW)), land))
            turns.until()

        def wait(barrier: Barrier, parity: int) -> None:
            turns.until(lambda: barrier.ended % 2 != parity)

        def atomic_add(count: list[int], value: int, sem: str) -> int:
            turns.until()
            count[0] += value
            return count[0] - value

        def multiplied(w_tile: list[Cell], x_tile: list[Cell], sums: list[Any], is_async: bool) -> list[Any]:
            turns.until()
            rows, column = w_tile[0].holds[1:]
            assert [cell.holds for cell in w_tile] == [("w", rows, column + box * BOX) for box in range(len(w_tile))]
            assert [cell.holds for cell in x_tile] == [("x", 0, column + box * BOX) for box in range(len(x_tile))]
            return [*sums, (rows // TILE, column)]

        def store(at: Any, value: Any, mask: Any = None) -> None:
            if isinstance(at, list):
                at[0] = value
            else:
                self.finished.append((value[0][0], value))

        gl = SimpleNamespace(
            constexpr=whatever,
            int32=whatever,
            int64=whatever,
            float32=whatever,
            NVMMADistributedLayout=whatever,
            BlockedLayout=whatever,
            SliceLayout=whatever,
            arange=whatever,
            full=lambda shape, value, *_: value if shape == [1] else whatever,
            zeros=lambda *_: [],
            max=lambda value, _: value,
            static_range=range,
            program_id=lambda _: program,
            num_programs=lambda _: self.programs,
            atomic_add=atomic_add,
            store=store,
        )
        names: dict[str, Any] = {
            "gl": gl,
            "tl": SimpleNamespace(debug_barrier=turns.until),
            "mbarrier": SimpleNamespace(
                wait=wait,
                expect=lambda barrier, size: barrier.arrive(size),
                arrive=lambda barrier, count: barrier.arrive(),
            ),
            "tma": SimpleNamespace(async_copy_global_to_shared=copy),
            "warpgroup_mma": multiplied,
            "warpgroup_mma_wait": lambda _, deps: deps[0],
            "gdc_wait": turns.until,
            "gdc_launch_dependents": turns.until,
            "BOX": BOX,
            "_END": -1,
        }
        exec(self.code, names)
        return names

    def parts(self, program: int, tiles: int, cut: tuple[int, int, bool, bool], order: str) -> list[Any]:
        (steps, stages, holds_x, staggered), boxes = cut, 2
        x_stages, functions = steps if holds_x else stages, self.functions(program)
        w_units = [Cell() for _ in range(stages * boxes)]
        x_units = [Cell() for _ in range(x_stages * boxes)]
        x_tiles = [Permuted(x_units[i * boxes : (i + 1) * boxes]) for i in range(x_stages)]
        tile_of = Cells([Cell() for _ in range(stages)])
        w_full, empty = (Cells([Barrier() for _ in range(stages)]) for _ in range(2))
        x_full, whatever = Cells([Barrier() for _ in range(x_stages)]), Whatever()
        w_tiles = Cells([w_units[i * boxes : (i + 1) * boxes] for i in range(stages)])
        barriers = {"tile_of": tile_of, "w_full": w_full, "x_full": x_full, "empty": empty}
        shape: dict[str, Any] = {"BM": ROWS, "TILE": TILE, "STEPS": steps, "STAGES": stages}
        shape |= {"HOLDS_X": holds_x, "STAGGERED": staggered, "PDL": True, **barriers}
        compare: dict[str, Any] = {
            name: whatever for name in ("value_ptr", "id_ptr", "logits_ptr", "M", "V", "logits_stride")
        }
        compare |= {"w_tiles": w_tiles, "x_tiles": Cells(x_tiles), "LOGITS": True}
        bring: dict[str, Any] = {
            "w_desc": "w",
            "x_desc": "x",
            "w_units": Cells(w_units),
            "x_units": Cells(x_units),
            "ORDER": order,
        }
        bring |= {"count_ptr": self.count, "num_tiles": tiles, "BK": boxes * BOX}
        return [lambda: functions["_compare"](**compare, **shape), lambda: functions["_bring"](**bring, **shape)]


class Permuted(list[Cell]):
    def permute(self, _: Any) -> list[Cell]:
        return self


def launched(seed: int, cut: tuple[int, int, bool, bool], order: str, tiles: int, source: str) -> tuple[bool, Machine]:
    machine = Machine(seed, min(3, tiles), source)
    parts = [part for program in range(machine.programs) for part in machine.parts(program, tiles, cut, order)]
    return machine.turns.run(parts), machine


@pytest.mark.parametrize("order", ["apart", "together", "free"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_tile_is_summed_from_what_was_brought(cut: tuple[int, int, bool, bool], order: str) -> None:
    source = SOURCE.read_text()
    for seed, tiles in enumerate((1, 5)):
        ended, machine = launched(seed, cut, order, tiles, source)
        assert not machine.turns.errors, machine.turns.errors
        assert ended and machine.count == [0] and not machine.turns.coming
        assert sorted(tile for tile, _ in machine.finished) == list(range(tiles))
        for tile, summed in machine.finished:
            assert sorted(summed) == [(tile, step * 2 * BOX) for step in range(cut[0])]


def test_a_wait_for_the_first_fill_stops_a_program_that_holds_all_of_x() -> None:
    source = SOURCE.read_text()
    assert source.count(FIRST_FILL) == 1
    waiting = source.replace(
        FIRST_FILL, "            mbarrier.wait(empty.index(stage), ((number // STAGES) & 1) ^ 1)\n" + FIRST_FILL
    )
    assert not all(launched(seed, (16, 3, True, False), "apart", 4, waiting)[0] for seed in range(20))
    assert all(launched(seed, (16, 5, False, False), "apart", 4, waiting)[0] for seed in range(5))
