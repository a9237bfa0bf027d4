"""Models of transformers' classes with random weights as ONNX files: ResNet-18 and others.

`python tests/helpers/onnx_models.py resnet18 mobilenet_v2 gpt2 -o FOLDER` writes them.
"""

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

SEED = 0


def resnet18() -> tuple[Any, Any]:
    """Return ResNet-18 on an image of 224 × 224."""
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}
    config = ResNetConfig(embedding_size=64, layer_type="basic", num_labels=1000, **sizes)
    return ResNetForImageClassification(config), torch.randn(1, 3, 224, 224)


def mobilenet_v2() -> tuple[Any, Any]:
    """Return MobileNetV2 on an image of 224 × 224."""
    import torch
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    made = MobileNetV2ForImageClassification(MobileNetV2Config(num_labels=1000))
    # As initialised, its numbers shrink from layer to layer until no input changes its results.
    # One pass in training sets the means and variances of the norms to those of an input.
    for layer in made.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.momentum = 1.0
    image = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        made.train()(image)
    return made.eval(), image


def gpt2() -> tuple[Any, Any]:
    """Return a GPT-2 of 4 layers, 256 wide, on 64 tokens."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    special = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(
        n_layer=4, n_embd=256, n_head=4, vocab_size=5000, use_cache=False, **special
    )
    return GPT2LMHeadModel(config), torch.randint(0, 5000, (1, 64))


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "resnet18": resnet18,
    "mobilenet_v2": mobilenet_v2,
    "gpt2": gpt2,
}


def write(name: str, folder: Path) -> Path:
    """Write a model with its weights in one file, and return its path."""
    import torch

    class Logits(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Any) -> Any:
            return self.inner(x).logits

    torch.manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, example = MODELS[name]()
        made = torch.onnx.export(
            Logits(model).eval(), (example,), dynamo=True, opset_version=18, verbose=False
        )
    assert made is not None
    path = folder / f"{name}.onnx"
    made.save(path, external_data=False)
    return path


def small_model(path: Path, rows: int | str = 4) -> Path:
    """Write a model: two equal products of matrices with relu, and a sum."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weights = numpy_helper.from_array(np.ones((8, 8), np.float32), "w")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "w"], ["c"]),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("Add", ["d", "x"], ["y"]),
    ]
    given, made = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, 8]) for name in ("x", "y")
    )
    graph = helper.make_graph(nodes, "g", [given], [made], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, path)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=MODELS)
    parser.add_argument("-o", dest="folder", type=Path, default=Path())
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    for one in asked.names:
        print(write(one, asked.folder))
