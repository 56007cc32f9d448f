"""LLVM IR of the arithmetic of the CPU matrix kernel: tiles of sums, widening, rounding. Pure functions returning text.

A tile keeps rows x 16 (or x 32) sums in registers for the whole of k. A float32 sum is one chain of fused multiply-adds
over k = 0, 1, 2, .. whatever the tile's size: a row's bits do not depend on the other rows. With int8 weights a step
takes a pair of k: `vpmaddwd` multiplies two 16-bit activations by two weights and adds them, sums are exact int32.
"""

from typing import Literal

PANEL = 16  # outputs per panel: two registers of eight float32
LANES = 8
MAX_TILE_ROWS = 6  # 12 sums + 2 weights + 1 broadcast of the 16 AVX2 registers
MAX_INT8_TILE_ROWS = 5  # a product needs a register before it is added
WIDE_TILE_ROWS = 2  # up to here two panels at once: one panel has too few independent chains to hide the FMA latency
ACC_STRIDE = 2 * PANEL  # float32 per row of a tile's result buffer
ALL_LANES_0 = "<8 x i32> zeroinitializer"
UNROLL = 4  # 4 k of bfloat16 weights are two cache lines

WeightType = Literal["bfloat16", "float32"]
GemmWeight = Literal["bfloat16", "float32", "int8"]
_Sums = dict[tuple[int, int, int], str]  # (row, panel, half): name of the value


# out = x widened from bfloat16 to float32
WIDEN = """
define internal void @widen(ptr noalias %x, ptr noalias %out, i64 %n) {
entry:
  %main_n = and i64 %n, -8
  %has_main = icmp sgt i64 %main_n, 0
  br i1 %has_main, label %main, label %rest
main:
  %i = phi i64 [0, %entry], [%i_next, %main]
  %src = getelementptr i16, ptr %x, i64 %i
  %dst = getelementptr float, ptr %out, i64 %i
  %raw = load <8 x i16>, ptr %src, align 2
  %wide = zext <8 x i16> %raw to <8 x i32>
  %bits = shl <8 x i32> %wide, splat (i32 16)
  store <8 x i32> %bits, ptr %dst, align 4
  %i_next = add i64 %i, 8
  %more = icmp slt i64 %i_next, %main_n
  br i1 %more, label %main, label %rest
rest:
  %has_tail = icmp slt i64 %main_n, %n
  br i1 %has_tail, label %tail, label %done
tail:
  %j = phi i64 [%main_n, %rest], [%j_next, %tail]
  %src1 = getelementptr i16, ptr %x, i64 %j
  %dst1 = getelementptr float, ptr %out, i64 %j
  %raw1 = load i16, ptr %src1, align 2
  %wide1 = zext i16 %raw1 to i32
  %bits1 = shl i32 %wide1, 16
  store i32 %bits1, ptr %dst1, align 4
  %j_next = add i64 %j, 1
  %more1 = icmp slt i64 %j_next, %n
  br i1 %more1, label %tail, label %done
done:
  ret void
}
"""

_SCALE = """
  %scale_p = getelementptr float, ptr %scale, i64 %c
  %column = load <8 x float>, ptr %scale_p, align 32
  %row_p = getelementptr float, ptr %row_scale, i64 %r
  %row_s = load float, ptr %row_p, align 4
  %row_i = insertelement <8 x float> poison, float %row_s, i32 0
  %row_v = shufflevector <8 x float> %row_i, <8 x float> poison, <8 x i32> zeroinitializer
  %factor = fmul <8 x float> %column, %row_v
  %sum = fmul <8 x float> %raw, %factor"""


def finish_ir(weight: GemmWeight) -> str:
    """Function finish: adds the bias to a tile's sums, rounds to the output type (nearest even; NaN becomes the quiet
    NaN, as in torch) and stores the columns that exist. int8: the sums are first multiplied by the column's and the
    row's scale."""
    scaled = weight == "int8"
    return _FINISH.replace("%SUM", "%raw" if scaled else "%sum").replace("  ; scale", _SCALE if scaled else "")


_FINISH = f"""
define internal void @finish(ptr noalias %acc, i64 %m, ptr noalias %bias, ptr noalias %out, i64 %ldo, i64 %cols,
    i64 %out_f32, ptr noalias %scale, ptr noalias %row_scale) {{
entry:
  %staged = alloca [8 x float], align 32
  %is_f32 = icmp ne i64 %out_f32, 0
  %esz = select i1 %is_f32, i64 4, i64 2
  br label %row
row:
  %r = phi i64 [0, %entry], [%r_next, %row_end]
  %acc_o = mul i64 %r, {ACC_STRIDE}
  %acc_r = getelementptr float, ptr %acc, i64 %acc_o
  %out_o = mul i64 %r, %ldo
  br label %chunk
chunk:
  %c = phi i64 [0, %row], [%c_next, %stored]
  %acc_p = getelementptr float, ptr %acc_r, i64 %c
  %bias_p = getelementptr float, ptr %bias, i64 %c
  %SUM = load <8 x float>, ptr %acc_p, align 32
  ; scale
  %b = load <8 x float>, ptr %bias_p, align 32
  %y = fadd <8 x float> %sum, %b
  %pos = add i64 %out_o, %c
  %pos_b = mul i64 %pos, %esz
  %out_p = getelementptr i8, ptr %out, i64 %pos_b
  %left = sub i64 %cols, %c
  %whole = icmp sge i64 %left, 8
  %dst = select i1 %whole, ptr %out_p, ptr %staged
  br i1 %is_f32, label %store_f32, label %store_bf16
store_f32:
  store <8 x float> %y, ptr %dst, align 4
  br label %tail
store_bf16:
  %bits = bitcast <8 x float> %y to <8 x i32>
  %high = lshr <8 x i32> %bits, splat (i32 16)
  %odd = and <8 x i32> %high, splat (i32 1)
  %half = add <8 x i32> %odd, splat (i32 32767)
  %up = add <8 x i32> %bits, %half
  %rounded = lshr <8 x i32> %up, splat (i32 16)
  %nan = fcmp uno <8 x float> %y, zeroinitializer
  %safe = select <8 x i1> %nan, <8 x i32> splat (i32 32704), <8 x i32> %rounded
  %narrow = trunc <8 x i32> %safe to <8 x i16>
  store <8 x i16> %narrow, ptr %dst, align 2
  br label %tail
tail:
  br i1 %whole, label %stored, label %copy
copy:
  %bytes = mul i64 %left, %esz
  call void @llvm.memcpy.p0.p0.i64(ptr %out_p, ptr %staged, i64 %bytes, i1 false)
  br label %stored
stored:
  %c_next = add i64 %c, 8
  %more_c = icmp slt i64 %c_next, %cols
  br i1 %more_c, label %chunk, label %row_end
row_end:
  %r_next = add i64 %r, 1
  %more_r = icmp slt i64 %r_next, %m
  br i1 %more_r, label %row, label %done
done:
  ret void
}}
"""


def max_tile_rows(weight: GemmWeight) -> int:
    return MAX_INT8_TILE_ROWS if weight == "int8" else MAX_TILE_ROWS


def panel_bytes_per_step(weight: GemmWeight) -> int:
    """Bytes of a panel that one step of k takes: one k, or a pair of them for int8. A step of x is always 4 bytes."""
    return PANEL * (4 if weight == "float32" else 2)


def tile_ir(rows: int, panels: int, weight: GemmWeight) -> str:
    """Function tile_{rows}_{panels}: sums of `rows` rows and `panels` neighbouring panels into acc[row][ACC_STRIDE],
    float32. k, ldx: in steps (`panel_bytes_per_step`)."""
    k_bytes = panel_bytes_per_step(weight)
    integer = weight == "int8"
    sum_type = "<8 x i32>" if integer else "<8 x float>"
    x_type, x_lanes = ("i32", "<8 x i32>") if integer else ("float", "<8 x float>")
    sums = [(r, p, h) for r in range(rows) for p in range(panels) for h in (0, 1)]
    lines: list[str] = []
    emit = lines.append

    def step(tag: str, k: str, before: _Sums) -> _Sums:
        """Emits one k: widens the weights, broadcasts each row's x, one FMA per sum. Returns the new sums' names."""
        for p in range(panels):
            emit(f"  %wo.{tag}.{p} = mul i64 {k}, {k_bytes}")
            emit(f"  %wa.{tag}.{p} = getelementptr i8, ptr %w{p}, i64 %wo.{tag}.{p}")
            if weight == "bfloat16":
                emit(f"  %wr.{tag}.{p} = load <8 x i32>, ptr %wa.{tag}.{p}, align 32")
                emit(f"  %wi.{tag}.{p}.0 = shl <8 x i32> %wr.{tag}.{p}, splat (i32 16)")
                emit(f"  %wi.{tag}.{p}.1 = and <8 x i32> %wr.{tag}.{p}, splat (i32 -65536)")
                for h in (0, 1):
                    emit(f"  %w.{tag}.{p}.{h} = bitcast <8 x i32> %wi.{tag}.{p}.{h} to <8 x float>")
            elif integer:
                for h in (0, 1):
                    emit(f"  %wb.{tag}.{p}.{h} = getelementptr i8, ptr %wa.{tag}.{p}, i64 {16 * h}")
                    emit(f"  %wr.{tag}.{p}.{h} = load <16 x i8>, ptr %wb.{tag}.{p}.{h}, align 16")
                    emit(f"  %w.{tag}.{p}.{h} = sext <16 x i8> %wr.{tag}.{p}.{h} to <16 x i16>")
            else:
                emit(f"  %wb.{tag}.{p} = getelementptr i8, ptr %wa.{tag}.{p}, i64 32")
                emit(f"  %w.{tag}.{p}.0 = load <8 x float>, ptr %wa.{tag}.{p}, align 32")
                emit(f"  %w.{tag}.{p}.1 = load <8 x float>, ptr %wb.{tag}.{p}, align 32")
        after = {}
        for r in range(rows):
            emit(f"  %xa.{tag}.{r} = getelementptr float, ptr %x{r}, i64 {k}")
            emit(f"  %xs.{tag}.{r} = load {x_type}, ptr %xa.{tag}.{r}, align 4")
            emit(f"  %xi.{tag}.{r} = insertelement {x_lanes} poison, {x_type} %xs.{tag}.{r}, i32 0")
            emit(f"  %x.{tag}.{r} = shufflevector {x_lanes} %xi.{tag}.{r}, {x_lanes} poison, {ALL_LANES_0}")
            if integer:
                emit(f"  %xp.{tag}.{r} = bitcast <8 x i32> %x.{tag}.{r} to <16 x i16>")
            for p in range(panels):
                for h in (0, 1):
                    name = f"%a.{tag}.{r}.{p}.{h}"
                    after[r, p, h] = name
                    if integer:
                        pair = f"%d.{tag}.{r}.{p}.{h}"
                        operands = f"<16 x i16> %xp.{tag}.{r}, <16 x i16> %w.{tag}.{p}.{h}"
                        emit(f"  {pair} = call <8 x i32> @llvm.x86.avx2.pmadd.wd({operands})")
                        emit(f"  {name} = add <8 x i32> {pair}, {before[r, p, h]}")
                        continue
                    operands = f"<8 x float> %x.{tag}.{r}, <8 x float> %w.{tag}.{p}.{h}, <8 x float> {before[r, p, h]}"
                    emit(f"  {name} = call <8 x float> @llvm.fma.v8f32({operands})")
        return after

    def phis(prefix: str, incoming: list[tuple[_Sums | None, str]]) -> _Sums:
        names = {s: f"%{prefix}.{s[0]}.{s[1]}.{s[2]}" for s in sums}
        for s in sums:
            sources = ", ".join(
                f"[{values[s] if values else 'zeroinitializer'}, %{block}]" for values, block in incoming
            )
            emit(f"  {names[s]} = phi {sum_type} {sources}")
        return names

    def looped(tag: str, times: int) -> _Sums:
        """Names of the sums after `times` steps, known before they are emitted (a loop's phi nodes need them)."""
        last = f"{tag}{times - 1}"
        return {s: f"%a.{last}.{s[0]}.{s[1]}.{s[2]}" for s in sums}

    emit(f"define internal void @tile_{rows}_{panels}(ptr noalias %x, i64 %ldx, ptr noalias %w, i64 %panel_bytes,")
    emit("    i64 %k, ptr noalias %acc, ptr %ahead, i64 %ahead_step) {")
    emit("entry:")
    for r in range(rows):
        emit(f"  %xo{r} = mul i64 %ldx, {r}")
        emit(f"  %x{r} = getelementptr float, ptr %x, i64 %xo{r}")
    for p in range(panels):
        emit(f"  %po{p} = mul i64 %panel_bytes, {p}")
        emit(f"  %w{p} = getelementptr i8, ptr %w, i64 %po{p}")
    emit(f"  %k_main = and i64 %k, {-UNROLL}")
    emit("  %has_main = icmp sgt i64 %k_main, 0")
    emit("  br i1 %has_main, label %main, label %rest")

    emit("main:")
    emit("  %i = phi i64 [0, %entry], [%i_next, %main]")
    emit("  %f0 = phi ptr [%ahead, %entry], [%f_next, %main]")
    main_end = looped("m", UNROLL)
    current = phis("main", [(None, "entry"), (main_end, "main")])
    for u in range(UNROLL):
        emit(f"  %k{u} = add i64 %i, {u}")
        current = step(f"m{u}", f"%k{u}", current)
    # One or two rows are bound by memory alone, where the hardware prefetcher does better by itself.
    prefetches = UNROLL * k_bytes * panels // 64 if rows > WIDE_TILE_ROWS else 0
    for f in range(prefetches):
        emit(f"  call void @llvm.prefetch.p0(ptr %f{f}, i32 0, i32 2, i32 1)")
        emit(f"  %f{f + 1} = getelementptr i8, ptr %f{f}, i64 %ahead_step")
    emit(f"  %f_next = getelementptr i8, ptr %f{prefetches}, i64 0")
    emit(f"  %i_next = add i64 %i, {UNROLL}")
    emit("  %more = icmp slt i64 %i_next, %k_main")
    emit("  br i1 %more, label %main, label %rest")

    emit("rest:")
    rest = phis("rest", [(None, "entry"), (main_end, "main")])
    emit("  %has_tail = icmp slt i64 %k_main, %k")
    emit("  br i1 %has_tail, label %tail, label %done")
    emit("tail:")
    emit("  %j = phi i64 [%k_main, %rest], [%j_next, %tail]")
    tail_end = looped("t", 1)
    step("t0", "%j", phis("tail", [(rest, "rest"), (tail_end, "tail")]))
    emit("  %j_next = add i64 %j, 1")
    emit("  %more_tail = icmp slt i64 %j_next, %k")
    emit("  br i1 %more_tail, label %tail, label %done")

    emit("done:")
    final = phis("sum", [(rest, "rest"), (tail_end, "tail")])
    for r, p, h in sums:
        if integer:
            emit(f"  %sf.{r}.{p}.{h} = sitofp <8 x i32> {final[r, p, h]} to <8 x float>")
            final[r, p, h] = f"%sf.{r}.{p}.{h}"
        emit(f"  %sp.{r}.{p}.{h} = getelementptr float, ptr %acc, i64 {r * ACC_STRIDE + p * PANEL + h * LANES}")
        emit(f"  store <8 x float> {final[r, p, h]}, ptr %sp.{r}.{p}.{h}, align 32")
    emit("  ret void")
    emit("}")
    return "\n".join(lines)
