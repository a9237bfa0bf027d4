"""Settings in JSON, as programs that train BERT have them: flat names with numbers.

Such a file has names that `key_names` knows, in one object, for instance
{"seed": 3431, "batch_size": 32, "lr": 1e-4, "n_epochs": 30, "warmup": 0.1, "save_steps": 10000,
"total_steps": 1000000}. One of a model has its sizes. That of MLIR-RL's DistilBERT names
`model_type` and, in a table for each, `model_config`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tokmill.errors import UsageError
from tokmill.files import machine_errors
from tokmill.headers import loads_json

BASE = "pretrain"
"""The shipped recipe that settings alone are put over."""
POLICY = "policy"
"""The same for settings of a policy."""
OF_POLICIES = ("model_type", "model_config", "bench_count", "benchmarks_folder_path")
"""Names that settings of a policy alone have."""
CALLED = {
    "nb_iterations": "steps",
    "max_num_loops": "loops",
    "max_num_stores_loads": "accesses",
    "max_num_load_store_dim": "dimensions",
}
"""Names that MLIR-RL's settings alone have → ours."""
ELSEWHERE = {
    "vocab_size": "the vocabulary of the store says it",
    "n_segments": "the task says how many segments there are",
    "type_vocab_size": "the task says how many segments there are",
    "json_file": "times without a schedule are measured beside each schedule",
    "eval_json_file": "times without a schedule are measured beside each schedule",
    "normalize_adv": "advantages are always normalised",
    "sparse_reward": "the reward comes with the measurement of the whole module",
    "results_dir": "-o names the folder of the run",
}
"""Names of such files that are no keys → who says it here."""
OF_BERT = ("hidden_act", "initializer_range", "type_vocab_size")
"""Names that say that a file is BERT's configuration, of Google or of transformers."""
WITHOUT_EFFECT = (
    "architectures", "classifier_dropout", "directionality", "dtype", "gradient_checkpointing",
    "initializer_range", "is_decoder", "model_type", "pad_token_id", "position_embedding_type",
    "torch_dtype", "transformers_version", "use_cache",
)  # fmt: skip
"""Names of such a file that choose nothing here."""
MOST_BYTES = 1 << 20


def read_settings(path: Path) -> dict[str, Any]:
    """Return the names and values of a file of settings.

    What is said elsewhere is left out, with a note on stderr. Raises `UsageError` for a file that
    is no such thing.
    """
    with machine_errors("read", path), open(path, "rb") as file:
        raw = file.read(MOST_BYTES + 1)
    try:
        found = loads_json(raw) if len(raw) <= MOST_BYTES else None
        if isinstance(found, dict):
            json.loads(raw, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"the file is no JSON: {error}", where=str(path), hint="names need quotation marks"
        ) from None
    if not isinstance(found, dict) or any(
        isinstance(value, dict) and name not in OF_POLICIES for name, value in found.items()
    ):
        raise UsageError(
            "the file is no recipe and holds no settings",
            where=str(path),
            hint='settings are one object of names and numbers: {"batch_size": 32, "lr": 1e-4}; '
            "texts in JSON become a store with `tokmill build jsonl`",
        )
    if "model_config" not in found and any(name in found for name in OF_BERT):
        found = _of_bert(found, path)
    for name in found.keys() & ELSEWHERE.keys():
        tell(f"{path}: {name} = {found[name]!r} is not used: {ELSEWHERE[name]}")
    kept = {name: value for name, value in found.items() if name not in ELSEWHERE}
    if base_of(kept) != POLICY:
        return kept
    if twice := [name for name in kept if CALLED.get(name) in kept]:
        raise UsageError(
            f"{twice[0]} and {CALLED[twice[0]]} are the same setting",
            where=str(path),
            hint="give one of them",
        )
    return {CALLED.get(name, name): value for name, value in kept.items()}


def _of_bert(found: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the sizes and rates of a configuration of BERT."""
    for name, plain in (("model_type", "bert"), ("position_embedding_type", "absolute")):
        if found.get(name, plain) != plain:
            raise UsageError(
                f"{name} is {found[name]!r}, and such a file is read of BERT alone",
                where=str(path),
                hint="`tokmill model import` reads a checkpoint of other models, with its weights",
            )
    if left := [name for name in found if name in WITHOUT_EFFECT or name.startswith("pooler_")]:
        tell(f"{path}: chooses nothing here: {', '.join(left)}")
    return {name: value for name, value in found.items() if name not in left}


def base_of(said: Mapping[str, Any]) -> str:
    """Return the shipped recipe that settings alone are put over."""
    return POLICY if any(name in said for name in OF_POLICIES) else BASE


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Readers of JSON take the last of two values in silence.
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name!r} stands twice")
        found[name] = value
    return found


@cache
def tell(note: str) -> None:
    """Print a note on stderr, once."""
    print(f"note: {note}", file=sys.stderr)
