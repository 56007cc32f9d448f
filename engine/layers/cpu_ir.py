"""A thin layer over llvmlite's IR builder for the small CPU kernels: loops, eight float32 lanes, bfloat16 in and out.

A kernel is `void f(i64* job)`: every argument is one 64-bit word of the job (pointers, sizes, float32 bit patterns).
Importing this module needs llvmlite.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from engine.layers.cpu_tile_ir import WeightType

LANES = 8
I1, I16, I32, I64 = (ir.IntType(n) for n in (1, 16, 32, 64))
F32, PTR = ir.FloatType(), ir.PointerType()
V8F, V8I, V8H = (ir.VectorType(t, LANES) for t in (F32, I32, I16))
Value = Any  # an llvmlite value

_LOG2E, _LN2_HIGH, _LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
_EXP_MIN = -87.0  # below, exp is taken as exactly 0
# exp(r) on |r| <= ln 2 / 2 to within a float32 rounding or two (Cephes, expf): r^2 (c0 r^5 + .. + c5) + r + 1
_EXP_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


class Kernel:
    """Builds one function into a module. Methods emit code at the current place; loops are context managers."""

    def __init__(self, module: Any, name: str) -> None:
        self.module = module
        self.function = ir.Function(module, ir.FunctionType(ir.VoidType(), [PTR]), name)
        self.b = ir.IRBuilder(self.function.append_basic_block("entry"))
        self.job = self.function.args[0]
        self._words: dict[tuple[int, str], Value] = {}

    def declared(self, name: str, result: Any, arguments: list[Any]) -> Any:
        if name not in self.module.globals:
            ir.Function(self.module, ir.FunctionType(result, arguments), name)
        return self.module.globals[name]

    def word(self, index: int) -> Value:
        """The job's 64-bit word `index`, read once at the start."""
        return self._read(index, "word", lambda word: word)

    def pointer(self, index: int) -> Value:
        return self._read(index, "pointer", lambda word: self.b.inttoptr(word, PTR))

    def number(self, index: int) -> Value:
        """The float32 whose bits are in the low half of word `index`."""
        return self._read(index, "number", lambda word: self.b.bitcast(self.b.trunc(word, I32), F32))

    def _read(self, index: int, form: str, convert: Callable[[Value], Value]) -> Value:
        if (index, form) not in self._words:
            with self.b.goto_entry_block():
                self._words[index, form] = convert(self.b.load(self.at(self.job, index, I64), typ=I64))
        return self._words[index, form]

    def const(self, value: int) -> Value:
        return ir.Constant(I64, value)

    def floats(self, value: float) -> Value:
        """Eight lanes of one constant."""
        return ir.Constant(V8F, [value] * LANES)

    def at(self, base: Value, index: Value, element: Any) -> Value:
        """Address of base[index]."""
        index = self.const(index) if isinstance(index, int) else index
        return self.b.gep(base, [index], source_etype=element)

    def splat(self, scalar: Value) -> Value:
        one = self.b.insert_element(ir.Constant(V8F, ir.Undefined), scalar, ir.Constant(I32, 0))
        return self.b.shuffle_vector(one, one, ir.Constant(V8I, [0] * LANES))

    def splat_int(self, scalar: Value) -> Value:
        """Eight lanes of a 32-bit integer."""
        one = self.b.insert_element(ir.Constant(V8I, ir.Undefined), scalar, ir.Constant(I32, 0))
        return self.b.shuffle_vector(one, one, ir.Constant(V8I, [0] * LANES))

    def local(self, value: Value) -> Value:
        """A variable (promoted to a register by the optimiser), initialised to value."""
        with self.b.goto_entry_block():
            slot = self.b.alloca(value.type)
            slot.align = 32
        self.b.store(value, slot)
        return slot

    @contextmanager
    def loop(self, start: Value, stop: Value, step: int = 1) -> Iterator[Value]:
        """for i in range(start, stop, step); yields i."""
        start = self.const(start) if isinstance(start, int) else start
        stop = self.const(stop) if isinstance(stop, int) else stop
        before = self.b.block
        head, body, after = (self.function.append_basic_block(n) for n in ("head", "body", "after"))
        self.b.branch(head)
        self.b.position_at_end(head)
        i = self.b.phi(I64)
        i.add_incoming(start, before)
        self.b.cbranch(self.b.icmp_signed("<", i, stop), body, after)
        self.b.position_at_end(body)
        yield i
        i.add_incoming(self.b.add(i, self.const(step)), self.b.block)
        self.b.branch(head)
        self.b.position_at_end(after)

    @contextmanager
    def shared_loop(self, counter: Value, stop: Value, grain: int = 1) -> Iterator[Value]:
        """Numbers below stop, each given to exactly one of the threads that run this: `grain` in a row at a time."""
        head, body, after = (self.function.append_basic_block(n) for n in ("grab", "grabbed", "nothing_left"))
        self.b.branch(head)
        self.b.position_at_end(head)
        first = self.b.atomic_rmw("add", counter, self.const(grain), "monotonic")
        self.b.cbranch(self.b.icmp_signed("<", first, stop), body, after)
        self.b.position_at_end(body)
        with self.loop(first, self.least(self.b.add(first, self.const(grain)), stop)) as i:
            yield i
        self.b.branch(head)
        self.b.position_at_end(after)

    def least(self, a: Value, c: Value) -> Value:
        return self.b.select(self.b.icmp_signed("<", a, c), a, c)

    def fma(self, a: Value, c: Value, d: Value) -> Value:
        return self.b.call(self.declared("llvm.fma.v8f32", V8F, [V8F, V8F, V8F]), [a, c, d])

    def maximum(self, a: Value, c: Value) -> Value:
        return self.b.select(self.b.fcmp_ordered(">", a, c), a, c)

    def load8(self, base: Value, index: Value, kind: WeightType) -> Value:
        """Eight elements base[index ..] of the kind, as float32."""
        if kind == "float32":
            return self.b.load(self.at(base, index, F32), typ=V8F, align=4)
        narrow = self.b.load(self.at(base, index, I16), typ=V8H, align=2)
        wide = self.b.shl(self.b.zext(narrow, V8I), ir.Constant(V8I, [16] * LANES))
        return self.b.bitcast(wide, V8F)

    def store8(self, value: Value, base: Value, index: Value, kind: WeightType) -> None:
        """Stores eight float32, rounded to the kind."""
        if kind == "float32":
            self.b.store(value, self.at(base, index, F32), align=4)
            return
        high = self.b.lshr(self._rounded_bits(value), ir.Constant(V8I, [16] * LANES))
        self.b.store(self.b.trunc(high, V8H), self.at(base, index, I16), align=2)

    def rounded(self, value: Value, kind: WeightType) -> Value:
        """Eight float32 rounded to the kind's precision."""
        return value if kind == "float32" else self.b.bitcast(self._rounded_bits(value), V8F)

    def _rounded_bits(self, value: Value) -> Value:
        """Bits of the nearest bfloat16, lower half 0; ties to even, NaN becomes the quiet NaN."""
        b = self.b

        def const(n: int) -> Value:
            return ir.Constant(V8I, [n] * LANES)

        bits = b.bitcast(value, V8I)
        odd = b.and_(b.lshr(bits, const(16)), const(1))
        near = b.and_(b.add(bits, b.add(odd, const(0x7FFF))), const(0xFFFF0000))
        return b.select(b.fcmp_unordered("uno", value, value), const(0x7FC00000), near)

    def shuffled(self, a: Value, c: Value, lanes: list[int]) -> Value:
        return self.b.shuffle_vector(a, c, ir.Constant(V8I, lanes))

    def sums(self, vectors: list[Value]) -> Value:
        """Lane j: the sum of the lanes of vectors[j] (eight of them), always added in the same tree."""
        assert len(vectors) == LANES

        def paired(a: Value, c: Value) -> Value:
            low = self.shuffled(a, c, [0, 8, 1, 9, 4, 12, 5, 13])
            return self.b.fadd(low, self.shuffled(a, c, [2, 10, 3, 11, 6, 14, 7, 15]))

        first, second = (
            paired(paired(vectors[i], vectors[i + 2]), paired(vectors[i + 1], vectors[i + 3])) for i in (0, 4)
        )
        low = self.shuffled(first, second, [0, 1, 2, 3, 8, 9, 10, 11])
        return self.b.fadd(low, self.shuffled(first, second, [4, 5, 6, 7, 12, 13, 14, 15]))

    def total(self, vector: Value) -> Value:
        """The sum of the lanes, in a fixed tree, as a scalar."""
        for distance in (4, 2, 1):
            moved = self.shuffled(vector, vector, [(i + distance) % LANES for i in range(LANES)])
            vector = self.b.fadd(vector, moved)
        return self.b.extract_element(vector, ir.Constant(I32, 0))

    def largest(self, vector: Value) -> Value:
        """The greatest lane, in every lane."""
        for distance in (4, 2, 1):
            moved = self.shuffled(vector, vector, [(i + distance) % LANES for i in range(LANES)])
            vector = self.maximum(vector, moved)
        return vector

    def exp(self, x: Value) -> Value:
        """exp of x in [-inf, 88]."""
        b = self.b
        rint = self.declared("llvm.rint.v8f32", V8F, [V8F])
        small = b.fcmp_ordered("<", x, self.floats(_EXP_MIN))
        safe = b.select(small, self.floats(0.0), x)
        n = b.call(rint, [b.fmul(safe, self.floats(_LOG2E))])
        r = self.fma(n, self.floats(-_LN2_LOW), self.fma(n, self.floats(-_LN2_HIGH), safe))
        y = self.floats(_EXP_POLYNOMIAL[0])
        for c in _EXP_POLYNOMIAL[1:]:
            y = self.fma(y, r, self.floats(c))
        y = self.fma(y, b.fmul(r, r), b.fadd(r, self.floats(1.0)))
        exponent = b.shl(b.add(b.fptosi(n, V8I), ir.Constant(V8I, [127] * LANES)), ir.Constant(V8I, [23] * LANES))
        return b.select(small, self.floats(0.0), b.fmul(y, b.bitcast(exponent, V8F)))
