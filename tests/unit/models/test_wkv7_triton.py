"""The kernels for CUDA, run in Triton's interpreter by a child process: this file as a script."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tokmill.models.wkv7 as recurrence
from tokmill.errors import MissingExtraError, UsageError
from tokmill.models import wkv7_triton
from tokmill.models.wkv7 import Form, wkv7
from tokmill.models.wkv7_triton import CHUNK

interpreted = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (it comes with torch for CUDA)",
)
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
FORMS: tuple[Form, ...] = ("step_by_step", "triton")
SIX = ("r", "w", "k", "v", "a", "b")
NAMES = ("y", "state", "dr", "dw", "dk", "dv", "da", "db", "dstate")


@dataclass(frozen=True)
class Case:
    """Inputs of a call: sizes, where documents begin, and what decays and keys are like."""

    length: int
    width: int = 32
    rows: int = 1
    heads: int = 1
    borders: tuple[int, ...] = ()
    decay: float | None = None
    """Of all positions; None: as the model has them."""
    repeats: bool = False
    """Whether all positions remove and write the same key, whole."""
    dtype: torch.dtype = torch.float32
    near: float = 1e-5
    """The largest error, a part of the norm."""

    def inputs(self) -> list[Tensor]:
        """Return r, w, k, v, a, b as the model makes them, and a state, in fp64."""
        torch.manual_seed(self.length)
        shape = self.rows, self.length, self.heads, self.width

        def draw() -> Tensor:
            return torch.randn(shape, dtype=torch.float64)

        w = -0.6065 * torch.sigmoid(draw())
        if self.decay is not None:
            w = torch.full_like(w, self.decay)
        unit, rate = torch.nn.functional.normalize(draw(), dim=-1), torch.sigmoid(draw())
        if self.repeats:
            unit, rate = unit[:, :1].expand(shape), torch.ones(shape, dtype=torch.float64)
        state = torch.randn(self.rows, self.heads, self.width, self.width, dtype=torch.float64)
        made = [draw(), w, draw(), draw(), -unit, unit * rate, state]
        # Rounded first: what is compared is the computation, not the inputs.
        return [x.to(self.dtype).double() for x in made[:6]] + [state.float().double()]

    def document(self) -> Tensor | None:
        """Return numbers of documents that do not rise, as they need not; rows differ by one."""
        if not self.borders:
            return None
        begins = torch.zeros(self.rows, self.length, dtype=torch.int64)
        for row in range(self.rows):
            for place in self.borders:
                begins[row, min(place + row, self.length - 1)] = 1
        return begins.cumsum(1) % 2

    def run(self, form: Form, dtype: torch.dtype, device: str) -> list[Tensor]:
        """Return outputs, the state after, and all gradients, in fp64."""
        *six, state = (x.to(device) for x in self.inputs())
        given = [*(x.to(dtype) for x in six), state.to(torch.promote_types(dtype, torch.float32))]
        given = [x.detach().requires_grad_() for x in given]
        document = self.document()
        if document is not None:
            document = document.to(device)
        y, last = wkv7(*given, document=document, form=form)
        torch.manual_seed(0)
        ahead = [torch.randn(x.shape, dtype=torch.float64).to(self.dtype).to(x) for x in (y, last)]
        found = torch.autograd.grad([y, last], given, ahead)
        return [x.detach().cpu().double() for x in (y, last, *found)]

    def errors(self, device: str) -> dict[str, float]:
        """Return how far the kernels are from the recurrence in fp64, a part of its norm."""
        expected = self.run("step_by_step", torch.float64, "cpu")
        found = self.run("triton", self.dtype, device)
        return {
            name: float((one - other).norm() / one.norm())
            for name, one, other in zip(NAMES, expected, found, strict=True)
        }


CASES = {
    "whole chunks": Case(2 * CHUNK, rows=2, heads=2),
    "one position": Case(1, width=64, heads=2),
    "no multiple of a chunk": Case(2 * CHUNK + 5, width=64),
    "the widest head": Case(CHUNK + 3, width=128),
    "documents": Case(4 * CHUNK + 2, rows=2, heads=2, borders=(3, 20, 31, 32, 62, 70, 71)),
    "a border at each position": Case(CHUNK + 9, borders=tuple(range(1, CHUNK + 9))),
    "the strongest decay": Case(3 * CHUNK, decay=-0.6065),
    # What is behind a decay is next to nothing, and the gradient of w a small rest of large terms.
    "decays next to the limit": Case(2 * CHUNK, decay=-4.9, near=2e-4),
    "next to no decay": Case(3 * CHUNK, decay=-1e-6),
    "one key again and again": Case(2 * CHUNK, decay=-1e-4, repeats=True),
    "bf16": Case(CHUNK + 7, borders=(11,), dtype=torch.bfloat16, near=5e-3),
}


def compiled(device: str) -> dict[str, float]:
    """Return how far a compiled call is from one that is not; it has to be one graph."""
    case = Case(CHUNK + 1, borders=(5,))
    given = [x.to(device, torch.float32).requires_grad_() for x in case.inputs()]
    document = case.document()
    assert document is not None
    document = document.to(device)

    def call(*given: Tensor) -> Tensor:
        y, last = wkv7(*given, document=document, form="triton")
        return y.sum() + last.square().sum()

    results = []
    for run in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        loss = run(*given)
        results.append([loss.detach(), *torch.autograd.grad(loss, given)])
    return {
        name: float((one - other).abs().max())
        for name, one, other in zip(("loss", *NAMES[2:]), *results, strict=True)
    }


def used_alone(device: str) -> dict[str, float]:
    """Return errors of gradients where y alone is used, and where the state after alone is."""
    found = {}
    for place, name in enumerate(NAMES[:2]):
        parts = []
        for form in FORMS:
            given = [x.to(device, torch.float32).requires_grad_() for x in Case(CHUNK + 1).inputs()]
            used = wkv7(*given, form=form)[place].sum()
            # r has no part in the state.
            parts.append(torch.cat([x.flatten() for x in torch.autograd.grad(used, given[1:])]))
        found[name] = float((parts[0] - parts[1]).norm() / parts[0].norm())
    return found


def check_operator(device: str) -> None:
    """Let PyTorch check schema, fakes and gradients of the operator."""
    given = [x.to(device, torch.float32).requires_grad_() for x in Case(CHUNK + 1).inputs()]
    number = torch.zeros(1, CHUNK + 1, dtype=torch.int32, device=device)
    torch.library.opcheck(wkv7_triton.forward, (*given, number, False))


def measure(device: str) -> dict[str, dict[str, float]]:
    """Return what the tests look at, by name."""
    check_operator(device)
    found = {name: case.errors(device) for name, case in CASES.items()}
    return {**found, "compiled": compiled(device), "used alone": used_alone(device)}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("cpu", marks=interpreted, id="interpreter"),
        pytest.param("cuda", marks=on_cuda),
    ],
)
def results(request: pytest.FixtureRequest) -> dict[str, dict[str, float]]:
    """What a child found: in Triton's interpreter, or on a GPU."""
    interpret = {"TRITON_INTERPRET": "1"} if request.param == "cpu" else {}
    done = subprocess.run(
        [sys.executable, __file__, request.param],
        env={**os.environ, **interpret},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_the_recurrence(name: str, results: dict[str, dict[str, float]]) -> None:
    """Outputs, the state after, and the gradients of all inputs and of the state before."""
    errors = results[name]
    # NaN is not below anything.
    far = {what: error for what, error in errors.items() if not error < CASES[name].near}
    assert {*errors} == {*NAMES} and not far


def test_what_nobody_uses_needs_no_gradient(results: dict[str, dict[str, float]]) -> None:
    assert all(error < 1e-5 for error in results["used alone"].values()), results["used alone"]


def test_a_compiled_call_is_one_graph(results: dict[str, dict[str, float]]) -> None:
    assert all(error == 0 for error in results["compiled"].values()), results["compiled"]


def test_shapes_are_known_without_running() -> None:
    """Of outputs and gradients, as compiling and reckoning memory take them."""
    with FakeTensorMode():
        six = [torch.empty(2, 70, 3, 64, dtype=torch.bfloat16, requires_grad=True) for _ in SIX]
        state = torch.empty(2, 3, 64, 64, requires_grad=True)
        number = torch.empty(2, 70, dtype=torch.int32)
        y, last, states, inverses = wkv7_triton.forward(*six, state, number, True)
        found = torch.autograd.grad(y.float().sum() + last.sum(), [*six, state])
    assert (y.shape, y.dtype) == (six[0].shape, torch.bfloat16)
    assert (last.shape, last.dtype) == (state.shape, torch.float32)
    assert states.shape == (2, 3, 3, 64, 64) and inverses.shape == (2, 3, 3, CHUNK, CHUNK)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in (*six, state)]


@pytest.mark.parametrize(
    "length, width, dtype, device, form",
    [
        (40, 64, torch.bfloat16, (8, 6), "triton"),
        (40, 128, torch.float32, (9, 0), "triton"),
        (8, 64, torch.float32, (9, 0), "step_by_step"),
        (40, 48, torch.float32, (9, 0), "chunked"),
        (40, 64, torch.float64, (9, 0), "chunked"),
        (40, 64, torch.float16, (9, 0), "chunked"),
        (40, 64, torch.float32, (7, 5), "chunked"),
        (40, 128, torch.float32, (8, 6), "chunked"),
        (40, 128, torch.float32, (12, 0), "chunked"),
    ],
)
def test_cuda_has_kernels_for_some_heads(
    length: int,
    width: int,
    dtype: torch.dtype,
    device: tuple[int, int],
    form: Form,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which form is chosen there; none is run, as most machines have no such device."""
    chosen = []

    def choose(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
        return lambda *given: (chosen.append(name) or given[0], given[6])

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: device)
    monkeypatch.setattr(wkv7_triton, "HAS_TRITON", True)
    monkeypatch.setattr(wkv7_triton, "by_kernels", choose("triton"))
    for name in ("chunked", "step_by_step"):
        monkeypatch.setattr(recurrence, name, choose(name))
    with FakeTensorMode():
        wkv7(*(torch.empty(1, length, 1, width, dtype=dtype, device="cuda") for _ in SIX))
    assert chosen == [form]


def test_forcing_it_on_a_cpu_is_refused() -> None:
    with pytest.raises(UsageError, match="for CUDA, not for tensors on cpu"):
        wkv7(*(torch.zeros(1, 40, 1, 64) for _ in SIX), form="triton")


def test_without_triton_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wkv7_triton, "INTERPRETED", True)
    monkeypatch.setattr(wkv7_triton, "HAS_TRITON", False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingExtraError, match="'triton' is not installed"):
        wkv7(*(torch.zeros(1, 40, 1, 64) for _ in SIX), form="triton")


def test_what_no_kernel_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wkv7_triton, "INTERPRETED", True)
    monkeypatch.setattr(wkv7_triton, "HAS_TRITON", True)
    with pytest.raises(UsageError, match=r"not of 48 in torch\.float32"):
        wkv7(*(torch.zeros(1, 40, 1, 48) for _ in SIX), form="triton")


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
