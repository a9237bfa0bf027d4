"""From linalg on tensors to machine code in this process: schedule, bufferize, lower, compile.

Each pattern of vector lowering is applied alone, with canonicalization after it: several in one
set can undo each other without end (LLVM 22 took 12 GB and 70 s for one small schedule).
"""

import hashlib
from typing import Any

from tokmill import plugins
from tokmill.base.errors import TokmillError
from tokmill.mlir.modules import toolkit

BEFORE_BUFFERS = (
    "transform.apply_patterns.vector.reduction_to_contract",
    "transform.apply_patterns.vector.transfer_permutation_patterns",
    "transform.apply_patterns.tensor.fold_tensor_subset_ops_into_vector_transfers",
)
VECTORS = (
    'transform.apply_patterns.vector.lower_contraction lowering_strategy = "outerproduct"',
    "transform.apply_patterns.vector.transfer_permutation_patterns",
    "transform.apply_patterns.vector.reorder_multi_reduction_dims lowering_strategy = "
    '"innerparallel"',
    "transform.apply_patterns.vector.multi_reduction_flattening lowering_strategy = "
    '"innerparallel"',
    'transform.apply_patterns.vector.multi_reduction_unrolling lowering_strategy = "innerparallel"',
    "transform.apply_patterns.vector.lower_outerproduct",
    "transform.apply_patterns.vector.split_transfer_full_partial split_transfer_strategy = "
    '"linalg-copy"',
    "transform.apply_patterns.vector.transfer_to_scf max_transfer_rank = 1 full_unroll = true",
    "transform.apply_patterns.vector.lower_transfer max_transfer_rank = 1",
    "transform.apply_patterns.vector.lower_shape_cast",
    'transform.apply_patterns.vector.lower_transpose lowering_strategy = "shuffle_1d"',
    "transform.apply_patterns.vector.lower_broadcast",
)
BUFFERS = (
    "canonicalize",
    "cse",
    "eliminate-empty-tensors",
    "one-shot-bufferize{bufferize-function-boundaries=1 "
    "function-boundary-type-conversion=identity-layout-map}",
    "buffer-results-to-out-params{hoist-static-allocs=1 modify-public-functions=1}",
    "canonicalize",
    "cse",
    "func.func(buffer-loop-hoisting,promote-buffers-to-stack{max-alloc-size-in-bytes=65536 "
    "max-rank-of-allocated-memref=8})",
    "buffer-deallocation-pipeline",
)
MACHINE = (
    "convert-linalg-to-loops",
    "func.func(scf-forall-to-for)",
    "fold-memref-alias-ops",
    "expand-strided-metadata",
    "lower-affine",
    # Processors without AVX512-BF16 would call a function of compiler-rt, which is not there.
    "math-extend-to-supported-types{target-type=f32}",
    "arith-emulate-unsupported-floats{source-types=bf16 target-type=f32}",
    "arith-expand{include-bf16=true}",
    "canonicalize",
    "cse",
    "convert-scf-to-cf",
    "convert-math-to-llvm",
    # `erf`, of which GELU is made, is not a function of LLVM. It is called for each number.
    "convert-math-to-libm",
    "convert-vector-to-llvm",
    "finalize-memref-to-llvm",
    "convert-arith-to-llvm",
    "convert-ub-to-llvm",
    "convert-index-to-llvm",
    "convert-cf-to-llvm",
    "convert-func-to-llvm",
    "reconcile-unrealized-casts",
    "canonicalize",
    "cse",
)


def rules() -> str:
    """Return a digest of all passes and patterns: times by others are not comparable."""
    return hashlib.sha256(repr((BEFORE_BUFFERS, BUFFERS, VECTORS, MACHINE)).encode()).hexdigest()


class Refused(TokmillError):
    """A schedule that MLIR declines: the module is as it was asked for, but cannot be made so."""


def transform(module: Any, schedule: str) -> None:
    """Apply the text of a schedule to a module; raises `Refused` with MLIR's reason."""
    bindings = toolkit.ir()
    interpreter = plugins.require("torch_mlir.dialects.transform.interpreter")
    sequence = toolkit.parse(schedule, module.context, "schedule")
    try:
        interpreter.apply_named_sequence(
            module.operation, sequence.body.operations[0], sequence.operation
        )
    except (bindings.MLIRError, ValueError, RuntimeError) as error:
        raise Refused(
            f"MLIR cannot apply the schedule: {toolkit.first_error(str(error))}",
            hint="another schedule of this operation may pass",
        ) from None


def lower(module: Any) -> None:
    """Turn a module on tensors into LLVM's dialect; results become arguments behind the others."""
    transform(module, _patterns(BEFORE_BUFFERS))
    _copy_results_given_twice(module)
    _passes(module, BUFFERS)
    _copies(module)
    transform(module, _patterns(VECTORS))
    _copies(module)
    _passes(module, MACHINE)


def _copy_results_given_twice(module: Any) -> None:
    """Copy each value that a function returns again: two results would get one buffer."""
    bindings = toolkit.ir()
    for function in module.body.operations:
        if function.operation.name != "func.func" or not function.regions[0].blocks:
            continue
        (end,) = [one.operation for one in function.regions[0].blocks[0].operations][-1:]
        values = list(end.operands)
        for place, value in enumerate(values):
            if value in values[:place]:
                copy = bindings.Operation.create(
                    "bufferization.alloc_tensor",
                    results=[value.type],
                    operands=[value],
                    attributes={"operandSegmentSizes": bindings.DenseI32ArrayAttr.get([0, 1, 0])},
                    ip=bindings.InsertionPoint(end),
                    loc=end.location,
                )
                end.operands[place] = copy.results[0]


ROUND_TO_BF16 = """
llvm.func @__truncsfbf2(%x: f32) -> bf16 {
  %bits = llvm.bitcast %x : f32 to i32
  %half = llvm.mlir.constant(16 : i32) : i32
  %one = llvm.mlir.constant(1 : i32) : i32
  %almost = llvm.mlir.constant(32767 : i32) : i32
  %none = llvm.mlir.constant(2143289344 : i32) : i32
  %high = llvm.lshr %bits, %half : i32
  %odd = llvm.and %high, %one : i32
  %bias = llvm.add %odd, %almost : i32
  %sum = llvm.add %bits, %bias : i32
  %is_nan = llvm.fcmp "uno" %x, %x : f32
  %kept = llvm.select %is_nan, %none, %sum : i1, i32
  %shifted = llvm.lshr %kept, %half : i32
  %short = llvm.trunc %shifted : i32 to i16
  %result = llvm.bitcast %short : i16 to bf16
  llvm.return %result : bf16
}
"""
"""What LLVM calls to round a sum of bf16 to nearest even where the processor cannot; no library of
older systems has it."""


def compiled(module: Any) -> Any:
    """Return an execution engine of a lowered module; raises `Refused` if LLVM declines it."""
    engine = plugins.require("torch_mlir.execution_engine")
    if "xbf16>" in str(module):
        rounding = toolkit.parse(ROUND_TO_BF16, module.context, "rounding")
        place = toolkit.ir().InsertionPoint(module.body)
        rounding.body.operations[0].operation.clone(place)
    try:
        return engine.ExecutionEngine(module, opt_level=3)
    except RuntimeError as error:
        raise Refused(
            f"LLVM cannot compile the module: {error}",
            hint="another schedule of this operation may pass",
        ) from None


def _passes(module: Any, names: tuple[str, ...]) -> None:
    bindings = toolkit.ir()
    manager = plugins.require("torch_mlir.passmanager").PassManager
    try:
        with module.context:
            manager.parse(f"builtin.module({','.join(names)})").run(module.operation)
    except bindings.MLIRError as error:
        raise Refused(
            f"MLIR cannot lower the module: {toolkit.first_error(str(error))}",
            hint="another schedule of this operation may pass",
        ) from None


def _copies(module: Any) -> None:
    """Write copies as linalg does: `memref.copy` would call a library that is not there."""
    bindings, linalg = toolkit.ir(), plugins.require("torch_mlir.dialects.linalg")
    result: list[Any] = []

    def look(operation: Any) -> Any:
        if operation.name == "memref.copy":
            result.append(operation)
        return bindings.WalkResult.ADVANCE

    module.operation.walk(look)
    for operation in result:
        with module.context, bindings.Location.unknown(), bindings.InsertionPoint(operation):
            source, target = operation.operands
            linalg.copy(source, outs=[target])
        operation.erase()


def _patterns(names: tuple[str, ...]) -> str:
    lines = []
    for number, name in enumerate(names):
        lines.append(
            f'    %f{number} = transform.structured.match ops{{["func.func"]}} in %module : '
            "(!transform.any_op) -> !transform.any_op"
        )
        for one in (name, "transform.apply_patterns.canonicalization"):
            lines.append(
                f"    transform.apply_patterns to %f{number} {{ {one} }} : !transform.any_op"
            )
    inner = "\n".join(lines)
    return (
        "module attributes {transform.with_named_sequence} {\n"
        "  transform.named_sequence @__transform_main(%module: !transform.any_op) {\n"
        f"{inner}\n    transform.yield\n  }}\n}}\n"
    )
