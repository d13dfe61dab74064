"""A compiled kernel's machine code: its registers, its main loop, and the cycles that units of a multiprocessor need.

The disassembler is the one that comes with Triton. Cycles are lower bounds: latencies, waiting and bank conflicts are
not in them, nor on capability 10.0 what tensor cores read from shared and tensor memory.

Source of the rates: NVIDIA's white papers of the A100, GA102, Ada, H100 and Blackwell architectures; CUDA C++
Programming Guide, throughput of native arithmetic instructions.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

WARP = 32  #: threads
ISSUED = 4  #: instructions of warps that a multiprocessor issues in a cycle
SHARED_BYTES = 128  #: of shared memory, read or written in a cycle
SPECIAL = 16  #: exponentials in a cycle


class Rates(NamedTuple):
    """Multiply-adds of a multiprocessor in a cycle: of 16-bit products with float32 sums, and of float32."""

    tensor: int
    single: int


#: By capability. tf32 products run at half the rate of 16-bit ones.
RATES = {
    80: Rates(1024, 64),
    86: Rates(256, 128),
    89: Rates(256, 128),
    90: Rates(2048, 128),
    100: Rates(4096, 128),
    120: Rates(256, 128),
}

TENSOR = ("HMMA", "HGMMA", "UTCHMMA")
JUMPS = ("BRA", "EXIT", "RET")
LOCAL = ("LDL", "STL")
SHARED = ("LDS", "LDSM", "STS", "STSM", "LDGSTS")
MANY_PRODUCTS = 100  #: FFMA of a loop that multiplies without tensor cores

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_LABEL = re.compile(r"^(\.L_\w+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_SIZES = re.compile(r"\.(\d+)x(\d+)x(\d+)")
#: Multiply-adds of a warp's instruction, by the digits of its opcode: rows, columns and depth.
_WARP_PRODUCTS = {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8, "1684": 16 * 8 * 4}


class Instruction(NamedTuple):
    """`opcode` with its suffixes, such as "LDS.128"; `predicate` "" where it always runs."""

    opcode: str
    operands: str
    predicate: str

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]


@dataclass(frozen=True)
class Usage:
    """What a kernel is given: registers of a thread, and bytes of its stack, where values are spilled to."""

    registers: int
    stack_bytes: int


@dataclass(frozen=True)
class Loop:
    """The instructions of a loop's body, of one warp: a pass over a block of columns."""

    body: tuple[Instruction, ...]

    def count(self, names: Iterable[str]) -> int:
        """Instructions of these names."""
        wanted = set(names)
        return sum(each.name in wanted for each in self.body)

    def products(self, warps: int) -> int:
        """Multiply-adds of a program's tensor-core instructions, where their opcodes say how many.

        More than a block needs where warps compute the same twice.
        """
        return sum(_products(each, warps) for each in self.body)


def usage(cubin: bytes) -> Usage:
    """Raises RuntimeError: the tool does not report it."""
    text = _tool("cuobjdump", cubin, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump reports no registers: {text[:200]}")
    return Usage(int(found[1]), int(found[2]))


def disassembled(cubin: bytes) -> str:
    """The text of nvdisasm."""
    return _tool("nvdisasm", cubin, "-c")


def innermost_loops(text: str) -> list[tuple[Instruction, ...]]:
    """The bodies of the loops that contain no other loop with products; loops without products are left out.

    Loops inside them, which wait for a barrier, are not in the bodies.
    """
    blocks = _blocks(*parsed(text))
    loops = _loops(blocks)
    with_products = {
        head: body for head, body in loops.items() if _multiplies(each for at in body for each in blocks[at].code)
    }
    found = []
    for head, body in with_products.items():
        inside = [other for at, other in loops.items() if at != head and at in body]
        if not any(at != head and at in body for at in with_products):
            own = sorted(body.difference(*inside))
            found.append(tuple(each for at in own for each in blocks[at].code))
    return found


def main_loop(text: str) -> Loop:
    """The loop that computes blocks which need no mask, the shortest, of a disassembled kernel.

    Raises LookupError: no loop multiplies.
    """
    loops = innermost_loops(text)
    if not loops:
        raise LookupError("no loop of the kernel multiplies")
    return Loop(min(loops, key=len))


def cycles(loop: Loop, warps: int) -> dict[str, float]:
    """The cycles for which a pass of a program keeps each unit of a multiprocessor busy, at least, but for products."""
    found = {
        "issue": len(loop.body) * warps / ISSUED,
        "special": loop.count(["MUFU"]) * warps * WARP / SPECIAL,
    }
    if not loop.count(["UTCHMMA"]):
        found["shared"] = sum(map(_shared_bytes, loop.body)) * warps / SHARED_BYTES
    return found


def parsed(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions that can run, and the number of the first one after each label."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        label, found = _LABEL.match(line.strip()), _INSTRUCTION.search(line)
        if label:
            labels[label[1]] = len(code)
        elif found and found[1] != "!PT":
            code.append(Instruction(found[2], found[3].strip(), found[1] or ""))
    return code, labels


class _Block(NamedTuple):
    """Instructions that run in a row, and the numbers of the blocks that may follow."""

    code: list[Instruction]
    next: tuple[int, ...]


def _blocks(code: list[Instruction], labels: dict[str, int]) -> list[_Block]:
    starts = {0, *labels.values(), *(at + 1 for at, each in enumerate(code) if each.name in JUMPS)}
    edges = [*sorted(at for at in starts if at < len(code)), len(code)]
    number = {start: n for n, start in enumerate(edges[:-1])}
    found = []
    for start, end in pairwise(edges):
        last = code[end - 1]
        following = [] if _always_leaves(last) else [end]
        if last.name == "BRA":
            following += [labels[name] for name in _TARGET.findall(last.operands)]
        found.append(_Block(code[start:end], tuple(number[at] for at in following if at in number)))
    return found


def _always_leaves(each: Instruction) -> bool:
    conditional = each.predicate or (each.name == "BRA" and "," in each.operands)
    return each.name in JUMPS and not conditional


def _loops(blocks: list[_Block]) -> dict[int, set[int]]:
    """The blocks of each natural loop, by its first block: what leads back to it without leaving it."""
    before: list[set[int]] = [set() for _ in blocks]
    for at, block in enumerate(blocks):
        for to in block.next:
            before[to].add(at)
    dominators = _dominators(before)
    loops: dict[int, set[int]] = {}
    for at, block in enumerate(blocks):
        for head in block.next:
            if head in dominators[at]:
                body, todo = loops.setdefault(head, {head}), [at]
                while todo:
                    one = todo.pop()
                    if one not in body:
                        body.add(one)
                        todo += before[one]
    return loops


def _dominators(before: list[set[int]]) -> list[set[int]]:
    """For each block those that every way to it passes; none for blocks that no way leads to."""
    everything = set(range(len(before)))
    found = [{0}, *(everything for _ in before[1:])]
    changed = True
    while changed:
        changed = False
        for at in range(1, len(before)):
            new = {at} | set.intersection(*(found[one] for one in before[at])) if before[at] else set()
            changed, found[at] = changed or new != found[at], new
    return found


def _multiplies(code: Iterable[Instruction]) -> bool:
    names = [each.name for each in code]
    return any(name in TENSOR for name in names) or names.count("FFMA") > MANY_PRODUCTS


def _products(each: Instruction, warps: int) -> int:
    """Multiply-adds of a program's instruction."""
    sizes, digits = _SIZES.search(each.opcode), re.match(r"HMMA\.(\d+)", each.opcode)
    if each.name == "HGMMA" and sizes:  # of four warps
        return int(sizes[1]) * int(sizes[2]) * int(sizes[3]) * warps // 4
    return _WARP_PRODUCTS.get(digits[1], 0) * warps if digits else 0


def _shared_bytes(each: Instruction) -> float:
    """Bytes of shared memory that a warp's instruction reads or writes; of products, a warp's share of four warps'."""
    sizes = _SIZES.search(each.opcode)
    if each.name == "HGMMA" and sizes:
        rows, columns, depth = (int(number) for number in sizes.groups())
        element = 4 if "TF32" in each.opcode else 2
        from_memory = each.operands.split(",")[1].strip().startswith("gdesc")
        return element * depth * (columns + rows * from_memory) / 4
    if each.name not in SHARED:
        return 0.0
    if each.name in ("LDSM", "STSM"):
        matrices = each.opcode.rsplit(".", 1)[1]  # of 8 x 16 bytes; none is said of a single one
        return 128.0 * (int(matrices) if matrices.isdigit() else 1)
    wide = re.search(r"\.(128|64)\b", each.opcode)
    return WARP * (int(wide[1]) // 8 if wide else 4)


def _tool(name: str, cubin: bytes, *options: str) -> str:
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        raise RuntimeError("Triton, with its disassembler, is not installed")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        program = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name
        done = subprocess.run([program, *options, file.name], capture_output=True, text=True, check=True)
    return done.stdout
