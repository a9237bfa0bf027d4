"""Settings in JSON, as programs that train BERT have them: flat names with numbers.

Such a file has names that `read_recipe` knows, in one object, for instance
{"seed": 3431, "batch_size": 32, "lr": 1e-4, "n_epochs": 30, "warmup": 0.1, "save_steps": 10000,
"total_steps": 1000000}. One of a model has its sizes. That of MLIR-RL's DistilBERT names
`model_type` and, in a table for each, `model_config`; its other names may stand in sections. That
of DeepSpeed is nested (`deepspeed_config`).
"""

import json
import os
import shlex
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tokmill.base.errors import UsageError
from tokmill.base.files import machine_errors
from tokmill.base.headers import loads_json
from tokmill.store.store import Store
from tokmill.training.launch import LAUNCHED, place
from tokmill.training.recipe.read_recipe import in_tables

BERT, POLICY = "pretrain", "policy"
"""The shipped recipes that settings of BERT and of a policy are put over."""
OF_DEEPSPEED = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu")
"""Names that settings of DeepSpeed alone have."""
BLOCKS_OF_DEEPSPEED = ("optimizer", "scheduler", "fp16", "bf16")
"""The same, where the value is an object."""
OF_POLICIES = ("model_type", "model_config", "bench_count", "benchmarks_folder_path")
"""Names that settings of a policy alone have."""
OF_CONFIGURATIONS = ("hidden_act", "initializer_range", "type_vocab_size")
"""Names that say that a file is BERT's configuration, of Google or of transformers."""
OF_BERT = (
    *OF_CONFIGURATIONS, "attention_probs_dropout_prob", "dim_ff", "hidden_dropout_prob",
    "hidden_size", "intermediate_size", "mask_prob", "masked_lm_prob", "max_len",
    "max_position_embeddings", "max_pred", "max_predictions_per_seq", "mlm_probability",
    "n_segments", "num_attention_heads", "num_hidden_layers", "p_drop_attn", "p_drop_hidden",
)  # fmt: skip
"""Names that settings of BERT alone have."""
OF_DECODERS = (
    "block_size", "context_length", "d_ff", "d_model", "max_iters", "n_embd", "n_head", "n_layer",
    "num_heads", "num_layers", "rope_theta",
)  # fmt: skip
"""Names that settings of a decoder alone have, as of nanoGPT and CS336."""
UNUSED = {
    "the vocabulary of the store says it": "vocab_size",
    "the task says how many segments there are": "n_segments type_vocab_size",
}
"""Why names of such files are not keys → these names."""
UNUSED_OF_BERT = {
    "they choose nothing here": "architectures classifier_dropout directionality dtype "
    "gradient_checkpointing initializer_range is_decoder model_type pad_token_id pooler_fc_size "
    "pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type "
    "position_embedding_type torch_dtype transformers_version use_cache"
}
"""The same for BERT's configuration."""
UNUSED_OF_POLICIES = {
    "times without a schedule are measured beside each schedule": "json_file eval_json_file",
    "task.cache names a file of measurements": "main_exec_data_file",
    "-o names the folder of the run": "results_dir",
    "actions are those of `rl search`": "num_tile_sizes vect_size_limit interchange_mode",
    "masks say what may follow, and what ends a schedule": "order truncate split_ops",
    "actions are drawn from the policy": "exploration strategy init_epsilon",
    "a policy sees bounds as logarithms": "normalize_bounds",
    "advantages are always normalised": "normalize_adv",
    "the loss of the value is not clipped": "value_clip",
    "the reward comes with the measurement of the whole module": "sparse_reward",
    "the best schedules of earlier steps are imitated": "reuse_experience replay_count",
    "task.benchmarks_folder_path has all modules": "use_augmentation augmentation_ratio "
    "augmentation_folder_path augmentation_json_file neural_nets_folder_path",
    "they choose nothing here": "activation debug hardware_auto_detect implementation "
    "new_architecture tags",
}
"""The same for settings of MLIR-RL."""
MOST_BYTES = 1 << 20


def read_settings(path: Path) -> dict[str, Any]:
    """Return the names and values of a file of settings, MLIR-RL's without sections."""
    with machine_errors("read", path), open(path, "rb") as file:
        raw = file.read(MOST_BYTES + 1)
    try:
        result = loads_json(raw) if len(raw) <= MOST_BYTES else None
        if isinstance(result, dict):
            json.loads(raw, object_pairs_hook=_once)
            if is_of_deepspeed(result):
                return result
            if not result.keys().isdisjoint(OF_POLICIES[:2]) and not _is_of_bert(result):
                result = _flat(result)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"the file is not JSON: {error}", where=str(path), hint="names need quotes, no comments"
        ) from None
    if not isinstance(result, dict) or any(
        isinstance(value, dict) and name not in OF_POLICIES for name, value in result.items()
    ):
        raise UsageError(
            "the file is not a recipe and holds no settings",
            where=str(path),
            hint='settings are one object of names and numbers: {"batch_size": 32, "lr": 1e-4}; '
            "texts in JSON become a store with `tokmill build jsonl`",
        )
    for name, plain in (("model_type", "bert"), ("position_embedding_type", "absolute")):
        if _is_of_bert(result) and result.get(name, plain) != plain:
            raise UsageError(
                f"{name} is {result[name]!r}, and such a file is read of BERT alone",
                where=str(path),
                hint="`tokmill model import` reads checkpoints of other models, with weights",
            )
    return result


def used(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings that are keys; notes on stderr say why the others are not."""
    unused = dict(UNUSED)
    if _is_of_bert(given):
        unused |= UNUSED_OF_BERT
    elif not given.keys().isdisjoint(OF_POLICIES):
        unused |= UNUSED_OF_POLICIES
    for why, names in unused.items():
        if left := [name for name in given if name in names.split()]:
            tell(f"{where}: not used: {', '.join(left)}: {why}")
            given = {name: value for name, value in given.items() if name not in left}
    return dict(given)


def is_of_deepspeed(given: Mapping[str, Any]) -> bool:
    return any(name in given for name in OF_DEEPSPEED) or any(
        isinstance(given.get(name), dict) for name in BLOCKS_OF_DEEPSPEED
    )


def _is_of_bert(given: Mapping[str, Any]) -> bool:
    """Say whether a file is the configuration of BERT: its `model_type` is of no policy."""
    return "model_config" not in given and any(name in given for name in OF_CONFIGURATIONS)


def _flat(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return MLIR-RL's settings without their sections and comments, sizes by the type of model."""
    pairs = []
    for name, value in given.items():
        if isinstance(value, dict):
            value = {key: one for key, one in value.items() if not key.startswith("_")}
        inside = isinstance(value, dict) and name != "model_config"
        pairs += [*value.items()] if inside else [(name, value)]
    flat = _once([(name, value) for name, value in pairs if not name.startswith("_")])
    sizes = flat.get("model_config")
    if isinstance(sizes, dict) and not any(isinstance(one, dict) for one in sizes.values()):
        flat["model_config"] = {str(flat.get("model_type", "lstm")): sizes} if sizes else {}
    return flat


def base_of(files: Mapping[str, Mapping[str, Any]], options: Mapping[str, Any], alone: bool) -> str:
    """Return the shipped recipe that settings are put over; "": the default of every key.

    Args:
        alone: whether the settings are the recipe; if not, a decoder is meant unless they tell.
    """
    of_models = [names for names in files.values() if not is_of_deepspeed(names)]
    settings = {name: value for names in of_models for name, value in names.items()}
    if any(name in settings for name in OF_POLICIES) and not _is_of_bert(settings):
        return POLICY
    decoder, bert = ([n for n in settings if n in names] for names in (OF_DECODERS, OF_BERT))
    if decoder and bert:
        raise UsageError(
            f"settings of a decoder ({', '.join(decoder)}) and of BERT ({', '.join(bert)})",
            where=", ".join(files),
            hint="take out those of one",
        )
    warmup = settings.get("warmup")
    if bert or (not decoder and isinstance(warmup, float) and 0 < warmup < 1):
        return BERT
    model, data = (options.get(name, {}) for name in ("model", "data"))
    if isinstance(model, Mapping) and "kind" in model:
        return BERT if model["kind"] == "encoder" else ""
    stores = (data if isinstance(data, Mapping) else {}).get("train", options.get("train", ()))
    stores = stores if isinstance(stores, list | tuple) else [stores]
    vocabularies = (one for store in stores for one in Store(str(store)).vocabularies.values())
    if alone and not decoder and any("mask" in vocabulary.roles for vocabulary in vocabularies):
        in_tables(settings, {}, ", ".join(files))  # unknown names are told first
        names = [f"--config {shlex.quote(one)}" for one in files]
        rest = " ".join([*names, *(f"--data {shlex.quote(one)}" for one in stores), "-o RUN"])
        raise UsageError(
            "the settings do not tell whether a decoder or BERT is meant, and the store suits both",
            where=", ".join(files),
            hint=f"`tokmill train pretrain {rest}` trains BERT, `tokmill train {rest}` a decoder",
        )
    return ""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Readers of JSON take the last of two values in silence.
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"the name {name!r} stands twice")
        result[name] = value
    return result


@cache
def tell(note: str) -> None:
    """Print a note on stderr, once; of several processes the first, or their launcher, does."""
    if not place().rank and LAUNCHED not in os.environ:
        print(f"note: {note}", file=sys.stderr)
