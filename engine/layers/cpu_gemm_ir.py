"""LLVM IR of the CPU matrix kernel behind `engine.layers.cpu_gemm`: a pure function from weight type to module text.

out[r, o] = bias[o] + sum over k of x[r, k] * weight[o, k], products and sums in float32, one rounding at the end. int8:
x is quantised per row to 16-bit integers, the integer sums are exact and then scaled by row and output.

Weights come in panels of 16 outputs, `[panels][k][16]`, so that vector lanes are outputs and one broadcast of x[r, k]
meets two 8-lane registers of weights. A bfloat16 panel stores, for each k, eight 32-bit words whose low half is output
j and whose high half is output j + 8: a shift and a mask widen sixteen weights exactly. An int8 panel stores, for each
pair of k, both weights of output 0, of output 1, and so on.

A panel is read from memory once for up to MAX_TILE_ROWS rows, and from the cache for further blocks of rows. While a
block computes, it prefetches its share of the thread's next panels. Threads split the panels in contiguous ranges (the
hardware prefetcher likes them) and, once done, take what others have left. They are the threads of the OpenMP runtime
that torch itself uses (`GOMP_parallel`), so the two never compete for cores.
"""

from engine.layers.cpu_quantise_ir import QUANTISE
from engine.layers.cpu_tile_ir import (
    ACC_STRIDE,
    PANEL,
    WIDE_TILE_ROWS,
    WIDEN,
    GemmWeight,
    finish_ir,
    max_tile_rows,
    panel_bytes_per_step,
    tile_ir,
)

PANELS_PER_GRAB = 2  # a thread takes this many panels at a time: the most that a wide tile uses at once

_DECLARATIONS = """
; weights, bias[16 * panels], k, o, panels, threads, 1 for a float32 output (0: bfloat16), int8: scale[16 * panels]
; k and the rows of x are in steps of `panel_bytes_per_step`
%Layer = type { ptr, ptr, i64, i64, i64, i64, i64, ptr }
; layer, x (float32 [rows, k] or int8's pairs), out [rows, o], rows, next thread's number, panel counters of the
; threads, 64 bytes apart, int8: scale[rows]
%Job = type { ptr, ptr, ptr, i64, i64, ptr, ptr }
declare <8 x float> @llvm.fma.v8f32(<8 x float>, <8 x float>, <8 x float>)
declare <8 x i32> @llvm.x86.avx2.pmadd.wd(<16 x i16>, <16 x i16>)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare void @GOMP_parallel(ptr, ptr, i32, i32)
"""


def _worker(weight: GemmWeight) -> str:
    """Function worker(job), run by every thread. Rows go in blocks of up to MAX_TILE_ROWS, as equal as they can be."""
    k_bytes = panel_bytes_per_step(weight)
    max_rows = max_tile_rows(weight)
    tiles = [(m, 1) for m in range(1, max_rows + 1)] + [(m, 2) for m in range(1, WIDE_TILE_ROWS + 1)]
    narrow = " ".join(f"i64 {m}, label %tile_{m}_1" for m, panels in tiles if panels == 1)
    wide = " ".join(f"i64 {m}, label %tile_{m}_2" for m, panels in tiles if panels == 2)
    calls = "\n".join(
        f"tile_{m}_{panels}:\n"
        f"  call void @tile_{m}_{panels}(ptr %x_b, i64 %k, ptr %w_panel, i64 %panel_bytes, i64 %k, ptr %acc,\n"
        "      ptr %ahead, i64 %ahead_step)\n"
        "  br label %finish"
        for m, panels in tiles
    )
    layer = "\n".join(
        f"  %at.{name} = getelementptr %Layer, ptr %layer, i32 0, i32 {i}\n  %{name} = load {kind}, ptr %at.{name}"
        for i, (name, kind) in enumerate(
            [
                ("w", "ptr"),
                ("bias", "ptr"),
                ("k", "i64"),
                ("o", "i64"),
                ("panels", "i64"),
                ("threads", "i64"),
                ("out_f32", "i64"),
                ("scale", "ptr"),
            ]
        )
    )
    return f"""
define void @worker(ptr %job) {{
entry:
  %acc = alloca [{max_rows * ACC_STRIDE} x float], align 32
  %layer = load ptr, ptr %job
{layer}
  %at.x = getelementptr %Job, ptr %job, i32 0, i32 1
  %x = load ptr, ptr %at.x
  %at.out = getelementptr %Job, ptr %job, i32 0, i32 2
  %out = load ptr, ptr %at.out
  %at.rows = getelementptr %Job, ptr %job, i32 0, i32 3
  %rows = load i64, ptr %at.rows
  %at.ticket = getelementptr %Job, ptr %job, i32 0, i32 4
  %at.counters = getelementptr %Job, ptr %job, i32 0, i32 5
  %counters = load ptr, ptr %at.counters
  %at.row_scale = getelementptr %Job, ptr %job, i32 0, i32 6
  %row_scale = load ptr, ptr %at.row_scale
  %panel_bytes = mul i64 %k, {k_bytes}
  %grab_bytes = mul i64 %panel_bytes, {PANELS_PER_GRAB}
  %is_f32 = icmp ne i64 %out_f32, 0
  %out_esz = select i1 %is_f32, i64 4, i64 2
  %rows_up = add i64 %rows, {max_rows - 1}
  %blocks = udiv i64 %rows_up, {max_rows}
  %block_rows = udiv i64 %rows, %blocks
  %longer_blocks = urem i64 %rows, %blocks
  %ahead_step = udiv i64 64, %blocks
  %wide_ok = icmp sle i64 %rows, {WIDE_TILE_ROWS}
  %thread = atomicrmw add ptr %at.ticket, i64 1 monotonic
  br label %victim
victim:
  %v_i = phi i64 [0, %entry], [%v_next, %victim_end]
  %v_sum = add i64 %thread, %v_i
  %v = urem i64 %v_sum, %threads
  %v_off = mul i64 %v, 64
  %counter = getelementptr i8, ptr %counters, i64 %v_off
  %v_1 = add i64 %v, 1
  %v_mul = mul i64 %v_1, %panels
  %v_end = udiv i64 %v_mul, %threads
  br label %grab
grab:
  %first = atomicrmw add ptr %counter, i64 {PANELS_PER_GRAB} monotonic
  %empty = icmp sge i64 %first, %v_end
  br i1 %empty, label %victim_end, label %grabbed
grabbed:
  %full_end = add i64 %first, {PANELS_PER_GRAB}
  %is_full = icmp sle i64 %full_end, %v_end
  %end = select i1 %is_full, i64 %full_end, i64 %v_end
  br label %block
block:
  %b = phi i64 [0, %grabbed], [%b_next, %block_end]
  %row = phi i64 [0, %grabbed], [%row_next, %block_end]
  %is_longer = icmp slt i64 %b, %longer_blocks
  %one_more = zext i1 %is_longer to i64
  %m = add i64 %block_rows, %one_more
  %x_off = mul i64 %row, %k
  %x_b = getelementptr float, ptr %x, i64 %x_off
  %out_row = mul i64 %row, %o
  %share = mul i64 %panel_bytes, %b
  %share_off = udiv i64 %share, %blocks
  %ahead_off = add i64 %grab_bytes, %share_off
  br label %panel
panel:
  %p = phi i64 [%first, %block], [%p_next, %finish]
  %w_off = mul i64 %p, %panel_bytes
  %w_panel = getelementptr i8, ptr %w, i64 %w_off
  %left = sub i64 %end, %p
  %two_left = icmp sge i64 %left, 2
  %use_wide = and i1 %wide_ok, %two_left
  %taken = select i1 %use_wide, i64 2, i64 1
  %ahead = getelementptr i8, ptr %w_panel, i64 %ahead_off
  br i1 %use_wide, label %pick_wide, label %pick_narrow
pick_wide:
  switch i64 %m, label %finish [ {wide} ]
pick_narrow:
  switch i64 %m, label %finish [ {narrow} ]
{calls}
finish:
  %col = mul i64 %p, {PANEL}
  %bias_c = getelementptr float, ptr %bias, i64 %col
  %scale_c = getelementptr float, ptr %scale, i64 %col
  %scale_r = getelementptr float, ptr %row_scale, i64 %row
  %out_pos = add i64 %out_row, %col
  %out_b = mul i64 %out_pos, %out_esz
  %out_c = getelementptr i8, ptr %out, i64 %out_b
  %cols_left = sub i64 %o, %col
  %cols_tile = mul i64 %taken, {PANEL}
  %cols_less = icmp slt i64 %cols_left, %cols_tile
  %cols = select i1 %cols_less, i64 %cols_left, i64 %cols_tile
  call void @finish(ptr %acc, i64 %m, ptr %bias_c, ptr %out_c, i64 %o, i64 %cols, i64 %out_f32,
      ptr %scale_c, ptr %scale_r)
  %p_next = add i64 %p, %taken
  %more_p = icmp slt i64 %p_next, %end
  br i1 %more_p, label %panel, label %block_end
block_end:
  %row_next = add i64 %row, %m
  %b_next = add i64 %b, 1
  %more_b = icmp slt i64 %b_next, %blocks
  br i1 %more_b, label %block, label %grab
victim_end:
  %v_next = add i64 %v_i, 1
  %more_v = icmp slt i64 %v_next, %threads
  br i1 %more_v, label %victim, label %done
done:
  ret void
}}
"""


_ENTRY_HEAD = """
  %at.k = getelementptr %Layer, ptr %layer, i32 0, i32 2
  %k = load i64, ptr %at.k
  %at.panels = getelementptr %Layer, ptr %layer, i32 0, i32 4
  %panels = load i64, ptr %at.panels
  %at.threads = getelementptr %Layer, ptr %layer, i32 0, i32 5
  %threads = load i64, ptr %at.threads
  %counter_bytes = mul i64 %threads, 64"""

_ENTRY_BODY = """
  %counters = alloca i8, i64 %counter_bytes, align 64
  %job = alloca %Job, align 64
  %j0 = insertvalue %Job zeroinitializer, ptr %layer, 0
  %j1 = insertvalue %Job %j0, ptr %X, 1
  %j2 = insertvalue %Job %j1, ptr %out, 2
  %j3 = insertvalue %Job %j2, i64 %rows, 3
  %j5 = insertvalue %Job %j3, ptr %counters, 5
  %j6 = insertvalue %Job %j5, ptr %ROW_SCALE, 6
  store %Job %j6, ptr %job
  br label %init
init:
  %t = phi i64 [0, %entry], [%t_next, %init]
  %t_off = mul i64 %t, 64
  %counter = getelementptr i8, ptr %counters, i64 %t_off
  %t_mul = mul i64 %t, %panels
  %t_first = udiv i64 %t_mul, %threads
  store i64 %t_first, ptr %counter
  %t_next = add i64 %t, 1
  %more = icmp slt i64 %t_next, %threads
  br i1 %more, label %init, label %start
start:
  %alone = icmp eq i64 %threads, 1
  br i1 %alone, label %serial, label %parallel
serial:
  call void @worker(ptr %job)
  ret void
parallel:
  %team = trunc i64 %threads to i32
  call void @GOMP_parallel(ptr @worker, ptr %job, i32 %team, i32 0)
  ret void
}
"""

# Each of these makes the kernel's x from the caller's, on the stack, so rows * k must be small.
_WIDEN_X = """
  %n = mul i64 %rows, %k
  %wide = alloca float, i64 %n, align 32
  call void @widen(ptr %x, ptr %wide, i64 %n)"""

_QUANTISE_X = """
  %n = mul i64 %rows, %k
  %pairs = alloca i32, i64 %n, align 32
  %row_scale = alloca float, i64 %rows, align 32
  %size = mul i64 %k, 2
  call void @quantise(ptr %x, ptr %pairs, ptr %row_scale, i64 %rows, i64 %size)"""


def _entry(name: str, make_x: str, x: str, row_scale: str) -> str:
    """Function name(layer, x, out, rows)."""
    body = _ENTRY_BODY.replace("ptr %X", f"ptr {x}").replace("ptr %ROW_SCALE", f"ptr {row_scale}")
    return f"define void @{name}(ptr %layer, ptr %x, ptr %out, i64 %rows) {{\nentry:{_ENTRY_HEAD}{make_x}{body}"


def module_ir(weight: GemmWeight) -> str:
    """The module's text. It exports gemm_float32 and gemm_bfloat16, named by the type of x; int8: only the latter."""
    tiles = [tile_ir(m, 1, weight) for m in range(1, max_tile_rows(weight) + 1)] + [
        tile_ir(m, 2, weight) for m in range(1, WIDE_TILE_ROWS + 1)
    ]
    if weight == "int8":
        makers = [QUANTISE]
        entries = [_entry("gemm_bfloat16", _QUANTISE_X, "%pairs", "%row_scale")]
    else:
        makers = [WIDEN]
        entries = [_entry("gemm_float32", "", "%x", "null"), _entry("gemm_bfloat16", _WIDEN_X, "%wide", "null")]
    return "\n".join([_DECLARATIONS, *makers, finish_ir(weight), *tiles, _worker(weight), *entries])
