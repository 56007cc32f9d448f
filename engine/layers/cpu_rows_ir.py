"""LLVM IR of the row-wise CPU kernels: RMS norm, gated SiLU, rotary embedding with the cache write.

They compute in float32 and round where the torch expressions they stand for round, so that in bfloat16 too they differ
from those only by the order of the norm's sum. Each row is computed alone.
"""

from llvmlite import ir

from engine.layers.cpu_ir import F32, I32, I64, LANES, PTR, V8F, V8I, Kernel, Value
from engine.layers.cpu_rows_job import MAX_HEAD_DIM, WIDE, NormWord, PeakWord, RotateWord, SiluWord
from engine.layers.cpu_tile_ir import WeightType

ROWS_PER_GRAB = 1
_MAX_EXP = 88.0


def module_ir(kind: WeightType) -> str:
    """Text of a module with rms_norm(job), add_rms_norm(job), silu_mul(job), their wide variants,
    rotate_and_write(job), and for float32 row_peaks(job)."""
    module = ir.Module()
    for out_kind, suffix in ((kind, ""), ("float32", WIDE)):
        _norm(module, kind, out_kind, name=f"rms_norm{suffix}", add=False)
        _norm(module, kind, out_kind, name=f"add_rms_norm{suffix}", add=True)
        _silu_mul(module, kind, out_kind, name=f"silu_mul{suffix}")
    _rotate_and_write(module, kind)
    if kind == "float32":
        _row_peaks(module)
    return str(module)


def _inverse_root_mean_square(k: Kernel, squares: Value, size: Value, eps: Value) -> Value:
    """1 / sqrt(sum of the lanes / size + eps), in every lane."""
    b = k.b
    mean = b.fdiv(k.total(squares), b.sitofp(size, F32))
    root = b.call(k.declared("llvm.sqrt.f32", F32, [F32]), [b.fadd(mean, eps)])
    return k.splat(b.fdiv(ir.Constant(F32, 1.0), root))


def _norm(module: ir.Module, kind: WeightType, out_kind: WeightType, *, name: str, add: bool) -> None:
    """out = x / rms(x) * weight; with add: sum = x + delta first, and the norm of the rounded sum."""
    k = Kernel(module, name)
    b = k.b
    size = k.word(NormWord.SIZE)
    source = k.pointer(NormWord.SUM if add else NormWord.X)
    out, weight = k.pointer(NormWord.OUT), k.pointer(NormWord.WEIGHT)
    with k.shared_loop(k.at(k.job, NormWord.COUNTER, I64), k.word(NormWord.ROWS), ROWS_PER_GRAB) as row:
        start = b.mul(row, size)
        squares = k.local(k.floats(0.0))
        with k.loop(0, size, LANES) as i:
            at = b.add(start, i)
            if add:
                delta = k.load8(k.pointer(NormWord.DELTA), at, kind)
                x = k.rounded(b.fadd(k.load8(k.pointer(NormWord.X), at, kind), delta), kind)
                k.store8(x, source, at, kind)
            else:
                x = k.load8(source, at, kind)
            b.store(k.fma(x, x, b.load(squares, typ=V8F)), squares)
        scale = _inverse_root_mean_square(k, b.load(squares, typ=V8F), size, k.number(NormWord.EPS))
        with k.loop(0, size, LANES) as i:
            at = b.add(start, i)
            unit = k.rounded(b.fmul(k.load8(source, at, kind), scale), kind)
            k.store8(k.rounded(b.fmul(unit, k.load8(weight, i, kind)), kind), out, at, out_kind)
    b.ret_void()


def _silu_mul(module: ir.Module, kind: WeightType, out_kind: WeightType, *, name: str) -> None:
    """out = silu(gate) * up, x being [gate | up]."""
    k = Kernel(module, name)
    b = k.b
    size, x, out = k.word(SiluWord.SIZE), k.pointer(SiluWord.X), k.pointer(SiluWord.OUT)
    with k.shared_loop(k.at(k.job, SiluWord.COUNTER, I64), k.word(SiluWord.ROWS), ROWS_PER_GRAB) as row:
        target = b.mul(row, size)
        gate_at = b.mul(target, k.const(2))
        with k.loop(0, size, LANES) as i:
            gate = k.load8(x, b.add(gate_at, i), kind)
            up = k.load8(x, b.add(b.add(gate_at, size), i), kind)
            negative = b.fsub(k.floats(-0.0), gate)
            too_large = b.fcmp_ordered(">", negative, k.floats(_MAX_EXP))
            decay = k.exp(b.select(too_large, k.floats(_MAX_EXP), negative))
            silu = k.rounded(b.fdiv(gate, b.fadd(k.floats(1.0), decay)), kind)
            k.store8(k.rounded(b.fmul(silu, up), kind), out, b.add(target, i), out_kind)
    b.ret_void()


def _row_peaks(module: ir.Module) -> None:
    """Each row's largest value and its index. The last eight elements are looked at once more."""
    k = Kernel(module, "row_peaks")
    b = k.b
    size = k.word(PeakWord.SIZE)
    lanes = ir.Constant(V8I, list(range(LANES)))
    best, index, broken = k.local(k.floats(0.0)), k.local(lanes), k.local(k.floats(0.0))

    def look(row_at: Value, i: Value) -> None:
        x = k.load8(k.pointer(PeakWord.X), b.add(row_at, i), "float32")
        held = b.load(best, typ=V8F)
        is_larger = b.fcmp_ordered(">", x, held)
        start = k.splat_int(b.trunc(i, I32))
        b.store(b.select(is_larger, x, held), best)
        b.store(b.select(is_larger, b.add(start, lanes), b.load(index, typ=V8I)), index)
        is_nan = b.fcmp_unordered("uno", x, x)
        b.store(b.select(is_nan, x, b.load(broken, typ=V8F)), broken)

    with k.shared_loop(k.at(k.job, PeakWord.COUNTER, I64), k.word(PeakWord.ROWS)) as row:
        row_at = b.mul(row, size)
        b.store(k.floats(float("-inf")), best)
        b.store(lanes, index)
        b.store(k.floats(0.0), broken)
        with k.loop(0, b.sub(size, k.const(LANES - 1)), LANES) as i:
            look(row_at, i)
        look(row_at, b.sub(size, k.const(LANES)))
        values, places = b.load(best, typ=V8F), b.load(index, typ=V8I)
        peak = k.largest(values)
        # Of the lanes that hold the peak, the lowest index; the others count as beyond every index.
        places = b.select(b.fcmp_ordered("==", values, peak), places, ir.Constant(V8I, [2**31 - 1] * LANES))
        lowest = b.call(k.declared("llvm.vector.reduce.smin.v8i32", I32, [V8I]), [places])
        nan = b.call(
            k.declared("llvm.vector.reduce.fadd.v8f32", F32, [F32, V8F]),
            [ir.Constant(F32, 0.0), b.load(broken, typ=V8F)],
        )
        value = b.fadd(b.extract_element(peak, ir.Constant(I32, 0)), nan)
        b.store(value, k.at(k.pointer(PeakWord.VALUE), row, F32))
        place = b.add(b.zext(lowest, I64), k.word(PeakWord.FIRST))
        b.store(place, k.at(k.pointer(PeakWord.INDEX), row, I64))
    b.ret_void()


def _rotate_and_write(module: ir.Module, kind: WeightType) -> None:
    """Per row of qkv: q heads rotated into Q, k heads rotated and v heads copied to the row's cache slot."""
    k = Kernel(module, "rotate_and_write")
    b = k.b
    dim, heads, kv_heads = k.word(RotateWord.HEAD_DIM), k.word(RotateWord.HEADS), k.word(RotateWord.KV_HEADS)
    qkv, weight = k.pointer(RotateWord.QKV), k.pointer(RotateWord.NORM_WEIGHT)
    turned = b.add(heads, kv_heads)
    half = b.sdiv(dim, k.const(2))
    has_norm = b.icmp_signed("!=", k.word(RotateWord.NORM_WEIGHT), k.const(0))
    room = b.alloca(F32, MAX_HEAD_DIM)
    room.align = 32
    buffer = b.inttoptr(b.ptrtoint(room, I64), PTR)  # llvmlite types the address of a local; the helpers want any
    with k.shared_loop(k.at(k.job, RotateWord.COUNTER, I64), k.word(RotateWord.ROWS), ROWS_PER_GRAB) as row:
        slot = b.load(k.at(k.pointer(RotateWord.SLOTS), row, I64), typ=I64)
        angle_at = b.mul(row, k.word(RotateWord.ANGLE_STRIDE))
        cache_at = b.mul(b.mul(slot, kv_heads), dim)
        row_at = b.mul(row, k.word(RotateWord.QKV_STRIDE))
        with k.loop(0, turned) as head:
            head_at = b.add(row_at, b.mul(head, dim))
            squares = k.local(k.floats(0.0))
            with k.loop(0, dim, LANES) as d:
                x = k.load8(qkv, b.add(head_at, d), kind)
                b.store(k.fma(x, x, b.load(squares, typ=V8F)), squares)
                k.store8(x, buffer, d, "float32")
            with b.if_then(has_norm):
                scale = _inverse_root_mean_square(k, b.load(squares, typ=V8F), dim, k.number(RotateWord.EPS))
                with k.loop(0, dim, LANES) as d:
                    unit = k.rounded(b.fmul(k.load8(buffer, d, "float32"), scale), kind)
                    factor = k.load8(weight, b.add(b.mul(head, dim), d), kind)
                    k.store8(k.rounded(b.fmul(unit, factor), kind), buffer, d, "float32")
            is_query = b.icmp_signed("<", head, heads)
            query_at = b.mul(b.add(b.mul(row, heads), head), dim)
            key_at = b.add(cache_at, b.mul(b.sub(head, heads), dim))
            target = b.select(is_query, k.pointer(RotateWord.Q), k.pointer(RotateWord.K))
            target_at = b.select(is_query, query_at, key_at)
            with k.loop(0, dim, LANES) as d:
                lower = b.icmp_signed("<", d, half)
                partner = b.select(lower, b.add(d, half), b.sub(d, half))
                cos = k.load8(k.pointer(RotateWord.COS), b.add(angle_at, d), kind)
                sin = k.load8(k.pointer(RotateWord.SIN), b.add(angle_at, d), kind)
                straight = k.rounded(b.fmul(k.load8(buffer, d, "float32"), cos), kind)
                crossed = b.fmul(k.load8(buffer, partner, "float32"), sin)
                k.store8(b.fadd(straight, crossed), target, b.add(target_at, d), kind)
        value_at = b.add(row_at, b.mul(turned, dim))
        with k.loop(0, b.mul(kv_heads, dim), LANES) as d:
            value = k.load8(qkv, b.add(value_at, d), kind)
            k.store8(value, k.pointer(RotateWord.V), b.add(cache_at, d), kind)
    b.ret_void()
