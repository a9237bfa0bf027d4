"""Safetensors files: the library reads ours, we read the library's."""

from pathlib import Path

import safetensors.torch
import torch

from tokmill.training.engines.tensors import TYPES, read_tensors, write_tensors

TENSORS = {
    **{f"t.{name}": torch.arange(6).reshape(2, 3).to(dtype) for dtype, name in TYPES.items()},
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "turned": torch.arange(6.0).reshape(2, 3).T,
}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name])
        for name in left
    )


def test_both_ways(tmp_path: Path) -> None:
    write_tensors(tmp_path / "ours.safetensors", TENSORS, {"a": "b"})
    assert same(read_tensors(tmp_path / "ours.safetensors"), TENSORS)
    assert same(safetensors.torch.load_file(tmp_path / "ours.safetensors"), TENSORS)
    theirs = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    safetensors.torch.save_file(theirs, tmp_path / "theirs.safetensors")
    assert same(read_tensors(tmp_path / "theirs.safetensors"), TENSORS)


def test_equal_tensors_make_equal_files(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", TENSORS)
    write_tensors(tmp_path / "b", dict(reversed(TENSORS.items())))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
