"""Decoders as public checkpoints: the names of their tensors, and how these hold ours.

Formats: the modelling files of transformers, https://github.com/huggingface/transformers, for
`GPT2LMHeadModel`, `LlamaForCausalLM` and `Qwen3ForCausalLM`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tokmill.errors import TokmillError
from tokmill.models.fields import PREFIX

HEAD = "lm_head.weight"
DERIVED = re.compile(
    r"h\.\d+\.attn\.(masked_)?bias|(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
)
"""Tensors of older checkpoints that follow from the configuration."""


class PublicModule(NamedTuple):
    """A module of a public checkpoint, and which of ours it holds, one after the other."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    """Whether its weight is (inputs, outputs)."""


class TensorNames(NamedTuple):
    """How a family of public checkpoints names its modules."""

    base: str
    """What stands before all names but the head's; some checkpoints leave it out."""
    embedding: str
    outer: tuple[PublicModule, ...]
    blocks: str
    block: tuple[PublicModule, ...]


GPT2_NAMES = TensorNames(
    base="transformer.",
    embedding="wte",
    outer=(PublicModule("wpe", ("positions",)), PublicModule("ln_f", ("norm",))),
    blocks="h",
    block=(
        PublicModule("ln_1", ("attention_norm",)),
        PublicModule("attn.c_attn", ("attention.q", "attention.k", "attention.v"), transposed=True),
        PublicModule("attn.c_proj", ("attention.o",), transposed=True),
        PublicModule("ln_2", ("feed_forward_norm",)),
        PublicModule("mlp.c_fc", ("feed_forward.up",), transposed=True),
        PublicModule("mlp.c_proj", ("feed_forward.down",), transposed=True),
    ),
)
LLAMA_NAMES = TensorNames(
    base="model.",
    embedding="embed_tokens",
    outer=(PublicModule("norm", ("norm",)),),
    blocks="layers",
    block=(
        PublicModule("input_layernorm", ("attention_norm",)),
        PublicModule("self_attn.q_proj", ("attention.q",)),
        PublicModule("self_attn.k_proj", ("attention.k",)),
        PublicModule("self_attn.v_proj", ("attention.v",)),
        PublicModule("self_attn.o_proj", ("attention.o",)),
        PublicModule("post_attention_layernorm", ("feed_forward_norm",)),
        PublicModule("mlp.gate_proj", ("feed_forward.gate",)),
        PublicModule("mlp.up_proj", ("feed_forward.up",)),
        PublicModule("mlp.down_proj", ("feed_forward.down",)),
    ),
)


QWEN3_NAMES = LLAMA_NAMES._replace(
    block=(
        *LLAMA_NAMES.block,
        PublicModule("self_attn.q_norm", ("attention.q_norm",)),
        PublicModule("self_attn.k_norm", ("attention.k_norm",)),
    )
)


def entries(
    tensor_names: TensorNames, own: Mapping[str, Tensor], column: str
) -> Iterator[PublicModule]:
    """Yield the tensors of a public checkpoint that hold those of a task's state dict, all once."""
    modules = [
        PublicModule(tensor_names.embedding, (f"fields.embeddings.{PREFIX}{column}",)),
        *tensor_names.outer,
    ]
    for number in range(1 + max(int(name.split(".")[2]) for name in own if ".blocks." in name)):
        for theirs, ours, transposed in tensor_names.block:
            places = tuple(f"blocks.{number}.{name}" for name in ours)
            modules.append(
                PublicModule(f"{tensor_names.blocks}.{number}.{theirs}", places, transposed)
            )
    for theirs, ours, transposed in modules:
        for leaf in ("weight", "bias"):
            names = tuple(f"model.{name}.{leaf}" for name in ours)
            if names[0] in own:
                yield PublicModule(
                    f"{tensor_names.base}{theirs}.{leaf}", names, transposed and leaf == "weight"
                )
    head = f"heads.linear.{PREFIX}{column}.weight"
    if head in own:
        yield PublicModule(HEAD, (head,))


def from_public(
    tensors: Mapping[str, Tensor],
    tensor_names: TensorNames,
    own: Mapping[str, Tensor],
    column: str,
    where: str,
) -> dict[str, Tensor]:
    """Return the state dict of a task, in float32, from the tensors of a public checkpoint.

    `own` is the task's state dict, of which names and shapes count. Raises `TokmillError` that
    names tensors which are missing, unknown or of another shape.
    """
    found = {plain(name, tensor_names): tensor for name, tensor in tensors.items()}
    wanted = {
        plain(entry.theirs, tensor_names): entry for entry in entries(tensor_names, own, column)
    }
    unknown = {name for name in found.keys() - wanted.keys() if not DERIVED.fullmatch(name)}
    if HEAD in unknown and tensor_names.embedding + ".weight" in found:
        # A tied head may be written out a second time.
        if not torch.equal(found[HEAD], found[tensor_names.embedding + ".weight"]):
            raise TokmillError(
                f"the head is tied to the embedding, but {HEAD} holds other values",
                where=where,
                hint="should they differ, config.json has to say tie_word_embeddings = false",
            )
        unknown.remove(HEAD)
    for said, names in (("lacks", wanted.keys() - found.keys()), ("also holds", unknown)):
        if names:
            shown = ", ".join(sorted(names)[:4]) + (", …" if len(names) > 4 else "")
            raise TokmillError(
                f"the checkpoint {said} the tensors {shown}",
                where=where,
                hint="config.json and the weights are not of one model",
            )
    state: dict[str, Tensor] = {}
    for name, (_, ours, transposed) in wanted.items():
        parts = [own[part] for part in ours]
        shape = torch.Size([sum(part.shape[0] for part in parts), *parts[0].shape[1:]])
        tensor = found[name].T if transposed else found[name]
        if tensor.shape != shape or not tensor.is_floating_point():
            asked = shape[::-1] if transposed else shape
            raise TokmillError(
                f"the tensor {name!r} is {found[name].dtype} of {list(found[name].shape)}; "
                f"config.json asks for fractions of {list(asked)}",
                where=where,
                hint="config.json and the weights are not of one model",
            )
        cut = torch.split(tensor.float(), [part.shape[0] for part in parts])
        state |= {part: piece.contiguous() for part, piece in zip(ours, cut, strict=True)}
    return state


def to_public(
    state: Mapping[str, Tensor], tensor_names: TensorNames, column: str
) -> dict[str, Tensor]:
    """Return the tensors of a public checkpoint from the state dict of a task."""
    tensors: dict[str, Tensor] = {}
    for theirs, ours, transposed in entries(tensor_names, state, column):
        tensor = torch.cat([state[name] for name in ours])
        tensors[theirs] = tensor.T.contiguous() if transposed else tensor
    return tensors


def plain(name: str, tensor_names: TensorNames) -> str:
    """Return a tensor's name without what some checkpoints put before it."""
    return name.removeprefix(tensor_names.base)
