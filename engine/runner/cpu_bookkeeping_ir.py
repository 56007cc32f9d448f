"""LLVM IR of the integer work around T and D of decode rows on the CPU; one thread, row by row.

What is computed is told by the torch forms in `engine.runner.batch`, `engine.sampling.verify` and
`engine.runner.draft_program`. Shapes as in `engine.kernels.row_state`.
"""

from llvmlite import ir

from engine.layers.cpu_ir import F32, I32, I64, Kernel, Value
from engine.runner.cpu_bookkeeping_job import CommitWord, StoreWord, TargetWord
from engine.step import Finish

_I8 = ir.IntType(8)


class _Rows(Kernel):
    """Scalars of 64 bits in memory."""

    def get(self, base: Value, index: Value) -> Value:
        return self.b.load(self.at(base, index, I64), typ=I64)

    def put(self, value: Value, base: Value, index: Value) -> None:
        self.b.store(value, self.at(base, index, I64))

    def get_flag(self, base: Value, index: Value) -> Value:
        return self.b.icmp_unsigned("!=", self.b.load(self.at(base, index, _I8), typ=_I8), ir.Constant(_I8, 0))

    def put_flag(self, value: Value, base: Value, index: Value) -> None:
        self.b.store(self.b.zext(value, _I8), self.at(base, index, _I8))

    def put_narrow(self, value: Value, base: Value, index: Value) -> None:
        self.b.store(self.b.trunc(value, I32), self.at(base, index, I32))

    def most(self, a: Value, c: Value) -> Value:
        return self.b.select(self.b.icmp_signed(">", a, c), a, c)

    def below(self, a: Value, c: Value) -> Value:
        return self.b.icmp_signed("<", a, c)

    def equal(self, a: Value, c: Value) -> Value:
        return self.b.icmp_signed("==", a, c)

    def cache_slot(self, table: Value, position: Value, block_size: Value) -> Value:
        block = self.get(table, self.b.sdiv(position, block_size))
        return self.b.add(self.b.mul(block, block_size), self.b.srem(position, block_size))


def module_ir() -> str:
    """Text of a module with target_rows(job), commit_rows(job) and store_drafts(job)."""
    module = ir.Module()
    _target_rows(module)
    _commit_rows(module)
    _store_drafts(module)
    return str(module)


def _target_rows(module: ir.Module) -> None:
    k = _Rows(module, "target_rows")
    b, w = k.b, TargetWord
    width, block_size = k.word(w.WIDTH), k.word(w.BLOCK_SIZE)
    columns = b.add(width, k.const(1))
    with k.loop(0, k.word(w.ROWS)) as row:
        slot = k.get(k.pointer(w.SLOTS), row)
        committed, last = k.get(k.pointer(w.COMMITTED), slot), k.get(k.pointer(w.LAST), slot)
        finished = k.get_flag(k.pointer(w.FINISHED), slot)
        max_len = k.get(k.pointer(w.MAX_LEN), b.mul(slot, k.word(w.LENGTH_STRIDE)))
        fitting = b.sub(b.sub(max_len, k.const(2)), committed)
        drafted = k.least(k.get(k.pointer(w.DRAFT_COUNT), slot), fitting)
        drafted = b.select(finished, k.const(0), k.least(k.most(drafted, k.const(0)), width))
        k.put(drafted, k.pointer(w.OUT_K), row)
        k.put(committed, k.pointer(w.OUT_COMMITTED), row)
        k.put_flag(finished, k.pointer(w.OUT_FINISHED), row)
        k.put(b.add(b.add(committed, drafted), k.const(1)), k.pointer(w.OUT_KV_LEN), row)
        drafts = k.at(k.pointer(w.DRAFTS), b.mul(slot, k.word(w.DRAFT_STRIDE)), I64)
        table = k.at(k.pointer(w.TABLE), b.mul(slot, k.word(w.TABLE_STRIDE)), I64)
        with k.loop(0, width) as c:
            k.put(k.get(drafts, c), k.pointer(w.OUT_DRAFTS), b.add(b.mul(row, width), c))
        with k.loop(0, columns) as c:
            # Column 0 is the last token, column c its draft c - 1, columns past k the last one again, written nowhere.
            is_filler = b.icmp_signed(">", c, drafted)
            draft = k.get(drafts, k.most(b.sub(c, k.const(1)), k.const(0)))
            token = b.select(b.or_(is_filler, k.equal(c, k.const(0))), last, draft)
            position = b.add(committed, k.least(c, drafted))
            cache = k.cache_slot(table, position, block_size)
            at = b.add(b.mul(row, columns), c)
            k.put(token, k.pointer(w.OUT_IDS), at)
            k.put(position, k.pointer(w.OUT_POSITIONS), at)
            k.put(b.select(b.or_(is_filler, finished), k.const(0), cache), k.pointer(w.OUT_CACHE), at)
    b.ret_void()


def _commit_rows(module: ir.Module) -> None:
    k = _Rows(module, "commit_rows")
    b, w = k.b, CommitWord
    width = k.word(w.WIDTH)
    columns = b.add(width, k.const(1))
    none = b.add(width, k.const(2))  # more than any column
    with k.loop(0, k.word(w.ROWS)) as row:
        slot, committed = k.get(k.pointer(w.SLOTS), row), k.get(k.pointer(w.COMMITTED), row)
        finished, drafted = k.get_flag(k.pointer(w.FINISHED), row), k.get(k.pointer(w.K), row)
        first = b.mul(row, columns)
        packed = k.at(k.pointer(w.OUT_PACKED), b.mul(row, b.add(columns, k.const(4))), I32)
        min_len = k.get(k.pointer(w.MIN_LEN), b.mul(slot, k.word(w.LENGTH_STRIDE)))
        stops = k.at(k.pointer(w.STOPS), b.mul(slot, k.word(w.NUM_STOPS)), I64)
        until_stop, until_invalid = k.local(none), k.local(none)
        with k.loop(0, columns) as c:
            at = b.add(first, c)
            valid = _is_valid(k, at)
            token = b.select(valid, k.get(k.pointer(w.DRAWN), at), k.const(0))
            k.put(token, k.pointer(w.OUT_TOKENS), at)
            k.put_narrow(token, packed, b.add(c, k.const(4)))
            _lower(k, until_invalid, c, b.not_(valid))
            position = b.add(b.add(committed, k.const(1)), c)
            may_stop = b.and_(b.icmp_signed(">=", token, k.const(0)), b.icmp_signed(">=", position, min_len))
            with k.loop(0, k.word(w.NUM_STOPS)) as s:
                is_stop = b.and_(may_stop, k.equal(k.get(stops, s), token))
                _lower(k, until_stop, b.add(c, k.const(1)), is_stop)
        accepted = _accepted(k, row, first, drafted)
        max_len = k.get(k.pointer(w.MAX_LEN), b.mul(slot, k.word(w.LENGTH_STRIDE)))
        to_length = k.most(b.sub(b.sub(max_len, committed), k.const(1)), k.const(0))
        to_stop, to_invalid = b.load(until_stop, typ=I64), b.load(until_invalid, typ=I64)
        emitted = k.least(k.least(b.add(accepted, k.const(1)), to_stop), to_length)
        emitted = b.select(finished, k.const(0), emitted)
        finish = b.select(k.equal(emitted, to_length), k.const(int(Finish.LENGTH)), k.const(int(Finish.NONE)))
        finish = b.select(k.equal(emitted, to_stop), k.const(int(Finish.STOP)), finish)
        finish = b.select(k.below(to_invalid, emitted), k.const(int(Finish.ERROR)), finish)
        finish = b.select(finished, k.const(int(Finish.NONE)), finish)
        emitted = k.least(emitted, to_invalid)
        accepted = b.select(finished, k.const(0), accepted)
        newest = k.get(k.pointer(w.OUT_TOKENS), b.add(first, k.most(b.sub(emitted, k.const(1)), k.const(0))))
        kept = k.get(k.pointer(w.STATE_LAST), slot)
        last = b.select(b.icmp_signed(">", emitted, k.const(0)), newest, kept)
        end = b.add(committed, emitted)
        over = b.or_(finished, b.icmp_signed("!=", finish, k.const(int(Finish.NONE))))
        k.put(end, k.pointer(w.STATE_COMMITTED), slot)
        k.put(last, k.pointer(w.STATE_LAST), slot)
        k.put_flag(over, k.pointer(w.STATE_FINISHED), slot)
        for value, out in ((emitted, w.OUT_EMITTED), (accepted, w.OUT_ACCEPTED), (finish, w.OUT_FINISH)):
            k.put(value, k.pointer(out), row)
        for index, value in enumerate((emitted, accepted, drafted, finish)):
            k.put_narrow(value, packed, k.const(index))
        with b.if_then(b.icmp_signed("!=", k.word(w.BLOCK_WIDTH), k.const(0))):
            _context(k, first, columns, emitted)
            _block(k, row, slot, end, last, over)
    b.ret_void()


def _is_valid(k: _Rows, at: Value) -> Value:
    """The largest logit is below infinity and no NaN; -inf is what padded ids hold."""
    peak = k.b.load(k.at(k.pointer(CommitWord.PEAK), at, F32), typ=F32)
    return k.b.fcmp_ordered("<", peak, ir.Constant(F32, float("inf")))


def _lower(k: _Rows, variable: Value, value: Value, condition: Value) -> None:
    """variable = min(variable, value) where the condition holds."""
    held = k.b.load(variable, typ=I64)
    k.b.store(k.b.select(condition, k.least(held, value), held), variable)


def _accepted(k: _Rows, row: Value, first: Value, drafted: Value) -> Value:
    """Leading drafts that are the target's own tokens; or as many as `SYNTHETIC` says."""
    b, w = k.b, CommitWord
    width = k.word(w.WIDTH)
    run, so_far = k.local(k.const(1)), k.local(k.const(0))
    with k.loop(0, width) as c:
        at = b.add(first, c)
        draft = k.get(k.pointer(w.DRAFTS), b.add(b.mul(row, width), c))
        matches = k.equal(draft, k.get(k.pointer(w.OUT_TOKENS), at))
        matches = b.and_(b.and_(matches, k.below(c, drafted)), _is_valid(k, at))
        b.store(b.and_(b.load(run, typ=I64), b.zext(matches, I64)), run)
        b.store(b.add(b.load(so_far, typ=I64), b.load(run, typ=I64)), so_far)
    with b.if_then(b.icmp_signed("!=", k.word(w.SYNTHETIC), k.const(0))):
        b.store(k.least(k.get(k.pointer(w.SYNTHETIC), row), drafted), so_far)
    return b.load(so_far, typ=I64)


def _context(k: _Rows, first: Value, columns: Value, emitted: Value) -> None:
    """The context's rows: rejected ones and those past the drafter's positions go to the null block."""
    b, w = k.b, CommitWord
    limit = k.word(w.POSITIONS)
    with k.loop(0, columns) as c:
        at = b.add(first, c)
        position = k.get(k.pointer(w.ROW_POSITIONS), at)
        is_kept = b.and_(k.below(c, emitted), k.below(position, limit))
        cache = b.select(is_kept, k.get(k.pointer(w.ROW_CACHE), at), k.const(0))
        k.put(cache, k.pointer(w.OUT_CONTEXT_SLOTS), at)
        k.put(k.least(position, b.sub(limit, k.const(1))), k.pointer(w.OUT_CONTEXT_POSITIONS), at)


def _block(k: _Rows, row: Value, slot: Value, end: Value, last: Value, over: Value) -> None:
    """The drafter's block behind the committed tokens."""
    b, w = k.b, CommitWord
    block_width, limit = k.word(w.BLOCK_WIDTH), k.word(w.POSITIONS)
    behind = b.add(end, block_width)
    live = b.and_(b.not_(over), b.icmp_signed("<=", behind, limit))
    k.put_flag(live, k.pointer(w.OUT_LIVE), row)
    k.put(end, k.pointer(w.OUT_START), row)
    k.put(b.select(live, behind, k.const(1)), k.pointer(w.OUT_KV_LEN), row)
    table = k.at(k.pointer(w.TABLE), b.mul(slot, k.word(w.TABLE_STRIDE)), I64)
    with k.loop(0, block_width) as c:
        at = b.add(b.mul(row, block_width), c)
        position = k.least(b.add(end, c), b.sub(limit, k.const(1)))
        cache = k.local(k.const(0))
        with b.if_then(live):  # the table of a row that is over may end before its block
            b.store(k.cache_slot(table, position, k.word(w.BLOCK_SIZE)), cache)
        k.put(b.select(k.equal(c, k.const(0)), last, k.word(w.MASK_ID)), k.pointer(w.OUT_BLOCK_IDS), at)
        k.put(position, k.pointer(w.OUT_BLOCK_POSITIONS), at)
        k.put(b.load(cache, typ=I64), k.pointer(w.OUT_BLOCK_CACHE), at)


def _store_drafts(module: ir.Module) -> None:
    k = _Rows(module, "store_drafts")
    b, w = k.b, StoreWord
    width = k.word(w.WIDTH)
    with k.loop(0, k.word(w.ROWS)) as row:
        slot = k.get(k.pointer(w.SLOTS), row)
        with k.loop(0, width) as c:
            draft = k.get(k.pointer(w.DRAFTS), b.add(b.mul(row, width), c))
            k.put(draft, k.pointer(w.STATE_DRAFTS), b.add(b.mul(slot, k.word(w.DRAFT_STRIDE)), c))
        count = b.select(k.get_flag(k.pointer(w.LIVE), row), width, k.const(0))
        k.put(count, k.pointer(w.STATE_COUNT), slot)
    b.ret_void()
