"""The reader of generated code: what it takes for an access, and which faults it finds."""

from __future__ import annotations

import pytest
from generated_code import Span, read_code

WRAPPER = """
cpp_fused_0 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''...''')
triton_poi_0 = async_compile.triton('triton_poi_0', '''
@triton.jit
def triton_poi_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    pass
''', device_str='cuda')

class Runner:
    def call(self, args):
        arg0_1, arg1_1 = args
        args.clear()
        with torch.cuda._DeviceGuard(0):
            buf0 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
            buf9 = empty_strided_cuda((48, ), (1, ), torch.float32)
            buf1 = reinterpret_tensor(buf9, (4, 4), (4, 1), 32)  # alias
            cpp_fused_0(arg0_1, buf0)
            triton_poi_0.run(buf0, reinterpret_tensor(buf9, (4, 8), (8, 1), 0), 32, stream=raw_stream0)
            extern_kernels.mm(arg1_1, buf0, out=buf1)
            del buf1
            torch.ops._c10d_functional.all_reduce_.default(buf9, 'avg', '0')
            {in flight}
            torch.ops._c10d_functional.wait_tensor.default(buf9)
            del buf0
        return (reinterpret_tensor(buf9, (4, 8), (8, 1), 0), )
"""
NOTHING_ELSE = "pass"


def code(in_flight: str = NOTHING_ELSE) -> str:
    return WRAPPER.replace("{in flight}", in_flight)


def test_calls_in_their_order_with_what_they_read_and_write() -> None:
    found = read_code(code())
    assert found.order == "kkmAW"
    assert not found.faults
    bucket = Span("buf9", 0, 48)
    assert [call.writes for call in found.calls] == [
        (Span("buf0", 0, 32),),
        (Span("buf9", 0, 32),),
        (Span("buf9", 32, 48),),
        (bucket,),
        (),
    ]
    assert found.calls[1].reads == (Span("buf0", 0, 32), Span("buf9", 0, 32))
    assert found.calls[-1].reads == (bucket,)


@pytest.mark.parametrize(
    ("in_flight", "fault"),
    [
        ("extern_kernels.mm(buf0, buf0, out=buf9)", "extern_kernels.mm writes buf9[0:48]"),
        ("cpp_fused_0(reinterpret_tensor(buf9, (2, ), (1, ), 3), buf0)", "cpp_fused_0 reads buf9[3:5]"),
        ("buf5 = buf9; cpp_fused_0(arg0_1, buf5)  # reuse", "cpp_fused_0 writes buf9[0:48]"),
        ("buf6 = torch.ops.aten.view.dtype(buf9, torch.int32); buf6.fill_(0)", "buf6.fill_ writes buf9"),
        ("buf7 = buf9[0].sum()", "buf9[0].sum reads buf9"),
        ("torch.ops._c10d_functional.all_reduce_.default(buf9, 'avg', '0')", "all_reduce_ writes buf9[0:48]"),
        ("buf9 = empty_strided_cuda((48, ), (1, ), torch.float32)", "frees buf9[0:48]"),
    ],
)
def test_faults_in_flight(in_flight: str, fault: str) -> None:
    faults = read_code(code(in_flight)).faults
    assert any(fault in each and "while all_reduce_ of line" in each for each in faults), faults


@pytest.mark.parametrize(
    "in_flight",
    [
        "buf5 = buf0; extern_kernels.mm(arg0_1, arg1_1, out=buf5)",
        "buf5 = empty_strided_cuda((48, ), (1, ), torch.float32); cpp_fused_0(arg0_1, buf5)",
        "buf5 = buf9; del buf5",
        "assert_size_stride(buf9, (48, ), (1, ))",
    ],
)
def test_what_is_allowed_in_flight(in_flight: str) -> None:
    assert not read_code(code(in_flight)).faults


def test_a_part_may_be_written_while_another_is_in_flight() -> None:
    parts = code("extern_kernels.mm(arg1_1, buf0, out=reinterpret_tensor(buf9, (4, ), (1, ), 40))")
    parts = parts.replace("default(buf9", "default(reinterpret_tensor(buf9, (40, ), (1, ), 0)")
    assert not read_code(parts).faults


def test_waits_and_launches_come_in_pairs() -> None:
    (fault,) = read_code(code().replace("torch.ops._c10d_functional.wait_tensor.default(buf9)", "pass")).faults
    assert "no wait for buf9[0:48]" in fault
    (fault,) = read_code(code("torch.ops._c10d_functional.wait_tensor.default(buf0)")).faults
    assert "waits for buf0[0:32], which is not on its way" in fault
