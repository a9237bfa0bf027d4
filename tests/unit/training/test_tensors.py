"""Safetensors files: the library reads ours, we read the library's."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from tokmill.base.errors import TokmillError
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


@pytest.mark.parametrize("cut", [0, 5, 40, -1])
def test_damage_is_an_error(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x"
    write_tensors(path, TENSORS)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(TokmillError, match="damaged"):
        read_tensors(path)


def test_a_wrong_header_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes((12).to_bytes(8, "little") + b'{"a": [1,2]}' + b"\0" * 8)
    with pytest.raises(TokmillError, match="damaged"):
        read_tensors(path)
