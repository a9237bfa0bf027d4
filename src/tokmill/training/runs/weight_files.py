"""Single files of weights: official checkpoints of RWKV-7, and a run's state dict for torch.

Format: https://github.com/BlinkDL/RWKV-LM, folder RWKV-v7: a dict name → tensor, as a `.pth` of
torch or as safetensors. There is no configuration but the shapes of the tensors.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import reading, write_file
from tokmill.models.fields import PREFIX
from tokmill.models.rwkv.rwkv7 import RWKV7
from tokmill.store.schema import Column, id_dtype
from tokmill.tasks.task_inputs import Facts
from tokmill.training.engines.tensors import write_tensors
from tokmill.training.recipe.check_recipe import from_dict
from tokmill.training.runs.exchange import COLUMN, LONGEST, write_run
from tokmill.training.runs.public_files import find_vocabulary, read_fetched
from tokmill.training.runs.run import Run, inputs_of, load_task, make_task

OFFICIAL = (".pth", ".safetensors")
PLAIN = ".pt"
ZIP = b"PK\x03\x04"
"""First bytes of the files of torch.save since torch 1.6."""
EMBEDDING, HEAD = "emb.weight", "head.weight"
UNUSED = re.compile(r"blocks\.0\.att\.v[012]")
"""The first layer has no earlier values to mix in, so some checkpoints leave these tensors out."""


def import_file(
    path: Path | str, out: Path | str, *, tokenizer: Path | str | None = None, length: int = 0
) -> Run:
    """Make a run at step 0 of an official RWKV-7 checkpoint; its weights are read as float32.

    Args: as of `exchange.import_model`; `path` is a .pth or .safetensors file.

    Raises:
        TokmillError: the file is not an RWKV-7, is incomplete, or does not fit its tokenizer.
    """
    path, out = Path(path), Path(out)
    found = read_file(path)
    sizes = sizes_of(found, str(path))
    vocabulary = find_vocabulary(path, tokenizer, {}, sizes["rows"], {})
    task_recipe = {"column": COLUMN, "tied": False, "length": length or LONGEST}
    recipe = {"model": {"kind": "rwkv7", **sizes["model"]}, "task": task_recipe}
    config = from_dict(recipe, str(path))
    facts = Facts(
        fingerprint="",
        columns={COLUMN: sizes["rows"]},
        schema={COLUMN: Column(id_dtype(sizes["rows"]), vocab=COLUMN if vocabulary else None)},
        vocabularies={COLUMN: vocabulary[0]} if vocabulary else {},
    )
    with torch.device("meta"):
        task = make_task(config, inputs_of(config, facts))
    task.load_state_dict(from_official(found, task.state_dict(), str(path)), assign=True)
    return write_run(out, config, task, facts, vocabulary)


def export_file(run: Path | str, path: Path | str, *, at: str = "") -> Path:
    """Write the weights of a run as one file, and return its path.

    `.pth` and `.safetensors` have the official names of RWKV-7; `.pt` is the state dict of any
    task, under the names of the run's own `model.safetensors`, for `torch.load`.

    Raises `TokmillError` where the run's model has no official names.
    """
    path = Path(path)
    task = load_task(run, at)
    state: dict[str, Tensor] = {name: value.detach() for name, value in task.state_dict().items()}
    if path.suffix in OFFICIAL:
        own = [name for name in state if not name.startswith("model.")]
        heads = [f"heads.linear.{PREFIX}{column}.weight" for column in task.sizes]
        if not isinstance(task.model, RWKV7) or len(heads) > 1 or own != heads:
            raise TokmillError(
                "only an RWKV-7 over one column with a head of its own has official names",
                where=str(run),
                hint=f"a name that ends in {PLAIN} writes the weights under the names of the run",
            )
        names = {ours: theirs for theirs, ours in official_names(state).items()}
        state = {names[ours]: value for ours, value in state.items()}
    if path.suffix == ".safetensors":
        write_tensors(path, state, {"format": "pt"})
        return path
    buffer = io.BytesIO()
    torch.save({name: value.cpu() for name, value in state.items()}, buffer)
    write_file(path, buffer.getvalue())
    return path


def official_names(state: Mapping[str, Tensor], column: str = COLUMN) -> dict[str, str]:
    own = {
        EMBEDDING: f"model.fields.embeddings.{PREFIX}{column}.weight",
        HEAD: f"heads.linear.{PREFIX}{column}.weight",
    }
    rest = {name.removeprefix("model."): name for name in state if name not in own.values()}
    return own | rest


def from_official(
    found: Mapping[str, Tensor], own: Mapping[str, Tensor], where: str
) -> dict[str, Tensor]:
    """Return the state dict of a task in float32; `own`: a state dict with its names and shapes."""
    wanted = official_names(own, next(_columns(own)))
    lacking = [n for n in wanted if n not in found and not UNUSED.fullmatch(n)]
    unknown = [name for name in found if name not in wanted]
    for said, names in (("lacks", lacking), ("also holds", unknown)):
        if names:
            shown = ", ".join(sorted(names)[:4]) + (", …" if len(names) > 4 else "")
            raise TokmillError(
                f"the checkpoint {said} the tensors {shown}",
                where=where,
                hint="it has to be one of RWKV-7; its older versions are other models",
            )
    state = {}
    for theirs, ours in wanted.items():
        shape = own[ours].shape
        value = found[theirs] if theirs in found else torch.zeros(shape)
        # Vectors are stored with or without axes of size 1.
        if value.numel() != shape.numel() or not value.is_floating_point():
            raise TokmillError(
                f"the tensor {theirs!r} is {value.dtype} of {list(value.shape)}, "
                f"not floats of {list(shape)}",
                where=where,
                hint="the other tensors say this size; is the file whole?",
            )
        state[ours] = value.float().reshape(shape).contiguous()
    return state


def sizes_of(found: Mapping[str, Tensor], where: str) -> dict[str, Any]:
    """Return the number of ids and the keys of the model, which follow from the shapes."""
    block = "blocks.0.att."
    needed = [EMBEDDING, HEAD, "blocks.0.ffn.key.weight"]
    needed += [block + name for name in ("r_k", "w1", "a1", "g1")]
    if any(name not in found or found[name].ndim != 2 for name in needed):
        raise TokmillError(
            "the file holds no RWKV-7",
            where=where,
            hint="for a model of transformers, name its folder; older RWKV versions are not read",
        )
    layers = 1 + max(int(n.split(".")[1]) for n in found if re.match(r"blocks\.\d+\.", n))
    values = found.get(f"blocks.{layers - 1}.att.v1", found[block + "a1"])
    model = {
        "dim": found[EMBEDDING].shape[1],
        "layers": layers,
        "head_dim": found[block + "r_k"].shape[1],
        "hidden": found["blocks.0.ffn.key.weight"].shape[0],
        "decay_rank": found[block + "w1"].shape[1],
        "rate_rank": found[block + "a1"].shape[1],
        "value_rank": values.shape[-1],
        "gate_rank": found[block + "g1"].shape[1],
    }
    return {"rows": found[EMBEDDING].shape[0], "model": model}


def read_file(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a .pth or .safetensors file; no other objects of a .pth are built."""
    if not path.exists():
        raise TokmillError(
            "there is no such file",
            where=str(path),
            hint="a checkpoint is a .pth or .safetensors file of RWKV-7, or a folder",
        )
    if path.suffix == PLAIN:
        raise UsageError(
            "a .pt file is for torch.load alone: it does not describe the model",
            where=str(path),
            hint="use the run that it was written from: `tokmill train STORE --from RUN -o NEW` "
            "begins with its weights",
        )
    if path.suffix not in OFFICIAL:
        raise UsageError(
            "a checkpoint is a folder, or a file that ends in .pth or .safetensors",
            where=str(path),
            hint="give the folder that save_pretrained of transformers wrote, or a file of RWKV-7",
        )
    if path.suffix == ".safetensors":
        return read_fetched(path)
    with reading(path) as file:
        head = file.read(len(ZIP))
    if head != ZIP:
        raise TokmillError(
            "this is not a checkpoint of torch",
            where=str(path),
            hint="torch.save writes one; what it wrote before torch 1.6 has to be saved again",
        )
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError:
        raise TokmillError(
            "the file holds more than tensors",
            where=str(path),
            hint="only tensors are read, because a pickle may run any code",
        ) from None
    except Exception:
        raise TokmillError(
            "the file is damaged, or no checkpoint of torch",
            where=str(path),
            hint="fetch or write it again",
        ) from None
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise TokmillError(
            "the file is no dict of tensors", where=str(path), hint="is it a checkpoint of RWKV-7?"
        )
    return found


def _columns(own: Mapping[str, Tensor]) -> Any:
    for name in own:
        part = re.fullmatch(rf"model\.fields\.embeddings\.{PREFIX}(\w+)\.weight", name)
        if part:
            yield part[1]
