"""Channels last: a model whose convolutions are nchw becomes one that works on nhwc throughout.

IREE's code for nhwc is about twice as fast. Its own pass (`iree-preprocessing-convert-conv-to-
channels-last`) puts transpositions around each convolution, and those around pads and poolings
stay. Here an image is transposed once where the model begins and once where it ends: pads,
poolings and what works element by element take the new layout. Weights are transposed too, which
IREE does when it loads them; filters that are arguments are transposed in each run.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from tokmill import plugins
from tokmill.base.errors import TokmillError

LAST = (0, 2, 3, 1)
"""Place of each dimension of nhwc in nchw."""
FIRST = (0, 3, 1, 2)
_FILTERS = {
    "linalg.conv_2d_nchw_fchw": ("conv_2d_nhwc_hwcf", (2, 3, 1, 0)),
    "linalg.depthwise_conv_2d_nchw_chw": ("depthwise_conv_2d_nhwc_hwc", (1, 2, 0)),
}
"""Operation → what it becomes, and how its filters are transposed."""
_WINDOWS = {f"linalg.pooling_nchw_{kind}": f"pooling_nhwc_{kind}" for kind in ("max", "sum")}


def channels_last(text: str) -> tuple[str, int]:
    """Return the text of a module with its convolutions in nhwc, and how many were changed.

    Run in a child: the bindings are those of IREE's compiler. The results of the module have the
    shapes that they had.

    Raises `TokmillError` for what is not a module.
    """
    bindings = plugins.require("iree.compiler.ir")
    plugins.require("iree.compiler.dialects.linalg")
    with bindings.Context() as context, bindings.Location.unknown():
        context.allow_unregistered_dialects = True
        try:
            module = bindings.Module.parse(text)
        except bindings.MLIRError as error:
            raise TokmillError(
                f"the module cannot be read: {error}"[:300], hint="export it anew"
            ) from None
        changed = 0
        for function in module.body.operations:
            for region in function.operation.regions:
                for block in region.blocks:
                    changed += _Images(bindings, block).change()
        module.operation.verify()
        rewritten = module.operation.get_asm(print_generic_op_form=True)
    return rewritten, changed


class _Images:
    """A block of operations whose images get another layout."""

    def __init__(self, bindings: Any, block: Any) -> None:
        self._ir, self._block = bindings, block
        self._linalg = plugins.require("iree.compiler.dialects.linalg")
        self._tensor = plugins.require("iree.compiler.dialects.tensor")
        self._last: dict[Any, Any] = {}
        """Value in nchw → the same in nhwc."""
        self._done: list[Any] = []
        """Operations that were replaced."""
        self._given = set(block.arguments)
        """Values that an argument of the block changes: IREE cannot compute them when it loads."""

    def change(self) -> int:
        """Change the block; return how many convolutions were changed."""
        changed = 0
        for operation in list(self._block.operations):
            view = operation.operation
            if any(value in self._given for value in view.operands):
                self._given.update(view.results)
            with self._ir.InsertionPoint(operation):
                make = self._way(view)
                replacement = None if make is None else make(view)
            if replacement is None:
                self._back(operation)
                continue
            changed += view.name in _FILTERS
            self._last[view.results[0]] = replacement
            self._done.append(view)
        for view in reversed(self._done):
            if not any(True for _ in view.results[0].uses):
                view.erase()
        return changed

    def _way(self, view: Any) -> Callable[[Any], Any] | None:
        if len(view.results) != 1 or _rank(view.results[0]) != 4:
            return None
        if view.name in _FILTERS or view.name in _WINDOWS:
            return self._window
        moved = any(value in self._last for value in view.operands)
        if view.name == "linalg.generic" and moved and self._regular(view):
            return self._generic
        if view.name == "tensor.pad" and moved and len(view.operands) == 1:
            return self._pad
        return None

    def _regular(self, view: Any) -> bool:
        """Say whether an operation has the four loops of an image, each used as it is."""
        if len(view.attributes["iterator_types"]) != 4:
            return False
        return all(
            re.fullmatch(r"d\d|0", result)
            for one in view.attributes["indexing_maps"]
            for result in _results(str(one))
        ) and not any(
            inner.operation.name == "linalg.index"
            for block in view.regions[0].blocks
            for inner in block.operations
        )

    def _window(self, view: Any) -> Any:
        image, kernel, start = view.operands
        name = _WINDOWS.get(view.name)
        if name is None:
            name, order = _FILTERS[view.name]
            given = kernel in self._given
            kernel = self._transposed(kernel, order)
            # Those of constants stay as they are: IREE transposes them once, when it loads them.
            kernel = self._kept(kernel) if given else kernel
        # Each of them is [1, 1] where a module does not write it.
        sizes = {
            key: list(self._ir.DenseIntElementsAttr(view.attributes[key]))
            for key in ("strides", "dilations")
            if key in view.attributes
        }
        op = getattr(self._linalg, name)(self._of(image), kernel, outs=[self._of(start)], **sizes)
        return op if hasattr(op, "type") else op.results[0]

    def _generic(self, view: Any) -> Any:
        images = {
            place: self._of(value) for place, value in enumerate(view.operands) if _rank(value) == 4
        }
        copy = view.clone().operation
        maps = []
        for place, one in enumerate(view.attributes["indexing_maps"]):
            results = [
                result if result == "0" else f"d{LAST.index(int(result[1:]))}"
                for result in _results(str(one))
            ]
            if place in images:
                copy.operands[place] = images[place]
                results = [results[source] for source in LAST]
            text = f"affine_map<(d0, d1, d2, d3) -> ({', '.join(results)})>"
            maps.append(self._ir.Attribute.parse(text))
        loops = list(view.attributes["iterator_types"])
        copy.attributes["indexing_maps"] = self._ir.ArrayAttr.get(maps)
        copy.attributes["iterator_types"] = self._ir.ArrayAttr.get([loops[each] for each in LAST])
        return self._typed(copy)

    def _pad(self, view: Any) -> Any:
        image = self._of(view.operands[0])
        copy = view.clone().operation
        copy.operands[0] = image
        for key in ("static_low", "static_high"):
            sizes = list(view.attributes[key])
            copy.attributes[key] = self._ir.DenseI64ArrayAttr.get([sizes[each] for each in LAST])
        return self._typed(copy)

    def _typed(self, copy: Any) -> Any:
        result = copy.results[0]
        result.set_type(self._ordered(result.type, LAST))
        return result

    def _of(self, value: Any) -> Any:
        if value in self._last:
            return self._last[value]
        owner = value.owner
        name = owner.operation.name if hasattr(owner, "operation") else ""
        if name == "tensor.empty":
            kind = self._ordered(value.type, LAST)
            result = self._tensor.EmptyOp(list(kind.shape), kind.element_type).result
        elif name == "linalg.fill":
            filled = owner.operation
            result = self._linalg.fill(filled.operands[0], outs=[self._of(filled.operands[1])])
            result = result if hasattr(result, "type") else result.results[0]
        else:
            result = self._kept(self._transposed(value, LAST))
        self._last[value] = result
        return result

    def _kept(self, value: Any) -> Any:
        """Return a value that IREE does not fuse with what follows.

        A convolution that reads an image or filters in the old layout takes 14 to 20 times as long.
        """
        return self._ir.Operation.create(
            "util.optimization_barrier", results=[value.type], operands=[value]
        ).results[0]

    def _transposed(self, value: Any, order: Sequence[int]) -> Any:
        kind = self._ordered(value.type, order)
        empty = self._tensor.EmptyOp(list(kind.shape), kind.element_type).result
        op = self._linalg.transpose(value, outs=[empty], permutation=list(order))
        return op if hasattr(op, "type") else op.results[0]

    def _ordered(self, kind: Any, order: Sequence[int]) -> Any:
        shape = self._ir.RankedTensorType(kind)
        return self._ir.RankedTensorType.get(
            [shape.shape[place] for place in order], shape.element_type
        )

    def _back(self, operation: Any) -> None:
        view = operation.operation
        for place, value in enumerate(view.operands):
            if value in self._last and _comes_from(value, self._done):
                with self._ir.InsertionPoint(operation):
                    view.operands[place] = self._transposed(self._last[value], FIRST)


def _comes_from(value: Any, done: list[Any]) -> bool:
    owner = value.owner
    return hasattr(owner, "operation") and any(owner.operation == each for each in done)


def _rank(value: Any) -> int:
    match = re.match(r"tensor<((?:\d+x)*)", str(value.type))
    return match[1].count("x") if match else -1


def _results(text: str) -> list[str]:
    inside = text.partition("-> (")[2].rpartition(")")[0]
    return [each for each in inside.split(", ") if each]
