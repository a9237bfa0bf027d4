"""Make the checkpoints of this folder with TensorFlow: `python make_checkpoints.py FOLDER`.

It was run once, with TensorFlow 2.21.0, and is kept so that anybody can see what the files hold.
The weights are random, so another run makes other files; the .npz files say what TensorFlow itself
reads from each checkpoint.

bert/           a small BERT as Google's code saves it, with Adam's slots, in one data shard
two-shards/     the same variables in two data shards
plain/          dtypes that are no BERT: float16, bfloat16, int32, int64, an empty one, no axes
version-1       a checkpoint of the older format, in one file
partitioned     a variable that was split in three parts
objects         what `tf.train.Checkpoint` of TensorFlow 2 writes
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import tensorflow as tf  # noqa: E402

v1 = tf.compat.v1

CONFIG = {
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 8,
    "initializer_range": 0.02,
    "intermediate_size": 12,
    "max_position_embeddings": 6,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "type_vocab_size": 2,
    "vocab_size": 11,
}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "mov", "rax", "call", "##l", "##x", "é"]


def bert_shapes() -> dict[str, tuple[int, ...]]:
    """Return name → shape of BERT's variables, as Google's modeling code makes them."""
    dim, hidden, words = (
        CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"],
    )  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {}

    def dense(name: str, inputs: int, outputs: int) -> None:
        shapes[f"{name}/kernel"] = (inputs, outputs)
        shapes[f"{name}/bias"] = (outputs,)

    def norm(name: str) -> None:
        shapes[f"{name}/LayerNorm/gamma"] = (dim,)
        shapes[f"{name}/LayerNorm/beta"] = (dim,)

    for name, rows in (
        ("word", words),
        ("token_type", CONFIG["type_vocab_size"]),
        ("position", CONFIG["max_position_embeddings"]),
    ):
        shapes[f"bert/embeddings/{name}_embeddings"] = (rows, dim)
    norm("bert/embeddings")
    for number in range(CONFIG["num_hidden_layers"]):
        layer = f"bert/encoder/layer_{number}"
        for name in ("query", "key", "value"):
            dense(f"{layer}/attention/self/{name}", dim, dim)
        dense(f"{layer}/attention/output/dense", dim, dim)
        norm(f"{layer}/attention/output")
        dense(f"{layer}/intermediate/dense", dim, hidden)
        dense(f"{layer}/output/dense", hidden, dim)
        norm(f"{layer}/output")
    dense("bert/pooler/dense", dim, dim)
    dense("cls/predictions/transform/dense", dim, dim)
    norm("cls/predictions/transform")
    shapes["cls/predictions/output_bias"] = (words,)
    shapes["cls/seq_relationship/output_weights"] = (2, dim)
    shapes["cls/seq_relationship/output_bias"] = (2,)
    return shapes


def bert_values() -> dict[str, np.ndarray]:
    """Return the variables of a BERT in training, with Adam's slots."""
    draw = np.random.default_rng(0)
    values: dict[str, np.ndarray] = {}
    for name, shape in bert_shapes().items():
        for slot in ("", "/adam_m", "/adam_v"):
            values[name + slot] = draw.normal(size=shape).astype(np.float32)
    values["global_step"] = np.asarray(1234, np.int64)
    return values


def plain_values() -> dict[str, np.ndarray]:
    """Return values of the other dtypes."""
    draw = np.random.default_rng(1)
    hard = np.asarray([0.0, -0.0, 1.5, np.inf, -np.inf, 1e-30, 3e38, 65504.0], np.float32)
    return {
        "float32": hard,
        "float16": draw.normal(size=(3, 5)).astype(np.float16),
        "bfloat16": tf.dtypes.bfloat16.as_numpy_dtype(hard),
        "int32": draw.integers(-(2**31), 2**31, (7,)).astype(np.int32),
        "int64": draw.integers(-(2**63), 2**63 - 1, (2, 2, 2)).astype(np.int64),
        "empty": np.zeros((0, 3), np.float32),
        "no_axes": np.asarray(2.5, np.float32),
        "bool": np.asarray([True, False]),
        # Names that share beginnings, for several blocks of the index.
        **{
            f"scope_{'deep/' * 9}{number:04d}": np.asarray([number], np.float32)
            for number in range(40)
        },
    }


def read(prefix: Path) -> dict[str, np.ndarray]:
    """Return what TensorFlow reads; bfloat16 as float32."""
    reader = tf.train.load_checkpoint(str(prefix))
    found: dict[str, np.ndarray] = {}
    for name in sorted(reader.get_variable_to_shape_map()):
        value = np.asarray(reader.get_tensor(name))
        found[name] = value.astype(np.float32) if value.dtype.name == "bfloat16" else value
    return found


def save(prefix: Path, values: dict[str, np.ndarray], version: int = 2) -> None:
    """Save variables as `tf.train.Saver` does."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with v1.Graph().as_default():
        for name, value in values.items():
            v1.get_variable(name, initializer=tf.constant(value), use_resource=False)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            saver = v1.train.Saver(write_version=version)
            saver.save(session, str(prefix), write_meta_graph=False, write_state=False)


def save_shards(prefix: Path, values: dict[str, np.ndarray]) -> None:
    """Save variables in two data shards, which are written apart and merged."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    parts = [f"{prefix}_temp/part-{number:05d}-of-00002" for number in range(2)]
    for number, part in enumerate(parts):
        names = list(values)[number::2]
        tf.raw_ops.SaveV2(
            prefix=part,
            tensor_names=names,
            shape_and_slices=[""] * len(names),
            tensors=[tf.constant(values[name]) for name in names],
        )
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=parts, destination_prefix=str(prefix), delete_old_dirs=True
    )


def save_partitioned(prefix: Path) -> None:
    """Save a variable of three parts."""
    with v1.Graph().as_default():
        v1.get_variable(
            "bert/embeddings/word_embeddings",
            initializer=tf.constant(np.arange(24, dtype=np.float32).reshape(6, 4)),
            partitioner=v1.fixed_size_partitioner(3),
            use_resource=False,
        )
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            v1.train.Saver().save(session, str(prefix), write_meta_graph=False, write_state=False)


def save_objects(prefix: Path) -> None:
    """Save what TensorFlow 2 calls an object-based checkpoint."""
    tf.train.Checkpoint(kernel=tf.Variable(np.arange(3, dtype=np.float32))).write(str(prefix))


def main(folder: Path) -> None:
    """Make all checkpoints."""
    values = bert_values()
    save(folder / "bert/bert_model.ckpt", values)
    for name in ("bert", "two-shards"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "bert_config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
        (folder / name / "vocab.txt").write_text("\n".join(WORDS) + "\n", "utf-8")
    save_shards(folder / "two-shards/model.ckpt-1234", values)
    save(folder / "plain/plain", plain_values())
    save(folder / "version-1/model.ckpt", {"a": np.arange(4, dtype=np.float32)}, version=1)
    (folder / "partitioned").mkdir(exist_ok=True)
    save_partitioned(folder / "partitioned/model.ckpt")
    (folder / "objects").mkdir(exist_ok=True)
    save_objects(folder / "objects/ckpt")
    for prefix in ("bert/bert_model.ckpt", "plain/plain"):
        # Slots are in the checkpoint to be left out.
        kept = {name: v for name, v in read(folder / prefix).items() if "/adam_" not in name}
        np.savez_compressed(folder / Path(prefix).parent / "expected.npz", **kept)
    one, other = read(folder / "bert/bert_model.ckpt"), read(folder / "two-shards/model.ckpt-1234")
    assert one.keys() == other.keys() and all((one[key] == other[key]).all() for key in one)
    for extra in folder.rglob("checkpoint"):
        extra.unlink()
    for extra in folder.rglob("*_temp"):
        shutil.rmtree(extra)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent))
