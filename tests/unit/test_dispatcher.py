"""The C++ dispatcher, run on the CPU: its kernels are Python functions, called through the same C interface."""

from __future__ import annotations

import ctypes
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import gemmgen as gg
from gemmgen import choose, dispatcher, doctor, jit, ops, pipeline, plan, runtime, tune, ways
from gemmgen.dtypes import DType
from gemmgen.errors import CompileError, LaunchError, OperandError
from gemmgen.jit import load
from gemmgen.operand_schema import OperandSchema
from gemmgen.ops import returned, returned_text
from gemmgen.problem import Extents, representative_of
from gemmgen.runtime import DEFAULT, Options, Runner
from gemmgen.ways import Library, Split
from tests.unit import fake_device
from tests.unit.fake_device import floats

pytestmark = pytest.mark.compile

RUN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(jit.Args), ctypes.c_void_p, ctypes.c_void_p)
CONTEXT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
WORKSPACE_OF = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.POINTER(jit.Args))
STREAM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    *(ctypes.c_uint,) * 7,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)
FINISH, POINTWISE = 41, 42  # the CUfunctions of the fake modules

FLOAT = torch.float32

_numbers = itertools.count()


@gg.epilogue
def scaled(accum, scale: gg.Scalar, bias: gg.Row):
    result = accum * scale + bias
    return result, gg.sum(result, over="M"), gg.sum(result, over="MN")


@gg.epilogue
def shifted(accum, shift: gg.Col, bias: gg.Row, residual: gg.Tile):
    return accum + shift + bias + residual


class Fake:
    """What the fake driver and the fake kernel do."""

    def __init__(self) -> None:
        self.context, self.status, self.stream, self.computes = 1, 0, 7, True
        self.streams: list[int] = []
        self.grids: list[tuple[int, int, int]] = []  # of the pointwise kernel
        self.workspaces: list[int] = []
        self.callbacks = (
            RUN(self.run),
            CONTEXT(self.current_context),
            STREAM(self.current_stream),
            LAUNCH(self.launch),
            WORKSPACE_OF(lambda args: self.workspace_bytes(args[0])),
        )
        self.entry, context, stream, launch, self.workspace_of = (
            ctypes.cast(callback, ctypes.c_void_p).value for callback in self.callbacks
        )
        self.handle, self.name, self.asked = 99, "fake", []
        self.driver = dispatcher._Driver(context, launch, stream)

    # of the driver

    def current_context(self, context) -> int:
        context[0] = self.context
        return 0

    def current_stream(self, device, stream) -> int:
        stream[0] = self.stream
        return 0

    def launch(self, function, gx, gy, gz, bx, by, bz, smem, stream, parameters, extra) -> int:
        assert stream == self.stream
        if function == POINTWISE:
            assert bx == plan.pointwise.THREADS
            self.grids.append((gx, gy, gz))
            return self.pointwise(jit.Args.from_address(parameters[0]))
        assert (function, bx) == (FINISH, plan.pointwise.FINISH_THREADS)
        source, target = (ctypes.c_void_p.from_address(parameters[i]).value for i in (0, 1))
        count, kept, batches = (ctypes.c_int64.from_address(parameters[i]).value for i in (2, 3, 4))
        floats(target, batches, kept).copy_(floats(source, batches, count, kept).sum(1))
        return 0

    def pointwise(self, args) -> int:
        """`scaled` or `shifted` of int32."""
        if self.status:
            return self.status
        accum = floats(args.a.ptr, args.m, args.n).view(torch.int32).float()
        inputs, rows = args.inputs, plan.pointwise.ROWS_PER_CTA
        if inputs[2].ptr:
            of_m, of_n = floats(inputs[0].ptr, args.m, 1), floats(inputs[1].ptr, args.n)
            result = accum + of_m + of_n + floats(inputs[2].ptr, args.m, args.n)
        else:
            scale = floats(inputs[0].ptr, 1) if inputs[0].ptr else inputs[0].value
            result = accum * scale + floats(inputs[1].ptr, args.n)
            partials = torch.stack([tile.sum(0) for tile in result.split(rows)])
            for output in (1, 2):
                floats(args.outputs[output].ptr, *partials.shape).copy_(partials)
        floats(args.outputs[0].ptr, args.m, args.n).copy_(result)
        return 0

    # of the kernel, whose tiles have one row

    def workspace_bytes(self, args) -> int:
        self.asked.append(args.m)
        return 64

    def run(self, handle, args, workspace, stream) -> int:
        if self.status:
            return self.status
        args = args[0] if not isinstance(args, jit.Args) else args
        self.streams.append(stream)
        self.workspaces.append(workspace or 0)
        if not self.computes:
            return 0
        A, B = floats(args.a.ptr, args.m, args.k), floats(args.b.ptr, args.n, args.k).t()
        inputs = args.inputs
        if inputs[2].ptr:
            of_m, of_n, of_both = (floats(inputs[i].ptr, *shape) for i, shape in enumerate(
                ((args.m, 1), (args.n,), (args.m, args.n))))  # fmt: skip
            floats(args.outputs[0].ptr, args.m, args.n).copy_(A @ B + of_m + of_n + of_both)
            return 0
        scale = floats(inputs[0].ptr, 1) if inputs[0].ptr else inputs[0].value
        result = A @ B * scale + floats(inputs[1].ptr, args.n)
        floats(args.outputs[0].ptr, args.m, args.n).copy_(result)
        for output in (1, 2):
            floats(args.outputs[output].ptr, args.m, args.n).copy_(result)
        return 0


class FakeKernel:
    """As Python sees the kernel."""

    def __init__(self, fake: Fake):
        self.fake, self.entry, self.handle, self.name = fake, fake.entry, fake.handle, fake.name
        self.workspace_of = fake.workspace_of

    def run(self, args, workspace, stream) -> None:
        if status := self.fake.run(self.handle, args, workspace, stream):
            raise LaunchError(f"status {status}")

    def workspace_bytes(self, args) -> int:
        return self.fake.workspace_bytes(args)

    def partial_count(self, args, output) -> int:
        return args.m


class FakeModule:
    def __init__(self, fake: Fake):
        self.fake = fake

    def function(self, name: str) -> int:
        return {"gemmgen_finish": FINISH, "gemmgen_pointwise": POINTWISE}[name]

    def launch(self, name, grid, block, arguments, stream, smem_bytes=0) -> None:
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        parameters = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))
        if status := self.fake.launch(self.function(name), *grid, *block, 0, stream, parameters, None):
            raise LaunchError(f"status {status}")


class Op:
    """An op whose device is the CPU. `in_python` counts the calls that came to Python."""

    def __init__(self, epilogue, options=DEFAULT, accum=DType.F32):
        graph = pipeline.graph_of(epilogue, accum)
        self.name, self.in_python, self.recorded = f"dispatched_{next(_numbers)}", 0, 0
        self.operands = OperandSchema(graph.parameters, reserved={"A", "B", "out_dtype"})
        self.runner = Runner(lambda accum: graph, options)
        self.library = torch.library.Library("gemmgen", "FRAGMENT")
        arguments = ", ".join(["Tensor A", "Tensor B", *self.operands.texts])
        schema = f"({arguments}, *, ScalarType? out_dtype=None) -> {returned_text(graph)}"
        for name in (self.name, f"{self.name}.python"):
            self.library.define(name + schema)
        self.library.impl(f"{self.name}.python", self._run, "CPU")
        self.library.impl(f"{self.name}.python", self._record, "Autograd")
        self.runner.dispatched = dispatcher.implement(self.name, graph, self.operands, "CPU")
        self.overload = getattr(torch.ops.gemmgen, self.name).default

    def _run(self, A, B, *flat, out_dtype=None):
        self.in_python += 1
        return returned(self.runner(A, B, self.operands.named(flat), out_dtype))

    def _record(self, *args, out_dtype=None):
        self.recorded += 1
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload(*args, out_dtype=out_dtype)

    def __call__(self, A, B, **operands):
        # the fakes write float32, which is no default for int8
        return self.overload(A, B, *self.operands.flat(operands), out_dtype=None if A.is_floating_point() else FLOAT)

    @property
    def launches(self) -> int:
        return self.runner.dispatched.launches


@pytest.fixture(scope="module")
def library():
    return dispatcher.load_library(dispatcher.build().path)


@pytest.fixture
def fake(monkeypatch, library):
    fake_device.installed(monkeypatch)
    monkeypatch.setattr(Split, "reject_reason", lambda *_: "only fused kernels are dispatched by C++")
    fake = Fake()
    monkeypatch.setattr(jit, "load_kernel", lambda built: FakeKernel(fake))
    monkeypatch.setattr(jit, "load_module", lambda path: FakeModule(fake))
    monkeypatch.setattr(load, "current_context", lambda: fake.context)
    monkeypatch.setattr(plan, "stream_of", lambda index: fake.stream)
    monkeypatch.setattr(plan.Plan, "depends_on_precision", False)  # the fake kernels are of fp32
    monkeypatch.setattr(dispatcher, "_loaded", library)
    library.gemmgen_dispatcher_bind(ctypes.byref(fake.driver))
    return fake


def call_of(M: int = 16, N: int = 32, K: int = 8):
    generator = torch.Generator().manual_seed(M)
    A, B, bias = (torch.randint(-3, 4, shape, generator=generator).float() for shape in ((M, K), (N, K), (N,)))
    return A, B.t(), bias


def check(results, A, B, scale, bias):
    want = A @ B * scale + bias
    for got, expected in zip(results, (want, want.sum(0), want.sum()), strict=True):
        assert torch.equal(got, expected)


def test_calls_alike_are_launched_by_cpp(fake):
    op = Op(scaled)
    for M, in_python in ((16, 1), (16, 1), (16, 1), (48, 2), (16, 2), (48, 2)):
        A, B, bias = call_of(M)
        check(op(A, B, scale=2.0, bias=bias), A, B, 2.0, bias)
        assert op.in_python == in_python
    assert op.launches == 4
    assert set(fake.streams) == {7} and all(fake.workspaces)


def test_numbers_are_read_at_every_call(fake):
    op = Op(scaled)
    A, B, bias = call_of()
    for scale in (2.0, 3.0, -1.0, torch.tensor(4.0), torch.tensor([5.0]), torch.tensor(6.0), 7.0):
        check(op(A, B, scale=scale, bias=bias), A, B, scale, bias)
    assert op.in_python == 3  # a number, a tensor of no dimension, one of one


def shifted_call_of(M: int):
    A, B, bias = call_of(M)
    shift, residual = torch.arange(float(M)), torch.arange(float(M * 32)).reshape(M, 32)
    return A, B, {"shift": shift, "bias": bias, "residual": residual}


def test_all_m_of_a_class_have_one_plan(fake):
    op = Op(shifted)
    for M, in_python in ((65, 1), (72, 1), (66, 1), (73, 2), (80, 2), (65, 2), (1024, 3), (1025, 4), (1088, 4), (64, 5),
                         (63, 6), (64, 6)):  # fmt: skip
        A, B, operands = shifted_call_of(M)
        want = A @ B + operands["shift"][:, None] + operands["bias"] + operands["residual"]
        assert torch.equal(op(A, B, **operands), want)
        assert op.in_python == in_python, M
        assert fake.asked[-1] == M  # the scratch memory of a call is its own
    assert op.launches == 6


def test_operands_of_another_m_of_the_class_are_refused(fake):
    op = Op(shifted)
    A, B, operands = shifted_call_of(66)
    op(A, B, **operands)
    for name in ("shift", "residual"):
        for M in (65, 67, 72):  # 72 stands for the class
            with pytest.raises(gg.ShapeMismatch, match=name):
                op(A, B, **operands | {name: shifted_call_of(M)[2][name]})
    assert op.launches == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda A, B: (torch.zeros(8, 128)[:, : len(A)].t(), B),
        lambda A, B: (A[None], B),
        lambda A, B: (A, B.expand(2, 8, 32)),
    ],
    ids=["contiguous along M", "batch of one", "batch of B"],
)
def test_an_m_that_is_more_than_a_count_of_rows_is_planned_for_itself(fake, change):
    op = Op(shifted)
    fake.computes = False  # it reads contiguous memory only
    for M, in_python in ((65, 1), (65, 1), (66, 2)):
        A, B, operands = shifted_call_of(M)
        op(*change(A, B), **operands)
        assert op.in_python == in_python


def test_a_call_that_could_not_be_measured_leaves_its_class_to_the_next(fake, monkeypatch):
    op = Op(shifted, Options(tune="first-call"))
    measured = []
    monkeypatch.setattr(runtime, "is_capturing", lambda: not measured)
    monkeypatch.setattr(tune, "found_or_measured", lambda call: measured.append(call.binding.extents.M))
    for M, in_python in ((66, 1), (66, 2)):
        A, B, operands = shifted_call_of(M)
        op(A, B, **operands)
        assert op.in_python == in_python and not measured
    monkeypatch.setattr(runtime, "is_capturing", lambda: False)
    for M, in_python in ((66, 3), (67, 3)):
        A, B, operands = shifted_call_of(M)
        op(A, B, **operands)
        assert op.in_python == in_python and measured == [66]


def test_every_m_of_a_reduction_is_planned_for_itself(fake):
    op = Op(scaled)
    for in_python, M in enumerate((65, 66, 72), 1):
        A, B, bias = call_of(M)
        check(op(A, B, scale=2.0, bias=bias), A, B, 2.0, bias)
        assert op.in_python == in_python


def test_classes_of_m_are_pythons(library):
    for M in (*range(1, 2300), 16320, 16321, 2**31 - 1):
        assert library.gemmgen_dispatcher_representative(M) == representative_of(Extents(M, 8, 8, 1, False)).M


@pytest.mark.parametrize(
    "change",
    [
        lambda A, B, bias: (A.t().contiguous().t(), B, bias),
        lambda A, B, bias: (torch.nn.functional.pad(A, (0, 4))[:, :8], B, bias),
        lambda A, B, bias: (A, B, torch.cat((bias[:1], bias))[1:]),
        lambda A, B, bias: (A, B, bias[:1].expand(32)),
        lambda A, B, bias: (A[None], B, bias),
    ],
    ids=["transposed", "padded", "misaligned", "expanded", "batched"],
)
def test_calls_of_other_metadata_are_planned_anew(fake, change):
    """The fake kernel reads contiguous memory only: what matters is that no plan of another layout is used."""
    op = Op(scaled)
    A, B, bias = call_of()
    for _ in range(2):
        op(A, B, scale=2.0, bias=bias)
    op(*change(A, B, bias)[:2], scale=2.0, bias=change(A, B, bias)[2])
    assert op.in_python == 2


def test_gradients_are_pythons(fake):
    op = Op(scaled)
    A, B, bias = call_of()
    leaf = bias.clone().requires_grad_()
    for _ in range(3):
        op(A, B, scale=2.0, bias=leaf)
    assert (op.recorded, op.in_python) == (3, 1)
    with torch.no_grad():
        op(A, B, scale=2.0, bias=leaf)
    assert op.recorded == 3
    with torch.autograd.forward_ad.dual_level():
        op(A, B, scale=2.0, bias=torch.autograd.forward_ad.make_dual(bias, bias))
    assert op.recorded == 4


def test_errors_keep_their_type(fake, monkeypatch):
    op = Op(scaled)
    A, B, bias = call_of()

    def refusing(*args, **keywords):
        raise OperandError("no")

    monkeypatch.setattr(op.runner, "plan", refusing)
    with pytest.raises(OperandError, match="no"):
        op(A, B, scale=2.0, bias=bias)
    monkeypatch.undo()


def test_a_refused_launch_is_reported_by_python(fake):
    op = Op(scaled)
    A, B, bias = call_of()
    op(A, B, scale=2.0, bias=bias)
    fake.status = 700
    with pytest.raises(LaunchError, match="700"):
        op(A, B, scale=2.0, bias=bias)
    fake.status = 0
    check(op(A, B, scale=2.0, bias=bias), A, B, 2.0, bias)


def test_another_context_is_left_to_python(fake):
    op = Op(scaled)
    A, B, bias = call_of()
    op(A, B, scale=2.0, bias=bias)
    fake.context = 2
    check(op(A, B, scale=2.0, bias=bias), A, B, 2.0, bias)
    assert op.in_python == 2
    op(A, B, scale=2.0, bias=bias)
    assert op.in_python == 2  # planned for that context now


def test_forgotten_plans_are_made_anew(fake):
    op = Op(scaled)
    A, B, bias = call_of()
    op(A, B, scale=2.0, bias=bias)
    op.runner.forget_plans()
    op(A, B, scale=2.0, bias=bias)
    assert op.in_python == 2


def test_a_plan_that_is_forgotten_while_it_runs_stays_forgotten(fake, monkeypatch):
    op = Op(scaled)
    A, B, bias = call_of()
    run = FakeKernel.run

    def forgetting(self, *args):
        op.runner.forget_plans()
        run(self, *args)

    monkeypatch.setattr(FakeKernel, "run", forgetting)
    for in_python in (1, 2):
        op(A, B, scale=2.0, bias=bias)
        assert op.in_python == in_python


def test_nested_calls_offer_their_own_plans(fake, monkeypatch):
    outer, inner = Op(scaled), Op(scaled)
    calls = [call_of(M) for M in (16, 48)]
    run = FakeKernel.run

    def nesting(self, *args):
        monkeypatch.setattr(FakeKernel, "run", run)
        for op in (inner, outer):
            A, B, bias = calls[1]
            check(op(A, B, scale=3.0, bias=bias), A, B, 3.0, bias)
        run(self, *args)

    monkeypatch.setattr(FakeKernel, "run", nesting)
    for _ in range(2):
        for A, B, bias in calls:
            for op in (outer, inner):
                check(op(A, B, scale=2.0, bias=bias), A, B, 2.0, bias)


def test_a_plan_that_python_must_run_is_not_offered(fake, monkeypatch):
    monkeypatch.setattr(plan.Plan, "depends_on_precision", True)
    op = Op(scaled)
    A, B, bias = call_of()
    for _ in range(3):
        op(A, B, scale=2.0, bias=bias)
    assert (op.in_python, op.launches) == (3, 0)


def test_threads(fake):
    op = Op(scaled)
    calls = [call_of(M) for M in (1, 2, 16, 48)]
    barrier = threading.Barrier(4)

    def work(start: int) -> None:
        barrier.wait(10)
        for index in range(60):
            A, B, bias = calls[(start + index) % 4]
            check(op(A, B, scale=float(index), bias=bias), A, B, float(index), bias)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert op.launches + op.in_python == 240
    assert op.launches > 200


@pytest.fixture
def split(fake, monkeypatch):
    """Every call is torch's product, here of int8, and the pointwise kernel."""
    monkeypatch.setattr(runtime, "selected", lambda *_: ways.Selection((ways.SPLIT,), "as the test wants it", ()))
    return fake


def int8_call_of(M: int, N: int = 32):
    A, B, bias = call_of(M, N)
    return A.to(torch.int8), B.t().to(torch.int8).t(), bias


@pytest.mark.parametrize("N", [32, 1040])
def test_a_product_and_the_pointwise_kernel_are_launched_by_cpp(split, N):
    op = Op(scaled, accum=DType.I32)
    rows, columns = plan.pointwise.ROWS_PER_CTA, plan.pointwise.COLUMN_LANES * plan.pointwise.MAX_VECTOR
    for M, in_python in ((48, 1), (48, 1), (2 * rows + 1, 2), (48, 2), (2 * rows + 1, 2)):
        A, B, bias = int8_call_of(M, N)
        check(op(A, B, scale=2.0, bias=bias), A.float(), B.float(), 2.0, bias)
        assert op.in_python == in_python
        assert split.grids[-1] == (-(-M // rows) * -(-N // columns), 1, 1)
        assert op.runner.plan(A, B, {"scale": 2.0, "bias": bias}, FLOAT).way == "split"
    assert op.launches == 3
    assert not split.streams  # no fused kernel ran


def test_all_m_of_a_class_have_one_split_plan(split):
    op = Op(shifted, accum=DType.I32)
    for M, in_python in ((129, 1), (136, 1), (130, 1), (137, 2), (129, 2), (1025, 3), (1088, 3)):
        A, B, _ = int8_call_of(M)
        operands = shifted_call_of(M)[2]
        want = (A.float() @ B.float()) + operands["shift"][:, None] + operands["bias"] + operands["residual"]
        assert torch.equal(op(A, B, **operands), want)
        assert op.in_python == in_python, M
    assert op.launches == 4


def test_all_m_of_a_class_take_as_many_ctas():
    """C++ launches the grid of the plan."""
    for M in range(1, 20000):
        most = representative_of(Extents(M, 8, 8, 1, False)).M
        assert plan.pointwise.grid(M, 8, 8) == plan.pointwise.grid(most, 8, 8)


def test_numbers_of_a_split_call_are_read_every_time(split):
    op = Op(scaled, accum=DType.I32)
    A, B, bias = int8_call_of(48)
    for scale in (2.0, -3.0, torch.tensor(4.0), 0.5):
        check(op(A, B, scale=scale, bias=bias), A.float(), B.float(), scale, bias)
    assert op.in_python == 2


def test_a_refused_launch_of_the_pointwise_kernel_is_reported_by_python(split):
    op = Op(scaled, accum=DType.I32)
    A, B, bias = int8_call_of(48)
    op(A, B, scale=2.0, bias=bias)
    split.status = 700
    with pytest.raises(LaunchError, match="700"):
        op(A, B, scale=2.0, bias=bias)
    assert (op.in_python, op.launches, len(split.grids)) == (2, 0, 3)  # C++ tried, and then Python


def test_split_calls_in_another_context_are_left_to_python(split):
    op = Op(scaled, accum=DType.I32)
    A, B, bias = int8_call_of(48)
    for context, in_python in ((1, 1), (2, 2), (2, 2), (1, 3)):
        split.context = context
        check(op(A, B, scale=2.0, bias=bias), A.float(), B.float(), 2.0, bias)
        assert op.in_python == in_python


def test_operands_that_are_copied_first_are_pythons(split):
    op = Op(scaled, accum=DType.I32)
    A, B, _ = int8_call_of(48)
    wide = torch.arange(64.0)
    for _ in range(3):
        check(op(A, B, scale=2.0, bias=wide[::2]), A.float(), B.float(), 2.0, wide[::2])
    assert (op.in_python, op.launches) == (3, 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda A, B: (A[None], B),
        lambda A, B: (A, B.contiguous()),
        lambda A, B: (A.t().contiguous().t(), B),
    ],
    ids=["a batch", "B that is copied", "A that is copied"],
)
def test_products_of_more_than_one_op_are_pythons(split, change):
    op = Op(scaled, accum=DType.I32)
    A, B, bias = int8_call_of(48)
    for _ in range(3):
        D, *_ = op(*change(A, B), scale=2.0, bias=bias)
        assert torch.equal(D.view(48, 32), A.float() @ B.float() * 2.0 + bias)
    assert (op.in_python, op.launches) == (3, 0)


TORCHS = {
    "mm": (lambda accum: accum, lambda A, B, bias: A @ B),
    "addmm": (lambda accum, bias: accum + bias, lambda A, B, bias: torch.addmm(bias, A, B)),
    "relu": (lambda accum, bias: gg.relu(accum + bias), lambda A, B, bias: torch.addmm(bias, A, B).relu()),
    "gelu_tanh": (
        lambda accum, bias: gg.gelu_tanh(accum + bias),
        lambda A, B, bias: torch._addmm_activation(bias, A, B, use_gelu=True),
    ),
}


@pytest.mark.parametrize("name", TORCHS)
def test_torchs_ops_are_called_by_cpp(fake, monkeypatch, name):
    monkeypatch.setattr(choose, "estimate_library_us", lambda *_: 1e-3)
    function, expected = TORCHS[name]
    function.__annotations__ = {"bias": gg.Row}
    op = Op(named(function, f"torchs_{name}"))
    operands = {} if name == "mm" else {"bias": call_of()[2].bfloat16()}
    for M in (16, 16, 48, 16, 65, 66):
        A, B = (x.bfloat16() for x in call_of(M)[:2])
        assert torch.equal(op(A, B, **operands), expected(A, B, operands.get("bias")))
        assert op.runner.plan(A, B, operands).way == "library"
    assert (op.in_python, op.launches) == (3, 3)
    assert not fake.streams  # no kernel of ours ran


@pytest.mark.parametrize("fails", [False, True])
def test_torchs_op_that_stands_in_gives_way_to_the_fused_kernel(fake, monkeypatch, fails):
    device = fake_device.installed(monkeypatch)
    monkeypatch.setattr(jit, "load_kernel", lambda built: FakeKernel(fake))
    monkeypatch.setattr(Library, "estimate_us", lambda *_: 1e9)
    fake.computes = False  # its arithmetic is that of `scaled`
    device.gate.clear()
    op = Op(gg.library.bias, Options(compile="background"))
    A, B, bias = (x.bfloat16() for x in call_of())
    for _ in range(3):
        assert torch.equal(op(A, B, bias=bias), torch.addmm(bias, A, B))
    assert (op.in_python, op.launches, len(fake.streams)) == (3, 0, 0)
    (upgrade,) = op.runner._pending.values()
    if fails:
        monkeypatch.setattr(upgrade.building, "exception", lambda: CompileError("it spills"))
    device.gate.set()
    upgrade.building.result(10)
    for _ in range(3):
        op(A, B, bias=bias)
    assert (op.in_python, op.launches, len(fake.streams)) == (4, 2, 0 if fails else 3)


@pytest.fixture
def on_the_cpu(fake, monkeypatch):
    """Ops that are registered now take the CPU for their GPU, on which torch's own ops are the fastest."""
    implement, register = dispatcher.implement, ops._library.impl
    monkeypatch.setattr(choose, "estimate_library_us", lambda *_: 1e-3)
    monkeypatch.setattr(dispatcher, "implement", lambda name, graph, operands: implement(name, graph, operands, "CPU"))

    def impl(name, function, key, **keywords):
        method = getattr(function, "__func__", None)
        if method is not ops.EpilogueOp._cpu:
            register(name, function, "CPU" if method is ops.EpilogueOp._cuda else key, **keywords)

    monkeypatch.setattr(ops._library, "impl", impl)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_torchs_transforms_and_views_pass_through_cpp(on_the_cpu):
    function = lambda accum, bias: accum + bias  # noqa: E731
    function.__annotations__ = {"bias": gg.Row}
    op = gg.Gemm(named(function, "through_cpp"))
    A, B, bias = (x.bfloat16() for x in call_of())
    D, dA = torch.addmm(bias, A, B), B.float().sum(1).bfloat16().expand(16, 8)
    with torch.inference_mode():
        B_of_inference = B.clone()

    def call(A):
        return op(A, B, bias=bias)

    def total(A):
        return call(A).float().sum()

    for _ in range(2):
        assert torch.equal(call(A), D)
        assert torch.equal(op(torch._neg_view(-A), B, bias=bias), D)
        assert torch.equal(op(A, B_of_inference, bias=bias), D)
        assert torch.equal(torch.vmap(call)(A.expand(3, 16, 8).contiguous()), D.expand(3, 16, 32))
        assert torch.equal(torch.func.grad(total)(A), dA)
        assert torch.equal(torch.vmap(torch.func.grad(total))(A.expand(3, 16, 8).contiguous()), dA.expand(3, 16, 8))
        assert torch.equal(torch.compile(torch.func.grad(total), backend="aot_eager", fullgraph=True)(A), dA)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(call(A.float()), D)
        with pytest.raises(gg.NoBackward, match="no forward-mode derivative"):
            torch.func.jvp(call, (A,), (A,))
    assert op._op.runner.dispatched.launches > 5


def named(function, name: str) -> gg.Epilogue:
    function.__name__ = function.__qualname__ = name
    return gg.epilogue(function)


def test_a_library_of_other_structures_is_refused(library, monkeypatch):
    monkeypatch.setattr(dispatcher, "ABI_VERSION", 0)
    with pytest.raises(gg.GemmgenError, match="cache clear"):
        dispatcher.load_library(dispatcher.build().path)


def test_a_library_that_this_machine_cannot_load_leaves_calls_to_python(monkeypatch, tmp_path, caplog):
    (tmp_path / "dispatcher.so").write_bytes(b"of another machine")
    entry = jit.cache.Entry(tmp_path, {}, {})
    monkeypatch.setattr(dispatcher, "_loaded", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(dispatcher, "find", lambda: entry)
    for _ in range(2):
        assert not dispatcher.is_available()
    (record,) = caplog.records
    assert "calls stay in Python: the C++ dispatcher cannot be loaded" in record.message
    (finding,) = (each for each in doctor.diagnose() if each.topic == "C++ dispatcher")
    assert finding.status == "fail" and "gemmgen cache clear" in finding.mend


def test_it_can_be_switched_off(monkeypatch):
    monkeypatch.setattr(dispatcher, "_loaded", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(dispatcher, "find", lambda: pytest.fail("looked for"))
    monkeypatch.setenv("GEMMGEN_DISPATCHER", "0")
    assert not dispatcher.is_available()
