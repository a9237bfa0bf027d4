"""Write a small convolutional network with random weights as ONNX: python small_model.py FILE"""

from __future__ import annotations

import sys

import numpy as np
from onnx import TensorProto, checker, helper, numpy_helper, save

CHANNELS = (3, 32, 64, 128)
SIZE = 64


def main() -> None:
    """Write the file: three convolutions with ReLU, the mean of each channel, ten numbers."""
    draw = np.random.default_rng(0)
    nodes, weights, last = [], [], "image"
    for i, (into, out) in enumerate(zip(CHANNELS, CHANNELS[1:], strict=False)):
        weight = draw.normal(0, (2 / (9 * into)) ** 0.5, (out, into, 3, 3)).astype(np.float32)
        weights.append(numpy_helper.from_array(weight, f"weight{i}"))
        stride = 1 if i == 0 else 2
        words = {"pads": [1, 1, 1, 1], "strides": [stride, stride]}
        nodes.append(helper.make_node("Conv", [last, f"weight{i}"], [f"conv{i}"], **words))
        nodes.append(helper.make_node("Relu", [f"conv{i}"], [f"relu{i}"]))
        last = f"relu{i}"
    weight = draw.normal(0, 0.1, (CHANNELS[-1], 10)).astype(np.float32)
    weights.append(numpy_helper.from_array(weight, "head"))
    nodes += [
        helper.make_node("GlobalAveragePool", [last], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["flat"]),
        helper.make_node("MatMul", ["flat", "head"], ["classes"]),
    ]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, SIZE, SIZE])
    classes = helper.make_tensor_value_info("classes", TensorProto.FLOAT, [1, 10])
    graph = helper.make_graph(nodes, "small", [image], [classes], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    checker.check_model(model, full_check=True)
    save(model, sys.argv[1])


if __name__ == "__main__":
    main()
