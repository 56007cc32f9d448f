"""LLVM IR of paged attention on the CPU, for query rows that each see the first `visible` positions of their sequence.

A unit of work is a few neighbouring query rows of one sequence with one KV head, G query heads each: M = rows * G
queries that read the same K and V. Scores of all positions, softmax, weighted sum of V, all in float32 with one
rounding at the end. For a query, each sum runs in an order fixed by the positions alone, and positions past its own
`visible` add exact zeros: its result depends neither on the rows beside it nor on padding.
"""

from llvmlite import ir

from engine.attention.cpu_job import Word
from engine.layers.cpu_ir import F32, I64, LANES, V8F, V8I, Kernel, Value
from engine.layers.cpu_tile_ir import WeightType


def module_ir(kind: WeightType) -> str:
    """Text of a module with `attention(job)` for queries, cache and output of the kind, and `attention_wide(job)` with
    an output of float32, rounded to the kind."""
    module = ir.Module()
    _attention(module, kind, kind, name="attention")
    _attention(module, kind, "float32", name="attention_wide")
    return str(module)


def _attention(module: ir.Module, kind: WeightType, out_kind: WeightType, *, name: str) -> None:
    k = Kernel(module, name)
    b = k.b
    dim, group, kv_heads = k.word(Word.HEAD_DIM), k.word(Word.GROUP), k.word(Word.KV_HEADS)
    units, visible, stride = k.pointer(Word.UNITS), k.pointer(Word.VISIBLE), k.word(Word.SCORE_STRIDE)
    thread = b.atomic_rmw("add", k.at(k.job, Word.TICKET, I64), k.const(1), "monotonic")
    queries = k.at(k.pointer(Word.SCRATCH), b.mul(thread, k.word(Word.SCRATCH_STRIDE)), F32)
    query_floats = b.mul(k.word(Word.MAX_QUERIES), dim)
    sums = k.at(queries, query_floats, F32)
    eight = k.at(sums, query_floats, F32)  # K or V of eight positions
    scores = k.at(eight, b.mul(dim, k.const(LANES)), F32)
    out_stride = b.mul(b.mul(kv_heads, group), dim)

    with k.shared_loop(k.at(k.job, Word.COUNTER, I64), b.mul(k.word(Word.NUM_UNITS), kv_heads)) as item:
        unit, kv_head = b.sdiv(item, kv_heads), b.srem(item, kv_heads)
        unit_at = b.mul(unit, k.const(3))
        sequence, first_row, rows = (b.load(k.at(units, b.add(unit_at, k.const(i)), I64), typ=I64) for i in range(3))
        num_queries = b.mul(rows, group)
        table = k.at(k.pointer(Word.TABLE), b.mul(sequence, k.word(Word.TABLE_STRIDE)), I64)

        longest = k.local(k.const(0))
        with k.loop(0, rows) as row:
            seen = b.load(k.at(visible, b.add(first_row, row), I64), typ=I64)
            so_far = b.load(longest, typ=I64)
            b.store(b.select(b.icmp_signed(">", seen, so_far), seen, so_far), longest)
            source = b.add(b.mul(b.add(first_row, row), k.word(Word.Q_STRIDE)), b.mul(b.mul(kv_head, group), dim))
            target = b.mul(b.mul(row, group), dim)
            with k.loop(0, b.mul(group, dim), LANES) as d:
                value = k.load8(k.pointer(Word.Q), b.add(source, d), kind)
                k.store8(value, queries, b.add(target, d), "float32")
                k.store8(k.floats(0.0), sums, b.add(target, d), "float32")
        positions = b.load(longest, typ=I64)

        with k.loop(0, positions, LANES) as position:
            _read_eight(k, k.pointer(Word.K), table, kv_head, position, positions, eight, kind)
            with k.loop(0, num_queries) as m:
                limit = _visible_of(k, visible, first_row, m, group)
                score = _eight_scores(k, k.at(queries, b.mul(m, dim), F32), eight, dim)
                score = b.fmul(score, k.splat(k.number(Word.SCALE)))
                score = b.select(_before(k, position, limit), score, k.floats(float("-inf")))
                k.store8(score, scores, b.add(b.mul(m, stride), position), "float32")

        with k.loop(0, num_queries) as m:
            _softmax(k, k.at(scores, b.mul(m, stride), F32), positions)

        with k.loop(0, positions, LANES) as position:
            _read_eight(k, k.pointer(Word.V), table, kv_head, position, positions, eight, kind)
            with k.loop(0, num_queries) as m:
                at = b.add(b.mul(m, stride), position)
                weights = [k.splat(b.load(k.at(scores, b.add(at, k.const(j)), F32), typ=F32)) for j in range(LANES)]
                with k.loop(0, dim, LANES) as d:
                    place = b.add(b.mul(m, dim), d)
                    value = k.load8(sums, place, "float32")
                    for j in range(LANES):
                        row_j = b.add(b.mul(dim, k.const(j)), d)
                        value = k.fma(weights[j], k.load8(eight, row_j, "float32"), value)
                    k.store8(value, sums, place, "float32")

        with k.loop(0, rows) as row:
            source = b.mul(b.mul(row, group), dim)
            target = b.add(b.mul(b.add(first_row, row), out_stride), b.mul(b.mul(kv_head, group), dim))
            with k.loop(0, b.mul(group, dim), LANES) as d:
                value = k.load8(sums, b.add(source, d), "float32")
                k.store8(k.rounded(value, kind), k.pointer(Word.OUT), b.add(target, d), out_kind)
    b.ret_void()


def _read_eight(
    k: Kernel,
    cache: Value,
    table: Value,
    kv_head: Value,
    position: Value,
    positions: Value,
    eight: Value,
    kind: WeightType,
) -> None:
    """eight[j] = cache row of position + j as float32; zeros from `positions` on."""
    b = k.b
    dim, block_size = k.word(Word.HEAD_DIM), k.word(Word.BLOCK_SIZE)
    with k.loop(0, LANES) as j:
        place, target = b.add(position, j), b.mul(j, dim)
        exists = b.icmp_signed("<", place, positions)
        with b.if_else(exists) as (present, absent):
            with present:
                block = b.load(k.at(table, b.sdiv(place, block_size), I64), typ=I64)
                slot = b.add(b.mul(block, block_size), b.srem(place, block_size))
                source = b.mul(b.add(b.mul(slot, k.word(Word.KV_HEADS)), kv_head), dim)
                with k.loop(0, dim, LANES) as d:
                    k.store8(k.load8(cache, b.add(source, d), kind), eight, b.add(target, d), "float32")
            with absent, k.loop(0, dim, LANES) as d:
                k.store8(k.floats(0.0), eight, b.add(target, d), "float32")


def _visible_of(k: Kernel, visible: Value, first_row: Value, m: Value, group: Value) -> Value:
    return k.b.load(k.at(visible, k.b.add(first_row, k.b.sdiv(m, group)), I64), typ=I64)


def _before(k: Kernel, position: Value, limit: Value) -> Value:
    """Lane j: position + j < limit."""
    b = k.b
    left = b.trunc(b.sub(limit, position), V8I.element)
    one = b.insert_element(ir.Constant(V8I, ir.Undefined), left, ir.Constant(V8I.element, 0))
    everywhere = b.shuffle_vector(one, one, ir.Constant(V8I, [0] * LANES))
    return b.icmp_signed("<", ir.Constant(V8I, list(range(LANES))), everywhere)


def _eight_scores(k: Kernel, query: Value, eight: Value, dim: Value) -> Value:
    """Dot products of the query with the eight rows."""
    b = k.b
    partial = [k.local(k.floats(0.0)) for _ in range(LANES)]
    with k.loop(0, dim, LANES) as d:
        q = k.load8(query, d, "float32")
        for j in range(LANES):
            row = k.load8(eight, b.add(b.mul(dim, k.const(j)), d), "float32")
            b.store(k.fma(q, row, b.load(partial[j], typ=V8F)), partial[j])
    return k.sums([b.load(p, typ=V8F) for p in partial])


def _softmax(k: Kernel, row: Value, positions: Value) -> None:
    """In place over whole groups of eight; masked places hold -inf and become 0."""
    b = k.b
    top, total = k.local(k.floats(float("-inf"))), k.local(k.floats(0.0))
    with k.loop(0, positions, LANES) as i:
        b.store(k.maximum(k.load8(row, i, "float32"), b.load(top, typ=V8F)), top)
    peak = k.largest(b.load(top, typ=V8F))
    with k.loop(0, positions, LANES) as i:
        e = k.exp(b.fsub(k.load8(row, i, "float32"), peak))
        k.store8(e, row, i, "float32")
        b.store(b.fadd(b.load(total, typ=V8F), e), total)
    inverse = k.splat(b.fdiv(ir.Constant(F32, 1.0), k.total(b.load(total, typ=V8F))))
    with k.loop(0, positions, LANES) as i:
        k.store8(b.fmul(k.load8(row, i, "float32"), inverse), row, i, "float32")
