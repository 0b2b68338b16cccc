"""`multiply`: y = x Wᵀ on a CPU, with a fixed order of every sum.

The sum of one output of one row is always:

    lane l of 16:  s[l] = fma(w[l + 16 i], x[l + 16 i], s[l])   for i = 0, 1, … (s[l] starts at 0)
    result:        s[0..7] + s[8..15], of these 8 the first 4 + the last 4, then 2, then 1
    int8, float8:  times the scale of the output

Weights are read as float32, bfloat16, int8 or float8 and widened to float32, which is exact. Of
weights in groups a group of consecutive inputs has a scale s and may have a minimum m, and numbers
q of 4 or 8 bits: the weight is fma(q, s, m), rounded once to float32, so that a product has the
bits of that with the expanded matrix. They are expanded in registers for one row; for several, a
tile's are expanded once, to memory that stays in the cache.

A result does not depend on the number of rows of a call, the position of the row, the number of
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
    FunctionBuilder,
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

(
    WEIGHTS,
    INPUTS,
    OUTPUTS,
    SCALES,
    MINIMUMS,
    GROUP_BITS,  # a group has 2 to this power inputs
    NUM_IN,
    NUM_OUT,
    NUM_ROWS,
    BLOCK_OUTS,
    ROWS_AT_ONCE,
    JOB_SIZE,
) = range(JOB_HEADER, JOB_HEADER + 12)
NUM_NUMBERS = JOB_SIZE - JOB_HEADER

FORMATS = {
    torch.float32: FLOAT,
    torch.bfloat16: I16,
    torch.int8: I8,
    torch.float8_e4m3fn: I8,
    torch.uint8: I8,
}
"""Element type by format of the weights."""
SCALED = (torch.int8, torch.float8_e4m3fn)
"""Formats with a scale for each output."""


class Form(NamedTuple):
    """Format of the weights that a kernel reads; uint8 are two of 4 bits each, in groups."""

    dtype: torch.dtype
    is_grouped: bool = False
    has_minimums: bool = False  # of groups; else q is signed: less 8 with 4 bits

    @property
    def per_element(self) -> int:
        """Number of weights in one element."""
        return 2 if self.dtype is torch.uint8 else 1

    @property
    def step(self) -> int:
        """Number of consecutive inputs that are read at once."""
        return LANES * self.per_element

    @property
    def has_row_scales(self) -> bool:
        """Whether a sum is multiplied by the output's scale."""
        return self.dtype in SCALED and not self.is_grouped


FLOATS = Form(torch.float32)


class Tiles(NamedTuple):
    """Tile sizes that fit the processor's registers; results do not depend on them."""

    outs: int
    rows: tuple[int, ...]
    outs_of_one_row: int


WIDE = Tiles(outs=4, rows=(4, 2, 1), outs_of_one_row=8)
NARROW = Tiles(outs=2, rows=(2, 1), outs_of_one_row=4)


def _vector(of: ir.Type, value: float) -> ir.Constant:
    return ir.Constant(ir.VectorType(of, LANES), [value] * LANES)


class _Reader:
    """Emits loads of weights, as float32, into a function."""

    def __init__(self, body: FunctionBuilder, form: Form, group_bits: ir.Value) -> None:
        self.body, self.form, self.group_bits = body, form, group_bits

    def row(self, matrix: ir.Value, index: int, num_in: ir.Value) -> ir.Value:
        """Return the address of a row of a matrix, or of inputs."""
        start = self.body.mul(num_in, I64(index))
        return self.body.gep(matrix, [self.elements(start)])

    def elements(self, weights: ir.Value) -> ir.Value:
        """Return the number of elements that hold so many weights."""
        return self.body.lshr(weights, I64(1)) if self.form.per_element == 2 else weights

    def groups(self, array: ir.Value, index: int, num_in: ir.Value) -> ir.Value:
        """Return the address of a row of scales or minimums of groups."""
        num_groups = self.body.lshr(num_in, self.group_bits)
        return self.body.gep(array, [self.body.mul(num_groups, I64(index))])

    def weights(
        self, row: ir.Value, scales: ir.Value, minimums: ir.Value, first: ir.Value
    ) -> list[ir.Value]:
        """Load the weights of one step from input `first` on, in vectors of `LANES`.

        `scales` and `minimums` are those of the row's groups.
        """
        body, form = self.body, self.form
        address = body.gep(row, [self.elements(first)])
        if not form.is_grouped:
            return [self.floats(address, form.dtype)]
        group = body.lshr(first, self.group_bits)
        scale = body.load(body.gep(scales, [group]))
        if form.has_minimums:
            minimum = body.load(body.gep(minimums, [group]))
        else:
            minimum = body.fmul(scale, ir.Constant(FLOAT, -8.0))
        scale = self._repeated(scale)
        if form.dtype is torch.int8 and not form.has_minimums:
            return [body.fmul(self.floats(address, form.dtype), scale)]
        low = self._repeated(minimum)
        return [multiply_add(body, q, scale, low) for q in self._numbers(address)]

    def _numbers(self, address: ir.Value) -> list[ir.Value]:
        """Load q: two vectors of 4 bits, from the lower and the upper halves of bytes, or one."""
        body = self.body
        if self.form.dtype is torch.int8:
            return [self.floats(address, torch.int8)]
        octets = ir.VectorType(I8, LANES)
        loaded = body.load(body.bitcast(address, octets.as_pointer()), align=1)
        wide = body.zext(loaded, ir.VectorType(I32, LANES))
        halves = (body.and_(wide, _vector(I32, 15)), body.lshr(wide, _vector(I32, 4)))
        return [body.sitofp(half, VECTOR) for half in halves]

    def _repeated(self, value: ir.Value) -> ir.Value:
        body, undefined = self.body, ir.Constant(VECTOR, ir.Undefined)
        single = body.insert_element(undefined, value, I32(0))
        return body.shuffle_vector(single, undefined, _vector(I32, 0))

    def fetch(self, row: ir.Value, ahead: ir.Value) -> None:
        """Emit a hint to load what is `ahead` weights behind the beginning of a row."""
        body = self.body
        hint = external(body.module, "llvm.prefetch.p0", VOID, POINTER, I32, I32, I32)
        address = body.bitcast(body.gep(row, [self.elements(ahead)]), POINTER)
        body.call(hint, [address, I32(0), I32(3), I32(1)])

    def floats(self, address: ir.Value, dtype: torch.dtype) -> ir.Value:
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


def multiply_add(
    body: FunctionBuilder, left: ir.Value, right: ir.Value, so_far: ir.Value
) -> ir.Value:
    """Emit left × right + so_far of vectors, rounded once."""
    fused = external(body.module, f"llvm.fma.v{LANES}f32", VECTOR, *[VECTOR] * 3)
    return body.call(fused, [left, right, so_far])


class _Tile:
    """Emits the function that computes `outs` × `rows` outputs: [rows, outs]."""

    def __init__(self, module: ir.Module, form: Form, outs: int, rows: int) -> None:
        self.form, self.outs, self.rows = form, outs, rows
        pointers = (FORMATS[form.dtype].as_pointer(), *[FLOAT.as_pointer()] * 4)
        name = f"tile_{'groups' if form.is_grouped else 'rows'}_{outs}_{rows}"
        self.body, arguments = function(module, name, VOID, *pointers, *[I64] * 3)
        self.function = self.body.function
        self.function.linkage = "internal"
        self.matrix, self.inputs, self.outputs, self.scales, self.minimums = arguments[:5]
        group_bits, self.num_in, self.num_out = arguments[5:]
        self.reader = _Reader(self.body, form, group_bits)
        for argument in arguments[:3]:
            argument.add_attribute("noalias")
        self._emit()

    def _emit(self) -> None:
        body, reader = self.body, self.reader
        before, loop, after = body.block, *map(body.append_basic_block, ("inputs", "sums"))
        matrix_rows = [reader.row(self.matrix, i, self.num_in) for i in range(self.outs)]
        scales, minimums = (
            [reader.groups(array, i, self.num_in) for i in range(self.outs)]
            for array in (self.scales, self.minimums)
        )
        input_rows = [
            body.gep(self.inputs, [body.mul(self.num_in, I64(i))]) for i in range(self.rows)
        ]
        body.branch(loop)
        body.position_at_end(loop)
        first = body.phi(I64)
        first.add_incoming(I64(0), before)
        sums = [body.phi(VECTOR) for _ in range(self.outs * self.rows)]
        inputs = [self._inputs(row, first) for row in input_rows]
        grown = []
        for out, row in enumerate(matrix_rows):
            reader.fetch(row, body.add(first, body.mul(self.num_in, I64(self.outs))))
            weights = reader.weights(row, scales[out], minimums[out], first)
            for values, so_far in zip(inputs, sums[out * self.rows :], strict=False):
                result: ir.Value = so_far
                for weight, value in zip(weights, values, strict=True):
                    result = multiply_add(body, weight, value, result)
                grown.append(result)
        for so_far, result in zip(sums, grown, strict=True):
            so_far.add_incoming(_vector(FLOAT, 0.0), before)
            so_far.add_incoming(result, loop)
        following = body.add(first, I64(self.form.step))
        first.add_incoming(following, loop)
        body.cbranch(body.icmp_signed("<", following, self.num_in), loop, after)
        body.position_at_end(after)
        for index, result in enumerate(grown):
            self._store(result, *divmod(index, self.rows))
        body.ret_void()

    def _inputs(self, row: ir.Value, first: ir.Value) -> list[ir.Value]:
        """Load one row's inputs of a step."""
        places = [self.body.add(first, I64(at)) for at in range(0, self.form.step, LANES)]
        return [self.reader.floats(self.body.gep(row, [at]), torch.float32) for at in places]

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
        if self.form.has_row_scales:
            result = body.fmul(result, body.load(body.gep(self.scales, [I64(out)])))
        place = body.add(body.mul(self.num_out, I64(row)), I64(out))
        body.store(result, body.gep(self.outputs, [place]))


def _define_expand(module: ir.Module, form: Form, outs: int) -> ir.Function:
    """Add `expand_OUTS(matrix, target, scales, minimums, group_bits, num_in)`: the float32 weights
    [outs, num_in] of a matrix in groups.
    """
    pointers = (FORMATS[form.dtype].as_pointer(), *[FLOAT.as_pointer()] * 3)
    body, arguments = function(module, f"expand_{outs}", VOID, *pointers, *[I64] * 2)
    matrix, target, scales, minimums, group_bits, num_in = arguments
    body.function.linkage = "internal"
    for argument in arguments[:2]:
        argument.add_attribute("noalias")
    reader = _Reader(body, form, group_bits)

    def expand(out: int, first: ir.Value) -> None:
        row = reader.row(matrix, out, num_in)
        reader.fetch(row, body.add(first, body.mul(num_in, I64(outs))))  # of the next tile
        own_scales = reader.groups(scales, out, num_in)
        own_minimums = reader.groups(minimums, out, num_in)
        weights = reader.weights(row, own_scales, own_minimums, first)
        for part, values in enumerate(weights):
            place = body.add(body.mul(num_in, I64(out)), body.add(first, I64(part * LANES)))
            address = body.bitcast(body.gep(target, [place]), VECTOR.as_pointer())
            body.store(values, address, align=4)

    for out in range(outs):
        body.steps(I64(0), num_in, form.step, partial(expand, out))
    body.ret_void()
    return body.function


class _Block:
    """Emits `block(job, number)`: the outputs of one block, for all rows."""

    def __init__(self, module: ir.Module, form: Form, tiles: Tiles) -> None:
        self.form, self.tiles = form, tiles
        self.rows_of = {tiles.outs: tiles.rows, 1: (1,)}
        self._several_read = FLOATS if form.is_grouped else form
        shapes = {(form, outs, 1) for outs in (tiles.outs_of_one_row, 1)}
        for outs, sizes in self.rows_of.items():
            shapes |= {(self._several_read, outs, rows) for rows in sizes}
        self._tiles = {shape: _Tile(module, *shape).function for shape in sorted(shapes, key=str)}
        self._expand = (
            {outs: _define_expand(module, form, outs) for outs in self.rows_of}
            if form.is_grouped
            else {}
        )
        self.body, (self.job, number) = function(module, "block", VOID, WORD, I64)
        self._emit(number)

    def _job(self, word: int) -> ir.Value:
        return self.body.load(self.body.gep(self.job, [I64(word)]))

    def _emit(self, number: ir.Value) -> None:
        body = self.body
        self.num_in, self.num_out, num_rows = map(self._job, (NUM_IN, NUM_OUT, NUM_ROWS))
        self.group_bits = self._job(GROUP_BITS)
        size, at_once = self._job(BLOCK_OUTS), self._job(ROWS_AT_ONCE)
        first = body.mul(number, size)
        last = body.smaller(body.add(first, size), self.num_out)
        with body.if_else(body.icmp_signed("==", num_rows, I64(1))) as (one, several):
            with one:
                outs = self.tiles.outs_of_one_row
                self._outs(first, last, outs, self._tile_of_one_row)
            with several:
                rows = body.alloca(I64)
                body.store(I64(0), rows)
                self.expanded = self._scratch()

                def next_rows() -> ir.Value:
                    start = body.load(rows)
                    end = body.smaller(body.add(start, at_once), num_rows)
                    tile = partial(self._row_tiles, start, end)
                    self._outs(first, last, self.tiles.outs, tile)
                    body.store(end, rows)
                    return body.icmp_signed("<", end, num_rows)

                body.repeat_while(next_rows)
        body.ret_void()

    def _scratch(self) -> ir.Value | None:
        """Return memory for the weights of a tile in float32; None where tiles read them."""
        if not self.form.is_grouped:
            return None
        size = self.body.mul(self.num_in, I64(self.tiles.outs))
        memory = self.body.alloca(FLOAT, size)
        memory.align = 64
        return memory

    def _outs(
        self, first: ir.Value, last: ir.Value, outs: int, tile: Callable[[int, ir.Value], None]
    ) -> None:
        """Emit the outputs [first, last): tiles of `outs`, then the rest one by one."""
        first = self.body.steps(first, last, outs, partial(tile, outs))
        self.body.steps(first, last, 1, partial(tile, 1))

    def _tile_of_one_row(self, outs: int, out: ir.Value) -> None:
        self._call(self._tiles[self.form, outs, 1], self._matrix(out), out, I64(0))

    def _row_tiles(self, row: ir.Value, end: ir.Value, outs: int, out: ir.Value) -> None:
        matrix = self._matrix(out)
        if self.expanded is not None:
            groups = (self._groups(SCALES, out), self._groups(MINIMUMS, out))
            arguments = [matrix, self.expanded, *groups, self.group_bits, self.num_in]
            self.body.call(self._expand[outs], arguments)
            matrix = self.expanded
        for count in self.rows_of[outs]:
            compute = self._tiles[self._several_read, outs, count]
            tile = partial(self._call, compute, matrix, out)
            row = self.body.steps(row, end, count, tile)

    def _part(self, word: int, element: ir.Type, offset: ir.Value) -> ir.Value:
        start = self.body.inttoptr(self._job(word), element.as_pointer())
        return self.body.gep(start, [offset])

    def _matrix(self, out: ir.Value) -> ir.Value:
        """Return the address of an output's weights."""
        start = self.body.mul(out, self.num_in)
        if self.form.per_element == 2:
            start = self.body.lshr(start, I64(1))
        return self._part(WEIGHTS, FORMATS[self.form.dtype], start)

    def _groups(self, word: int, out: ir.Value) -> ir.Value:
        """Return the address of an output's scale or minimum, or those of its groups."""
        if self.form.is_grouped:
            out = self.body.mul(out, self.body.lshr(self.num_in, self.group_bits))
        return self._part(word, FLOAT, out)

    def _call(self, tile: ir.Function, matrix: ir.Value, out: ir.Value, row: ir.Value) -> None:
        body = self.body
        inputs = self._part(INPUTS, FLOAT, body.mul(row, self.num_in))
        outputs = self._part(OUTPUTS, FLOAT, body.add(body.mul(row, self.num_out), out))
        groups = (self._groups(SCALES, out), self._groups(MINIMUMS, out))
        sizes = (self.group_bits, self.num_in, self.num_out)
        body.call(tile, [matrix, inputs, outputs, *groups, *sizes])


def _define_multiply(module: ir.Module, block: ir.Function) -> None:
    """Add `multiply(state, …)`: a job from numbers, computed with a team or (state 0) alone."""
    lead = define_lead(module)
    body, (state, *numbers) = function(module, "multiply", VOID, WORD, *[I64] * NUM_NUMBERS)
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

    def __init__(self, form: Form, machine: Machine) -> None:
        module = ir.Module("products")
        tiles = WIDE if machine.has_wide_vectors else NARROW
        block = _Block(module, form, tiles).body.function
        _define_multiply(module, block)
        self._code = Compiled(module, machine)
        signature = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * (1 + NUM_NUMBERS))
        self._compute = signature(self._code.address("multiply"))

    def multiply(
        self,
        inputs: Tensor,
        weights: Tensor,
        scales: Tensor | None,
        minimums: Tensor | None,
        team: Team | None,
    ) -> Tensor:
        """Return the product as `multiply` does, computed with a team or alone."""
        (num_rows, num_in), num_out = inputs.shape, len(weights)
        outputs = inputs.new_empty(num_rows, num_out)
        is_grouped = scales is not None and scales.ndim == 2
        group = num_in // scales.shape[1] if scales is not None and is_grouped else 1
        self._compute(
            0 if team is None else team.state,
            weights.data_ptr(),
            inputs.data_ptr(),
            outputs.data_ptr(),
            0 if scales is None else scales.data_ptr(),
            0 if minimums is None else minimums.data_ptr(),
            group.bit_length() - 1,
            num_in,
            num_out,
            num_rows,
            *_cuts(num_in, weights.shape[1] * weights.element_size()),
        )
        return outputs


@cache
def _kernel(dtype: torch.dtype, is_grouped: bool, has_minimums: bool) -> Kernel:
    return Kernel(Form(dtype, is_grouped, has_minimums), this_machine())


@cache
def _cuts(num_in: int, row_bytes: int) -> tuple[int, int]:
    """Return the number of outputs of a block, and of rows that are computed at once."""
    widest = max(WIDE.outs_of_one_row, WIDE.rows[0])

    def fitting(size: int, unit: int) -> int:
        return max(widest, size // unit // widest * widest)

    return fitting(BLOCK_BYTES, row_bytes), fitting(ROWS_BYTES, num_in * 4)


def multiply(
    inputs: Tensor,
    weights: Tensor,
    scales: Tensor | None = None,
    minimums: Tensor | None = None,
) -> Tensor:
    """Return inputs [T, K] × weights [N, K] transposed: float32 [T, N].

    `inputs` are float32, `weights` of a format in `FORMATS`, without NaN; those of `SCALED` have
    float32 `scales` [N]. K is a multiple of `LANES`. Weights in groups are int8 [N, K], or uint8
    [N, K / 2] (see `layers.weight`), with float32 `scales` [N, G] and perhaps `minimums` [N, G]; a
    group has K / G inputs, a power of two and a multiple of `LANES`, of 2 × `LANES` with uint8. All
    are contiguous and on the CPU. Called by several threads at once, one of them computes with the
    team and the others alone.
    """
    in_groups = scales is not None and scales.dim() == 2  # more work than bytes, in every row
    kernel = _kernel(weights.dtype, in_groups, minimums is not None)
    num_bytes = weights.numel() * weights.element_size() * (len(inputs) if in_groups else 1)
    is_small = num_bytes < ALONE_BYTES
    team = None if is_small else teams.find()
    if team is None or not team.lock.acquire(blocking=False):
        return kernel.multiply(inputs, weights, scales, minimums, None)
    try:
        return kernel.multiply(inputs, weights, scales, minimums, team)
    finally:
        team.lock.release()
