"""Every task on a GPU: the losses of the CPU, resumes that are exact, and what is made of a run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tokmill
from object_servers import free_port
from task_cases import CASES, make_stores, recipe, store_of
from task_runs import train_all
from toy import cycles, losses, make_store, text_store, weights
from toy import recipe as toy_recipe

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
KINDS: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu"},
    "bf16": {"device": DEVICE, "precision": "bf16"},
    "recomputing": {"device": DEVICE, "recompute": True},
}
RWKV = {"kind": "rwkv7", "dim": 128, "layers": 2, "head_dim": 64}
"""With heads that fla's kernels take."""
TEXTS = [f"{'abcdefgh'[i % 8 :]}{'abcdefgh' * 4}"[:24] for i in range(64)]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stores(tmp_path_factory.mktemp("stores"))


@pytest.fixture(scope="module")
def runs(stores: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every task: on the GPU, whole and resumed; and in other ways."""
    root = tmp_path_factory.mktemp("runs")
    train_all(CASES, lambda name: recipe(stores, name, device=DEVICE), root)
    for name in CASES:
        for kind, keys in KINDS.items():
            tokmill.train(recipe(stores, name, **keys), root / name / kind, quiet=True)
    return root


@pytest.mark.parametrize("name", CASES)
def test_the_gpu_computes_what_the_cpu_does(runs: Path, name: str) -> None:
    whole = runs / name / "whole"
    for metric in ("loss", "grad_norm", "val_loss"):
        found, cpu = losses(whole, metric), losses(runs / name / "cpu", metric)
        assert found and found == pytest.approx(cpu, rel=2e-3, abs=2e-4), metric
        rounded = losses(runs / name / "bf16", metric)
        assert rounded == pytest.approx(found, rel=0.1, abs=0.05), metric
    again = losses(runs / name / "recomputing")
    assert again == pytest.approx(losses(whole), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_is_the_same_to_the_bit(runs: Path, name: str) -> None:
    whole, parts = (weights(runs / name / kind) for kind in ("whole", "parts"))
    assert all(torch.equal(value, parts[key]) for key, value in whole.items())
    assert losses(runs / name / "whole") == losses(runs / name / "parts")


@pytest.mark.parametrize("name", CASES)
def test_a_run_of_the_gpu_is_read_on_both(runs: Path, stores: Path, name: str) -> None:
    run, store = runs / name / "whole", stores / f"{store_of(name)}-val"
    on = {device: tokmill.evaluate(run, store, device=device) for device in (DEVICE, "cpu")}
    assert on[DEVICE]["loss"] == pytest.approx(on["cpu"]["loss"], rel=2e-3, abs=2e-4)


@pytest.mark.parametrize("precision, near", [("fp32", 2e-3), ("bf16", 5e-2)])
def test_rwkv7_on_a_gpu(tmp_path: Path, precision: str, near: float) -> None:
    """In fp32 by chunks, in bf16 by fla's kernels where they are installed."""
    store = make_store(tmp_path / "store", cycles(60))
    for device, kind in (("cpu", "fp32"), (DEVICE, precision)):
        value = toy_recipe(store, 8, task={"length": 64}, run={"device": device, "precision": kind})
        tokmill.train({**value, "model": RWKV}, tmp_path / device, quiet=True)
    assert losses(tmp_path / DEVICE) == pytest.approx(losses(tmp_path / "cpu"), rel=near)


@pytest.mark.parametrize("name", ["next_token", "masked", "rwkv7"])
def test_compiled_blocks_compute_the_same(stores: Path, tmp_path: Path, name: str) -> None:
    """Documents of several lengths in a row, in bf16: with the kernel for documents."""
    value = recipe(stores, "next_token" if name == "rwkv7" else name, device=DEVICE)
    value["run"]["precision"] = "bf16"
    if name == "rwkv7":
        value |= {"model": RWKV, "task": {"length": 64}}
    for compiled in (False, True):
        value["run"]["compile"] = compiled
        tokmill.train(value, tmp_path / str(compiled), quiet=True)
    for metric in ("loss", "grad_norm"):
        plain, found = (losses(tmp_path / kind, metric) for kind in ("False", "True"))
        assert found == pytest.approx(plain, rel=0.05, abs=0.02)


@pytest.mark.parametrize("kind", ["decoder", "rwkv7"])
def test_sampled_text_is_that_of_the_cpu(tmp_path: Path, kind: str) -> None:
    """The most likely bytes of a model that has learned the rule."""
    store = text_store(tmp_path / "store", TEXTS)
    value = toy_recipe(store, 100, task={"length": 24}, run={"device": DEVICE})
    if kind == "rwkv7":
        value["model"] = RWKV
    run = tokmill.train(value, tmp_path / "run", quiet=True).path
    on = {
        device: [
            one.text
            for one in tokmill.generate(
                run, ["abcd", "efghab"], tokens=12, temperature=0.0, device=device
            )
        ]
        for device in (DEVICE, "cpu")
    }
    assert on[DEVICE] == on["cpu"] and "efgh" in on["cpu"][0]


@pytest.mark.parametrize("kind", ["adamw", "muon", "bert_adam"])
def test_each_optimiser(tmp_path: Path, kind: str) -> None:
    store = make_store(tmp_path / "store", cycles(60))
    for device in ("cpu", DEVICE):
        value = toy_recipe(store, 8, optim={"kind": kind, "lr": 2e-3}, run={"device": device})
        tokmill.train(value, tmp_path / device, quiet=True)
    # Muon's products are in bf16.
    assert losses(tmp_path / DEVICE) == pytest.approx(losses(tmp_path / "cpu"), rel=1e-2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_on_one_gpu(tmp_path: Path, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed", reason="needs the extra deepspeed")
    # Several of these tests may run at once.
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    store = make_store(tmp_path / "store", cycles(60))
    single = toy_recipe(store, 8, run={"device": DEVICE})
    tokmill.train(single, tmp_path / "single", quiet=True)
    shared = toy_recipe(store, 8, run={"device": DEVICE, "engine": "deepspeed"})
    shared["engine"] = {"deepspeed": {"zero_optimization": {"stage": stage}}}
    try:
        tokmill.train(shared, tmp_path / "shared", quiet=True)
    finally:
        from deepspeed import comm

        if torch.distributed.is_initialized():
            comm.destroy_process_group()
    assert losses(tmp_path / "shared") == pytest.approx(losses(tmp_path / "single"), rel=1e-3)


def test_vectors_are_those_of_the_cpu(runs: Path, stores: Path) -> None:
    from tokmill.inference.embed import embed_store

    vectors = []
    for device in (DEVICE, "cpu"):
        made = embed_store(
            runs / "contrastive/whole", stores / "walks-val", device=device, name=device
        )
        store = tokmill.Store(stores / "walks-val", [made.overlay])
        vectors.append(np.asarray(store.column("embedding")))
    np.testing.assert_allclose(*vectors, rtol=2e-3, atol=2e-4)
