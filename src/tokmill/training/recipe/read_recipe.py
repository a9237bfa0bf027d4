"""Reading a recipe: from a file, the name of a shipped one, a store, nested dicts or a run.

Keys may stand without their table, and by the names of other trainers: `lr = 1e-3` at the top of a
recipe, or `--set lr=1e-3`, is `optim.lr`; `n_layer` is `model.layers`; `seed` is both `data.seed`
and `run.seed`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tokmill import plugins
from tokmill.base import recipe as recipes
from tokmill.base.errors import TokmillError, UsageError, nearest, shell_word
from tokmill.base.files import address_of
from tokmill.base.inflate import MAGIC
from tokmill.store.manifest import read_json
from tokmill.training.recipe.config import (
    DEFAULT_KINDS,
    KINDS,
    DataConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    check_kind,
    config_type,
    kinds_of,
    with_size,
)

FREE = {
    "data.train", "data.val", "data.verify", "run.device", "run.log_every", "run.eval_every",
    "run.eval_rows", "run.checkpoint_every", "run.keep", "run.max_time", "run.prefetch",
    "run.best", "run.track", "run.peak_flops", "run.recompute", "run.engine", "run.over_memory",
    "run.compile",
}  # fmt: skip
"""Keys that may change when a run is continued, because they do not decide the weights. The content
of `data.train` is checked by its fingerprint; another device changes only rounding, and is
reported."""

ENGINE = "engine."
"""Keys with this prefix (settings of engines) may change too."""

RATE = {
    "run.steps", "run.epochs",
    "optim.lr", "optim.schedule", "optim.warmup", "optim.warmup_share", "optim.decay",
    "optim.floor",
}  # fmt: skip
"""Keys that decide only the learning rates: they may change within a run if the steps that are
done had the same rates."""


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one: {"a": {"b": 1}} → {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            flat.update(flatten(inner, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = inner
    return flat


def is_free(key: str) -> bool:
    """Say whether a key may change within a run."""
    return key in FREE or key.startswith(ENGINE)


def differences(before: Mapping[str, Any], after: TrainConfig) -> dict[str, str]:
    """Return key → "old → new" for the keys that decide the weights and differ."""
    # `before` was read from JSON, which turns tuples into lists.
    old, new = flatten(before), flatten(msgspec.json.decode(msgspec.json.encode(after)))
    return {
        key: f"{old.get(key)!r} → {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if not is_free(key) and old.get(key) != new.get(key)
    }


RECIPE, FACTS = "recipe.json", "schema.json"
"""In the folder of a run: the resolved recipe, and the facts of its store."""
DATA_SUFFIXES = (".txt", ".text", ".md", ".jsonl", *MAGIC, ".parquet", ".bin")
"""Endings of data files, which are not recipes."""


def read_given(recipe: Path | str | Mapping[str, Any], named: bool) -> tuple[dict[str, Any], str]:
    """Return the recipe before options as nested dicts, and its name in errors.

    `named`: whether the options name stores to learn from.
    """
    if isinstance(recipe, Mapping):
        return dict(recipe), "options"
    path = Path(recipes.find(recipe))
    address = address_of(path)
    if address or path.is_dir():
        if named:
            raise UsageError(
                "stores to learn from are named twice, as an argument and by --data",
                where=address or str(path),
                hint="name all of them by --data: --data A --data B mixes two",
            )
        return {"data": {"train": address or str(path)}}, "options"
    if path.is_file():
        return read_file(path), str(path)
    hint = recipes.other_recipe(path)
    if path.suffix == ".toml":
        raise UsageError("there is no such recipe", where=str(path), hint=hint)
    # The exit code is that of a missing store of --data or --val.
    raise TokmillError(
        "there is no such recipe or store",
        where=str(path),
        hint=hint
        if "mean" in hint
        else "`tokmill build` makes a store, `tokmill recipe list` shows recipes",
    )


def read_file(path: Path) -> dict[str, Any]:
    """Return a recipe file as a dict; a data file is refused."""
    if path.suffix.lower() in DATA_SUFFIXES:
        kinds = {".jsonl": "jsonl", ".parquet": "parquet", ".bin": "bin"}
        kind = kinds.get(path.suffix.lower(), "text")
        raise UsageError(
            "this is neither a recipe nor a store",
            where=str(path),
            hint=f"`tokmill build {kind} {shell_word(path)} -o STORE` first, "
            "then `tokmill train STORE -o RUN`",
        )
    value = recipes.read_toml(path)
    if "source" in value:
        raise UsageError(
            f"this is a recipe of the build {value['source']}, not of a training",
            where=str(path),
            hint=f"tokmill build {path} INPUT… -o STORE, then tokmill train STORE -o RUN",
        )
    return value


def over(
    value: Mapping[str, Any],
    options: Mapping[str, Any],
    where: str = "",
    options_from: str = "options",
) -> dict[str, Any]:
    """Return a recipe with options over it, every key of both in its table.

    Epochs that options ask for are not ended by the steps of the recipe. In errors the recipe is
    called `where`, and the options `options_from`.
    """
    tables = merged(value, options, where, options_from)
    asked = in_tables(options, tables, options_from).get("run", {})
    if isinstance(asked, Mapping) and asked.get("epochs") and "steps" not in asked:
        tables["run"] = {key: one for key, one in tables["run"].items() if key != "steps"}
    return tables


def read_recipe(run: Path) -> dict[str, Any]:
    value: dict[str, Any] = read_json(run / RECIPE, dict[str, Any])
    if isinstance(value.get("run"), dict):
        # Runs of November 2026 have this key.
        value["run"].pop("push", None)
    return value


def run_of(place: Path) -> Path | None:
    """Return the run that a folder is or lies in (as a folder of weights), or None."""
    return next((run for run in (place, *place.parents[:2]) if (run / RECIPE).exists()), None)


OTHER_NAMES = {
    "batch_size": "data.batch",
    "d_model": "model.dim", "n_embd": "model.dim", "hidden_size": "model.dim",
    "num_layers": "model.layers", "n_layer": "model.layers", "n_layers": "model.layers",
    "num_hidden_layers": "model.layers",
    "num_heads": "model.heads", "n_head": "model.heads", "n_heads": "model.heads",
    "num_attention_heads": "model.heads",
    "num_kv_heads": "model.kv_heads", "n_kv_heads": "model.kv_heads",
    "num_key_value_heads": "model.kv_heads",
    "d_ff": "model.hidden", "dim_ff": "model.hidden", "intermediate_size": "model.hidden",
    "p_drop_hidden": "model.dropout", "hidden_dropout_prob": "model.dropout",
    "p_drop_attn": "model.attention_dropout",
    "attention_probs_dropout_prob": "model.attention_dropout",
    "max_position_embeddings": "model.context",
    "hidden_act": "model.activation", "layer_norm_eps": "model.norm_eps",
    "mask_prob": "task.share", "masked_lm_prob": "task.share", "mlm_probability": "task.share",
    "max_pred": "task.most", "max_predictions_per_seq": "task.most",
    "context_length": "task.length", "block_size": "task.length", "seq_len": "task.length",
    "sequence_length": "task.length", "max_seq_len": "task.length",
    "learning_rate": "optim.lr", "max_learning_rate": "optim.lr", "max_lr": "optim.lr",
    "warmup_iters": "optim.warmup", "warmup_steps": "optim.warmup",
    "lr_scheduler_type": "optim.schedule",
    "optimizer": "optim.kind",
    "grad_clip": "optim.clip", "max_grad_norm": "optim.clip", "max_l2_norm": "optim.clip",
    "max_iters": "run.steps", "max_steps": "run.steps", "num_steps": "run.steps",
    "total_steps": "run.steps",
    "n_epochs": "run.epochs", "num_epochs": "run.epochs", "max_epochs": "run.epochs",
    "num_train_epochs": "run.epochs",
    "eval_interval": "run.eval_every", "eval_steps": "run.eval_every",
    "log_interval": "run.log_every", "logging_steps": "run.log_every",
    "save_interval": "run.checkpoint_every", "checkpoint_interval": "run.checkpoint_every",
    "save_steps": "run.checkpoint_every",
    "save_total_limit": "run.keep",
    "nb_iterations": "run.steps", "clip_epsilon": "task.clip",
    "max_num_loops": "model.loops", "max_num_stores_loads": "model.accesses",
    "max_num_load_store_dim": "model.dimensions",
}  # fmt: skip
"""A name that nanoGPT, transformers, CS336, torchtitan or MLIR-RL has for a key → our key."""

OTHER_WAYS = {
    **dict.fromkeys(
        ["min_lr", "min_learning_rate"], "--set optim.floor=0.1 is a tenth of optim.lr"
    ),
    **dict.fromkeys(["cosine_cycle_iters", "lr_decay_iters"], "schedules end at run.steps"),
    "vocab_size": "the store's vocabulary says it",
    **dict.fromkeys(["train_data_path", "data_dir", "data_path", "dataset"], "--data names stores"),
    **dict.fromkeys(["checkpoint_dir", "out_dir", "output_dir"], "-o names the folder of the run"),
    **dict.fromkeys(["use_wandb", "wandb_log", "wandb_project"], "--set 'run.track=[\"wandb\"]'"),
    **dict.fromkeys(["beta1", "beta2"], "--set 'optim.betas=[0.9, 0.95]'"),
    "gradient_accumulation_steps": "data.batch is the whole batch; run.micro_tokens is the most "
    "that one forward takes, and the rest follows",
    "dtype": "--set run.precision=bf16",
    "push": "a copy of RUN, such as by `aws s3 sync`, can be continued elsewhere",
    **dict.fromkeys(
        ["warmup_ratio", "warmup_proportion"],
        "optim.warmup counts steps; bert_adam takes a share, optim.warmup_share",
    ),
}
"""A name for what is said in another way here → how."""

SEVERAL = {"seed": ("data.seed", "run.seed"), "max_len": ("task.length", "model.context")}
"""A name for several keys → these; those that the model lacks are left out."""
SHARE_KEY = "optim.warmup_share"
"""What `warmup` means where it is a fraction, as in the settings of BERT."""

NESTED = ("model_config",)
"""Names of keys whose value is a table. Those of all models are not loaded for this: that takes
seconds, and a wrong name is told at once."""

TABLES: dict[str, type[msgspec.Struct]] = {
    "data": DataConfig,
    "optim": OptimConfig,
    "run": RunConfig,
}
"""The tables with keys that are the same for every model, task and optimiser."""


def merged(
    value: Mapping[str, Any],
    options: Mapping[str, Any],
    where: str = "",
    options_from: str = "options",
) -> dict[str, Any]:
    """Return a recipe with options over it, every key of both in its table.

    In errors the recipe is called `where`, and the options `options_from`.
    """
    placed = in_tables(value, value, where)
    return recipes.merge(placed, in_tables(options, recipes.merge(placed, options), options_from))


def in_tables(
    value: Mapping[str, Any], whole: Mapping[str, Any], where: str = ""
) -> dict[str, Any]:
    """Return nested dicts whose keys without a table stand in theirs, and a named size is its keys.

    `whole` says which model and task it is about.
    """
    result: dict[str, Any] = {}
    given: dict[str, str] = {}
    for name, inner in value.items():
        is_table = isinstance(inner, Mapping) and name not in NESTED
        if name in TABLES or name in DEFAULT_KINDS or is_table:
            result = recipes.merge(result, {name: inner})
            if isinstance(inner, Mapping):
                given |= {f"{name}.{key}": f"{name}.{key}" for key in inner}
            for key in inner if isinstance(inner, Mapping) and name in ("data", "run") else ():
                check_way(key, f"{name}.{key}", where)
    for name in [name for name in value if name not in result]:
        for place in places_of(name, value[name], whole, where):
            if place in given:
                raise UsageError(
                    f"{given[place]} and {name} are the same key",
                    where=where,
                    hint="give one of them",
                )
            given[place] = name
            table, _, key = place.partition(".")
            result = recipes.merge(result, {table: {key: value[name]}})
    return with_size(result, kinds_of(whole)["model"], where)


def places_of(name: str, value: Any, whole: Mapping[str, Any], where: str = "") -> list[str]:
    """Return the keys, table and all, that a name without a table means with this value."""
    kinds = kinds_of(whole)
    if name == "warmup" and isinstance(value, float) and 0 < value < 1:
        check_kind("optim", kinds["optim"], where)
        if has_key("optim", kinds["optim"], "warmup_share"):
            return [SHARE_KEY]
        raise UsageError(
            f"warmup: {value} is a share of the steps, and {kinds['optim']} counts them",
            where=where,
            hint="--set warmup=100, or --set optim.kind=bert_adam, which takes a share",
        )
    if name not in SEVERAL:
        return [key_of(name, whole, where)]
    check_kind("model", kinds["model"], where)
    parts = [place.partition(".") for place in SEVERAL[name]]
    return [
        f"{table}.{key}"
        for table, _, key in parts
        if table not in KINDS or table == "task" or has_key(table, kinds[table], key)
    ]


def check_way(name: str, shown: str, where: str) -> None:
    """Refuse a name for what is said in another way here."""
    if name in OTHER_WAYS:
        hint = f"leave it out: {OTHER_WAYS[name]}"
        raise UsageError(f"{shown}: there is no such key", where=where, hint=hint)


def has_key(table: str, kind: str, key: str) -> bool:
    return key in plugins.load(KINDS[table], kind).Config.__struct_fields__


def key_of(name: str, whole: Mapping[str, Any], where: str = "") -> str:
    """Return the key, table and all, that a name without a table means."""
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    check_way(name, name, where)
    keys = plain_keys(name)
    allowed = {
        *OTHER_NAMES,
        *SEVERAL,
        *(key for kind in TABLES.values() for key in kind.__struct_fields__),
    }
    if not keys:
        # Only now: these come with torch, and who mistypes a plain key does not wait for it.
        parts = {f.name: f.default for f in msgspec.structs.fields(config_type(**kinds_of(whole)))}
        fields = {table: parts[table].__struct_fields__ for table in DEFAULT_KINDS}
        keys = [f"{table}.{name}" for table in fields if name in fields[table]]
        allowed.update(*fields.values())
    if len(keys) == 1:
        return keys[0]
    if keys:
        raise UsageError(f"{name} may be {' or '.join(keys)}", where=where, hint="name its table")
    raise UsageError(
        f"{name}: there is no such key",
        where=where,
        hint=nearest(name, allowed, "`tokmill recipe schema train` lists the keys"),
    )


def plain_key(name: str) -> str:
    """Return the key that is surely meant by a name, whatever model and task; "" where none is."""
    keys = plain_keys(name)
    return OTHER_NAMES.get(name) or (keys[0] if len(keys) == 1 else "")


def plain_keys(name: str) -> list[str]:
    # Each of those three has a kind, so the name alone says nothing.
    tables = {} if name == "kind" else TABLES
    return [f"{table}.{name}" for table, kind in tables.items() if name in kind.__struct_fields__]
