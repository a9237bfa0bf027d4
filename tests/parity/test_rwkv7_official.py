"""RWKV-7 beside the official inference package, on the same random weights."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tokmill.models.model import Inputs, Tensors
from tokmill.models.rwkv.rwkv7 import RWKV7, RWKV7Config

pytest.importorskip("rwkv", reason="tests/parity/readers.txt is not installed")

IDS = 97
OFFICIAL = """
import json, sys
from rwkv.model import RWKV
model = RWKV(model=sys.argv[1], strategy="cpu fp32")
ids = json.loads(sys.argv[2])
whole = model.forward(ids, None, full_output=True)[0]
json.dump(whole.tolist(), open(sys.argv[3], "w"))
"""


@pytest.mark.parametrize("config", [RWKV7Config(dim=128, layers=3), RWKV7Config(dim=192, layers=1)])
def test_logits_equal_the_official_ones(
    config: RWKV7Config, tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole sequence at once, a position after the other, and the peer of the benchmark."""
    torch.manual_seed(0)
    model = RWKV7(config, Inputs({"token": IDS})).eval()
    head = torch.empty(IDS, config.dim)
    model.init_head(head)
    with torch.no_grad():
        for parameter in model.parameters():
            width = parameter.shape[-1] if parameter.ndim == 2 else 25
            parameter.add_(torch.randn_like(parameter) * 0.5 * width**-0.5)
    weights = {
        name.replace("fields.embeddings.column_token", "emb"): value.clone()
        for name, value in model.state_dict().items()
    }
    torch.save({**weights, "head.weight": head}, tmp_path / "official.pth")
    ids = torch.randint(0, IDS, (75,))
    expected = official(tmp_path, ids.tolist())

    with torch.no_grad():
        place = torch.arange(75)[None]
        batch = Tensors({"token": ids[None]}, torch.zeros_like(place), place, whole=True)
        whole = model(batch)[0] @ head.t()
        state, steps = model.start(1), []
        for place in range(75):
            hidden, state = model.run({"token": ids[None, place : place + 1]}, state)
            steps.append(hidden[0, 0] @ head.t())
    monkeypatch.syspath_prepend(repository / "benchmarks" / "peers")
    formula = importlib.import_module("rwkv7_formula")
    monkeypatch.setattr(formula, "compiled", lambda: formula.positions)
    begins = torch.arange(75)[None] == 0
    heads = config.dim // config.head_dim
    with torch.no_grad():
        embedded = F.embedding(ids[None], weights["emb.weight"])
        peer = formula.hidden(embedded, begins, weights, config.layers, heads)[0] @ head.t()
    scale = expected.abs().max()
    assert scale > 0.5
    assert (whole - expected).abs().max() <= 1e-5 * scale
    assert (peer - expected).abs().max() <= 1e-5 * scale
    assert (torch.stack(steps) - expected).abs().max() <= 1e-5 * scale


def official(folder: Path, ids: list[int]) -> torch.Tensor:
    """Return the logits of the official package, which prints and warns as it likes."""
    environment = {**os.environ, "RWKV_V7_ON": "1", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}
    arguments = [str(folder / "official"), json.dumps(ids), str(folder / "logits.json")]
    done = subprocess.run(
        [sys.executable, "-c", OFFICIAL, *arguments],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return torch.tensor(json.loads((folder / "logits.json").read_text()))
