"""Official checkpoints of RWKV-7: into a run and back, and files that are none."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tokmill.base.errors import TokmillError
from tokmill.cli import main
from tokmill.models.model_inputs import Inputs
from tokmill.models.rwkv.rwkv7 import RWKV7, RWKV7Config
from tokmill.training.engines.tensors import write_tensors
from tokmill.training.runs.run import load_task, read_run
from tokmill.training.runs.weight_files import export_file, import_file

CONFIG = RWKV7Config(
    dim=16, layers=2, head_dim=8, hidden=24, decay_rank=3, rate_rank=5, value_rank=2, gate_rank=7
)


def checkpoint(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return tensors as official code names them."""
    torch.manual_seed(0)
    model = RWKV7(CONFIG, Inputs({"token": 11}))
    named = {
        name.replace("fields.embeddings.column_token", "emb"): torch.randn_like(value).to(dtype)
        for name, value in model.state_dict().items()
    }
    return {**named, "head.weight": torch.randn(11, 16).to(dtype)}


def test_a_file_becomes_a_run_and_the_run_the_same_file(tmp_path: Path) -> None:
    tensors = checkpoint()
    torch.save(tensors, tmp_path / "a.pth")
    run = import_file(tmp_path / "a.pth", tmp_path / "run", length=64)
    config, facts = read_run(run.path)
    assert config.model == CONFIG and facts.columns == {"token": 11}
    assert (config.task.length, config.task.tied) == (64, False)
    for suffix in (".pth", ".safetensors"):
        again = import_file(export_file(run.path, tmp_path / f"b{suffix}"), tmp_path / suffix[1:])
        one, other = (load_task(path).state_dict() for path in (run.path, again.path))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    back = torch.load(tmp_path / "b.pth", weights_only=True)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    plain = torch.load(export_file(run.path, tmp_path / "c.pt"), weights_only=True)
    assert all(torch.equal(plain[name], one[name]) for name in one)


def test_half_precision_flat_vectors_and_unused_tensors(tmp_path: Path) -> None:
    """As published checkpoints have them."""
    tensors = checkpoint(torch.bfloat16)
    for name in list(tensors):
        if name.startswith("blocks.0.att.v") and name[-1] in "012":
            del tensors[name]
        elif tensors[name].ndim == 3:
            tensors[name] = tensors[name].flatten()
    write_tensors(tmp_path / "a.safetensors", tensors)
    with pytest.raises(SystemExit) as left:
        main(["model", "import", str(tmp_path / "a.safetensors"), "-o", str(tmp_path / "r")])
    assert left.value.code == 0
    state = load_task(tmp_path / "r").state_dict()
    assert state["model.blocks.1.att.x_r"].shape == (1, 1, 16)
    assert not state["model.blocks.0.att.v1"].any()
    found = state["heads.linear.column_token.weight"]
    torch.testing.assert_close(found, tensors["head.weight"].float())


def test_files_that_are_no_rwkv(tmp_path: Path) -> None:
    def refused(match: str, tensors: object) -> None:
        torch.save(tensors, tmp_path / "a.pth")
        with pytest.raises(TokmillError, match=match) as caught:
            import_file(tmp_path / "a.pth", tmp_path / "run")
        assert caught.value.hint
        assert not (tmp_path / "run").exists()

    tensors = checkpoint()
    refused("no dict of tensors", [1, 2])
    refused("no RWKV-7", {"emb.weight": torch.zeros(3, 4)})
    refused("also holds the tensors blocks.1.more", {**tensors, "blocks.1.more": torch.zeros(3)})
    lacking = {name: t for name, t in tensors.items() if name != "blocks.1.att.w0"}
    refused(r"lacks the tensors blocks\.1\.att\.w0", lacking)
    refused("not floats of", {**tensors, "ln_out.bias": torch.zeros(5)})
    refused("holds more than tensors", {"emb.weight": print})


def test_files_that_are_no_checkpoint(tmp_path: Path) -> None:
    torch.save(checkpoint(), tmp_path / "whole.pth")
    contents = {
        "pickle.pth": pickle.dumps(print),
        "text.pth": b"hello",
        "cut.pth": (tmp_path / "whole.pth").read_bytes()[:-99],
        "text.safetensors": b"hello",
        "d.txt": b"hello",
        "own.pt": (tmp_path / "whole.pth").read_bytes(),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for name, match, hint in (
        ("pickle.pth", "not a checkpoint of torch", "torch.save"),
        ("text.pth", "not a checkpoint of torch", "torch.save"),
        ("cut.pth", "damaged", "again"),
        ("text.safetensors", "damaged", "fetch the file again"),
        ("none.pth", "there is no such file", "RWKV-7"),
        ("none.safetensors", "there is no such file", "RWKV-7"),
        ("d.txt", "ends in", "save_pretrained"),
        ("own.pt", "torch.load alone", "--from RUN"),
    ):
        with pytest.raises(SystemExit) as left:
            main(["model", "import", str(tmp_path / name), "-o", str(tmp_path / "run")])
        assert left.value.code in (1, 2)
        with pytest.raises(TokmillError, match=match) as caught:
            import_file(tmp_path / name, tmp_path / "run")
        assert hint in caught.value.hint and "hf download" not in str(caught.value), name
