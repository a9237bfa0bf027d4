"""Modules of single operations and short chains, made from sizes.

Each function returns the text of a module: `@main` takes tensors that are read and returns what
is computed, in f32. Chains are operations one after the other: `chain("matmul 64 64 64, relu")`.
"""

from collections.abc import Callable
from typing import NamedTuple

from tokmill.base.errors import UsageError, nearest
from tokmill.base.progress import human_count

LONGEST = 5
"""Operations of a chain."""


class Tensor(NamedTuple):
    """A value of a module that is being written."""

    name: str
    shape: tuple[int, ...]

    @property
    def type(self) -> str:
        return f"tensor<{'x'.join(map(str, self.shape))}xf32>"


class Writer:
    """The text of a function as it grows: inputs, and operations one after the other."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        self.lines: list[str] = []
        self._values = 0

    def input(self, *shape: int) -> Tensor:
        self.inputs.append(Tensor(f"%a{len(self.inputs)}", shape))
        return self.inputs[-1]

    def value(self, shape: tuple[int, ...], text: str) -> Tensor:
        name = f"%{self._values}"
        self._values += 1
        self.lines.append(f"    {name} = {text}")
        return Tensor(name, shape)

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor without content, which an operation fills."""
        tensor = Tensor("", shape)
        return self.value(shape, f"tensor.empty() : {tensor.type}")

    def filled(self, shape: tuple[int, ...], with_: str) -> Tensor:
        empty = self.empty(shape)
        number = self.value((), f"arith.constant {with_} : f32")
        return self.value(
            shape,
            f"linalg.fill ins({number.name} : f32) outs({empty.name} : {empty.type}) "
            f"-> {empty.type}",
        )

    def operation(
        self, name: str, inputs: list[Tensor], output: Tensor, attributes: str = ""
    ) -> Tensor:
        names = ", ".join(one.name for one in inputs)
        types = ", ".join(one.type for one in inputs)
        return self.value(
            output.shape,
            f"linalg.{name} {attributes}ins({names} : {types}) "
            f"outs({output.name} : {output.type}) -> {output.type}",
        )

    def generic(
        self,
        inputs: list[Tensor],
        output: Tensor,
        maps: list[str],
        iterators: list[str],
        body: list[str],
        result: str,
    ) -> Tensor:
        """Write an operation by its maps and the lines of its body (`%x0`, …, `%y`)."""
        loops = ", ".join(f"d{i}" for i in range(len(iterators)))
        text = ", ".join(f"affine_map<({loops}) -> ({one})>" for one in maps)
        kinds = ", ".join(f'"{one}"' for one in iterators)
        names = ", ".join(one.name for one in inputs)
        types = ", ".join(one.type for one in inputs)
        arguments = ", ".join(f"%x{i}: f32" for i in range(len(inputs)))
        inner = "\n".join(f"      {line}" for line in [*body, f"linalg.yield {result} : f32"])
        return self.value(
            output.shape,
            f"linalg.generic {{indexing_maps = [{text}], iterator_types = [{kinds}]}} "
            f"ins({names} : {types}) outs({output.name} : {output.type}) {{\n"
            f"    ^bb0({arguments}, %y: f32):\n{inner}\n    }} -> {output.type}",
        )

    def module(self, result: Tensor) -> str:
        arguments = ", ".join(f"{one.name}: {one.type}" for one in self.inputs)
        lines = "\n".join(self.lines)
        return (
            f"module {{\n  func.func @main({arguments}) -> {result.type} {{\n{lines}\n"
            f"    return {result.name} : {result.type}\n  }}\n}}\n"
        )


def _matmul(w: Writer, left: Tensor, n: int) -> Tensor:
    right = w.input(left.shape[1], n)
    return w.operation("matmul", [left, right], w.filled((left.shape[0], n), "0.0"))


def _batch_matmul(w: Writer, left: Tensor, n: int) -> Tensor:
    right = w.input(left.shape[0], left.shape[2], n)
    return w.operation("batch_matmul", [left, right], w.filled((*left.shape[:2], n), "0.0"))


def _window(stride: int) -> str:
    return f"{{dilations = dense<1> : vector<2xi64>, strides = dense<{stride}> : vector<2xi64>}} "


def _conv_nchw(w: Writer, image: Tensor, f: int, k: int, s: int = 1) -> Tensor:
    kernel = w.input(f, image.shape[1], k, k)
    high, wide = ((size - k) // s + 1 for size in image.shape[2:])
    out = w.filled((image.shape[0], f, high, wide), "0.0")
    return w.operation("conv_2d_nchw_fchw", [image, kernel], out, _window(s))


def _conv_nhwc(w: Writer, image: Tensor, f: int, k: int, s: int = 1) -> Tensor:
    kernel = w.input(k, k, image.shape[3], f)
    high, wide = ((size - k) // s + 1 for size in image.shape[1:3])
    out = w.filled((image.shape[0], high, wide, f), "0.0")
    return w.operation("conv_2d_nhwc_hwcf", [image, kernel], out, _window(s))


def _pooling(w: Writer, image: Tensor, k: int, s: int = 1) -> Tensor:
    window = w.empty((k, k))
    high, wide = ((size - k) // s + 1 for size in image.shape[2:])
    out = w.filled((*image.shape[:2], high, wide), "0xFF800000")
    return w.operation("pooling_nchw_max", [image, window], out, _window(s))


def _same(shape: tuple[int, ...]) -> str:
    return ", ".join(f"d{i}" for i in range(len(shape)))


def _add(w: Writer, left: Tensor) -> Tensor:
    return w.operation("add", [left, w.input(*left.shape)], w.empty(left.shape))


def _relu(w: Writer, source: Tensor) -> Tensor:
    same = _same(source.shape)
    body = ["%z = arith.constant 0.0 : f32", "%r = arith.maximumf %x0, %z : f32"]
    kinds = ["parallel"] * len(source.shape)
    return w.generic([source], w.empty(source.shape), [same, same], kinds, body, "%r")


def _exp(w: Writer, source: Tensor) -> Tensor:
    same = _same(source.shape)
    kinds = ["parallel"] * len(source.shape)
    body = ["%r = math.exp %x0 : f32"]
    return w.generic([source], w.empty(source.shape), [same, same], kinds, body, "%r")


def _reduce(w: Writer, source: Tensor) -> Tensor:
    if len(source.shape) < 2:
        raise UsageError(
            "a reduction needs two dimensions or more", hint="for example `reduce 64 128`"
        )
    loops = _same(source.shape)
    kinds = ["parallel"] * (len(source.shape) - 1) + ["reduction"]
    kept = _same(source.shape[:-1])
    out = w.filled(source.shape[:-1], "0.0")
    return w.generic([source], out, [loops, kept], kinds, ["%r = arith.addf %x0, %y : f32"], "%r")


def _softmax(w: Writer, source: Tensor) -> Tensor:
    """Exponentials, their sums along the last dimension, and the quotients: three operations."""
    above = _exp(w, source)
    sums = _reduce(w, above)
    same, kept = _same(above.shape), _same(above.shape[:-1])
    kinds = ["parallel"] * len(above.shape)
    body = ["%r = arith.divf %x0, %x1 : f32"]
    return w.generic([above, sums], w.empty(above.shape), [same, kept, same], kinds, body, "%r")


Read = Callable[..., tuple[tuple[int, ...], tuple[int, ...]]]
"""All sizes of an operation → the shape of what it reads first, and its other sizes."""


class _Kind(NamedTuple):
    write: Callable[..., Tensor]
    read: Read
    fewest: int
    most: int
    sizes: str
    continued: tuple[int, int]
    """How many sizes it takes when it goes on from another operation, at least and at most."""
    rank: int | None = None
    """Dimensions of what it goes on from; None for any."""


def _nchw(n: int, c: int, h: int, *new: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (n, c, h, h), new


def _all(*shape: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return shape, ()


GENERATORS: dict[str, _Kind] = {
    "matmul": _Kind(_matmul, lambda m, n, k: ((m, k), (n,)), 3, 3, "M N K", (1, 1), 2),
    "batch_matmul": _Kind(
        _batch_matmul, lambda b, m, n, k: ((b, m, k), (n,)), 4, 4, "B M N K", (1, 1), 3
    ),
    "conv_2d_nchw": _Kind(_conv_nchw, _nchw, 5, 6, "N C H F K [STRIDE]", (2, 3), 4),
    "conv_2d_nhwc": _Kind(
        _conv_nhwc, lambda n, c, h, *new: ((n, h, h, c), new), 5, 6, "N C H F K [STRIDE]", (2, 3), 4
    ),
    "pooling": _Kind(_pooling, _nchw, 4, 5, "N C H K [STRIDE]", (1, 2), 4),
    "add": _Kind(_add, _all, 1, 6, "D…", (0, 0)),
    "relu": _Kind(_relu, _all, 1, 6, "D…", (0, 0)),
    "exp": _Kind(_exp, _all, 1, 6, "D…", (0, 0)),
    "reduce": _Kind(_reduce, _all, 2, 6, "D…", (0, 0)),
    "softmax": _Kind(_softmax, _all, 2, 6, "D…", (0, 0)),
}
"""Name → how it is written. Images are square; no padding."""


def chain(text: str) -> str:
    """Return a module by a line such as `matmul 256 512 1024` or `matmul 64 64 64, relu`.

    Operations after the first take the result of the one before and only the sizes that are new:
    `matmul N`, `batch_matmul N`, `conv_2d_… F K [STRIDE]`, `pooling K [STRIDE]`, and none for the
    others.

    Raises `UsageError` for unknown names, wrong counts of sizes, and sizes that do not fit.
    """
    parts = [part.split() for part in text.split(",")]
    if len(parts) > LONGEST or not all(parts):
        raise UsageError(
            f"{text!r} is a chain of {len(parts)} operations",
            hint=f"a chain has 1 to {LONGEST}, with a comma between them",
        )
    writer, value = Writer(), None
    for name, *words in parts:
        if name not in GENERATORS:
            hint = nearest(name, GENERATORS)
            if name.endswith(".mlir"):
                hint = "folders of files go into task.benchmarks_folder_path, held_out_folder_path"
            raise UsageError(f"{name!r} in {text!r} is not an operation", hint=hint)
        value = _continue(writer, value, name, _sizes(words, text), text)
    assert value is not None
    return writer.module(value)


def _sizes(words: list[str], text: str) -> list[int]:
    if not all(word.isdecimal() and 0 < int(word) < 1 << 31 for word in words):
        raise UsageError(
            f"the sizes in {text!r} are not all positive numbers", hint="as in `matmul 64 64 64`"
        )
    return [int(word) for word in words]


def _continue(
    writer: Writer, before: Tensor | None, name: str, sizes: list[int], text: str
) -> Tensor:
    kind = GENERATORS[name]
    if before is None:
        if not kind.fewest <= len(sizes) <= kind.most:
            raise UsageError(
                f"{name} in {text!r} has {human_count(len(sizes), 'size')}",
                hint=f"{name} {kind.sizes}",
            )
        shape, new = kind.read(*sizes)
        result = kind.write(writer, writer.input(*shape), *new)
    else:
        rank, (least, most) = kind.rank or len(before.shape), kind.continued
        if len(before.shape) != rank or not least <= len(sizes) <= most:
            wanted = f"{least} or {most}" if least < most else f"{least}"
            raise UsageError(
                f"{name} with {human_count(len(sizes), 'size')} cannot follow a tensor of shape "
                f"{before.shape}",
                hint=f"it wants {rank} dimensions and {wanted} new sizes",
            )
        result = kind.write(writer, before, *sizes)
    if min(result.shape, default=1) < 1:
        raise UsageError(f"a window of {text!r} is larger than its image", hint=f"{kind.sizes}")
    return result
