"""Tables of all kinds of parts and where they are implemented: to add a part, add a line.

A part has a name ("jsonl", "decoder", …) and is imported when it is needed. If its packages are
missing, the error names the extra to install.

Installed packages add parts by entry points of the group `tokmill.parts`, named `TABLE.NAME`:

    [project.entry-points."tokmill.parts"]
    "LIFTERS.angr" = "tokmill_angr:lift"
"""

import ctypes
import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from tokmill.base.errors import MissingExtraError, UsageError, nearest


class Part(NamedTuple):
    """A part: its place (one of our own begins with a dot), the extra with its packages, a help."""

    target: str
    extra: str
    help: str


SOURCES: dict[str, Part] = {
    "text": Part(".text.plain_text:TextSource", "text", "plain text files"),
    "jsonl": Part(".text.jsonl:JsonlSource", "text", "JSON Lines files"),
    "parquet": Part(".text.parquet:ParquetSource", "parquet", "Parquet and Arrow files"),
    "corpus": Part(".text.corpus:CorpusSource", "text", "walks as text, a walk per line"),
    "tsv": Part(".text.tables.tsv:TsvSource", "text", "tables of labelled sentences, such as GLUE"),
    "x86": Part(".x86.program_source:X86Source", "x86", "x86 programs, or graphs of them"),
    "pairs": Part(
        ".x86.pairs:PairsSource", "x86", "pairs of graphs of programs: walks through both"
    ),
    "bbv": Part(
        ".bbv.execution_source:BbvSource", "", "basic block vectors of executions, and CPI"
    ),
    "mlir": Part(
        ".mlir.module_source:MlirSource",
        "mlir",
        "MLIR modules, ONNX models: operations as policies see them",
    ),
    "select": Part(
        ".builds.selection.select:SelectSource", "", "other stores: filter, sample, split, merge"
    ),
    "mine": Part(
        ".builds.mining.mining_source:MineSource",
        "",
        "a store of functions or intervals: entries for contrastive learning",
    ),
    "overlay": Part(
        ".builds.selection.overlay_values:ValuesSource",
        "",
        "a store, and numpy files with more columns for it",
    ),
    "embed": Part(
        ".inference.embed:EmbedSource", "train", "a store and a run: a vector per record"
    ),
    "npz": Part(".formats.windows.npz:NpzSource", "", "npz files of padded windows"),
    "bin": Part(".formats.bin:BinSource", "", "headerless token files"),
    "token-dicts": Part(
        ".formats.pickles.token_dicts:TokenDictsSource", "", "pickles of x86 token dicts"
    ),
    "triplets": Part(
        ".formats.pickles.triplets:TripletsSource", "", "pickles of triplets of intervals"
    ),
}

EXPORTS: dict[str, Part] = {
    "bin": Part(".formats.bin:BinExport", "", "headerless uint16 or uint32 token file"),
    "npz": Part(".formats.windows.npz:NpzExport", "", "padded windows with attention masks"),
    "corpus": Part(
        ".formats.pickles.corpus_export:CorpusExport", "", "walks as text, with vocab.txt"
    ),
    "token-dicts": Part(
        ".formats.pickles.token_dicts_export:TokenDictsExport", "", "pickle of x86 token dicts"
    ),
    "triplets": Part(
        ".formats.pickles.triplets_export:TripletsExport", "", "pickle of triplets of intervals"
    ),
}

MODELS: dict[str, Part] = {
    "decoder": Part(".models.transformers.transformer:Decoder", "train", "causal Transformer"),
    "encoder": Part(
        ".models.transformers.transformer:Encoder", "train", "Transformer that looks both ways"
    ),
    "rwkv7": Part(".models.rwkv.rwkv7:RWKV7", "train", "RWKV-7, a recurrent model"),
    "bag": Part(".models.sets.bag:Bag", "train", "a bag of n-grams, quick to learn"),
    "set_transformer": Part(
        ".models.sets.set_transformer:SetTransformer", "train", "one vector of a weighted set"
    ),
    "policy": Part(".rl.policy:Policy", "mlir", "sees operations of MLIR, for schedules"),
}

TASKS: dict[str, Part] = {
    "next_token": Part(".tasks.next_token:NextToken", "train", "predict the next token"),
    "masked": Part(".tasks.hidden.masked:Masked", "train", "predict hidden tokens, as BERT does"),
    "sentence_pair": Part(
        ".tasks.hidden.sentence_pair:SentencePair", "train", "masked, and whether halves belong"
    ),
    "classify": Part(".tasks.classify:Classify", "train", "a class or a number per record"),
    "contrastive": Part(
        ".tasks.comparison.contrastive:Contrastive",
        "train",
        "vectors in which similar records are near",
    ),
    "signature": Part(
        ".tasks.comparison.signature:Signature",
        "train",
        "vectors of weighted sets of blocks, and CPI",
    ),
    "schedules": Part(".rl.schedule_task:Schedules", "mlir", "schedule modules of MLIR by PPO"),
}

LOOPS: dict[str, Part] = {
    # what a task learns from (`Task.loop`)
    "rows": Part(".training.loop:RowLoop", "train", "rows of stores"),
    "schedules": Part(".rl.ppo_loop:ScheduleLoop", "mlir", "measured schedules of modules"),
}

EMBEDDINGS: dict[str, Part] = {
    # from observations of the environment of schedules to vectors: `model_type`
    "lstm": Part(".rl.embedding.lstm:Lstm", "train", "an LSTM over flat vectors, MLIR-RL's"),
    "distilbert": Part(
        ".rl.embedding.distilbert:DistilBert", "train", "an encoder over tokens of an operation"
    ),
    "loop_transformer": Part(
        ".rl.embedding.loop_transformer:LoopTransformer", "train", "a Transformer over its loops"
    ),
}

OPTIMIZERS: dict[str, Part] = {
    "adamw": Part(".training.engines.optimisers.optim:AdamW", "train", "AdamW"),
    "muon": Part(
        ".training.engines.optimisers.muon:Muon", "train", "Muon on matrices in blocks, else AdamW"
    ),
    "bert_adam": Part(".training.engines.optimisers.bert_adam:BertAdam", "train", "as BERT's"),
}

ENGINES: dict[str, Part] = {
    "single": Part(".training.engines.engine:Engine", "train", "one process"),
    "ddp": Part(".training.engines.several:Ddp", "train", "processes that share the rows"),
    "deepspeed": Part(".training.engines.deepspeed:DeepSpeed", "deepspeed", "DeepSpeed's ZeRO"),
}

ENCODERS: dict[str, Part] = {
    # text to ids in bulk; without a choice the first that gives the ids of the tokenizer
    "gigatoken": Part(".text.encoding.encoders:GigatokenEncoder", "text", "the fastest"),
    "tokenizers": Part(".text.encoding.encoders:TokenizersEncoder", "text", "every tokenizer.json"),
}

LIFTERS: dict[str, Part] = {
    "native": Part(".x86.lift.cfg:lift", "x86", "tokmill's own, on iced-x86")
}

RULES: dict[str, Part] = {
    # how an instruction becomes the tokens of its columns
    "tokmill": Part(".x86.tokens.tokmill_rules:TokmillRules", "x86", "nothing left out"),
    "semanticbbv": Part(".x86.tokens.semanticbbv:SemanticbbvRules", "x86", "as SemanticBBV emits"),
}

BASELINES: dict[str, Part] = {
    # vectors of functions of programs that no model made (`tokmill.x86.features.baselines`)
    "opcodes": Part(".x86.features.baselines:opcodes", "x86", "only code: histogram of mnemonics"),
    "code-around": Part(
        ".x86.features.baselines:code_around",
        "x86",
        "only code: seven cosines, of a function, its callees and its callers",
    ),
    "facts": Part(
        ".x86.features.baselines:facts",
        "x86",
        "TF-IDF of constants, strings, imports, less of callees",
    ),
    "ranker": Part(
        ".x86.features.baselines:ranker", "x86", "twelve cosines, their weights learned from pairs"
    ),
}

FIGURES: dict[str, Part] = {
    "lengths": Part(
        ".report.pages.figures:lengths",
        "plot",
        "histogram of the lengths of records (stores) or sequences (pickles)",
    ),
    "frequency": Part(
        ".report.pages.figures:frequency",
        "plot",
        "share of each id by its rank, both axes logarithmic (stores, vocabularies)",
    ),
    "tsne": Part(
        ".report.pages.tsne:tsne",
        "bbv",
        "vectors of records in two dimensions (an overlay), or basic block vectors of intervals",
    ),
    "phases": Part(
        ".report.pages.tsne:phases", "bbv", "an execution over time (basic block vectors)"
    ),
    "speedup": Part(
        ".report.pages.schedules:speedup", "plot", "speed-up by evaluations (runs of schedules)"
    ),
    "entropy": Part(
        ".report.pages.schedules:entropy", "plot", "entropy by evaluations (runs of schedules)"
    ),
    "loss": Part(
        ".report.pages.figures:loss", "plot", "loss by step, training and validation (runs)"
    ),
}

CODERS: dict[str, Part] = {
    # kind of a vocabulary: what turns text into its ids and back
    "tokenizer": Part(".text.tokenizers.tokenizer:Tokenizer", "text", "text of one column"),
    "x86": Part(".x86.x86_tokenizer:X86Coder", "x86", "instructions, a list a column"),
}

TRACKERS: dict[str, Part] = {
    "wandb": Part(".training.runs.trackers:Wandb", "track", "Weights & Biases, online or offline")
}

COMMANDS: dict[str, Part] = {
    # `tokmill NAME`: a function, or a typer app; `cli.PANELS` groups them
    "tokenizer": Part(".text.commands.tokenizer_command:app", "", "Train and use tokenizers."),
    "vocab": Part(
        ".x86.commands.vocab_command:app", "", "Make and convert vocabularies of x86 code."
    ),
    "build": Part(".cli.build_command:command", "", "Turn inputs into a token store."),
    "store": Part(".cli.store_command:app", "", "Validate or export a store."),
    "cfg": Part(".x86.commands.cfg_command:cfg", "", "Find functions, blocks, edges of programs."),
    "diff": Part(
        ".x86.commands.diff_command:diff", "", "Compare two programs, function by function."
    ),
    "similarity": Part(
        ".similarity.commands.similarity_command:app",
        "",
        "Find similar functions, and measure how well that works.",
    ),
    "bbv": Part(".bbv.commands.bbv_command:app", "", "Profile executions: block vectors, CPI."),
    "simpoint": Part(
        ".bbv.commands.simpoint_command:simpoint",
        "",
        "Choose intervals that represent a whole program.",
    ),
    "rl": Part(".rl.commands.rl_command:app", "", "Find and replay schedules of MLIR modules."),
    "train": Part(".cli.train_command:train", "", "Train a model on a store."),
    "eval": Part(".cli.eval_command:evaluate", "", "Evaluate a run on a store."),
    "trace": Part(".cli.trace_command:trace", "", "Show which documents a step of a run reads."),
    "predict": Part(".cli.eval_command:predict", "", "Predict the classes of records."),
    "embed": Part(".cli.eval_command:embed", "", "Compute vectors of records with a run."),
    "sample": Part(".cli.sample_command:sample", "", "Continue prompts with a trained model."),
    "model": Part(".cli.model_command:app", "", "Read and write public checkpoints."),
    "inspect": Part(".cli.inspect_command:inspect", "", "Describe a file or folder of any kind."),
    "compare": Part(".cli.inspect_command:compare", "", "Compare runs, averaged over seeds."),
    "plot": Part(".cli.inspect_command:plot", "", "Draw a figure of a store, tokenizer or run."),
    "report": Part(".cli.inspect_command:report", "", "Write one HTML page of runs."),
    "demo": Part(".cli.inspect_command:demo", "", "From text and programs to trained models."),
    "doctor": Part(".cli.inspect_command:doctor", "", "Check the machine and what is installed."),
    "recipe": Part(".cli.recipe_command:app", "", "List recipes and their keys."),
}

EXTRA_PACKAGES: dict[str, str] = {
    "gigatoken": "text",
    "tokenizers": "text",
    "google": "x86",
    "zstandard": "text",
    "psutil": "train",
    "pyarrow": "parquet",
    "iced_x86": "x86",
    "lief": "x86",
    "scipy": "x86",
    "sklearn": "bbv",
    "threadpoolctl": "bbv",
    "torch": "train",
    "fla": "fla",
    "triton": "fla",
    "einops": "fla",
    "deepspeed": "deepspeed",
    "google_crc32c": "tensorflow",
    "obstore": "remote",
    "torch_mlir": "mlir",
    "gymnasium": "mlir",
    "onnx": "mlir",
    "iree": "mlir",
    "ml_dtypes": "mlir",
    "matplotlib": "plot",
    "jinja2": "plot",
    "wandb": "track",
}
"""Package → the extra that installs it."""

LOADED_FIRST = {
    "torch_mlir": (
        "libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libz.so.1", "librt.so.1", "libdl.so.2",
        "libpthread.so.0",
    ),
}  # fmt: skip
"""Package → the system's libraries that it would look for in the working directory too."""


class Table(dict[str, Part]):
    """Parts by name. Those of installed packages join when a name is not here, and by `items()`."""

    def __contains__(self, name: object) -> bool:
        if not super().__contains__(name):
            _join_installed()
        return super().__contains__(name)

    def items(self) -> Any:
        """Return all names and parts."""
        _join_installed()
        return super().items()


TABLES = {
    name: Table(value)
    for name, value in list(globals().items())
    if name.isupper() and isinstance(value, dict)
    if all(isinstance(part, Part) for part in value.values())
}
globals().update(TABLES)


@functools.cache
def _join_installed() -> None:
    """Add the parts of installed packages; a name that is in a table stays what it is."""
    # It takes 20 ms, which most commands need not spend.
    from importlib.metadata import entry_points

    for point in entry_points(group="tokmill.parts"):
        name, _, kind = point.name.partition(".")
        if name not in TABLES or not kind:
            raise UsageError(
                f"the entry point {point.name!r} = {point.value!r} of the package "
                f"{point.dist.name if point.dist else '?'} names no table of parts",
                hint="uninstall the package if it is of an older tokmill; else TABLE.NAME, such as "
                f"LIFTERS.angr; tables are {', '.join(TABLES)}",
            )
        line = point.dist.metadata["Summary"] if point.dist else point.value
        TABLES[name].setdefault(kind, Part(point.value, "", line))


def load(table: dict[str, Part], kind: str) -> Any:
    """Import and return the part called `kind`.

    Raises `UsageError` for an unknown kind, `MissingExtraError` if its packages are missing.
    """
    if kind not in table:
        raise UsageError(f"nothing is called {kind!r}", hint=nearest(kind, table))
    module, _, name = table[kind].target.partition(":")
    return getattr(require(module), name)


def require(module: str) -> Any:
    """Import a module; raises `MissingExtraError` if it needs a package of a missing extra."""
    with extras():
        for library in LOADED_FIRST.get(module.partition(".")[0], ()):
            # The package itself says what is missing.
            with suppress(OSError):
                ctypes.CDLL(library)
        return importlib.import_module(module, __package__)


@contextmanager
def extras() -> Iterator[None]:
    """Turn the error of a package that is not installed into a `MissingExtraError`."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA_PACKAGES:
            raise
        raise MissingExtraError(
            f"the package {package!r} is not installed",
            hint=f"pip install 'tokmill[{EXTRA_PACKAGES[package]}]'",
        ) from None
