"""Runs, checkpoints and public models, and all that reads them."""

import contextlib
import io
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from reader import Make, Read
from small_recipes import make_tokenizer
from whole_stores import Refused

Tensors = dict[str, Any]


def make_run(folder: Path, text: bool = False) -> Path:
    """Train two steps, on bare ids or on text."""
    import torch

    from small_runs import train
    from toy import cycles, make_store, text_store

    torch.set_num_threads(1)
    for name, seed in (("train", 0), ("val", 1)):
        if text:
            text_store(folder / name, ["a text and another one, " * 4] * 5)
        else:
            make_store(folder / name, cycles(10, seed=seed))
    run = {"steps": 2, "eval_every": 2, "checkpoint_every": 1}
    with contextlib.redirect_stderr(io.StringIO()):
        return train(folder, folder / "run", run=run, optim={"warmup": 1})


def make_text_run(folder: Path) -> Iterable[Path]:
    run = make_run(folder, text=True)
    named = [run / name for name in ("recipe.json", "schema.json")]
    return [*named, *(run / "vocab").iterdir(), *sorted((run / "model").iterdir())]


def run_files(*patterns: str) -> Make:
    def make(folder: Path) -> Iterable[Path]:
        run = make_run(folder)
        return [path for pattern in patterns for path in sorted(run.glob(pattern))]

    return make


def read_summary(folder: Path) -> Any:
    """`inspect` and what `compare` reads."""
    from tokmill.cli.inspect_command import print_facts
    from tokmill.report.comparison.run_summaries import read_run
    from tokmill.report.describe.inspect import describe

    found = read_run(folder / "run")
    with contextlib.redirect_stdout(io.StringIO()):
        print_facts(describe(folder / "run"))
    return found.step, repr(found.flat)


def read_traced(folder: Path) -> Any:
    """`trace`: a step, and the steps of a record."""
    from tokmill.training.trace import Trace

    trace = Trace(folder / "run")
    found = [one._replace(store=0) for one in trace.step(2)]
    held = itertools.islice(trace.holding({0: np.asarray([3])}), 10)
    return found, [one._replace(store=0) for one in held]


def read_page(folder: Path) -> Any:
    """`compare`, `plot` and `report` of a run and its stores."""
    from tokmill.report.comparison.compare_runs import compare
    from tokmill.report.pages.page import page

    compare([folder / "run"])
    page([folder / "run"], folder / "page.html")
    return "a page"


# ---- checkpoints -----------------------------------------------------------------------------


@cache
def engine() -> Any:
    """The engine of the toy run, which a checkpoint is loaded into."""
    import torch

    from tokmill.models.model import Inputs
    from tokmill.training.engines.engine import make_engine
    from tokmill.training.recipe.resolve import from_dict
    from tokmill.training.runs.run import make_task
    from toy import recipe

    torch.set_num_threads(1)
    value = from_dict(recipe(Path("train"), 12), "")
    made = make_engine(value.run)
    made.prepare(make_task(value, Inputs({"token": 23})), value.optim)
    return made


def read_resumed(folder: Path) -> Any:
    """What a resume reads: the newest complete checkpoint, into the engine."""
    from tokmill.training.runs.checkpoint import find_whole, load_checkpoint

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        place = find_whole(folder / "run")
    assert place is not None
    state = load_checkpoint(place, engine(), 0)
    weights = {name: value.tolist() for name, value in engine().weights().items()}
    if state.step == 1 and "is damaged" in said.getvalue():
        raise Refused(
            "the newest is damaged, which was said; the one before was taken", hint="mend it"
        )
    return state.step, state.tokens, weights


def read_unchecked(folder: Path) -> Any:
    """A checkpoint whose files are not compared with their digests."""
    from tokmill.training.runs.checkpoint import load_checkpoint

    return load_checkpoint(folder / "run/checkpoints/step-00000002", engine(), 0).step


def make_unchecked(folder: Path) -> Iterable[Path]:
    """Without digests, so that all of a file is read and not only compared."""
    from tokmill.training.engines.tensors import read_tensors

    run = make_run(folder)
    place = run / "checkpoints/step-00000002"
    for name in ("model", "optimizer"):
        plain_tensors(place / f"{name}.safetensors", read_tensors(place / f"{name}.safetensors"))
    return sorted(path for path in place.iterdir() if path.name != "state.json")


def plain_tensors(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> None:
    """Write safetensors as other programs do, without a digest."""
    types = {"torch.float32": "F32", "torch.int64": "I64", "torch.bfloat16": "BF16"}
    header: dict[str, Any] = {"__metadata__": metadata or {"format": "pt"}}
    data = b""
    for name, value in tensors.items():
        raw = value.detach().contiguous().numpy().tobytes()
        place = [len(data), len(data) + len(raw)]
        kind = types[str(value.dtype)]
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": place}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


class Remembering:
    """What a task is to `save_extra` and `load_extra`: one that keeps something of everything."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def extra_state(self) -> dict[str, Any]:
        import torch

        return {"seen": torch.arange(4.0), "step": 3, "names": {"a": [1, 2.5, "x"]}}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self.found = state


def make_extra(folder: Path) -> Iterable[Path]:
    from tokmill.training.runs.checkpoint import save_extra

    task: Any = Remembering()
    save_extra(folder / "task-00000.safetensors", task)
    return [folder / "task-00000.safetensors"]


def read_extra(folder: Path) -> Any:
    from tokmill.training.runs.checkpoint import load_extra

    task: Any = Remembering()
    load_extra(folder / "task-00000.safetensors", task)
    return {name: repr(value) for name, value in sorted(task.found.items())}


def whole_run(folder: Path, kept: Path) -> None:
    """Put back names that a reader changed."""
    shutil.rmtree(folder / "run")
    shutil.copytree(kept / "run", folder / "run")


def read_opened(folder: Path) -> Any:
    """A run as `eval`, `sample` and `embed` open it, and that a training goes on in."""
    from tokmill.inference.sample import generate
    from tokmill.store.store import Store
    from tokmill.training.runs.run import facts_of, load_task, read_run

    run = folder / "run"
    config, _ = read_run(run)
    facts = facts_of(run, config, [Store(folder / "train")])
    load_task(run)
    made = [one.ids for one in generate(run, ["a te"], 2, temperature=0.0)]
    return repr(config), repr(facts), made


def read_embedded(folder: Path) -> Any:
    """What the source `embed` gives a build, and the overlay that it would write."""
    from readers import read_source

    return read_source("embed", [folder / "train"], run=str(folder / "run"))


def make_embedded(folder: Path) -> Iterable[Path]:
    run = make_run(folder)
    shutil.rmtree(run / "checkpoints")
    return [run / "recipe.json", run / "schema.json", *(run / "model").iterdir(),
            *(folder / "train").glob("shards/*"), folder / "train/manifest.json"]  # fmt: skip


# ---- models of others ------------------------------------------------------------------------


def make_public(kind: str, files: int = 1) -> Make:
    """A folder as transformers writes it."""

    def make(folder: Path) -> Iterable[Path]:
        import torch
        from test_huggingface import GPT2_SMALL, LLAMA_SMALL

        from tokmill.models.model import Inputs
        from tokmill.models.public.huggingface import read_config
        from tokmill.models.public.public import to_public
        from tokmill.training.runs.exchange import recipe_of
        from tokmill.training.runs.run import make_task

        torch.set_num_threads(1)
        small = {"gpt2": {**GPT2_SMALL, "n_positions": 16}, "llama": LLAMA_SMALL}[kind]
        config = {**small, "vocab_size": 300, "eos_token_id": 0, "rope_theta": 1e4}
        public, decoder = read_config(config, "")
        task = make_task(recipe_of(public, decoder, 0, ""), Inputs({"token": 300}))
        head = next(iter(public.heads.values()))
        tensors = to_public(task.state_dict(), public.tensor_names, head, "token")
        (folder / "config.json").write_text(json.dumps(config))
        made = [folder / "config.json", folder / "model.safetensors"]
        if files == 1:
            plain_tensors(made[1], tensors)
        else:
            names = {name: f"part-{number % files}.safetensors"
                     for number, name in enumerate(tensors)}  # fmt: skip
            for file in sorted({*names.values()}):
                part = {name: tensors[name] for name in tensors if names[name] == file}
                plain_tensors(folder / file, part)
            index = {"metadata": {"total_size": 1}, "weight_map": names}
            made = [folder / "model.safetensors.index.json", folder / "part-0.safetensors"]
            made[0].write_text(json.dumps(index))
        make_tokenizer(folder)
        return made

    return make


WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "mov", "##l")


def make_encoder(folder: Path) -> Iterable[Path]:
    """A folder of a BERT as transformers writes it, and a vocab.txt."""
    import torch
    from test_huggingface import BERT_SMALL

    from tokmill.models.model import Inputs
    from tokmill.models.public.huggingface import architecture, read_config
    from tokmill.models.public.public import to_public
    from tokmill.training.runs.exchange import recipe_of
    from tokmill.training.runs.run import make_task

    torch.set_num_threads(1)
    public, model = read_config(BERT_SMALL, "")
    _, head = architecture(BERT_SMALL, "")
    roles = {name[1:-1].lower(): number for number, name in enumerate(WORDS[:5])}
    inputs = Inputs({"token": 9}, {"token": roles}, {"segment": 2})
    task = make_task(recipe_of(public, model, 0, "", {"kind": head.task}), inputs)
    tensors = to_public(task.state_dict(), public.tensor_names, head, "token")
    (folder / "config.json").write_text(json.dumps(BERT_SMALL))
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    plain_tensors(folder / "model.safetensors", tensors)
    return [folder / name for name in ("config.json", "model.safetensors", "vocab.txt")]


def imported(read: Callable[[Path, Path], Any]) -> Read:
    """Import into a new folder and open what became of it."""

    def act(folder: Path) -> Any:
        from tokmill.training.runs.run import load_task

        out = folder / ".imported"
        shutil.rmtree(out, ignore_errors=True)
        try:
            read(folder, out)
            state = load_task(out).state_dict()
            return {name: np.asarray(value).tobytes() for name, value in state.items()}
        finally:
            shutil.rmtree(out, ignore_errors=True)

    return act


def read_public(folder: Path, out: Path) -> None:
    from tokmill.training.runs.exchange import import_model

    import_model(folder, out)


TENSORFLOW = Path(__file__).parents[1] / "golden" / "tensorflow" / "two-shards"


def make_tensorflow(*patterns: str) -> Make:
    """A BERT that TensorFlow wrote, in two data shards."""

    def make(folder: Path) -> Iterable[Path]:
        shutil.copytree(TENSORFLOW, folder, dirs_exist_ok=True)
        return sorted(path for pattern in patterns for path in folder.glob(pattern))

    return make


def read_tensorflow(folder: Path) -> Any:
    from tokmill.training.runs.tensorflow.google_bert_run import read_bert

    found = read_bert(folder)
    tensors = {name: np.asarray(value).tobytes() for name, value in found.tensors.items()}
    return tensors, found.config.to_config(), found.left_out


# ---- tensors ---------------------------------------------------------------------------------


def read_tensor_file(folder: Path) -> Any:
    from tokmill.training.engines.tensors import read_metadata, read_tensors

    found = read_tensors(folder / "a.safetensors")
    read_metadata(folder / "a.safetensors")
    return {name: tensor.tolist() for name, tensor in found.items()}


def make_tensor_file(folder: Path) -> Iterable[Path]:
    import torch

    from tokmill.training.engines.tensors import write_tensors

    tensors = {"a": torch.arange(6).reshape(2, 3), "b.c": torch.ones(4), "e": torch.zeros(0)}
    write_tensors(folder / "a.safetensors", tensors, {"step": "3"})
    return [folder / "a.safetensors"]


# ---- overlays --------------------------------------------------------------------------------


def make_overlaid(folder: Path) -> Iterable[Path]:
    """A store with an overlay inside."""
    from readers import ids_store

    from making import quick_build

    ids_store(folder / "s")
    np.save(folder / "values.npy", np.arange(30, dtype=np.int32))
    values = str(folder / "values.npy")
    quick_build("overlay", folder / "s", "", name="v", values=values)
    found: Sequence[Path] = sorted((folder / "s/overlays").rglob("*"))
    return [path for path in found if path.is_file() and path.name != ".lock"]


def read_overlaid(folder: Path) -> Any:
    from whole_stores import contents

    from tokmill.store.checks.validate import validate
    from tokmill.store.store import Store

    if problems := validate(Store(folder / "s")).problems:
        raise Refused(problems[0].what, hint="mend it")
    return contents(Store(folder / "s", ["v"]))
