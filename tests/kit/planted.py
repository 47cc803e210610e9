"""Planted faults: programs whose compiled form is wrong because a part of the compiler was changed at run time.

Each name in `FAULTS` is also a function of this module, so that `tests/kit/planted.py:pellucid_neg_wrong` is a target
for every command of the kit: calling it plants the fault for the rest of the process and returns the program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

Program = tuple[Callable[..., Any], tuple[Any, ...]]
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault and what a tool should say of it.

    subject: the backend. verdict: of `check`. component: of `bisect`. culprit: the ATen operator that is to blame, as
    its node in the graph is called; empty where no operator is. backward: it shows in gradients only. file: whose
    target it is.
    """

    name: str
    subject: str
    verdict: str
    component: str
    culprit: str
    plant: Callable[[], None]
    program: Callable[[], Any]
    backward: bool = False
    file: str = __file__


FAULTS: dict[str, Fault] = {}
_PLANTED: set[str] = set()


def __getattr__(name: str) -> Callable[[], Program]:
    return make_of(FAULTS, name)


def make_of(faults: Mapping[str, Fault], name: str) -> Callable[[], Any]:
    """What plants a fault, once, and returns its program. Raises AttributeError for a name that is none of them."""
    if name not in faults:
        raise AttributeError(name)
    fault = faults[name]

    def make() -> Any:
        if name not in _PLANTED:  # the tools call this again in the same process: two swaps would be none
            _PLANTED.add(name)
            fault.plant()
        return fault.program()

    return make


def planted(
    subject: str,
    verdict: str,
    component: str,
    culprit: str,
    program: Callable[[], Any],
    *,
    backward: bool = False,
    file: str = __file__,
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Enter a planting function into the library under its own name."""

    def enter(plant: Callable[[], None]) -> Callable[[], None]:
        name = plant.__name__.removeprefix("plant_")
        FAULTS[name] = Fault(name, subject, verdict, component, culprit, plant, program, backward, file)
        return plant

    return enter


def patch(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute by what `make` makes of it, for good."""
    mock.patch.object(owner, name, make(getattr(owner, name))).start()


# ------------------------------------------------------------------------------------------------ programs


def negated() -> Program:
    """The tutorial's: neg, maximum, cat."""

    def foo(x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
        a = torch.neg(x1)
        b = torch.maximum(x2, a)
        return torch.cat([b], dim=0)

    torch.manual_seed(0)
    return foo, (torch.randn(1, 8), torch.randn(8390, 8))


def mixed() -> Program:
    """Pointwise operators, a product that the library computes, reductions, flip: most parts of a compiler do some."""

    def mix(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        h = torch.relu(x.t() @ w + b)
        h = h - h.mean(-1, keepdim=True)
        h = h / (h.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        t = torch.flip(h, [1]).sigmoid()
        return torch.softmax(t * 2 - h.exp().clamp(max=3.0), -1)

    torch.manual_seed(0)
    return mix, (torch.randn(45, 37), torch.randn(45, 166)[:, ::2], torch.randn(83))


def summed() -> Program:
    """A reduction over everything, long enough for several threads."""

    def total(x: torch.Tensor) -> torch.Tensor:
        return (x * x).sum()

    torch.manual_seed(0)
    return total, (torch.rand(2000, 1000),)


def convolved() -> Program:
    """A convolution net in training: its batch norm changes the running statistics."""

    def net(
        x: torch.Tensor,
        w: torch.Tensor,
        scale: torch.Tensor,
        shift: torch.Tensor,
        mean: torch.Tensor,
        var: torch.Tensor,
    ) -> torch.Tensor:
        h = F.conv2d(x, w, padding=1)
        h = F.batch_norm(h, mean, var, scale, shift, training=True, momentum=0.3)
        return F.max_pool2d(torch.relu(h), 2).mean((2, 3))

    torch.manual_seed(0)
    state = (torch.rand(5), torch.randn(5), torch.zeros(5), torch.ones(5))
    return net, (torch.randn(2, 3, 8, 8), torch.randn(5, 3, 3, 3), *state)


def separable() -> Program:
    """Depthwise and pointwise convolutions: to be trained they lie channels-last."""

    def net(x: torch.Tensor, wide: torch.Tensor, across: torch.Tensor) -> torch.Tensor:
        h = torch.relu(F.conv2d(x, wide, padding=1, groups=6))
        h = torch.relu(F.conv2d(h, across))
        return F.conv2d(h, wide, padding=1, groups=6).mean((2, 3))

    torch.manual_seed(0)
    weights = (torch.randn(6, 1, 3, 3, requires_grad=True), torch.randn(6, 6, 1, 1, requires_grad=True))
    return net, (torch.randn(2, 6, 9, 8), *weights)


def attended() -> Program:
    """Attention with a mask; the scores are large, as they are early in training."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = q @ k.transpose(-1, -2) * 16.0
        scores = scores.masked_fill(mask, -math.inf)
        return torch.softmax(scores, -1) @ v

    torch.manual_seed(0)
    mask = torch.ones(33, 33, dtype=torch.bool).triu(1)
    return attend, (torch.randn(3, 33, 16), torch.randn(3, 33, 16), torch.randn(3, 33, 16), mask)


def embedded() -> Program:
    """Looking up, layer norm, GELU; rows of the table are looked up several times."""

    def embed(index: torch.Tensor, table: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        h = F.embedding(index, table)
        h = F.layer_norm(h, (93,), scale, shift)
        return F.gelu(h)

    torch.manual_seed(0)
    table = torch.randn(31, 93, requires_grad=True)
    return embed, (torch.randint(0, 30, (4, 19)), table, torch.rand(93), torch.randn(93))


def classified() -> Program:
    """A step of training with cross entropy."""

    def classify(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x @ w, target)

    torch.manual_seed(0)
    return classify, (torch.randn(26, 13), torch.randn(13, 11, requires_grad=True), torch.randint(0, 11, (26,)))


def gated() -> Program:
    """Two factors that the backward pass needs both."""

    def gate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.relu(a.sin() * b.exp())

    torch.manual_seed(0)
    return gate, (torch.randn(9, 21, requires_grad=True), torch.randn(9, 21, requires_grad=True))


def scattered() -> Program:
    """Very many values added up in few places."""

    def scatter(y: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return y.index_put((index,), values, accumulate=True)

    torch.manual_seed(0)
    return scatter, (torch.zeros(8), torch.randint(0, 8, (1 << 16,)), torch.rand(1 << 16))


def scanned() -> Program:
    """Prefix sums."""

    def scan(x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(x, 1).clamp(max=5.0)

    torch.manual_seed(0)
    return scan, (torch.randn(9, 37),)


def shifted() -> Program:
    """Differences of neighbours."""

    def differ(x: torch.Tensor) -> torch.Tensor:
        return (x[:, 1:] - x[:, :-1]).abs()

    torch.manual_seed(0)
    return differ, (torch.randn(13, 46),)


def centred() -> Program:
    """Every row less the first one."""

    def centre(x: torch.Tensor) -> torch.Tensor:
        h = torch.exp(x)
        return h - h[:1]

    torch.manual_seed(0)
    return centre, (torch.randn(14, 46),)


def crossed() -> Program:
    """The sum of each row is used in another row."""

    def cross(x: torch.Tensor) -> torch.Tensor:
        total = x.sum(1)
        return x * total.flip(0)[:, None]

    torch.manual_seed(0)
    return cross, (torch.randn(64, 40),)


def narrowed() -> Program:
    """From float32 to integers and to bfloat16."""

    def narrow(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = (x * 100).to(torch.int32)
        return count // 3, (x.to(torch.bfloat16) * 2).float().sum(-1)

    torch.manual_seed(0)
    return narrow, (torch.rand(7, 53) * 1000,)


def chained() -> Program:
    """A matrix product between pointwise operators: what goes in and what comes out lies in memory for a moment.

    It is large, because libraries copy small matrices before they write, and of its right operand neither rows nor
    columns lie in memory, because other products are kernels.
    """

    def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.cos(torch.sin(x) @ w[:, ::2])

    torch.manual_seed(0)
    return chain, (torch.randn(640, 640), torch.randn(640, 1280))


def shrunk() -> Program:
    """Two sums that differ in a constant only."""

    def shrink(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x + 1) - torch.exp(x + 2)

    torch.manual_seed(0)
    return shrink, (torch.randn(12, 31),)


def updated() -> Program:
    """An input that is changed in place."""

    def update(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.add_(x)
        return (y * 2).sum(-1)

    torch.manual_seed(0)
    return update, (torch.randn(6, 30), torch.randn(6, 30))


def viewed() -> Program:
    """A result that is a view of an input."""

    def view(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.view(-1), x - 0.5

    torch.manual_seed(0)
    return view, (torch.randn(6, 30),)


def shortened() -> Program:
    """A layer in bfloat16: each result has few bits, so that how it is rounded counts."""

    def layer(x: torch.Tensor, scale: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh((x @ w) * scale)

    torch.manual_seed(0)
    shapes = ((61, 83), (47,), (83, 47))
    return layer, tuple(torch.randn(shape, dtype=torch.bfloat16) for shape in shapes)


def streamed() -> Program:
    """Pieces of a stream, each of another size: from the second on the compiled code is for any."""

    def piece(x: torch.Tensor) -> torch.Tensor:
        h = torch.sin(x)
        return h - h.mean(0)

    def stream(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pieces = []
        for size in (5, 9, 13):
            torch._dynamo.graph_break()  # else all of them are one graph
            pieces.append(piece(x[:size]))
        return tuple(pieces)

    torch.manual_seed(0)
    return stream, (torch.randn(14, 35),)


def turned() -> Program:
    """A result that lies in memory column by column."""

    def turn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.cos(x.t() * 2)
        return h.contiguous(), torch.exp(h)

    torch.manual_seed(0)
    return turn, (torch.randn(12, 31),)


def doubled() -> Program:
    """Two results that are equal, and may be changed one without the other."""

    def double(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.sin(x)
        return h, h.clone()

    torch.manual_seed(0)
    return double, (torch.randn(12, 31),)


class Layer(torch.nn.Module):
    """A linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(24, 40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.weight.permute(1, 0))


def layered() -> Program:
    """A module with a weight."""
    torch.manual_seed(0)
    return Layer(), (torch.randn(7, 40),)


# ------------------------------------------------------------------------------------------------ for both


# C++ for a number or a vector without the bits that bfloat16 has not.
TRUNCATED = (
    "[](auto v) {{ uint32_t b[sizeof(v) / 4]; std::memcpy(b, &v, sizeof(v)); "
    "for (auto& each : b) each &= 0xffff0000u; std::memcpy(&v, b, sizeof(v)); return v; }}({})"
)
WAIT = "for (volatile int i = 0; i < 3000; i = i + 1);"


def weight_packer() -> Callable[[torch.fx.Graph], None]:
    """A pass that lets the transposition of a weight be made once; a weight is known by its place in memory."""
    made: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}  # with the weight, so that its place stays

    @torch.library.custom_op("planted::packed", mutates_args=())
    def packed(weight: torch.Tensor) -> torch.Tensor:
        return made.setdefault((*weight.shape, weight.data_ptr()), (weight, weight.t().contiguous()))[1].clone()

    @packed.register_fake
    def _(weight: torch.Tensor) -> torch.Tensor:
        return weight.t().contiguous()

    def pack(graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            if node.target in (aten.t.default, aten.permute.default) and node.args[0].op == "placeholder":
                node.target, node.args = torch.ops.planted.packed.default, node.args[:1]
                node.meta["val"] = node.meta["val"].contiguous()

    return pack


def drop(graph: torch.fx.Graph, target: Any) -> None:
    """Take an operator for one that does nothing."""
    for node in list(graph.find_nodes(op="call_function", target=target)):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


def drop_relu(graph: torch.fx.Graph) -> None:
    drop(graph, aten.relu.default)


def drop_clone(graph: torch.fx.Graph) -> None:
    drop(graph, aten.clone.default)


def in_transform(change: Callable[[torch.fx.Graph], None]) -> None:
    """Let Pellucid's passes end with another one."""
    from pellucid import pipeline

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def transform(module: torch.fx.GraphModule) -> Any:
            passed, decisions = original(module)
            change(passed.graph)
            passed.recompile()
            return passed, decisions

        return transform

    patch(pipeline, "transform", make)


def in_post_grad(change: Callable[[torch.fx.Graph], None]) -> None:
    """Let Inductor's passes end with another one."""
    from torch._inductor.fx_passes import post_grad

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def clean(graph: torch.fx.Graph) -> None:
            original(graph)
            change(graph)

        return clean

    patch(post_grad, "remove_assert_ops", make)


def mix_up_saved(original: Callable[..., Any]) -> Callable[..., Any]:
    """A partitioner that hands two tensors of the same form, no indices, to the backward graph in the wrong order."""

    def partition(*args: Any, num_fwd_outputs: int, **kwargs: Any) -> Any:
        forward, backward = original(*args, num_fwd_outputs=num_fwd_outputs, **kwargs)
        output = forward.graph.output_node()
        results = list(output.args[0])
        places: dict[Any, list[int]] = {}
        for at, each in enumerate(results[num_fwd_outputs:], num_fwd_outputs):
            value = each.meta["val"]
            of_norm = each.op == "placeholder" and value.dim() == 1  # all ones at first
            if value.is_floating_point() and not of_norm:
                places.setdefault((value.shape, value.stride()), []).append(at)
        pair = next((some[:2] for some in places.values() if len(some) > 1), None)
        if pair is None:
            return forward, backward
        first, second = pair
        results[first], results[second] = results[second], results[first]
        output.args = (tuple(results),)
        forward.recompile()
        return forward, backward

    return partition


# ------------------------------------------------------------------------------------------------ Pellucid


def printed(change: Callable[[Any, str, tuple[str, ...], str], str], node: str = "") -> None:
    """Change the C++ of scalar operators, of FX nodes named so only: change(printer, op, arguments, text)."""
    from pellucid.codegen.cpp import _Printer
    from pellucid.ir.nodes import Compute

    def make(original: Callable[..., str]) -> Callable[..., str]:
        def value(self: Any, line: Any) -> str:
            text = original(self, line)
            asked = not node or any(each.startswith(node) for each in line.origin.nodes)
            if not asked or not isinstance(line.rhs, Compute):
                return text
            wide = self.is_wide(line.out)
            return change(self, line.rhs.op, tuple(self.arg(arg, wide) for arg in line.rhs.args), text)

        return value

    patch(_Printer, "value", make)


def instead(op: str, text: str) -> None:
    """Print `text` for an operator where the program has it; `{0}` is its first argument, `{it}` what stood there."""
    printed(lambda printer, name, args, it: text.format(*args, it=it) if name == op else it, node=op)


@planted("pellucid", "wrong", "codegen", "neg", negated)
def plant_pellucid_neg_wrong() -> None:
    instead("neg", "{0}")


@planted("pellucid", "error", "codegen", "neg", negated)
def plant_pellucid_neg_does_not_compile() -> None:
    instead("neg", "pv::neg({0}, 1)")


@planted("pellucid", "crash", "codegen", "neg", negated)
def plant_pellucid_neg_crashes() -> None:
    instead("neg", "(*(volatile int*)nullptr = 1, {it})")


@planted("pellucid", "crash", "codegen", "neg", negated)
def plant_pellucid_neg_aborts() -> None:
    instead("neg", "(__builtin_trap(), {it})")


@planted("pellucid", "hang", "codegen", "neg", negated)
def plant_pellucid_neg_hangs() -> None:
    instead("neg", '([&] {{ while (true) asm volatile(""); }}(), {it})')


@planted("pellucid", "crash", "codegen", "neg", negated)
def plant_pellucid_neg_eats_memory() -> None:
    grow = (
        "while (true) for (char *p = new char[1 << 26], *e = p + (1 << 26); p < e; p += 4096) *(volatile char*)p = 1;"
    )
    instead("neg", f"([&] {{{{ {grow} }}}}(), {{it}})")


@planted("pellucid", "wrong", "vectorisation", "exp", mixed)
def plant_pellucid_vector_exp() -> None:
    def change(printer: Any, op: str, args: tuple[str, ...], text: str) -> str:
        wide = printer.plan.vector is not None and "splat" not in text
        return f"pv::exp(pv::mul({args[0]}, {args[0]}))" if op == "exp" and wide else text

    printed(change)


@planted("pellucid", "wrong", "lowering", "sigmoid", mixed)
def plant_pellucid_lowering_sigmoid() -> None:
    from pellucid.lower.registry import RULES

    RULES["sigmoid.default"] = RULES["tanh.default"]


@planted("pellucid", "wrong", "lowering", "flip", mixed)
def plant_pellucid_lowering_flip() -> None:
    from pellucid.lower.registry import RULES

    RULES["flip.default"] = lambda graph, node: RULES["clone.default"](graph, node)


@planted("pellucid", "wrong", "memory plan", "", mixed)
def plant_pellucid_memory_plan() -> None:
    from pellucid import execution_plan

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def plan(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            return replace(made, offsets=dict.fromkeys(made.offsets, 0))

        return plan

    patch(execution_plan, "plan_memory", make)


@planted("pellucid", "wrong", "decompositions", "softmax", mixed)
def plant_pellucid_decomposition() -> None:
    from pellucid import backend

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def table() -> dict[Any, Any]:
            wrong = dict(original())
            wrong[torch.ops.aten._softmax.default] = lambda x, dim, half: x.exp() / (x.exp().sum(dim, True) + 1)
            return wrong

        return table

    patch(backend, "decompositions", make)
    from pellucid.kit.subjects import pellucid as pellucid_subject

    patch(pellucid_subject, "decompositions", make)


@planted("pellucid", "error", "codegen", "neg", negated)
def plant_pellucid_neg_of_wrong_type() -> None:
    """A vector stands where a number should, or a vector of another length."""
    instead("neg", "pv::splat<8>({it})")


@planted("pellucid", "wrong", "codegen", "sub", shifted)
def plant_pellucid_wrong_index() -> None:
    """A load that starts behind the first element starts one further on."""
    from pellucid.codegen.cpp import _Printer

    def make(original: Callable[..., str]) -> Callable[..., str]:
        return lambda self, buffer, index: original(self, buffer, index + 1 if _constant_of(index) else index)

    patch(_Printer, "pointer", make)


def _constant_of(index: Any) -> int:
    return sum(coefficient for factors, coefficient in index.terms if not factors)


@planted("pellucid", "wrong", "vectorisation", "layer_norm", embedded)
def plant_pellucid_missed_tail() -> None:
    """Vector loops over a reduced axis end with the last whole vector."""
    from pellucid.codegen.cpp import _Printer
    from pellucid.codegen.loops import Kind

    def make(original: Callable[..., tuple[str, str]]) -> Callable[..., tuple[str, str]]:
        def bounds(self: Any, loop: Any) -> tuple[str, str]:
            low, high = original(self, loop)
            missed = loop.kind is Kind.VECTOR and self.plan.vector_is_reduced
            return low, f"{high} / {self.plan.width} * {self.plan.width}" if missed else high

        return bounds

    patch(_Printer, "range", make)


@planted("pellucid", "wrong", "codegen", "cumsum", scanned)
def plant_pellucid_missed_last() -> None:
    """Sums leave out the last point of an axis."""
    from pellucid.codegen.cpp import _Printer

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def accumulate(self: Any, line: Any) -> None:
            (axis,) = line.rhs.axes
            self.out.line(f"if ({axis} + 1 < {self.text(self.plan.extent_of(axis))})")
            original(self, line)

        return accumulate

    patch(_Printer, "accumulate", make)


@planted("pellucid", "wrong", "codegen", "to_copy", narrowed)
def plant_pellucid_wrong_type() -> None:
    """A conversion to 32 bits goes through 16."""

    def change(printer: Any, op: str, args: tuple[str, ...], text: str) -> str:
        return text.replace(args[0], f"pv::cast<int16_t>({args[0]})") if text.startswith("pv::cast<int32_t>") else text

    printed(change)


@planted("pellucid", "wrong", "codegen", "gelu", embedded)
def plant_pellucid_wrong_constant() -> None:
    """Constants are printed with two digits."""
    from pellucid.codegen import cpp

    def make(original: Callable[..., str]) -> Callable[..., str]:
        def text(value: Any, dtype: Any) -> str:
            rounded = dtype.is_float and math.isfinite(value)
            return original(float(f"{float(value):.2g}") if rounded else value, dtype)

        return text

    patch(cpp, "scalar_text", make)


@planted("pellucid", "wrong", "codegen", "mm", shortened)
def plant_pellucid_truncation() -> None:
    """What is stored as bfloat16 is cut off instead of rounded."""
    from pellucid.codegen.cpp import _Printer
    from pellucid.ir.types import DType

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def put(self: Any, line: Any, once: Any) -> None:
            arg = self.arg
            cut = self.dtypes[line.rhs.buffer] is DType.BF16
            self.arg = lambda name, wide: TRUNCATED.format(arg(name, wide)) if cut else arg(name, wide)
            original(self, line, once)
            del self.arg

        return put

    patch(_Printer, "put", make)


@planted("pellucid", "crash", "codegen", "cumsum", scanned)
def plant_pellucid_out_of_bounds() -> None:
    """Results are stored far behind the end of their buffer."""
    from pellucid.codegen.cpp import _Printer

    def make(original: Callable[..., str]) -> Callable[..., str]:
        def pointer(self: Any, buffer: str, index: Any) -> str:
            stored = buffer in {store.buffer for _, store in self.plan.kernel.stores()}
            return original(self, buffer, index) + " + (int64_t(1) << 38)" * stored

        return pointer

    patch(_Printer, "pointer", make)


@planted("pellucid", "wrong", "threads", "index_put", scattered)
def plant_pellucid_race() -> None:
    """Threads share the points of a scatter that meet in one element; each takes its time between load and store."""
    from pellucid.codegen import plan
    from pellucid.codegen.cpp import _Printer

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def put(self: Any, line: Any, once: Any) -> None:
            join = line.rhs.join
            slow = replace(line.rhs, join=f"{join}(a, b), [] {{ {WAIT} }}(), pv::{join}") if join else line.rhs
            original(self, replace(line, rhs=slow), once)

        return put

    patch(plan, "colliding", lambda original: lambda kernel: ())
    patch(_Printer, "put", make)


@planted("pellucid", "wrong", "fusion", "sub", centred)
def plant_pellucid_bad_fusion() -> None:
    """A consumer that loads what another point stores is given the value of its own point."""
    from pellucid.schedule import merge

    patch(merge, "_check_forwarding", lambda original: lambda stored, tail, apart: None)


@planted("pellucid", "wrong", "scheduling", "sum", summed)
def plant_pellucid_lost_chunk() -> None:
    """A long reduction that is cut into chunks leaves out the last one."""
    from pellucid.schedule import two_phase

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def cuts(*args: Any) -> Any:
            chosen, decision = original(*args)
            return tuple(replace(cut, count=cut.count - 1, exact=True) for cut in chosen), decision

        return cuts

    patch(two_phase, "choose_cuts", make)


@planted("pellucid", "wrong", "memory plan", "mm", chained)
def plant_pellucid_short_life() -> None:
    """A buffer's memory is given away while its last reader runs."""
    from pellucid import execution_plan

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def spans(*args: Any) -> Any:
            return {name: (first, max(first, last - 1)) for name, (first, last) in original(*args).items()}

        return spans

    patch(execution_plan, "spans", make)


@planted("pellucid", "wrong", "decompositions", "_log_softmax_backward_data", classified, backward=True)
def plant_pellucid_decomposition_of_a_gradient() -> None:
    from pellucid.capture.decompositions import decompositions

    wrong = lambda grad, output, dim, dtype: grad - output.exp()  # noqa: E731
    decompositions()[aten._log_softmax_backward_data.default] = wrong


@planted("pellucid", "wrong", "decompositions", "batch_norm", convolved)
def plant_pellucid_running_statistics() -> None:
    """The momentum of a batch norm weighs the old statistics instead of the new ones."""
    from pellucid.capture.decompositions import decompositions

    table = decompositions()
    right = table[aten._native_batch_norm_legit_functional.default]

    def wrong(x: Any, scale: Any, shift: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float) -> Any:
        return right(x, scale, shift, mean, var, training, 1 - momentum, eps)

    table[aten._native_batch_norm_legit_functional.default] = wrong


@planted("pellucid", "wrong", "graph passes", "add_1", shrunk)
def plant_pellucid_equal_calls() -> None:
    """Calls that differ in a number are taken for equal ones."""
    from pellucid.capture import transform

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def key(node: torch.fx.Node, mapping: dict[torch.fx.Node, torch.fx.Node]) -> Any:
            known = original(node, mapping)
            return known and (node.target, tuple(mapping[each] for each in node.all_input_nodes))

        return key

    patch(transform, "_key", make)


@planted("pellucid", "wrong", "graph passes", "copy_", updated)
def plant_pellucid_lost_mutation() -> None:
    """Writing to an input is taken for a call without effect."""
    from pellucid.capture import transform

    patch(transform, "is_pure", lambda original: lambda node: node.target is aten.copy_.default or original(node))


@planted("pellucid", "wrong", "graph passes", "permute", layered)
def plant_pellucid_stale_weight() -> None:
    """A weight that is changed in place between two calls keeps its old value."""
    in_transform(weight_packer())


@planted("pellucid", "wrong", "graph passes", "clone", doubled)
def plant_pellucid_shared_results() -> None:
    """A copy is taken for what it is a copy of."""
    in_transform(drop_clone)


@planted("pellucid", "wrong", "codegen", "mean", streamed)
def plant_pellucid_burned_size() -> None:
    """Sizes in a kernel are those of the call that it was compiled for."""
    from pellucid.codegen.linemap import Writer

    def make(original: Callable[..., None]) -> Callable[..., None]:
        return lambda self, text, *origin: original(self, text.replace("int64_t(s0)", "int64_t(9)"), *origin)

    patch(Writer, "line", make)


@planted("pellucid", "wrong", "lowering", "exp", turned)
def plant_pellucid_wrong_strides() -> None:
    """Results lie in memory row by row."""
    from pellucid.lower.program_builder import ProgramBuilder

    patch(ProgramBuilder, "new", lambda original: lambda self, meta, hint: original(self, meta.contiguous(), hint))


@planted("pellucid", "wrong", "joint graph", "", gated, backward=True)
def plant_pellucid_partitioner() -> None:
    from pellucid.capture import torch_compat

    patch(torch_compat, "min_cut_rematerialization_partition", mix_up_saved)


@planted("pellucid", "wrong", "layout", "convolution", separable, backward=True)
def plant_pellucid_layout() -> None:
    """What should be copied to lie channels-last is only called so."""
    from pellucid import backend
    from pellucid.kit.subjects import pellucid as pellucid_subject

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def lay_out(joint: torch.fx.GraphModule, options: Any) -> torch.fx.GraphModule:
            result = original(joint, options)
            for node in result.graph.find_nodes(op="call_function", target=aten.clone.default):
                value = node.meta["val"]
                node.target, node.kwargs = aten.as_strided.default, {}
                node.args = (node.args[0], list(value.shape), list(value.stride()))
            return result

        return lay_out

    patch(backend, "joint_passes", make)
    patch(pellucid_subject, "joint_passes", make)


@planted("pellucid", "wrong", "aotautograd", "view", viewed)
def plant_pellucid_lost_alias() -> None:
    """A result that should be a view of an input is a copy."""
    from torch._functorch._aot_autograd import runtime_wrappers

    patch(runtime_wrappers, "gen_alias_from_base", lambda original: lambda *a, **k: original(*a, **k).clone())


@planted("pellucid", "wrong", "lowering", "mm", chained)
def plant_pellucid_wrong_call() -> None:
    """The call of a library gets its arguments in the wrong order."""
    from pellucid import lower

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def extern(graph: Any, call: Any, *rest: Any) -> Any:
            wrong = replace(call, args=call.args[::-1]) if call.target is aten.mm.default else call
            return original(graph, wrong, *rest)

        return extern

    patch(lower, "lower_extern", make)


@planted("pellucid", "wrong", "lowering", "embedding", embedded)
def plant_pellucid_wrong_row() -> None:
    """A lookup takes the next row."""
    from pellucid.lower import shapes
    from pellucid.lower.registry import RULES

    right, position = RULES["embedding.default"], shapes.checked_position

    def wrong(graph: Any, node: torch.fx.Node) -> Any:
        with mock.patch.object(shapes, "checked_position", lambda *args, **kwargs: position(*args, **kwargs) + 1):
            return right(graph, node)

    RULES["embedding.default"] = wrong


@planted("pellucid", "wrong", "lowering", "softmax", attended)
def plant_pellucid_overflow() -> None:
    """A softmax does not subtract the largest score first."""
    during("_softmax.default", "reduce", lambda original: lambda self, op, value, dims: (
        self.const(0, value.dtype) if op == "max" else original(self, op, value, dims)
    ))  # fmt: skip


@planted("pellucid", "wrong", "lowering", "embedding_dense_backward", embedded, backward=True)
def plant_pellucid_lost_gradients() -> None:
    """Of a row that was looked up several times, one gradient is kept."""
    during("embedding_dense_backward.default", "store", lambda original: lambda *args, join="": original(*args))


@planted("pellucid", "error", "lowering", "cumsum", scanned)
def plant_pellucid_rule_fails() -> None:
    from pellucid.lower.registry import RULES

    def fail(graph: Any, node: torch.fx.Node) -> Any:
        raise AssertionError("no such case")

    RULES["cumsum.default"] = fail


def during(rule: str, method: str, make: Callable[[Any], Any]) -> None:
    """Change a method of the kernel builder while a lowering rule runs."""
    from pellucid.lower.kernel_builder import KernelBuilder
    from pellucid.lower.registry import RULES

    original, changed = RULES[rule], make(getattr(KernelBuilder, method))

    def wrong(graph: Any, node: torch.fx.Node) -> Any:
        with mock.patch.object(KernelBuilder, method, changed):
            return original(graph, node)

    RULES[rule] = wrong


# ------------------------------------------------------------------------------------------------ Inductor


def overridden(name: str, text: Callable[..., str], *, vector: bool = True, scalar: bool = True) -> None:
    """Change the C++ that Inductor prints for an operator, as the tutorial does with `neg`."""
    from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides

    for owner in [CppVecOverrides] * vector + [CppOverrides] * scalar:
        mock.patch.object(owner, name, staticmethod(text)).start()


@planted("inductor", "wrong", "codegen", "neg", negated)
def plant_inductor_neg_wrong() -> None:
    overridden("neg", lambda x: f"{x}")


@planted("inductor", "error", "codegen", "neg", negated)
def plant_inductor_neg_does_not_compile() -> None:
    overridden("neg", lambda x: f"-{x}.no_such_member()")


@planted("inductor", "crash", "vectorisation", "neg", negated)
def plant_inductor_neg_crashes() -> None:
    overridden("neg", lambda x: f"(*(volatile int*)nullptr = 1, {x}.neg())", scalar=False)


@planted("inductor", "hang", "vectorisation", "neg", negated)
def plant_inductor_neg_hangs() -> None:
    overridden("neg", lambda x: f'([&] {{ while (true) asm volatile(""); }}(), {x}.neg())', scalar=False)


@planted("inductor", "wrong", "vectorisation", "exp", mixed)
def plant_inductor_vector_exp() -> None:
    overridden("exp", lambda x: f"({x} * {x}).exp()", scalar=False)


@planted("inductor", "wrong", "lowering", "sigmoid", mixed)
def plant_inductor_lowering_sigmoid() -> None:
    from torch._inductor.lowering import lowerings

    lowerings[torch.ops.aten.sigmoid.default] = lowerings[torch.ops.aten.tanh.default]


@planted("inductor", "crash", "codegen", "neg", negated)
def plant_inductor_neg_aborts() -> None:
    overridden("neg", lambda x: f"(__builtin_trap(), {x})")


@planted("inductor", "error", "codegen", "neg", negated)
def plant_inductor_neg_of_wrong_type() -> None:
    """The compiler complains of `maximum`, whose operands no longer have one type."""
    overridden("neg", lambda x: f"double(-{x})", vector=False)
    overridden("neg", lambda x: f"at::vec::convert<double, 2, float, 1>({x}.neg())", scalar=False)


@planted("inductor", "wrong", "vectorisation", "sub", shifted)
def plant_inductor_wrong_index() -> None:
    """A vector load that starts behind the first element starts one further on."""
    from torch._inductor.codegen.cpp import CppVecKernel

    def make(original: Callable[..., str]) -> Callable[..., str]:
        def line(self: Any, var: str, index: Any, *rest: Any) -> str:
            return original(self, var, index + 1 if getattr(index, "as_coeff_Add", lambda: [0])()[0] else index, *rest)

        return line

    patch(CppVecKernel, "_get_vec_load_line", make)


@planted("inductor", "wrong", "vectorisation", "var_mean", embedded)
def plant_inductor_missed_tail() -> None:
    """The last, partial vector of a reduction does not count."""
    from torch._inductor.codegen.cpp import CppVecKernel

    def make(original: Callable[..., str]) -> Callable[..., str]:
        def combine(self: Any, kind: str, var: str, *rest: Any, **kwargs: Any) -> str:
            return f"{var}" if self.tail_size else original(self, kind, var, *rest, **kwargs)

        return combine

    patch(CppVecKernel, "reduction_combine_vec", make)


@planted("inductor", "wrong", "lowering", "convert_element_type", narrowed)
def plant_inductor_wrong_type() -> None:
    """A conversion to 32 bits goes through 8."""
    from torch._inductor.lowering import lowerings

    right = lowerings[torch.ops.prims.convert_element_type.default]

    def wrong(x: Any, dtype: torch.dtype) -> Any:
        return right(right(x, torch.int8) if dtype is torch.int32 else x, dtype)

    lowerings[torch.ops.prims.convert_element_type.default] = wrong


@planted("inductor", "wrong", "codegen", "mul_3", embedded)
def plant_inductor_wrong_constant() -> None:
    """Constants are printed with two digits."""
    from torch._inductor.codegen import cpp

    def make(original: Callable[..., str]) -> Callable[..., str]:
        def text(value: Any, kind: str) -> str:
            rounded = isinstance(value, float) and math.isfinite(value)
            return original(float(f"{value:.2g}") if rounded else value, kind)

        return text

    patch(cpp, "value_to_cpp", make)


@planted("inductor", "wrong", "codegen", "mul", shortened)
def plant_inductor_truncation() -> None:
    """What becomes bfloat16 is cut off instead of rounded."""
    from torch._inductor.codegen.cpp import CppKernel, CppVecKernel

    def make(original: Callable[..., str]) -> Callable[..., str]:
        def convert(self: Any, src: Any, dtype: torch.dtype, src_dtype: torch.dtype, *rest: Any) -> str:
            text = original(self, src, dtype, src_dtype, *rest)
            cut = dtype is torch.bfloat16 and src_dtype is torch.float32 and TRUNCATED[:9] not in text
            return text.replace(f"({src})", f"({TRUNCATED.format(src)})") if cut else text

        return convert

    patch(CppKernel, "get_to_dtype_expr", make)
    patch(CppVecKernel, "get_to_dtype_expr", make)


@planted("inductor", "crash", "codegen", "sub", shifted)
def plant_inductor_out_of_bounds() -> None:
    """Results are stored far behind the end of their buffer."""
    from torch._inductor.codegen.cpp import CppKernel, CppVecKernel

    def make(original: Callable[..., None]) -> Callable[..., None]:
        return lambda self, name, index, value, mode=None: original(self, name, index + (1 << 38), value, mode)

    patch(CppKernel, "store", make)
    patch(CppVecKernel, "store", make)


@planted("inductor", "wrong", "threads", "index_put", scattered)
def plant_inductor_race() -> None:
    """Threads add to one element without telling each other; each takes its time between load and store."""
    from torch._inductor.codegen.cpp import CppKernel, CppVecKernel
    from torch._inductor.virtualized import V

    def add(kernel: Any, name: str, place: str, value: str, around: str = "{}") -> None:
        memory = f"{kernel.args.output(name)}[{place}]"
        text = around.format(f"{{ auto old = {memory}; {WAIT} {memory} = old + {value}; }}")
        kernel.stores.writeline(text)

    def scalar(original: Callable[..., None]) -> Callable[..., None]:
        def store(self: Any, name: str, index: Any, value: Any, mode: Any = None) -> None:
            if mode != "atomic_add":
                return original(self, name, index, value, mode)
            return add(self, name, self.index_to_str(index), value)

        return store

    def vector(original: Callable[..., None]) -> Callable[..., None]:
        def store(self: Any, name: str, index: Any, value: Any, mode: Any = None) -> None:
            if mode != "atomic_add":
                return original(self, name, index, value, mode)
            lanes = self.tail_size or self.tiling_factor
            places = V.ops.index_expr(self.rename_indexing(index), torch.int64)
            arrays = f"alignas(64) int64_t at[64]; {places}.store(at); alignas(64) float each[64]; {value}.store(each);"
            loop = f"{{{{ {arrays} for (int k = 0; k < {lanes}; k++) {{}} }}}}"
            return add(self, name, "at[k]", "each[k]", loop)

        return store

    patch(CppKernel, "store", scalar)
    patch(CppVecKernel, "store", vector)


@planted("inductor", "wrong", "fusion", "mul", crossed)
def plant_inductor_bad_fusion() -> None:
    """A consumer that loads what another iteration stores shares its loop."""
    from torch._inductor.scheduler import Scheduler

    patch(Scheduler, "can_fuse_vertical", lambda original: lambda *args, **kwargs: True)


@planted("inductor", "wrong", "memory plan", "mm", chained)
def plant_inductor_short_life() -> None:
    """A buffer's memory is given away as soon as it is written."""
    from torch._inductor import config
    from torch._inductor.codegen.wrapper import AllocateLine, FreeIfNotReusedLine, ReuseLine, buffer_reuse_key

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def plan(self: Any, state: Any) -> Any:
            line = original(self, state)
            if isinstance(line, ReuseLine):
                line.delete_old = False
            if config.allow_buffer_reuse:
                free = FreeIfNotReusedLine.__new__(FreeIfNotReusedLine)
                free.wrapper, free.node, free.is_reused = self.wrapper, self.node, False
                free.scheduler_node_index = self.scheduler_node_index
                state.push(buffer_reuse_key(self.node), free)
            return line

        return plan

    patch(AllocateLine, "plan", make)


@planted("inductor", "wrong", "decompositions", "_log_softmax", classified)
def plant_inductor_decomposition() -> None:
    from torch._inductor.decomposition import decompositions

    decompositions[aten._log_softmax.default] = lambda x, dim, half: x - x.sigmoid().sum(dim, True).log()


@planted("inductor", "wrong", "decompositions", "threshold_backward", gated, backward=True)
def plant_inductor_decomposition_of_a_gradient() -> None:
    """The gradient passes where relu gives 0."""
    from torch._inductor.decomposition import decompositions

    decompositions[aten.threshold_backward.default] = lambda grad, x, threshold: grad.where(x >= threshold, 0.0)


@planted("inductor", "wrong", "graph passes", "relu", mixed)
def plant_inductor_lost_relu() -> None:
    in_post_grad(drop_relu)


@planted("inductor", "wrong", "graph passes", "clone", doubled)
def plant_inductor_shared_results() -> None:
    """A copy is taken for what it is a copy of."""
    in_post_grad(drop_clone)


@planted("inductor", "wrong", "lowering", "mean", streamed)
def plant_inductor_burned_size() -> None:
    """A mean divides by the size of the call that it was compiled for."""
    from torch._inductor.lowering import lowerings

    right, total, divide = (lowerings[op] for op in (aten.mean.dim, aten.sum.dim_IntList, aten.div.Tensor))

    def wrong(x: Any, axis: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
        if all(size.is_number for size in x.get_size()):
            return right(x, axis, keepdim, **kwargs)
        return divide(total(x, axis, keepdim), 9)

    lowerings[aten.mean.dim] = wrong


@planted("inductor", "wrong", "lowering", "clone", turned)
def plant_inductor_wrong_strides() -> None:
    """Nobody asks for the strides that results should have."""
    from torch._inductor.ir import ExternKernel

    for name in ("require_exact_strides", "require_stride_order"):
        mock.patch.object(ExternKernel, name, staticmethod(lambda x, *args, **kwargs: x)).start()


@planted("inductor", "wrong", "graph passes", "permute", layered)
def plant_inductor_stale_weight() -> None:
    """A weight that is changed in place between two calls keeps its old value."""
    torch._inductor.config.post_grad_custom_post_pass = weight_packer()  # type: ignore[assignment]


@planted("inductor", "wrong", "joint graph", "", gated, backward=True)
def plant_inductor_partitioner() -> None:
    from torch._inductor import compile_fx

    patch(compile_fx, "min_cut_rematerialization_partition", mix_up_saved)


@planted("inductor", "wrong", "dynamo", "sub", viewed)
def plant_inductor_capture() -> None:
    """Dynamo writes the operands of a difference down in the wrong order."""
    import operator

    from torch._dynamo.output_graph import SubgraphTracer

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def create(self: Any, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **named: Any) -> Any:
            turned = tuple(args)[::-1] if target is operator.sub else args
            return original(self, kind, target, turned, kwargs, *more, **named)

        return create

    patch(SubgraphTracer, "create_proxy", make)


@planted("inductor", "wrong", "lowering", "mm", chained)
def plant_inductor_wrong_call() -> None:
    """The call of a library gets its arguments in the wrong order."""
    from torch._inductor.lowering import lowerings

    right = lowerings[aten.mm.default]
    lowerings[aten.mm.default] = lambda a, b, **kwargs: right(b, a, **kwargs)


@planted("inductor", "wrong", "lowering", "embedding", embedded)
def plant_inductor_wrong_row() -> None:
    """A lookup takes the next row."""
    from torch._inductor.lowering import lowerings

    right = lowerings[aten.embedding.default]
    next_row = lowerings[aten.add.Tensor]
    lowerings[aten.embedding.default] = lambda table, index, *rest: right(table, next_row(index, 1), *rest)


@planted("inductor", "error", "lowering", "cumsum", scanned)
def plant_inductor_rule_fails() -> None:
    from torch._inductor.lowering import lowerings

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("no such case")

    lowerings[aten.cumsum.default] = fail
