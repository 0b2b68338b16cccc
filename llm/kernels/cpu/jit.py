"""Tools for kernels in LLVM's intermediate representation: types, loops, compilation.

llvmlite builds the code and compiles it at the first use of a kernel, in about a tenth of a second.
No fast-math flag is set, so that LLVM keeps the order of every sum as it is written.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import llvmlite.binding as llvm
from llvmlite import ir

VOID = ir.VoidType()
FLOAT = ir.FloatType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
POINTER = I8.as_pointer()


@dataclass(frozen=True, slots=True)
class Machine:
    """The processor that kernels are compiled for."""

    cpu: str
    features: str
    has_wide_vectors: bool
    """Whether a register holds 16 float32 values (AVX-512)."""


@cache
def this_machine() -> Machine:
    """Return the processor of this process; initialises LLVM."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    return Machine(llvm.get_host_cpu_name(), features.flatten(), bool(features.get("avx512f")))


class Compiled:
    """Machine code of a module. It lives as long as this object."""

    def __init__(self, module: ir.Module, machine: Machine) -> None:
        target = llvm.Target.from_default_triple().create_target_machine(
            cpu=machine.cpu, features=machine.features, opt=3
        )
        code = llvm.parse_assembly(str(module))
        code.verify()
        # One pass: all those of level 2 take 0.06 s longer, and the kernels get no faster by them.
        passes = llvm.create_new_module_pass_manager()
        passes.add_instruction_combine_pass()
        options = llvm.create_pipeline_tuning_options(0)
        passes.run(code, llvm.create_pass_builder(target, options))
        self._engine = llvm.create_mcjit_compiler(code, target)
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        """Return the address of an exported function."""
        return int(self._engine.get_function_address(name))


class FunctionBuilder(ir.IRBuilder):
    """An instruction builder with loops."""

    def steps(
        self, start: ir.Value, end: ir.Value, step: int, body: Callable[[ir.Value], None]
    ) -> ir.Value:
        """Emit `body(i)` for i = start, start + step, … while i + step <= end; return the next
        i.
        """
        head, inside, after = (self.append_basic_block(name) for name in ("head", "body", "after"))
        before = self.block
        self.branch(head)
        self.position_at_end(head)
        index = self.phi(I64)
        index.add_incoming(start, before)
        following = self.add(index, I64(step))
        self.cbranch(self.icmp_signed("<=", following, end), inside, after)
        self.position_at_end(inside)
        body(index)
        index.add_incoming(following, self.block)
        self.branch(head)
        self.position_at_end(after)
        return index

    def repeat_while(self, condition: Callable[[], ir.Value]) -> None:
        """Emit a loop that ends when `condition` is false."""
        head, after = self.append_basic_block("again"), self.append_basic_block("after")
        self.branch(head)
        self.position_at_end(head)
        self.cbranch(condition(), head, after)
        self.position_at_end(after)

    def smaller(self, left: ir.Value, right: ir.Value) -> ir.Value:
        """Return the smaller of two signed integers."""
        return self.select(self.icmp_signed("<", left, right), left, right)

    def pause(self) -> None:
        """Emit the processor's hint for spin-wait loops."""
        if platform.machine() in ("x86_64", "AMD64"):
            self.call(external(self.module, "llvm.x86.sse2.pause", VOID), [])


def external(module: ir.Module, name: str, result: ir.Type, *arguments: ir.Type) -> ir.Function:
    """Declare a function of another library or of LLVM, once."""
    found = module.globals.get(name)
    return found or ir.Function(module, ir.FunctionType(result, arguments), name)


def function(
    module: ir.Module, name: str, result: ir.Type, *arguments: ir.Type
) -> tuple[FunctionBuilder, tuple[ir.Argument, ...]]:
    """Define a function; return a builder at its first instruction, and its arguments."""
    defined = ir.Function(module, ir.FunctionType(result, arguments), name)
    return FunctionBuilder(defined.append_basic_block("entry")), defined.args
