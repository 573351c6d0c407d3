"""Read Inductor's output: which members of a bucket are copied into it, and how many kernels run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from generated_code import read_code

_ALIAS = re.compile(r"(\w+) = reinterpret_tensor\((\w+), \(([\d, ]*)\), \(([\d, ]*)\), (\d+)\)")
_ALLOCATION = re.compile(r"(\w+) = empty_strided\w*\(\(([\d, ]*)\),")
# Two names: torch 2.15 asserts the dtype of a result too.
_SIZE = re.compile(r"assert_(?:size_stride|tensor_metadata)\((\w+), \(([\d, ]*)\),")
_RENAMED = re.compile(r"(\w+) = (\w+)$")
_ITEM = re.compile(r"(\w+) = (\w+)\[(\d+)\]$")
_KERNEL = re.compile(r"(\w+) = async_compile\.cpp_pybinding\(\[([^\]]*)\]")
_LAUNCH = re.compile(r"all_reduce_(?:coalesced_)?\.default\((.*), '\w+', '\w+'\)")
_CALL = re.compile(r"(?:(\w+) = )?((?:cpp_fused|extern_kernels\.|torch\.ops\.)[\w.]*)\((.*)\)$")


@dataclass(frozen=True)
class Filled:
    """One member of a bucket: its size in elements, the call that writes it, and whether that call copies it."""

    numel: int
    call: str
    copied: bool


class Backward:
    """The generated code of one graph, CPU backend. `buckets` are the buffers that are reduced, `tensors` how many of
    them each launch carries.

    A member counts as copied if the kernel that writes it reads a buffer of the member's size that an earlier call
    has written. Test models need sizes that tell gradients from other tensors.
    """

    def __init__(self, code: str) -> None:
        faults = read_code(code).faults
        assert not faults, faults  # whatever a test looks for: nobody touches what the network has
        self._kernels = {name: [kind.strip(" '") for kind in kinds.split(",")] for name, kinds in _KERNEL.findall(code)}
        body = code.split("def call(self, args):")[1].split("\n    return (")[0].split("        return (")[0]
        self._lines = [line.split("#")[0].split(";")[0].strip() for line in body.splitlines()]
        launches = [re.findall(r"\bbuf\d+\b", arguments) for arguments in _LAUNCH.findall(body)]
        self.tensors = [len(each) for each in launches]
        self.buckets = [name for each in launches for name in each]
        self.numel: dict[str, int] = {}
        for line in self._lines:
            self._note_size(line)
        self.filled = tuple(self._members())

    @property
    def kernels(self) -> int:
        """Calls of anything but collectives."""
        return sum(self._calls_kernel(line) for line in self._lines)

    def copied(self) -> int:
        return sum(each.numel for each in self.filled if each.copied)

    def total(self) -> int:
        return sum(each.numel for each in self.filled)

    @staticmethod
    def _calls_kernel(line: str) -> bool:
        found = _CALL.match(line)
        return found is not None and "_c10d_functional" not in found[2]

    def _members(self) -> Iterator[Filled]:
        places, written = set[str](), set[str]()
        for line in self._lines:
            if found := _ALIAS.match(line):
                if found[2] in self.buckets:
                    places.add(found[1])
                if found[2] in written:
                    written.add(found[1])
            elif (found := _RENAMED.match(line)) and found[2] in self.buckets:
                places.add(found[1])
            elif found := _ITEM.match(line) or _RENAMED.match(line):
                if found[1] in self.buckets:  # the memory of a kernel's own result is the bucket
                    yield Filled(self.numel[found[1]], "fallback", False)
                written.add(found[1])
            elif found := _CALL.match(line):
                reads, writes = self._arguments(found[2], found[3])
                sources = written.intersection(reads).difference(writes)
                for name in (name for name in writes if name in places):
                    copied = any(self.numel[source] == self.numel[name] for source in sources)
                    places.remove(name)
                    yield Filled(self.numel[name], found[2], copied)
                written.update(writes)

    def _note_size(self, line: str) -> None:
        """How large a buffer is: from its allocation, or for the result of a fallback from what is asserted of it."""
        if found := _ALIAS.match(line):
            self.numel[found[1]] = _product(found[3])
        elif found := _ALLOCATION.match(line) or _SIZE.match(line):
            self.numel[found[1]] = _product(found[2])
        elif found := _RENAMED.match(line):
            self.numel[found[1]] = self.numel[found[2]]

    def _arguments(self, call: str, text: str) -> tuple[list[str], list[str]]:
        if call in self._kernels:
            pairs = list(zip(text.split(", "), self._kernels[call], strict=True))
            reads = [name for name, kind in pairs if kind.startswith("const")]
            return reads, [name for name, kind in pairs if not kind.startswith("const")]
        return [], re.findall(r"out=(\w+)", text)


def _product(sizes: str) -> int:
    return math.prod(int(size) for size in sizes.replace(" ", "").split(",") if size)
