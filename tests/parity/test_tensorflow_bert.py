"""A BERT that TensorFlow wrote, in transformers: the same weights, and the same results.

transformers 5 has no loader for checkpoints of TensorFlow. So the peer of its results is BERT
written out in numpy on TensorFlow's own variables, inputs times kernel (Devlin et al. 2018).
"""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tokmill.training.runs.exchange import export_model
from tokmill.training.runs.tensorflow.google_bert_run import import_bert

GOLDEN = Path(__file__).parents[1] / "golden" / "tensorflow"
HEADS = 2

# In a process of its own: the warnings of transformers are not ours.
PEER = """
import sys, torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, BertForPreTraining
folder = sys.argv[1]
model, told = BertForPreTraining.from_pretrained(
    folder, attn_implementation="eager", output_loading_info=True)
assert not any(told.values()), told
tokenizer = AutoTokenizer.from_pretrained(folder)
assert tokenizer.tokenize("MOV Raxl callx") == ["mov", "rax", "##l", "call", "##x"]
asked = dict(tokenizer("mov rax", "call", return_tensors="pt"))
assert asked["input_ids"].tolist() == [[2, 5, 6, 3, 7, 3]]
with torch.no_grad():
    out = model.eval()(**asked, output_hidden_states=True)
save_file({"hidden": out.hidden_states[-1], "words": out.prediction_logits,
    "next": out.seq_relationship_logits, **asked}, folder + "/seen.safetensors")
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("bert") / "out"
    import_bert(GOLDEN / "two-shards", folder.parent / "run")
    export_model(folder.parent / "run", folder)
    subprocess.run([sys.executable, "-c", PEER, folder], check=True)
    return load_file(folder / "seen.safetensors")


def test_transformers_computes_what_the_variables_of_tensorflow_say(seen: dict[str, Any]) -> None:
    with np.load(GOLDEN / "bert/expected.npz") as expected:
        v = {name: expected[name].astype(np.float64) for name in expected.files}

    def dense(x: Any, name: str) -> Any:
        return x @ v[f"{name}/kernel"] + v[f"{name}/bias"]

    def norm(x: Any, name: str) -> Any:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-12)
        return x * v[f"{name}/LayerNorm/gamma"] + v[f"{name}/LayerNorm/beta"]

    def gelu(x: Any) -> Any:
        return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2

    def heads(x: Any) -> Any:
        return x.reshape(len(x), HEADS, -1).swapaxes(0, 1)

    ids, segment = seen["input_ids"][0], seen["token_type_ids"][0]
    assert segment.tolist() == [0, 0, 0, 0, 1, 1]
    tables = [v[f"bert/embeddings/{n}_embeddings"] for n in ("word", "token_type", "position")]
    x = norm(tables[0][ids] + tables[1][segment] + tables[2][: len(ids)], "bert/embeddings")
    for number in range(2):
        layer = f"bert/encoder/layer_{number}"
        q, k, w = (
            heads(dense(x, f"{layer}/attention/self/{n}")) for n in ("query", "key", "value")
        )
        scores = np.exp(q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1]))
        y = scores / scores.sum(-1, keepdims=True) @ w
        y = dense(y.swapaxes(0, 1).reshape(x.shape), f"{layer}/attention/output/dense")
        x = norm(x + y, f"{layer}/attention/output")
        y = dense(gelu(dense(x, f"{layer}/intermediate/dense")), f"{layer}/output/dense")
        x = norm(x + y, f"{layer}/output")
    np.testing.assert_allclose(seen["hidden"][0], x, atol=1e-5)
    pooled = np.tanh(dense(x[0], "bert/pooler/dense"))
    after = pooled @ v["cls/seq_relationship/output_weights"].T
    after += v["cls/seq_relationship/output_bias"]
    np.testing.assert_allclose(seen["next"][0], after, atol=1e-5)
    name = "cls/predictions/transform"
    words = norm(gelu(dense(x, f"{name}/dense")), name) @ tables[0].T
    np.testing.assert_allclose(
        seen["words"][0], words + v["cls/predictions/output_bias"], atol=1e-5
    )
