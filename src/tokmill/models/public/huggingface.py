"""Public checkpoints: the model for a config.json, and the config.json for a model.

Formats: the configuration files of transformers, https://github.com/huggingface/transformers.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from tokmill import plugins
from tokmill.base.errors import TokmillError
from tokmill.models.public.public import Head, Public, unlike
from tokmill.models.public.public_decoders import GPT2, Llama
from tokmill.models.public.public_encoders import Bert, DistilBert
from tokmill.models.transformers.block import TransformerConfig

OTHER_NAMES = {
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "context": "max_position_embeddings",
}
"""Key of a model here → a name that transformers takes for the key of any family."""
FAMILIES: tuple[type[Public], ...] = (GPT2, Llama, Bert, DistilBert)


def architecture(config: Mapping[str, Any], where: str) -> tuple[type[Public], Head]:
    """Return the family of a config.json, and its head of the task that the file names.

    As in transformers `model_type` decides, and where there is none the name of the architecture.
    Raises `TokmillError` for an architecture that is not known.
    """
    names, kind = config.get("architectures"), config.get("model_type")
    name: Any = names[0] if isinstance(names, list) and names else None
    heads = {name: (family, head) for family in FAMILIES for name, head in family.heads.items()}
    named = heads.get(name) if isinstance(name, str) else None
    family = next((one for one in FAMILIES if one.model_type == kind), None)
    if kind is None and named:
        return named
    if family and name is None:
        return family, next(iter(family.heads.values()))
    if family and named:
        for class_name, head in family.heads.items():
            if class_name == name or (name not in family.heads and head.task == named[1].task):
                return family, head
    raise TokmillError(
        f"the architecture {name!r} of the model {kind!r} is not known",
        where=where,
        hint=f"known: {', '.join(name for family in FAMILIES for name in family.heads)}",
    )


def read_config(config: Mapping[str, Any], where: str) -> tuple[Public, TransformerConfig]:
    """Return the checked content of a config.json, and the model that computes the same.

    Raises `TokmillError` that names the key and its value if there is no such model.
    """
    family, _ = architecture(config, where)
    if quantized := config.get("quantization_config"):
        raise unlike("quantization_config", quantized, where, family.kind)
    kind = plugins.load(plugins.MODELS, family.kind).Config
    names = {other: key for key, name in family.same.items() if (other := OTHER_NAMES.get(name))}
    for other, key in names.items():
        if other in config and config[other] != config.get(key, config[other]):
            raise unlike(f"{key}, {other}", (config[key], config[other]), where, family.kind)
    config = {names.get(key, key): value for key, value in config.items()}
    try:
        public = msgspec.convert(config, family)
        for key, values in public.allowed.items():
            if getattr(public, key) not in values:
                raise unlike(key, getattr(public, key), where, family.kind)
        model: TransformerConfig = msgspec.convert(public.model(where), kind)
        return public, model
    except msgspec.ValidationError as error:
        raise TokmillError(
            f"a key has the wrong type: {error}", where=where, hint="fetch the file again"
        ) from None


def public_of(
    model: TransformerConfig,
    vocab: int,
    tied: bool,
    length: int,
    where: str = "",
    *,
    task: str = "next_token",
    segments: bool = False,
) -> Public:
    """Return the config.json for a model with `vocab` ids and rows of `length` positions.

    `task`: the kind of its task; `segments`: whether it reads a segment.

    Raises `TokmillError` if no public architecture computes the same.
    """
    wanted: list[str] = []
    for family in FAMILIES:
        names = [name for name, head in family.heads.items() if head.task == task]
        if family.kind != model.kind or not names:
            continue
        other = [
            f"{key} = {values[0]!r}"
            for key, values in family.needs(model).items()
            if getattr(model, key) not in values
        ]
        shown = [f"model.{key}" for key in other]
        if family.segments != segments:
            shown.append(("a" if family.segments else "no") + " segment of tokens")
        if not shown:
            return family.of(model, vocab, tied, length)
        wanted.append(f"{names[0]} with {', '.join(shown)}")
    raise TokmillError(
        "no public architecture computes the same as this model"
        if wanted
        else f"no public architecture has a model {model.kind!r} of the task {task!r}",
        where=where,
        hint=f"it would be {'; '.join(wanted)}"
        if wanted
        else "-o F.pt writes the weights of any run, with its own names",
    )
