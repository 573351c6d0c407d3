"""What generated code does with memory, read off the wrapper that Inductor writes for a CPU or for a GPU.

From launch to wait nothing may write or free what a collective reads, nor read what it writes. The text shows this for
the order of calls, which is the order on the device; the allocator of a GPU and its streams are another matter.
"""

import ast
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

LAUNCH = "launch"
WAIT = "wait"
KERNEL = "kernel"
LIBRARY = "library"
_NETWORK = re.compile(r"torch\.ops\._c10d_functional\.(\w+)")
_UNKNOWN = 2**62
"""The end of memory whose size the text does not say."""
_VIEWS = frozenset({"alias", "as_strided", "detach", "expand", "permute", "select", "slice", "t", "view"})
_NO_TENSORS = re.compile(r"assert_|get_raw_stream|torch\.cuda|torch\._C|args\.clear|empty_strided|device_interface")


@dataclass(frozen=True, slots=True)
class Span:
    """A part of one allocation, in elements. Between strides it counts as its own too."""

    storage: str
    start: int = 0
    end: int = _UNKNOWN

    @property
    def numel(self):
        return self.end - self.start

    def overlaps(self, other):
        return self.storage == other.storage and self.start < other.end and other.start < self.end

    def __str__(self):
        return self.storage if self.end == _UNKNOWN else f"{self.storage}[{self.start}:{self.end}]"


Spans = tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One call: its kind, name and line, the memory of all tensors that it is given, and of those that it changes."""

    kind: str
    name: str
    line: int
    reads: Spans
    writes: Spans


@dataclass(slots=True)
class _Flight:
    launch: Call
    written: list[Span]


@dataclass(frozen=True, slots=True)
class GeneratedCode:
    """The calls of one generated graph in their order, and what is wrong with memory that the network has."""

    calls: tuple[Call, ...]
    faults: tuple[str, ...]


def read_code(code):
    """Read the Python text that Inductor generated for one graph."""
    tree = ast.parse(code)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "call"]
    reader, statements = _Reader(_kernels(tree)), list(functions[-1].body)
    while statements:
        statement = statements.pop(0)
        if isinstance(statement, ast.With):
            statements[:0] = statement.body
        else:
            reader.read(statement)
    for flight in reader.flights:
        reader.fault(functions[-1].end_lineno or 0, f"the code ends, no wait for {_text(flight.written)}", flight)
    return GeneratedCode(tuple(reader.calls), tuple(reader.faults))


def copies(members, code):
    """Gradients whose last writer takes them from one memory of their size that another call has written before."""
    for label, member in members:
        written = set()
        for call in code.calls:
            if call.kind == LAUNCH and any(member.overlaps(span) for span in call.reads):
                break
            if any(span.overlaps(member) for span in call.writes):
                given = [span for span in call.reads if span not in call.writes]
                # Of its size or padded; what is much larger is added up.
                alike = [span for span in given if member.numel <= span.numel < 1.5 * member.numel]
                if call.kind == KERNEL and len(alike) == 1 and (alike[0] in written or _is_result(alike[0])):
                    yield label
            written.update(call.writes)


def _is_result(span):
    """Whether it is one of several that a library's call returned."""
    return "[" in span.storage and not span.storage.startswith("args")


def triton_sources(code):
    """The source of each Triton kernel of a generated code, by its name."""
    made = _made_by(ast.parse(code), "async_compile.triton")
    return {name: str(ast.literal_eval(call.args[1])) for name, call in made.items()}


def _made_by(tree, function):
    """What is assigned the result of a function, by name."""
    assigned = (node for node in ast.walk(tree) if isinstance(node, ast.Assign))
    return {
        ast.unparse(node.targets[0]): node.value
        for node in assigned
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == function
    }


def _kernels(tree):
    """Of each generated kernel, for its arguments in order, whether it writes them."""
    found = {}
    for name, call in _made_by(tree, "async_compile.cpp_pybinding").items():
        found[name] = ["const" not in kind for kind in ast.literal_eval(call.args[0])]
    for name, call in _made_by(tree, "async_compile.triton").items():
        arguments = kernel_arguments(str(ast.literal_eval(call.args[1])))
        found[name] = [re.match("(in_out|out|ws)_ptr", each) is not None for each in arguments]
    return found


def kernel_arguments(source):
    """The names of a Triton kernel's arguments, in order: `in_ptr0` is read, `out_ptr0` and `in_out_ptr0` written."""
    found = re.search(r"def \w+\(([^)]*)\):", source[source.index("@triton.jit") :])
    return tuple(each.split(":")[0].strip() for each in found[1].split(","))


@dataclass(slots=True)
class _Reader:
    """Reads the statements in order, with the memory of each name and what is in flight."""

    kernels: Mapping[str, Sequence[bool]]
    names: dict[str, Spans] = field(default_factory=dict)
    flights: list[_Flight] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    allocations: Counter[str] = field(default_factory=Counter)

    def read(self, statement):
        if isinstance(statement, ast.Delete):
            for target in statement.targets:
                self._bind(ast.unparse(target), (), statement.lineno)
        elif isinstance(statement, ast.Assign):
            result = self._value(statement.value, ast.unparse(statement.targets[0]))
            for target in statement.targets:
                self._assign(target, statement.value, result)
        elif not isinstance(statement, ast.Return):
            for node in ast.iter_child_nodes(statement):
                if isinstance(node, ast.expr):
                    self._value(node, f"line {statement.lineno}")

    def _assign(self, target, value, result):
        if isinstance(target, (ast.Tuple, ast.List)):  # the inputs, or the results of a kernel
            for number, each in enumerate(target.elts):
                name = ast.unparse(each)
                self._bind(name, (Span(f"{ast.unparse(value)}[{number}]"),), target.lineno)
        elif isinstance(target, ast.Name):
            self._bind(target.id, result, target.lineno)

    def _bind(self, name, spans, line):
        """A name stands for other memory from now on, or for none."""
        before = self.names.pop(name, ())
        if spans:
            self.names[name] = spans
        alive = {span.storage for held in self.names.values() for span in held}
        for flight in self.flights:
            for span in (*flight.written, *flight.launch.reads):
                if span.storage not in alive and any(span.storage == each.storage for each in before):
                    self.fault(line, f"frees {span}", flight)
                    break

    # --- expressions

    def _value(self, node, name):
        """The memory of an expression; calls in it are noted."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, ())
        if isinstance(node, ast.Subscript):
            return self._item(node, name)
        if isinstance(node, ast.Call):
            return self._call(node, name)
        found = (self._value(each, name) for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr))
        return tuple(span for spans in found for span in spans)

    def _item(self, node, name):
        spans = self._value(node.value, name)
        if len(spans) > 1 and isinstance(node.slice, ast.Constant):  # of a grouped collective
            return (spans[int(ast.literal_eval(node.slice))],)
        item = ast.unparse(node.slice)
        return tuple(span if span.end != _UNKNOWN else Span(f"{span.storage}[{item}]") for span in spans)

    def _call(self, node, name):
        function = ast.unparse(node.func)
        if function.endswith("reinterpret_tensor"):
            return self._view(node, name)
        if "empty_strided" in function:
            return (Span(self._allocated(name), 0, _numel(node.args[0], node.args[1])),)
        if function == "torch.ops.dp_compile.bucket_memory.default":
            return (Span(self._allocated(name), 0, int(ast.literal_eval(node.args[2]))),)
        if function == "copy_if_misaligned":  # of an input; the memory is another one, but then nobody else's
            return self._value(node.args[0], name)
        if function in ("assert_size_stride", "assert_tensor_metadata"):  # the second in torch 2.15
            self._note_size(node)
        if _NO_TENSORS.search(function):
            return ()
        given = [self._value(each, name) for each in node.args]
        named = {each.arg: self._value(each.value, name) for each in node.keywords}
        owner = self._value(node.func.value, name) if isinstance(node.func, ast.Attribute) else ()
        if (network := _NETWORK.match(function)) is not None:
            return self._network(network[1], node, given, named, name)
        reads = tuple(span for spans in (owner, *given, *named.values()) for span in spans)
        writes = self._written(function, given, named, owner)
        if reads or writes:
            kind = KERNEL if function.removesuffix(".run") in self.kernels else LIBRARY
            self._note(Call(kind, function, node.lineno, reads, writes))
        return self._result(function, reads, writes, name)

    def _note_size(self, node):
        """The text says of results of a library only here how large they are."""
        name = ast.unparse(node.args[0])
        for span in self.names.get(name, ())[:1]:
            if span.end == _UNKNOWN:
                self.names[name] = (Span(span.storage, 0, _numel(node.args[1], node.args[2])),)

    def _allocated(self, name):
        """A name for new memory, with a number if the name had memory before."""
        self.allocations[name] += 1
        return name if self.allocations[name] == 1 else f"{name}#{self.allocations[name]}"

    def _view(self, node, name):
        (base,) = self._value(node.args[0], name) or (Span(ast.unparse(node.args[0])),)
        try:
            start = base.start + int(ast.literal_eval(node.args[3]))
        except ValueError:
            return (base,)
        return (Span(base.storage, start, start + _numel(node.args[1], node.args[2])),)

    def _written(self, function, given, named, owner):
        kernel = self.kernels.get(function.removesuffix(".run"))
        if kernel is not None:
            return tuple(span for spans, writes in zip(given, kernel, strict=False) if writes for span in spans)
        changed = [named.get("out", ())]
        if function.startswith("torch.ops.") and function.split(".")[3].endswith("_"):
            changed.append(given[0] if given else ())
        elif function.endswith("_"):
            changed.append(owner)
        return tuple(span for spans in changed for span in spans)

    def _result(self, function, reads, writes, name):
        if function.startswith("torch.ops.") and function.split(".")[3] in _VIEWS:
            return reads[:1] and (Span(reads[0].storage),)
        return writes or (Span(self._allocated(name)),)

    # --- the network

    def _network(self, operator, node, given, named, name):
        tensors, line = given[0] if given else (), node.lineno
        if operator == "wait_tensor":
            self._wait(Call(WAIT, operator, line, tensors, ()))
            return tensors
        written = named.get("out", ())
        if operator.endswith("_"):
            written = tensors
        elif not written:
            results, made = len(tensors) if "coalesced" in operator else 1, self._allocated(name)
            several = tuple(Span(f"{made}[{each}]") for each in range(results))
            written = (Span(made, 0, _result_numel(operator, node, tensors)),) if results == 1 else several
        launch = Call(LAUNCH, operator, line, tensors, written)
        self._note(launch)
        self.flights.append(_Flight(launch, list(written)))
        return written

    def _wait(self, call):
        self.calls.append(call)
        landed = [flight for flight in self.flights if _overlap(flight.written, call.reads)]
        if not landed:
            self.faults.append(f"line {call.line}: waits for {_text(call.reads)}, which is not on its way")
        for flight in landed:
            flight.written = [span for span in flight.written if not _overlap([span], call.reads)]
        self.flights = [flight for flight in self.flights if flight.written]

    def _note(self, call):
        self.calls.append(call)
        for flight in self.flights:
            for span in call.reads + call.writes:
                if _overlap([span], flight.written):
                    self.fault(call.line, f"{call.name} {'writes' if span in call.writes else 'reads'} {span}", flight)
                    break
                if span in call.writes and _overlap([span], flight.launch.reads):
                    self.fault(call.line, f"{call.name} writes {span}, which is being sent", flight)
                    break

    def fault(self, line, what, flight):
        launch = flight.launch
        self.faults.append(f"line {line}: {what} while {launch.name} of line {launch.line} is under way")


def _result_numel(operator, node, tensors):
    """How many elements the result of a collective has, if the text shows it."""
    gathers = operator == "all_gather_into_tensor"
    if not (gathers or operator == "reduce_scatter_tensor") or len(tensors) != 1 or tensors[0].end == _UNKNOWN:
        return _UNKNOWN
    numel, ranks = tensors[0].numel, int(ast.literal_eval(node.args[-2]))
    return numel * ranks if gathers else numel // ranks


def _overlap(some, others):
    return any(one.overlaps(other) for one in some for other in others)


def _numel(sizes, strides):
    """Elements from the first to the last one."""
    try:
        pairs = list(zip(ast.literal_eval(sizes), ast.literal_eval(strides), strict=True))
    except ValueError:
        return _UNKNOWN
    return 0 if any(size == 0 for size, _ in pairs) else 1 + sum((size - 1) * stride for size, stride in pairs)


def _text(spans):
    return ", ".join(map(str, spans)) or "nothing"
