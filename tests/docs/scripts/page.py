"""docs/coming-from-the-scripts.md as rows and commands, and what plays them.

The page has a section for each system. Its tables have a row for each item of the system's own
documentation, and the columns `document`, `here`, `notes`.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import re
import shlex
import signal
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy

import tokmill
from tokmill.cli import main

PAGE = Path(__file__).parents[3] / "docs/coming-from-the-scripts.md"
COLUMNS = ("document", "here", "notes")
CODE = re.compile(r"`([^`]+)`")
RUNS = re.compile(r"tokmill [a-z-]+ .*|(?:(?:list|dict|len)\()?(?:tokmill|numpy)\..*")
"""Whole commands and expressions run; `tokmill train` alone is a mention."""
IMPORT = re.compile(r"from tokmill[\w.]* import (\w+)")
"""What is imported in a section may begin an expression of it."""
NAMES = {"tokmill": tokmill, "numpy": numpy}
Test = TypeVar("Test", bound=Callable[..., None])

SCRIPTS = {
    "SemanticBBV": """
        tokenizer.py collect_tokens_fine.py export_tokens.py asm_dataset_generator.py
        merge_tokens.py merge_pickle_files.py asm_dataset_preprocessed_fine.py
        train_rwkv7_deepspeed.py run_deepspeed.sh analyze_sequence_length.py analyze_sequences.py
        inspect_pkl_structure.py plot_token_frequency.py pickle_token_to_dict.py sort_tokens.py
        asm_bbv_dataset.py asm_bbv_cpi_dataset.py asm_triple_loss_dataset_generator.py
        merge_triple_loss_tokens.py extract_triple_dataset.py
        extract_triple_dataset_circle_loss.py asm_text_collect_iced.py
        asm_text_collect_tokenizer.py asm_text_collect_tokenizer_ktrans.py collect_tokens.py
        compress_vocabulary.py program_parser.py program_parser_func.py""",
    "CS336": "preprocess_data.py pretrain.py",
    "BERT": """
        tokenization.py checkpoint.py models.py optim.py train.py utils.py pretrain.py classify.py
        gendata.py dataprocess.py train.sh""",
    "MLIR-RL": """
        distilbert_tokenizer.py model.py train.py test_distilbert_data.py test_distilbert.py
        distilbert_quickref.sh MODEL_ARCHITECTURE_COMPARISON.py""",
    "JSONL kit": """
        tokenize_data.py run_full_tokenization.py test_cloud_tokenization_10min.py
        resume_tokenization.py fix_tokenization_single_threaded.py train_tokenizer.py""",
}
"""The scripts of the systems that tokmill takes the place of."""


@dataclass(frozen=True)
class Row:
    """An item of a system's documentation: three cells of markdown."""

    document: str
    here: str
    notes: str

    @property
    def text(self) -> str:
        return " ".join((self.document, self.here, self.notes))


def section(system: str) -> list[Row]:
    """Return the rows of all tables in the section of a system, in the order of the page."""
    found = re.search(
        rf"^## {re.escape(system)}\n(.*?)(?=^## |\Z)", PAGE.read_text("utf-8"), re.M | re.S
    )
    assert found, f"the page has no section '## {system}'"
    rows = []
    for line in found[1].splitlines():
        if not line.startswith("|") or re.fullmatch(r"[|\s:-]+", line):
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        assert len(cells) == len(COLUMNS), f"not {len(COLUMNS)} cells: {line}"
        if tuple(cells) != COLUMNS:
            rows.append(Row(*(cell.replace("\\|", "|") for cell in cells)))
    return rows


def commands(rows: Iterable[Row]) -> list[str]:
    """Return the commands of rows, and their imports and expressions of Python."""
    found: list[str] = []
    imported: set[str] = set()
    for code in (code for row in rows for code in CODE.findall(row.text)):
        given = IMPORT.fullmatch(code)
        imported |= {given[1]} if given else set()
        called = "(" in code and re.match(r"\w+", code)
        if given or RUNS.fullmatch(code) or (called and called[0] in imported):
            found.append(code)
    return found


def smaller(command: str) -> str:
    """Return a command that trains little: the only thing in which it is not that of the page."""
    if " rl train " in command:
        few = "--steps 1"
        sizes = {"hidden_size": 24, "num_hidden_layers": 1}
        wanted = [f"model.model_config.distilbert.{key}={sizes[key]}" for key in sizes]
    else:
        few = "--steps 2 --set eval_rows=4 --set peak_flops=1e12"
        wanted = [] if "mlir-fields" in command else ["dim=64", "layers=1"]
    # The weights of another run have their sizes.
    wanted = [] if " --from " in command else wanted
    return re.sub(r"--steps \d+", " ".join([few, *(f"--set {one}" for one in wanted)]), command)


def scripts_without_row(system: str) -> list[str]:
    """Return the scripts of a system that no row names in its first cell."""
    spans = [code for row in section(system) for code in CODE.findall(row.document)]
    named = {word for code in spans for word in code.split()}
    return [script for script in SCRIPTS[system].split() if script not in named]


class Checks:
    """Which rows have a test: `@checks("Step 1")` names the beginnings of their first cells."""

    def __init__(self, system: str) -> None:
        self.system = system
        self.beginnings: list[str] = []

    def __call__(self, *beginnings: str) -> Callable[[Test], Test]:
        def keep(test: Test) -> Test:
            self.beginnings += beginnings
            return test

        return keep

    def missing(self) -> list[str]:
        """Return rows that no test names, and names that are no row's."""
        documents = [row.document for row in section(self.system)]
        return [one for one in documents if not one.startswith(tuple(self.beginnings))] + [
            one for one in self.beginnings if not any(row.startswith(one) for row in documents)
        ]


class Played:
    """A folder in which the commands of a section have run.

    `output[command]` is what a command wrote to stdout and stderr, `failed[command]` why it did
    not do what the page says.
    """

    def __init__(self, system: str, folder: Path, later: Container[str]) -> None:
        self.system, self.folder, self.later = system, folder, later
        self.every = commands(section(system))
        self.output: dict[str, str] = {}
        self.failed: dict[str, str] = {}

    def first(self, put_inputs: Callable[[Path], None]) -> None:
        """Put the inputs into the folder and run all but the commands of `later`."""

        def run() -> None:
            put_inputs(self.folder)
            self._run(command for command in self.every if command not in self.later)

        self._once("first", run)

    def rest(self) -> None:
        """Run the commands of `later`; for tests that are marked long."""
        self._once(
            "rest", lambda: self._run(command for command in self.every if command in self.later)
        )

    def run(self, command: str, code: int = 0) -> str:
        """Run a command in the folder; what it writes belongs elsewhere."""
        with contextlib.chdir(self.folder):
            return run(command, code)

    def value(self, expression: str) -> Any:
        """Return the value of an expression of the page."""
        assert expression in self.every
        names = dict(NAMES)
        for code in filter(IMPORT.fullmatch, self.every):
            exec(code, names)
        with contextlib.chdir(self.folder):
            return eval(expression, names)

    def _run(self, wanted: Iterable[str]) -> None:
        for command in dict.fromkeys(wanted):
            try:
                if command.startswith("tokmill "):
                    self.output[command] = self.run(command)
                elif not IMPORT.fullmatch(command):
                    self.value(command)
            except Exception as error:
                self.failed[command] = str(error) or repr(error)

    def _once(self, part: str, work: Callable[[], None]) -> None:
        """Do the work, or read what came of it: one process of pytest-xdist does it for all."""
        path = self.folder.with_name(f"{self.folder.name}.{part}.json")
        with _locked(path.with_suffix(".lock")):
            if path.exists():
                output, failed = json.loads(path.read_text("utf-8"))
                self.output.update(output)
                self.failed.update(failed)
                return
            work()
            path.write_text(json.dumps([self.output, self.failed]), "utf-8")


def run(command: str, code: int = 0) -> str:
    """Run a command in this process, in the current folder; return its stdout and stderr.

    A training is made small. AssertionError if the exit code is another.
    """
    stdout = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    left: int | str | None = 0
    handler = signal.getsignal(signal.SIGTERM)
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stdout):
        try:
            main(shlex.split(smaller(command))[1:])
        except SystemExit as end:
            left = end.code
    signal.signal(signal.SIGTERM, handler)
    assert isinstance(stdout.buffer, io.BytesIO)
    text = stdout.buffer.getvalue().decode()
    assert (left or 0) == code, f"{command}: exit code {left}\n{text}"
    return text


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    handle = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
