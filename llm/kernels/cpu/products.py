"""`multiply`: y = x Wᵀ on a CPU, with a fixed order of every sum.

The sum of one output of one row is always:

    lane l of 16:  s[l] = fma(w[l + 16 i], x[l + 16 i], s[l])   for i = 0, 1, … (s[l] starts at 0)
    result:        s[0..7] + s[8..15], of these 8 the first 4 + the last 4, then 2, then 1
    int8, float8:  times the scale of the output

Weights are read as float32, bfloat16, int8 or float8 and widened to float32, which is exact. A
result does not depend on the number of rows of a call, the position of the row, the number of
threads or the processor. A fused multiply-add rounds once, by IEEE 754, also where a
processor has none and a function computes it; and neither LLVM (without fast-math flags) nor a
processor may reorder the sums. Only the sums that are computed at the same time may vary:

    tile     `outs` outputs of `rows` rows: their sums stay in registers
    block    some outputs of all rows: what one thread takes at a time

While a tile is computed, the weights of the next one are fetched into the cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
from llvmlite import ir
from torch import Tensor

from llm.kernels.cpu.jit import (
    FLOAT,
    I8,
    I16,
    I32,
    I64,
    POINTER,
    VOID,
    Compiled,
    Machine,
    external,
    function,
    this_machine,
)
from llm.kernels.cpu.team import (
    JOB_BLOCKS,
    JOB_FUNCTION,
    JOB_HEADER,
    WORD,
    Team,
    define_lead,
    teams,
)

LANES = 16
"""Number of partial sums per output. Inputs are padded to a multiple."""

VECTOR = ir.VectorType(FLOAT, LANES)
BLOCK_BYTES = 128 * 1024  # of weights that a thread takes at a time
# of inputs that are computed with one tile of weights: half of a small L2 cache
ROWS_BYTES = 256 * 1024
ALONE_BYTES = 512 * 1024
"""Products with fewer bytes of weights are computed by the caller alone: sharing costs more."""

WEIGHTS, INPUTS, OUTPUTS, SCALES, NUM_IN, NUM_OUT, NUM_ROWS, BLOCK_OUTS, ROWS_AT_ONCE, JOB_SIZE = (
    range(JOB_HEADER, JOB_HEADER + 10)
)


FORMATS = {torch.float32: FLOAT, torch.bfloat16: I16, torch.int8: I8, torch.float8_e4m3fn: I8}
"""Element type by format of the weights."""
SCALED = (torch.int8, torch.float8_e4m3fn)
"""Formats with a scale for each output."""


class Tiles(NamedTuple):
    """Tile sizes that fit the processor's registers; results do not depend on them."""

    outs: int
    rows: tuple[int, ...]
    outs_of_one_row: int


WIDE = Tiles(outs=4, rows=(4, 2, 1), outs_of_one_row=8)
NARROW = Tiles(outs=2, rows=(2, 1), outs_of_one_row=4)


def _vector(of: ir.Type, value: float) -> ir.Constant:
    return ir.Constant(ir.VectorType(of, LANES), [value] * LANES)


class _Tile:
    """Emits the function that computes `outs` × `rows` outputs: [rows, outs]."""

    def __init__(self, module: ir.Module, dtype: torch.dtype, outs: int, rows: int) -> None:
        self.dtype, self.outs, self.rows = dtype, outs, rows
        pointers = (FORMATS[dtype].as_pointer(), *[FLOAT.as_pointer()] * 3)
        self.body, arguments = function(module, f"tile_{outs}_{rows}", VOID, *pointers, *[I64] * 2)
        self.function = self.body.function
        self.function.linkage = "internal"
        self.matrix, self.inputs, self.outputs, self.scales, self.num_in, self.num_out = arguments
        for argument in arguments[:3]:
            argument.add_attribute("noalias")
        self._emit()

    def _emit(self) -> None:
        body = self.body
        before, loop, after = body.block, *map(body.append_basic_block, ("inputs", "sums"))
        matrix_rows, input_rows = (
            [body.gep(array, [body.mul(self.num_in, I64(i))]) for i in range(count)]
            for array, count in ((self.matrix, self.outs), (self.inputs, self.rows))
        )
        body.branch(loop)
        body.position_at_end(loop)
        first = body.phi(I64)
        first.add_incoming(I64(0), before)
        sums = [body.phi(VECTOR) for _ in range(self.outs * self.rows)]
        inputs = [self._floats(body.gep(row, [first]), torch.float32) for row in input_rows]
        multiply_add = external(body.module, f"llvm.fma.v{LANES}f32", VECTOR, *[VECTOR] * 3)
        grown = []
        for out, row in enumerate(matrix_rows):
            self._fetch_next_tile(row, first)
            weights = self._floats(body.gep(row, [first]), self.dtype)
            own = sums[out * self.rows :][: self.rows]
            grown += [
                body.call(multiply_add, [weights, values, so_far])
                for values, so_far in zip(inputs, own, strict=True)
            ]
        for so_far, result in zip(sums, grown, strict=True):
            so_far.add_incoming(_vector(FLOAT, 0.0), before)
            so_far.add_incoming(result, loop)
        following = body.add(first, I64(LANES))
        first.add_incoming(following, loop)
        body.cbranch(body.icmp_signed("<", following, self.num_in), loop, after)
        body.position_at_end(after)
        for index, result in enumerate(grown):
            self._store(result, *divmod(index, self.rows))
        body.ret_void()

    def _fetch_next_tile(self, row: ir.Value, first: ir.Value) -> None:
        body = self.body
        fetch = external(body.module, "llvm.prefetch.p0", VOID, POINTER, I32, I32, I32)
        ahead = body.gep(row, [body.add(first, body.mul(self.num_in, I64(self.outs)))])
        body.call(fetch, [body.bitcast(ahead, POINTER), I32(0), I32(3), I32(1)])

    def _floats(self, address: ir.Value, dtype: torch.dtype) -> ir.Value:
        """Load 16 numbers as float32."""
        body = self.body
        stored = ir.VectorType(FORMATS[dtype], LANES)
        values = body.load(body.bitcast(address, stored.as_pointer()), align=dtype.itemsize)
        if dtype is torch.float32:
            return values
        if dtype is torch.int8:
            return body.sitofp(values, VECTOR)
        wide = body.zext(values, ir.VectorType(I32, LANES))
        if dtype is torch.bfloat16:  # the upper half of a float32
            return body.bitcast(body.shl(wide, _vector(I32, 16)), VECTOR)
        return self._float8(wide)

    def _float8(self, wide: ir.Value) -> ir.Value:
        """Convert e4m3 numbers other than NaN: a sign, 4 bits of exponent + 7, 3 of mantissa.

        Those with the exponent 0 are multiples of 2^-9, without the leading 1.
        """
        body = self.body
        size = body.and_(wide, _vector(I32, 0x7F))
        bits = body.add(body.shl(size, _vector(I32, 20)), _vector(I32, (127 - 7) << 23))
        small = body.fmul(body.sitofp(size, VECTOR), _vector(FLOAT, 2.0**-9))
        is_small = body.icmp_signed("<", size, _vector(I32, 8))
        bits = body.select(is_small, body.bitcast(small, wide.type), bits)
        sign = body.shl(body.and_(wide, _vector(I32, 0x80)), _vector(I32, 24))
        return body.bitcast(body.or_(bits, sign), VECTOR)

    def _store(self, sums: ir.Value, out: int, row: int) -> None:
        body, size = self.body, LANES
        while size > 1:
            size //= 2
            lower, upper = (
                body.shuffle_vector(
                    sums,
                    ir.Constant(sums.type, ir.Undefined),
                    ir.Constant(ir.VectorType(I32, size), [I32(first + i) for i in range(size)]),
                )
                for first in (0, size)
            )
            sums = body.fadd(lower, upper)
        result = body.extract_element(sums, I32(0))
        if self.dtype in SCALED:
            result = body.fmul(result, body.load(body.gep(self.scales, [I64(out)])))
        place = body.add(body.mul(self.num_out, I64(row)), I64(out))
        body.store(result, body.gep(self.outputs, [place]))


class _Block:
    """Emits `block(job, number)`: the outputs of one block, for all rows."""

    def __init__(self, module: ir.Module, dtype: torch.dtype, tiles: Tiles) -> None:
        self.element, self.tiles = FORMATS[dtype], tiles
        self.rows_of = {tiles.outs: tiles.rows, tiles.outs_of_one_row: (1,), 1: (1,)}
        self._functions = {
            (outs, rows): _Tile(module, dtype, outs, rows).function
            for outs, sizes in self.rows_of.items()
            for rows in sizes
        }
        self.body, (self.job, number) = function(module, "block", VOID, WORD, I64)
        self._emit(number)

    def _job(self, word: int) -> ir.Value:
        return self.body.load(self.body.gep(self.job, [I64(word)]))

    def _emit(self, number: ir.Value) -> None:
        body = self.body
        self.num_in, self.num_out, num_rows = map(self._job, (NUM_IN, NUM_OUT, NUM_ROWS))
        size, at_once = self._job(BLOCK_OUTS), self._job(ROWS_AT_ONCE)
        first = body.mul(number, size)
        last = body.smaller(body.add(first, size), self.num_out)
        with body.if_else(body.icmp_signed("==", num_rows, I64(1))) as (one, several):
            with one:
                self._rows(first, last, (I64(0), I64(1)), self.tiles.outs_of_one_row)
            with several:
                rows = body.alloca(I64)
                body.store(I64(0), rows)

                def next_rows() -> ir.Value:
                    start = body.load(rows)
                    end = body.smaller(body.add(start, at_once), num_rows)
                    self._rows(first, last, (start, end), self.tiles.outs)
                    body.store(end, rows)
                    return body.icmp_signed("<", end, num_rows)

                body.repeat_while(next_rows)
        body.ret_void()

    def _rows(
        self, first: ir.Value, last: ir.Value, rows: tuple[ir.Value, ir.Value], outs: int
    ) -> None:
        """Emit the outputs [first, last) of some rows: tiles of `outs`, then the rest one by
        one.
        """

        def of(outs: int) -> Callable[[ir.Value], None]:
            return lambda out: self._row_tiles(outs, out, *rows)

        first = self.body.steps(first, last, outs, of(outs))
        self.body.steps(first, last, 1, of(1))

    def _row_tiles(self, outs: int, out: ir.Value, row: ir.Value, end: ir.Value) -> None:
        for count in self.rows_of[outs]:
            tile = partial(self._tile, outs, count, out)
            row = self.body.steps(row, end, count, tile)

    def _tile(self, outs: int, rows: int, out: ir.Value, row: ir.Value) -> None:
        body = self.body

        def part(word: int, element: ir.Type, offset: ir.Value) -> ir.Value:
            return body.gep(body.inttoptr(self._job(word), element.as_pointer()), [offset])

        matrix = part(WEIGHTS, self.element, body.mul(out, self.num_in))
        inputs = part(INPUTS, FLOAT, body.mul(row, self.num_in))
        outputs = part(OUTPUTS, FLOAT, body.add(body.mul(row, self.num_out), out))
        scales = part(SCALES, FLOAT, out)
        function_of = self._functions[outs, rows]
        body.call(function_of, [matrix, inputs, outputs, scales, self.num_in, self.num_out])


def _define_multiply(module: ir.Module, block: ir.Function) -> None:
    """Add `multiply(state, …)`: a job from numbers, computed with a team or (state 0) alone."""
    lead = define_lead(module)
    body, (state, *numbers) = function(module, "multiply", VOID, WORD, *[I64] * 9)
    job = body.alloca(I64, JOB_SIZE)
    *_, num_out, _, block_outs, _ = numbers
    num_blocks = body.sdiv(body.sub(body.add(num_out, block_outs), I64(1)), block_outs)
    words = {JOB_FUNCTION: body.ptrtoint(block, I64), JOB_BLOCKS: num_blocks}
    for word, value in {**words, **dict(enumerate(numbers, JOB_HEADER))}.items():
        body.store(value, body.gep(job, [I64(word)]))
    is_alone = body.icmp_signed("==", body.ptrtoint(state, I64), I64(0))
    with body.if_else(is_alone) as (alone, together):
        with alone:
            body.steps(I64(0), num_blocks, 1, lambda number: body.call(block, [job, number]))
        with together:
            body.call(lead, [state, job])
    body.ret_void()


class Kernel:
    """The product for one format of weights, compiled for a processor."""

    def __init__(self, dtype: torch.dtype, machine: Machine) -> None:
        module = ir.Module("products")
        tiles = WIDE if machine.has_wide_vectors else NARROW
        block = _Block(module, dtype, tiles).body.function
        _define_multiply(module, block)
        self._code = Compiled(module, machine)
        signature = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 10)
        self._compute = signature(self._code.address("multiply"))

    def multiply(
        self, inputs: Tensor, weights: Tensor, scales: Tensor | None, team: Team | None
    ) -> Tensor:
        """Return the product as `multiply` does, computed with a team or alone."""
        (num_rows, num_in), num_out = inputs.shape, len(weights)
        outputs = inputs.new_empty(num_rows, num_out)
        self._compute(
            0 if team is None else team.state,
            weights.data_ptr(),
            inputs.data_ptr(),
            outputs.data_ptr(),
            0 if scales is None else scales.data_ptr(),
            num_in,
            num_out,
            num_rows,
            *_cuts(num_in, weights.element_size()),
        )
        return outputs


@cache
def _kernel(dtype: torch.dtype) -> Kernel:
    return Kernel(dtype, this_machine())


@cache
def _cuts(num_in: int, num_bytes: int) -> tuple[int, int]:
    """Return the number of outputs of a block, and of rows that are computed at once."""
    widest = max(WIDE.outs_of_one_row, WIDE.rows[0])

    def fitting(size: int, unit: int) -> int:
        return max(widest, size // unit // widest * widest)

    return fitting(BLOCK_BYTES, num_in * num_bytes), fitting(ROWS_BYTES, num_in * 4)


def multiply(inputs: Tensor, weights: Tensor, scales: Tensor | None = None) -> Tensor:
    """Return inputs [T, K] × weights [N, K] transposed: float32 [T, N].

    `inputs` are float32, `weights` of a format in `FORMATS`, without NaN; those of `SCALED` have
    float32 `scales` [N]. K is a multiple of `LANES`. All are contiguous and on the CPU. Called by
    several threads at once, one of them computes with the team and the others alone.
    """
    kernel = _kernel(weights.dtype)
    is_small = weights.numel() * weights.element_size() < ALONE_BYTES
    team = None if is_small else teams.find()
    if team is None or not team.lock.acquire(blocking=False):
        return kernel.multiply(inputs, weights, scales, None)
    try:
        return kernel.multiply(inputs, weights, scales, team)
    finally:
        team.lock.release()
