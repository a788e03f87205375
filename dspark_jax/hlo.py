"""What a compiled program does, read from its HLO text: XLA's own counts take the body of a loop once."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s64": 8, "u64": 8, "f64": 8}
"""Of an element; 4 for all other types."""

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
SLICES = ("dynamic-slice", "slice", "gather")
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional", "after-all",
    "partition-id", "replica-id", "opt-barrier",
}  # fmt: skip
"""What moves no bytes by itself."""

AHEAD = {"copy-start": 0, "slice-start": 1, "dynamic-slice-start": 1}
"""Copies that run beside other work, and where in their result the destination stands."""

UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""What writes a part of its first operand in place, and which operand is written."""

ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\](?:\{([^}]*)\})?")
NAME = re.compile(r"%?([A-Za-z_][\w.\-]*)")
CALLED = re.compile(r"\b(?:calls|body|to_apply|branch_computations)=(?:\{([^}]*)\}|%?([\w.\-]+))")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a result; `fast` where it lies in the chip's own memory and not in HBM."""

    type: str
    shape: tuple[int, ...]
    fast: bool = False

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * BYTES.get(self.type, 4)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of HLO, `name = arrays kind(value), attributes`, where `value` lists operands, or is a number."""

    name: str
    arrays: tuple[Array, ...]
    kind: str
    operands: tuple[str, ...]
    value: str
    attributes: str
    root: bool

    @property
    def bytes(self) -> int:
        """Of its result in HBM."""
        return sum(array.bytes for array in self.arrays if not array.fast)

    @property
    def called(self) -> list[str]:
        """Computations it runs, but for the condition of a loop."""
        return [name for many, one in CALLED.findall(self.attributes) for name in NAME.findall(many or one)]


Computation = dict[str, Instruction]


@dataclasses.dataclass
class Counts:
    """What one device does in a run of a program.

    Attributes:
      flops: of products; bytes: read from and written to HBM.
      collectives: how many of each kind; sizes: bytes of their larger sides; wire: bytes that a device sends
        for them, in rings.
      kernels: calls of Pallas kernels, by name and the arrays they read; what they do inside is not in `flops`, and
        `bytes` has their operands and results once.
      arrays: every array of the program.
    """

    flops: float = 0
    bytes: float = 0
    collectives: Counter[str] = dataclasses.field(default_factory=Counter)
    sizes: Counter[str] = dataclasses.field(default_factory=Counter)
    wire: float = 0
    kernels: Counter[tuple[str, tuple[Array, ...]]] = dataclasses.field(default_factory=Counter)
    arrays: set[Array] = dataclasses.field(default_factory=set)


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Computations of an HLO module, by name, and the name of the one that runs first."""
    computations, entry, current = {}, "", {}
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith((" ", "HloModule")):
            name = NAME.findall(line.removeprefix("ENTRY "))[0]
            current = computations[name] = {}
            entry = name if line.startswith("ENTRY ") else entry
        elif line.startswith(" ") and " = " in line:
            left, right = line.strip().split(" = ", 1)
            name = left.removeprefix("ROOT ").removeprefix("%")
            current[name] = _instruction(name, right, current, name != left.removeprefix("%"))
    return computations, entry


def _instruction(name: str, text: str, earlier: Computation, root: bool) -> Instruction:
    middle = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    start = text.index("(", middle)
    end = _closing(text, start)
    value = text[start + 1 : end]
    arrays = tuple(
        Array(type, tuple(map(int, dims.split(","))) if dims else (), "S(" in layout)
        for type, dims, layout in ARRAY.findall(text[:middle])
    )
    operands = tuple(name for name in NAME.findall(value) if name in earlier)
    return Instruction(name, arrays, text[middle:start].strip(), operands, value, text[end + 1 :], root)


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` closes."""
    depth = 0
    for bracket in re.compile(r"[()]").finditer(text, start):
        depth += 1 if bracket[0] == "(" else -1
        if not depth:
            return bracket.start()
    raise ValueError(f"a bracket of this HLO does not close: {text[:80]}")


def count(text: str) -> Counts:
    """Counts what a program does, the body of a loop as often as it runs.

    Products count as in XLA: two operations for each pair multiplied and added. Bytes are those of the operands and
    results of what is not fused into something else; where a fusion reads or writes a slice of an array, of the slice.

    Raises:
      ValueError: how often a loop runs does not stand in the program.
    """
    computations, entry = parse(text)
    counts, channels = Counts(), set()
    for instruction, where, times, fused in _walk(computations, entry, 1, False):
        here, attributes = computations[where], instruction.attributes
        counts.arrays.update(instruction.arrays)
        kind = instruction.kind.removesuffix("-start")
        if kind in ("dot", "convolution"):
            counts.flops += times * _product(instruction, here)
        elif kind == "custom-call" and '"tpu_custom_call"' in attributes:
            read = tuple(array for operand in instruction.operands for array in here[operand].arrays)
            counts.kernels[instruction.name.split(".")[0], read] += times
        elif kind in COLLECTIVES and not channels & (channel := {*_numbers(r"channel_id=(\d+)", attributes)}):
            # Spread over several fusions, each of which computes something meanwhile, it is still one.
            channels |= channel
            n = _group(attributes)
            size = sum(a.bytes for operand in instruction.operands for a in here[operand].arrays)
            size *= n if kind == "all-gather" else 1
            kind = "reduce-scatter" if "all-reduce-scatter" in where else kind
            counts.collectives[kind] += times
            counts.sizes[kind] += times * size
            share = 1 if kind == "collective-permute" else (n - 1) / n
            counts.wire += times * size * share * (2 if kind == "all-reduce" else 1)
        if not fused:
            counts.bytes += times * _moved(instruction, here, computations)
    return counts


def _walk(
    computations: dict[str, Computation], name: str, times: int, fused: bool
) -> Iterator[tuple[Instruction, str, int, bool]]:
    """Every instruction that runs, the computation it stands in, how often it runs, and whether inside a fusion."""
    for instruction in computations[name].values():
        yield instruction, name, times, fused
        if instruction.kind in ("while", "fusion", "call", "conditional", "async-start"):
            loop = instruction.kind == "while"
            again = times * _trips(instruction, computations[name], computations) if loop else times
            for called in instruction.called:
                yield from _walk(computations, called, again, fused or instruction.kind == "fusion")


def _trips(loop: Instruction, here: Computation, computations: dict[str, Computation]) -> int:
    """How often a loop runs: as XLA noted, or from where its counter starts and ends and what is added to it."""
    if known := re.search(r'known_trip_count"?:\{"?n"?:"(\d+)"', loop.attributes):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", loop.attributes)
    assert condition
    inside, (body,) = computations[condition[1]], (computations[name] for name in loop.called)
    start, end, test = here[loop.operands[0]].operands, _root(body).operands, _root(inside)

    def changes(index: int) -> bool:
        return body[end[index]].kind != "get-tuple-element"

    def numbers(instruction: Instruction, computation: Computation) -> list[int]:
        """The constants that a scalar is made of."""
        if instruction.kind == "constant":
            return [int(instruction.value)] if instruction.value.isdigit() else []
        if instruction.kind == "get-tuple-element":
            (index,) = _numbers(r"index=(\d+)", instruction.attributes)
            return [] if changes(index) else numbers(here[start[index]], here)
        parts = [(computation[operand], computation) for operand in instruction.operands]
        for name in instruction.called if instruction.kind == "fusion" else []:
            parts += [(i, computations[name]) for i in computations[name].values() if i.kind == "constant"]
        return [n for part in parts for n in numbers(*part)]

    read = [inside[operand].attributes for operand in test.operands if inside[operand].kind == "get-tuple-element"]
    counter = [index for text in read for index in _numbers(r"index=(\d+)", text) if changes(index)]
    if len(counter) == 1:
        first = numbers(here[start[counter[0]]], here)
        last, step = numbers(test, inside), numbers(body[end[counter[0]]], body)
        if len(first) == len(last) == len(step) == 1:
            return -((first[0] - last[0]) // step[0])
    raise ValueError(f"how often a loop runs does not stand in the program: {loop.attributes[:200]}")


def _root(computation: Computation) -> Instruction:
    return next(i for i in computation.values() if i.root)


def _product(instruction: Instruction, here: Computation) -> int:
    """Operations of a dot or a convolution."""
    left, right = (here[operand].arrays[0].shape for operand in instruction.operands[:2])
    out, text = instruction.arrays[0].shape, instruction.attributes
    if instruction.kind == "dot":
        return 2 * math.prod(out) * math.prod(left[i] for i in _numbers(r"lhs_contracting_dims=\{([\d,]*)\}", text))
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", text)
    assert labels
    lhs, rhs, result = labels.groups()
    pairs = 1
    for axis in filter(str.isdigit, result):
        sizes = left[lhs.index(axis)], right[rhs.index(axis)], out[result.index(axis)]
        pairs *= _pairs(*sizes, **_window(text, int(axis)))
    groups = _numbers(r"batch_group_count=(\d+)", text) or [1]
    return 2 * pairs * right[rhs.index("i")] * out[result.index("f")] * out[result.index("b")] // groups[0]


def _numbers(pattern: str, text: str) -> list[int]:
    found = re.search(pattern, text)
    return [int(n) for n in re.findall(r"\d+", found[1])] if found else []


def _window(text: str, axis: int) -> dict[str, int]:
    """How a convolution moves along an axis."""
    window = re.search(r"window=\{([^}]*)\}", text)
    fields = dict(part.split("=") for part in window[1].split()) if window else {}
    at = {name: int(value.split("x")[axis].split("_")[0]) for name, value in fields.items()}
    names = {"stride": ("stride", 1), "pad": ("pad", 0), "gap": ("lhs_dilate", 1), "step": ("rhs_dilate", 1)}
    return {ours: at.get(theirs, default) for ours, (theirs, default) in names.items()}


def _pairs(data: int, kernel: int, out: int, stride: int, pad: int, gap: int, step: int) -> int:
    """Pairs of positions of the output and of the kernel whose product reads data, and neither padding nor a gap."""
    last = (data - 1) * gap
    starts = range(-pad, -pad + out * stride, stride)
    return sum(0 <= at <= last and at % gap == 0 for k in range(kernel) for at in (s + k * step for s in starts))


def _group(attributes: str) -> int:
    """Devices that take part in a collective together."""
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    if several := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(several[1])
    return max(len(_numbers(r"replica_groups=\{\{([\d,]*)\}", attributes)), 1)


def _moved(instruction: Instruction, here: Computation, computations: dict[str, Computation]) -> int:
    """Bytes of HBM that an instruction reads and writes."""
    kind = instruction.kind
    if kind in FREE or kind.endswith("-done"):
        return 0
    if kind in AHEAD:
        # Of the result, the source once more, the destination, and a flag.
        source, into = here[instruction.operands[0]].arrays[0], instruction.arrays[AHEAD[kind]]
        return into.bytes * ((not source.fast) + (not into.fast))
    passed = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", instruction.attributes)
    pairs = re.findall(r"\{(\d*)\}: \((\d+)", passed[1]) if passed else []
    read = [here[operand].bytes for operand in instruction.operands]
    written = instruction.bytes
    for result, operand in pairs:
        read[int(operand)] = 0
        array = instruction.arrays[int(result or 0)]
        written -= 0 if array.fast else array.bytes
    if kind in SLICES:
        return 2 * written
    if kind in UPDATES:
        return 2 * read[UPDATES[kind]]
    if kind == "fusion":
        inside = computations[instruction.called[0]]
        for name, parameter in inside.items():
            users = [i for i in inside.values() if name in i.operands[:1]] if parameter.kind == "parameter" else []
            every = sum(name in i.operands for i in inside.values())
            index = int(parameter.value) if users and every == len(users) else 0
            if users and every == len(users) and all(i.kind in SLICES for i in users):
                read[index] = min(read[index], sum(a.bytes for i in users for a in i.arrays))
            elif users and every == len(users) and all(i.kind in UPDATES for i in users):
                # Updated in place: what is written is the slice, and nothing else of the array is read.
                written += sum(a.bytes for i in users for a in inside[i.operands[UPDATES[i.kind]]].arrays) - read[index]
                read[index] = 0
    return max(written, 0) + sum(read)
