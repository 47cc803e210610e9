from __future__ import annotations

import gc
import threading
from dataclasses import replace

import pytest
import torch

from pellucid.errors import InternalError
from pellucid.native.encode import Template
from pellucid.native.instance import (
    ArenaSlot,
    ExternSlot,
    FunctionalCall,
    InputSlot,
    KernelCall,
    OutCall,
    OutputSlot,
    PythonCall,
    TensorView,
    Unknown,
)
from pellucid.native.runtime import Instance
from tests.unit.native.support import view

aten = torch.ops.aten


# ------------------------------------------------------------------------------------------------ kernels


def test_one_kernel(add):
    x, y = torch.randn(100), torch.randn(100)
    (out,) = add(100).run([x, y])
    assert out.shape == (100,) and out.dtype == torch.float32 and out.is_contiguous()
    torch.testing.assert_close(out, x + y, rtol=0, atol=0)


def test_parameters_and_subclasses_of_tensor_are_tensors(add):
    class Sub(torch.Tensor):
        pass

    x = torch.nn.Parameter(torch.ones(4))
    (out,) = add(4).run([x, torch.ones(4).as_subclass(Sub)])
    assert out.tolist() == [2.0] * 4 and type(out) is torch.Tensor and not out.requires_grad


def test_inputs_start_at_their_data_pointer(add):
    x = torch.arange(10.0)
    (out,) = add(3).run([x[2:5], x[7:]])
    assert out.tolist() == [9.0, 11.0, 13.0]


def test_empty_extent_calls_nothing(kernels):
    instance = Instance(
        [InputSlot(0), OutputSlot(0)],
        [KernelCall(kernels["test_double"], (0, 1), (), 0, 1, "nothing")],
        [view(1, 0, 3)],
        inputs=1,
        arena=0,
    )
    (out,) = instance.run([torch.empty(0, 3)])
    assert out.shape == (0, 3)


def test_wrong_arguments_raise(add):
    run = add(4).run
    x = torch.ones(4)
    with pytest.raises(TypeError, match="takes 2 arguments, not 1"):
        run([x])
    with pytest.raises(TypeError, match="argument 1 is not a tensor"):
        run([x, 3])
    with pytest.raises(SystemError):
        run((x, x))
    assert run([x, x])[0].tolist() == [2.0] * 4


def test_failed_index_check_raises_its_message(kernels):
    call = KernelCall(
        kernels["test_check"], (0,), (10,), 3, 1 << 40, "gather", ("first", "{index} is not below {size} in x[i]")
    )
    instance = Instance([InputSlot(0)], [call], [None], inputs=1, arena=0)
    assert instance.run([torch.tensor([1, 2, 9])]) == [None]
    with pytest.raises(IndexError, match=r"^10 is not below 10 in x\[i\]$"):
        instance.run([torch.tensor([1, 10, 0])])


def who(kernels, extent, grain):
    instance = Instance(
        [OutputSlot(16 * extent)],
        [KernelCall(kernels["test_who"], (0,), (), extent, grain, "who")],
        [view(0, extent, 2, dtype=torch.int64)],
        inputs=0,
        arena=0,
    )
    return sorted({tuple(row) for row in instance.run([])[0].tolist()})


def test_iterations_are_split_evenly_over_the_threads_that_torch_has(kernels):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        assert who(kernels, 10, 1) == [(0, 2), (2, 5), (5, 7), (7, 10)]
        assert who(kernels, 10, 5) == [(0, 5), (5, 10)], "grain 5 is worth two threads"
        assert who(kernels, 10, 6) == [(0, 10)]
        torch.set_num_threads(1)
        assert who(kernels, 10, 1) == [(0, 10)]
    finally:
        torch.set_num_threads(before)


def test_new_threads_use_the_number_of_threads_that_was_set(kernels):
    before = torch.get_num_threads()
    shares = []
    try:
        torch.set_num_threads(3)
        thread = threading.Thread(target=lambda: shares.append(len(who(kernels, 9, 1))))
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert shares == [3]


# ------------------------------------------------------------------------------------------------ results


def test_results_may_share_a_buffer_and_repeat(kernels):
    n = 6
    whole, second = view(1, n), view(1, 2, offset=3)
    bits = TensorView(1, (n,), (1,), 0, torch.int32)
    instance = Instance(
        [InputSlot(0), OutputSlot(4 * n)],
        [KernelCall(kernels["test_double"], (0, 1), (), n, 100, "double")],
        [whole, second, bits, None, 7, whole],
        inputs=1,
        arena=0,
    )
    a, b, c, none, seven, again = instance.run([torch.arange(6.0)])
    assert b.tolist() == [6.0, 8.0] and none is None and seven == 7 and again is a
    assert c.dtype == torch.int32 and c.tolist() == a.view(torch.int32).tolist()
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() == c.untyped_storage().data_ptr()
    del a, again
    gc.collect()
    b.fill_(1.0)
    assert b.tolist() == [1.0, 1.0]


def test_an_output_with_an_offset_has_it(kernels):
    instance = Instance(
        [InputSlot(0), OutputSlot(40)],
        [KernelCall(kernels["test_double"], (0, 1), (), 10, 100, "double")],
        [TensorView(1, (2, 2), (1, 4), 3, torch.float32)],
        inputs=1,
        arena=0,
    )
    (out,) = instance.run([torch.arange(10.0)])
    assert out.stride() == (1, 4) and out.tolist() == [[6.0, 14.0], [8.0, 16.0]]


def test_an_input_returns_as_the_same_object_or_as_a_view():
    instance = Instance(
        [InputSlot(0)], [], [view(0, 2, 3), TensorView(0, (3, 2), (1, 3), 0, torch.float32)], inputs=1, arena=0
    )
    x = torch.nn.Parameter(torch.randn(2, 3))
    same, transposed = instance.run([x])
    assert same is x
    assert transposed.data_ptr() == x.data_ptr() and torch.equal(transposed, x.t())
    part = torch.randn(5, 3)[3:]
    same, transposed = instance.run([part])
    assert same is part and torch.equal(transposed, part.t())


def test_outputs_outlive_their_instance(add):
    x = torch.randn(1000)
    (out,) = add(1000).run([x, x])
    gc.collect()
    (other,) = add(1000).run([out, out])
    torch.testing.assert_close(out, 2 * x)
    torch.testing.assert_close(other, 4 * x)


def test_outputs_are_inference_tensors_in_inference_mode_only(add):
    x = torch.ones(4)
    instance = add(4)
    with torch.inference_mode():
        assert instance.run([x, x])[0].is_inference()
    assert not instance.run([x, x])[0].is_inference()


# ---------------------------------------------------------------------------------------------- operators


def linear(kernels, op, first, results=None, arena=4096):
    """x -> 2x in the arena -> op into the arena -> 2 * that."""
    return Instance(
        [InputSlot(0), InputSlot(1), InputSlot(2), ArenaSlot(0), ArenaSlot(1024), OutputSlot(4 * 15)],
        [
            KernelCall(kernels["test_double"], (0, 3), (), 12, 100, "double"),
            OutCall(op, first, (("out", view(4, 3, 5)),), "gemm", "model.py:3"),
            KernelCall(kernels["test_double"], (4, 5), (), 15, 100, "double"),
        ],
        results or [view(5, 3, 5)],
        inputs=3,
        arena=arena,
    )


def test_gemm_into_the_arena(kernels):
    x, w, b = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    w_t = TensorView(1, (4, 5), (1, 4), 0, torch.float32)
    instance = linear(kernels, aten.mm.out, (view(3, 3, 4), w_t))
    assert instance.paths == ("kernel", "shim", "kernel")
    torch.testing.assert_close(instance.run([x, w, b])[0], 4 * (x @ w.t()))
    instance = linear(kernels, aten.addmm.out, (view(2, 5), view(3, 3, 4), w_t))
    for _ in range(3):
        torch.testing.assert_close(instance.run([x, w, b])[0], 2 * torch.addmm(b, 2 * x, w.t()))


def test_scalars_of_addmm(kernels):
    x, w, b = torch.randn(3, 4), torch.randn(4, 5), torch.randn(5)
    call = OutCall(
        aten.addmm.out,
        (view(2, 5), view(0, 3, 4), view(1, 4, 5)),
        (("beta", 2), ("alpha", 0.5), ("out", view(3, 3, 5))),
        "addmm",
    )
    instance = Instance(
        [InputSlot(0), InputSlot(1), InputSlot(2), OutputSlot(60)], [call], [view(3, 3, 5)], inputs=3, arena=0
    )
    torch.testing.assert_close(instance.run([x, w, b])[0], torch.addmm(b, x, w, beta=2, alpha=0.5))


def test_batched_gemm(kernels):
    x, y, z = torch.randn(2, 3, 4), torch.randn(2, 4, 5), torch.randn(2, 3, 5)
    slots = [InputSlot(0), InputSlot(1), InputSlot(2), OutputSlot(120)]
    bmm = OutCall(aten.bmm.out, (view(0, 2, 3, 4), view(1, 2, 4, 5)), (("out", view(3, 2, 3, 5)),), "bmm")
    (out,) = Instance(slots, [bmm], [view(3, 2, 3, 5)], inputs=3, arena=0).run([x, y, z])
    torch.testing.assert_close(out, x @ y)
    args = (view(2, 2, 3, 5), view(0, 2, 3, 4), view(1, 2, 4, 5))
    call = OutCall(aten.baddbmm.out, args, (("out", view(3, 2, 3, 5)),), "baddbmm")
    (out,) = Instance(slots, [call], [view(3, 2, 3, 5)], inputs=3, arena=0).run([x, y, z])
    torch.testing.assert_close(out, torch.baddbmm(z, x, y))


def test_integer_gemm_goes_through_python(kernels):
    x = torch.arange(12).reshape(3, 4)
    i64 = {"dtype": torch.int64}
    args = (view(1, 3, **i64), view(0, 3, 4, **i64), TensorView(0, (4, 3), (1, 4), 0, torch.int64))
    call = OutCall(aten.addmm.out, args, (("out", view(2, 3, 3, **i64)),), "addmm")
    instance = Instance([InputSlot(0), InputSlot(1), OutputSlot(72)], [call], [view(2, 3, 3, **i64)], inputs=2, arena=0)
    assert instance.paths == ("python: argument 'beta' is a Scalar",)
    bias = torch.tensor([1, 2, 3])
    assert torch.equal(instance.run([x, bias])[0], torch.addmm(bias, x, x.t()))


def test_other_out_overloads_use_the_dispatcher(kernels):
    x, y = torch.randn(8), torch.randn(8)
    call = OutCall(aten.maximum.out, (view(0, 8), view(1, 8)), (("out", view(2, 8)),), "maximum")
    instance = Instance([InputSlot(0), InputSlot(1), OutputSlot(32)], [call], [view(2, 8)], inputs=2, arena=0)
    assert instance.paths == ("dispatcher",)
    assert torch.equal(instance.run([x, y])[0], torch.maximum(x, y))


def one_operator(op, args, outputs, *inputs, kwargs=(), extra_slots=0):
    n = len(inputs)
    slots = [InputSlot(i) for i in range(n)] + [ExternSlot() for _ in outputs]
    call = FunctionalCall(op, args, tuple(kwargs), tuple(outputs), "op", "model.py:12 in forward")
    instance = Instance(slots, [call], [out for out in outputs if out], inputs=n, arena=0)
    return instance, instance.run(list(inputs))


def test_convolution_has_optionals_lists_and_bools():
    x, w = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    args = (view(0, 2, 3, 8, 8), view(1, 4, 3, 3, 3), None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    instance, (out,) = one_operator(aten.convolution.default, args, [view(2, 2, 4, 8, 8)], x, w)
    assert instance.paths == ("dispatcher",)
    torch.testing.assert_close(out, torch.conv2d(x, w, padding=1))


def test_several_results_some_unused():
    x = torch.randn(4, 10)
    outputs = [view(1, 4, 3), view(2, 4, 3, dtype=torch.int64)]
    _, (values, indices) = one_operator(aten.topk.default, (view(0, 4, 10), 3), outputs, x)
    assert torch.equal(values, x.topk(3)[0]) and torch.equal(indices, x.topk(3)[1])
    _, (values,) = one_operator(aten.topk.default, (view(0, 4, 10), 3), [outputs[0], None], x)
    assert torch.equal(values, x.topk(3)[0])


def test_list_of_tensors_returned_and_passed():
    x = torch.randn(6, 2)
    outputs = [view(1, 2, 2), view(2, 2, 2), view(3, 2, 2)]
    _, parts = one_operator(aten.split_with_sizes_copy.default, (view(0, 6, 2), (2, 2, 2)), outputs, x)
    assert all(torch.equal(part, expected) for part, expected in zip(parts, x.split(2), strict=True))
    args = ((view(0, 6, 2), view(0, 2, 2)), 0)
    _, (out,) = one_operator(aten.cat.default, args, [view(1, 8, 2)], x)
    assert torch.equal(out, torch.cat([x, x[:2]]))


def test_list_of_optional_tensors():
    x, index = torch.randn(5, 6), torch.tensor([0, 3])
    args = (view(0, 5, 6), (None, view(1, 2, dtype=torch.int64)))
    instance, (out,) = one_operator(aten.index.Tensor, args, [view(2, 5, 2)], x, index)
    assert instance.paths == ("dispatcher",)
    assert torch.equal(out, x[:, index])


def test_enumerations_floats_and_strings():
    size = (3, 4)
    kwargs = (
        ("dtype", torch.float64),
        ("device", torch.device("cpu")),
        ("layout", torch.strided),
        ("pin_memory", False),
    )
    instance, (out,) = one_operator(aten.zeros.default, (size,), [view(0, 3, 4, dtype=torch.float64)], kwargs=kwargs)
    assert instance.paths == ("dispatcher",) and torch.equal(out, torch.zeros(3, 4, dtype=torch.float64))
    x = torch.randn(1, 4, 4, 4)
    nhwc = TensorView(1, (1, 4, 4, 4), (64, 1, 16, 4), 0, torch.float32)
    kwargs = (("memory_format", torch.channels_last),)
    _, (out,) = one_operator(aten.clone.default, (view(0, 1, 4, 4, 4),), [nhwc], x, kwargs=kwargs)
    assert out.stride() == (64, 1, 16, 4) and torch.equal(out, x)
    x, y = torch.randn(5), torch.randn(5)
    _, (out,) = one_operator(
        aten.div.Tensor_mode, (view(0, 5), view(1, 5)), [view(2, 5)], x, y, kwargs=(("rounding_mode", "floor"),)
    )
    assert torch.equal(out, torch.div(x, y, rounding_mode="floor"))


def test_random_operators_keep_the_stream_of_eager():
    args, outputs = ((4, 4),), [view(0, 4, 4)]
    torch.manual_seed(3)
    instance, (first,) = one_operator(aten.randn.default, args, outputs)
    torch.manual_seed(3)
    assert instance.paths == ("dispatcher",) and torch.equal(first, torch.randn(4, 4))


def test_scalars_go_through_python():
    x = torch.randn(5)
    instance, (out,) = one_operator(aten.add.Scalar, (view(0, 5), 3), [view(1, 5)], x)
    assert instance.paths == ("python: argument 'other' is a Scalar",)
    assert torch.equal(out, x + 3)


def test_operators_mutate_buffers_in_place(kernels):
    slots = [InputSlot(0), ArenaSlot(0), OutputSlot(16)]
    calls = [
        KernelCall(kernels["test_double"], (0, 1), (), 4, 100, "double"),
        FunctionalCall(aten.relu_.default, (view(1, 4),), (), (None,), "relu_"),
        KernelCall(kernels["test_double"], (1, 2), (), 4, 100, "double"),
    ]
    instance = Instance(slots, calls, [view(2, 4)], inputs=1, arena=64)
    assert instance.run([torch.tensor([-1.0, 1.0, -2.0, 2.0])])[0].tolist() == [0.0, 4.0, 0.0, 8.0]


def test_results_with_other_strides_are_copied():
    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    given = TensorView(0, (2, 3, 4, 4), (48, 1, 12, 3), 0, torch.float32)
    _, (out,) = one_operator(aten.relu.default, (given,), [view(1, 2, 3, 4, 4)], x)
    assert out.is_contiguous() and torch.equal(out, x.relu())


def test_strides_of_single_elements_do_not_matter():
    x = torch.randn(1, 5)
    odd = TensorView(1, (1, 5), (77, 1), 0, torch.float32)
    _, (out,) = one_operator(aten.relu.default, (view(0, 1, 5),), [odd], x)
    assert torch.equal(out, x.relu())


def test_a_result_of_another_size_or_type_is_an_error():
    x = torch.randn(2, 3)
    with pytest.raises(RuntimeError, match=r"op: returned a tensor of size \[2, 3\].*expected size \[3, 2\]"):
        one_operator(aten.relu.default, (view(0, 2, 3),), [view(1, 3, 2)], x)
    with pytest.raises(RuntimeError, match="dtype"):
        one_operator(aten.relu.default, (view(0, 2, 3),), [view(1, 2, 3, dtype=torch.int32)], x)


def test_a_result_that_aliases_the_arena_is_copied(kernels):
    slots = [InputSlot(0), ArenaSlot(0), ExternSlot()]
    calls = [
        KernelCall(kernels["test_double"], (0, 1), (), 4, 100, "double"),
        FunctionalCall(aten.contiguous.default, (view(1, 4),), (), (view(2, 4),), "contiguous"),
    ]
    instance = Instance(slots, calls, [view(2, 4)], inputs=1, arena=64)
    first = instance.run([torch.ones(4)])[0]
    instance.run([torch.zeros(4)])
    assert first.tolist() == [2.0] * 4


def test_extern_results_feed_kernels_and_operators(kernels):
    slots = [InputSlot(0), ExternSlot(), ArenaSlot(0), OutputSlot(24)]
    calls = [
        FunctionalCall(aten.relu.default, (view(0, 2, 3),), (), (view(1, 2, 3),), "relu"),
        FunctionalCall(aten.neg_.default, (view(1, 3, offset=3),), (), (None,), "neg_"),
        KernelCall(kernels["test_double"], (1, 2), (), 6, 100, "double"),
        KernelCall(kernels["test_double"], (2, 3), (), 6, 100, "double"),
    ]
    instance = Instance(slots, calls, [view(3, 2, 3)], inputs=1, arena=64)
    x = torch.randn(2, 3)
    expected = 4 * x.relu()
    expected[1] *= -1
    for _ in range(2):
        torch.testing.assert_close(instance.run([x])[0], expected)


def test_errors_of_operators_name_the_operator_and_the_line():
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    with pytest.raises(RuntimeError) as error:
        one_operator(aten.mm.default, (view(0, 2, 3), view(1, 2, 3)), [view(2, 2, 3)], x, y)
    assert "op: mat1 and mat2 shapes cannot be multiplied" in str(error.value)
    assert "at model.py:12 in forward" in str(error.value)


def test_grad_mode_is_off_inside_and_restored():
    seen = []
    call = PythonCall(lambda x: seen.append(torch.is_grad_enabled()), (view(0, 2),), (), (), "spy")
    instance = Instance([InputSlot(0)], [call], [None], inputs=1, arena=0)
    instance.run([torch.ones(2)])
    assert seen == [False] and torch.is_grad_enabled()
    x = torch.ones(2, requires_grad=True)
    _, (out,) = one_operator(aten.relu.default, (view(0, 2),), [view(1, 2)], x)
    assert not out.requires_grad


def test_arena_tensors_work_in_and_out_of_inference_mode(kernels):
    w_t = TensorView(1, (4, 5), (1, 4), 0, torch.float32)
    x, w, b = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    calls = [
        KernelCall(kernels["test_double"], (0, 3), (), 12, 100, "double"),
        OutCall(aten.maximum.out, (view(3, 12), view(3, 12)), (("out", view(4, 12)),), "maximum"),
        FunctionalCall(aten.relu_.default, (view(4, 12),), (), (None,), "relu_"),
        KernelCall(kernels["test_double"], (4, 5), (), 12, 100, "double"),
    ]
    slots = [InputSlot(0), InputSlot(1), InputSlot(2), ArenaSlot(0), ArenaSlot(1024), OutputSlot(48)]
    instance = Instance(slots, calls, [view(5, 3, 4)], inputs=3, arena=1 << 22)
    with torch.inference_mode():
        inside = instance.run([x, w, b])[0]
    outside = instance.run([x, w, b])[0]
    torch.testing.assert_close(inside, 4 * x.relu())
    torch.testing.assert_close(outside, 4 * x.relu())
    torch.testing.assert_close(linear(kernels, aten.mm.out, (view(3, 3, 4), w_t)).run([x, w, b])[0], 4 * (x @ w.t()))


# ------------------------------------------------------------------------------------------ python calls


def test_python_functions_see_arena_tensors_and_bind_results(kernels):
    seen = []

    def function(x, scale, *, names):
        seen.append((x.clone(), scale, names))
        return x * scale, None

    slots = [InputSlot(0), ArenaSlot(0), ExternSlot(), OutputSlot(16)]
    calls = [
        KernelCall(kernels["test_double"], (0, 1), (), 4, 100, "double"),
        PythonCall(function, (view(1, 4), 3.0), (("names", ("a", None)),), (view(2, 4), None), "scale"),
        KernelCall(kernels["test_double"], (2, 3), (), 4, 100, "double"),
    ]
    instance = Instance(slots, calls, [view(3, 4)], inputs=1, arena=64)
    assert instance.run([torch.arange(4.0)])[0].tolist() == [0.0, 12.0, 24.0, 36.0]
    assert seen[0][0].tolist() == [0.0, 2.0, 4.0, 6.0] and seen[0][1:] == (3.0, ["a", None])


def test_python_functions_get_the_very_argument():
    seen = []
    call = PythonCall(lambda x: seen.append(x), (view(0, 2),), (), (), "spy")
    x = torch.nn.Parameter(torch.ones(2))
    Instance([InputSlot(0)], [call], [None], inputs=1, arena=0).run([x])
    assert seen[0] is x


def test_python_exceptions_pass_through(add):
    class Odd(Exception):
        pass

    def fail(x):
        raise Odd("because")

    call = PythonCall(fail, (view(0, 2),), (), (view(1, 2),), "fail")
    instance = Instance([InputSlot(0), ExternSlot()], [call], [view(1, 2)], inputs=1, arena=0)
    for _ in range(3):
        with pytest.raises(Odd, match="because"):
            instance.run([torch.ones(2)])
    wrong = PythonCall(lambda x: None, (view(0, 2),), (), (view(1, 2),), "wrong")
    with pytest.raises(RuntimeError, match="wrong: returned no tensor where one was expected"):
        Instance([InputSlot(0), ExternSlot()], [wrong], [view(1, 2)], inputs=1, arena=0).run([torch.ones(2)])


def test_a_run_may_run_another_graph_and_itself(kernels):
    depth = []

    def nested(x):
        if len(depth) >= 3:
            return x + 1
        depth.append(1)
        return instance.run([x])[0]

    slots = [InputSlot(0), ArenaSlot(0), ExternSlot(), OutputSlot(16)]
    calls = [
        KernelCall(kernels["test_double"], (0, 1), (), 4, 100, "double"),
        PythonCall(nested, (view(1, 4),), (), (view(2, 4),), "nested"),
        KernelCall(kernels["test_add"], (1, 2, 3), (), 4, 100, "add"),
    ]
    instance = Instance(slots, calls, [view(3, 4)], inputs=1, arena=64)

    def expected(x, level=0):
        return 2 * x + (2 * x + 1 if level == 3 else expected(2 * x, level + 1))

    assert instance.run([torch.ones(4)])[0].tolist() == expected(torch.ones(4)).tolist()


# ------------------------------------------------------------------------------------------- descriptions


def test_contradictory_descriptions_are_refused(kernels):
    x = InputSlot(0)
    call = KernelCall(kernels["test_double"], (0, 1), (), 4, 100, "double")
    with pytest.raises(InternalError, match="uses slot 1, which nothing has produced yet"):
        Instance([x, ExternSlot()], [call], [None], inputs=1, arena=0)
    with pytest.raises(InternalError, match="is never produced"):
        Instance([x, ExternSlot()], [], [view(1, 4)], inputs=1, arena=0)
    with pytest.raises(InternalError, match="outlive"):
        Instance([x, ArenaSlot(0)], [call], [view(1, 4)], inputs=1, arena=64)
    with pytest.raises(InternalError, match="argument 1 of 1"):
        Instance([InputSlot(1)], [], [None], inputs=1, arena=0)
    with pytest.raises(InternalError, match="byte 8 of"):
        Instance([ArenaSlot(8)], [], [None], inputs=0, arena=64)
    with pytest.raises(InternalError, match="lacks argument 'mat2'"):
        Instance(
            [x, ExternSlot()],
            [FunctionalCall(aten.mm.default, (view(0, 2, 2),), (), (view(1, 2, 2),), "mm")],
            [],
            inputs=1,
            arena=0,
        )


def test_instances_of_a_template_have_their_own_numbers(kernels):
    """Sizes of views and kernels, and integers, floats and scalars that operators are given."""
    n, m, step, alpha, slope = (Unknown(k) for k in range(5))
    flat = [TensorView(slot, (n, m), (m, 1), 0, torch.float32) for slot in range(5)]
    calls = [
        KernelCall(kernels["test_double"], (0, 1), (), Unknown(5), 1, "double"),
        OutCall(aten.sub.out, (flat[1], flat[0]), (("alpha", alpha), ("out", flat[2])), "sub"),
        OutCall(aten.hardtanh.out, (flat[2], slope, 100.0), (("out", flat[2]),), "hardtanh"),
        FunctionalCall(aten.slice.Tensor, (flat[2], 0, 0, n, step), (), (replace(flat[3], shape=(1, m)),), "slice"),
        PythonCall(lambda x, by: x * by, (flat[2], alpha), (), (flat[4],), "python"),
    ]
    template = Template(
        calls,
        [replace(flat[3], shape=(1, m)), flat[4], n],
        [],
        slots=5,
        externs={3, 4},
        inputs=1,
        name="program",
    )
    made = []
    for rows, columns, by in ((2, 3, 0.5), (4, 1, -2.0), (3, 5, 1.5)):
        slots = [InputSlot(0), ArenaSlot(0), OutputSlot(4 * rows * columns), ExternSlot(), ExternSlot()]
        numbers = (rows, columns, rows, by, -0.25, rows * columns)
        made.append((Instance.of(template, slots, 64, numbers), torch.randn(rows, columns), by))
    gc.collect()
    for instance, x, by in made:
        limited = (2 * x - by * x).clamp(-0.25, 100)
        first, scaled, rows = instance.run([x])
        assert rows == len(x)
        torch.testing.assert_close([first, scaled], [limited[:1], limited * by])
    with pytest.raises(InternalError, match="contradicts the template"):
        Instance.of(template, [InputSlot(0)] * 5, 64, (1,) * 6)


def test_profiler_shows_every_call_by_name(kernels):
    w_t = TensorView(1, (4, 5), (1, 4), 0, torch.float32)
    instance = linear(kernels, aten.mm.out, (view(3, 3, 4), w_t))
    args = [torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        shown = instance.run(list(args))
    names = [event.name for event in profile.events()]
    assert names.count("pellucid::program/double") == 2 and names.count("pellucid::program") == 1
    shapes = {event.name: event.input_shapes for event in profile.events()}
    assert shapes["pellucid::program/gemm"] == [[3, 4], [4, 5]]
    assert shapes["pellucid::program"] == [[3, 4], [5, 4], [5]]
    assert torch.equal(shown[0], instance.run(list(args))[0])
