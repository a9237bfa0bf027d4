"""Good tokenizers and recipes, and how they are read whole."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from making import TOKENIZER
from tokmill import plugins
from tokmill.base import recipe
from tokmill.builds.plan import BuildRecipe

TEXTS = [
    "The first text, of two sentences. This one ends.",
    "Grüße, 日本語 🦊",
    "x = [1, 2]\n  y",
] * 4


def make_tokenizer(folder: Path) -> Iterable[Path]:
    path = folder / "tokenizer.json"
    path.write_bytes(TOKENIZER.read_bytes())
    return [path]


def read_tokenizer(folder: Path) -> Any:
    from tokmill.text.encoding.encoders import make_encoder
    from tokmill.text.tokenizers.tokenizer import Tokenizer

    (path,) = folder.iterdir()
    found = Tokenizer.from_file(path)
    vocabulary, data = found.vocabulary()
    ids, lengths = make_encoder(data, threads=False)(TEXTS[:3])
    texts = found.decode(ids[: int(lengths[0])].tolist())
    return vocabulary, data, ids.tolist(), texts, found.merges, found.specials


RECIPE = b"""extends = "base.toml"
source = "jsonl"
inputs = ["a", "b"]
out = "s"
tokenizer = "t.json"

[options]
fields = ["text"]
keep = ["id"]

[roles]
eot = "<|endoftext|>"
"""


def make_recipe(folder: Path) -> Iterable[Path]:
    (folder / "base.toml").write_bytes(b'[options]\nspecials_in_text = "plain"\n')
    (folder / "r.toml").write_bytes(RECIPE)
    return [folder / "r.toml", folder / "base.toml"]


def read_recipe(folder: Path) -> Any:
    value = recipe.merge(recipe.read_toml(folder / "r.toml"), recipe.overrides(["options.x.y=3"]))
    found = recipe.convert(BuildRecipe, value, "r.toml")
    kind = plugins.load(plugins.SOURCES, "jsonl")
    options = {key: value for key, value in found.options.items() if key != "x"}
    return found, recipe.convert(kind.Config, options)


TRAINING = b"""[data]
train = "s"
batch = 8
[model]
kind = "decoder"
dim = 16
layers = 2
heads = 2
[task]
length = 16
[optim]
lr = 1e-2
[run]
steps = 10
seed = 3
"""


def read_training_recipe(folder: Path) -> Any:
    from tokmill.base.recipe import read_toml
    from tokmill.training.recipe.resolve import from_dict

    return repr(from_dict(read_toml(folder / "r.toml"), "r.toml"))


SETTINGS = b'{"seed": 3431, "batch_size": 32, "lr": 1e-4, "warmup": 0.1, "n_epochs": 3, "dim": 64}'


OF_DEEPSPEED = b"""{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4,
"gradient_clipping": 1.0, "bf16": {"enabled": true}, "steps_per_print": 5,
"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": "auto"}},
"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3,
"warmup_num_steps": 10, "total_num_steps": 90}},
"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}"""


def read_settings(folder: Path) -> Any:
    from tokmill.training.recipe import deepspeed_config, settings
    from tokmill.training.recipe.read_recipe import over
    from tokmill.training.recipe.resolve import from_dict

    file = folder / "s.json"
    said, base = settings.read_settings(file), {}
    if settings.is_of_deepspeed(said):
        said = deepspeed_config.as_recipe(said, {"task": {"length": 16}}, 2, "s.json")
    else:
        base = recipe.read_toml(settings.base_of({"s.json": said}, {}, False) or "decoder-tiny")
        said = settings.used(said, "s.json")
    return repr(from_dict(over(base, said, "base", "s.json"), "s.json"))
