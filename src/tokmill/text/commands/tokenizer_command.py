"""`tokmill tokenizer train|encode|decode`."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from tokmill.base.errors import TokmillError, UsageError, nearest
from tokmill.base.files import machine_errors, write_file
from tokmill.base.inflate import MAGIC
from tokmill.base.locks import writing
from tokmill.base.progress import human_count, human_time
from tokmill.base.recipe import merge, overrides
from tokmill.builds.finish import HEAD, encoding_of
from tokmill.builds.scan import with_lists
from tokmill.terminal.frame import AsJson, FilesFrom
from tokmill.terminal.output import print_json, print_line, print_text, say, say_not_reached

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Train and use tokenizers.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Tok = Annotated[
    str,
    typer.Option("--tokenizer", "-t", help="tokenizer.json or its folder, or a vocab.txt."),
]

Out = Annotated[str, typer.Option("-o", "--out", help="The tokenizer.json, or a folder.")]
VocabSize = Annotated[
    int, typer.Option(help="Number of ids, with special tokens and bytes or characters.")
]
Inputs = Annotated[list[str] | None, typer.Argument(help="Files and folders.", metavar="INPUT...")]
Model = Annotated[
    str, typer.Option(help="bpe (of bytes), or wordpiece (as BERT's, of lower-case words).")
]
Special = Annotated[
    list[str] | None,
    typer.Option(
        help="A special token; may be given several times. Default <|endoftext|>; wordpiece "
        "has \\[PAD] \\[UNK] \\[CLS] \\[SEP] \\[MASK] besides."
    ),
]
NoSpecial = Annotated[bool, typer.Option("--no-special", help="No special token.")]
Fields = Annotated[
    list[str] | None,
    typer.Option(help="A field of the records, or a column of a TSV; may be given several times."),
]
Kind = Annotated[str, typer.Option(help="text, jsonl, parquet or tsv; default: by suffix.")]
Pattern = Annotated[
    str, typer.Option(help="How words are cut: gpt2, cl100k, o200k or a regular expression.")
]
TieBreak = Annotated[
    str,
    typer.Option(help="Among equal counts: first (Hugging Face) or greatest-bytes (CS336)."),
]
Engine = Annotated[
    str, typer.Option(help="auto, gigatoken, tokenizers or python; the result is the same.")
]
Cased = Annotated[
    bool, typer.Option("--cased", help="wordpiece: keep capital letters and accents.")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="An option of the source, key=value (separator, fields, …)."),
]


@app.command()
def train(
    out: Out,
    vocab_size: VocabSize,
    inputs: Inputs = None,
    files_from: FilesFrom = None,
    model: Model = "bpe",
    special: Special = None,
    no_special: NoSpecial = False,
    field: Fields = None,
    kind: Kind = "",
    pattern: Pattern = "gpt2",
    tie_break: TieBreak = "first",
    engine: Engine = "auto",
    cased: Cased = False,
    set_: Set = None,
    as_json: AsJson = False,
) -> None:
    """Train a byte-level BPE or a WordPiece tokenizer on text, JSON Lines, Parquet or TSV files."""
    from tokmill.text.documents import iter_documents
    from tokmill.text.learning.train_tokenizer import train_tokenizer
    from tokmill.text.learning.train_wordpiece import train_wordpiece
    from tokmill.text.tokenizers.tokenizer import check_beside

    given = {"--pattern": pattern != "gpt2", "--tie-break": tie_break != "first"}
    given |= {"--no-special": no_special, "--engine": engine not in ("auto", "tokenizers")}
    _check_model(model, given, {"--cased": cased})
    specials = _specials(special, no_special)
    inputs = with_lists(inputs, files_from)
    path = Path(out) / "tokenizer.json" if Path(out).is_dir() or not Path(out).suffix else Path(out)
    begun = time.monotonic()
    kind = kind or _kind(inputs)
    with writing(path):
        check_beside(path)
        seen = Seen(chain.from_iterable(iter_documents(inputs, kind, _options(kind, set_, field))))
        if model == "wordpiece":
            tokenizer = train_wordpiece(seen, vocab_size, special or (), cased=cased)
        else:
            tokenizer = train_tokenizer(
                seen, vocab_size, specials, pattern=pattern, tie_break=tie_break, engine=engine
            )
        tokenizer.save(path)
    say(
        f"{human_count(seen.records, 'record')}, {human_count(seen.characters, 'character')}, "
        f"{human_time(time.monotonic() - begun)}"
    )
    say_not_reached(tokenizer.size, vocab_size)
    if not as_json:
        print_line(str(path))
        return
    facts = {
        "tokenizer": str(path),
        "size": tokenizer.size,
        "asked": vocab_size,
        "merges": len(tokenizer.merges),
        "specials": tokenizer.specials,
        "records": seen.records,
        "characters": seen.characters,
    }
    print_json(facts)


@app.command()
def encode(
    tokenizer: Tok,
    file: Annotated[str, typer.Argument(help="A UTF-8 text, - for stdin.")] = "-",
    text: Annotated[str | None, typer.Option(help="The text itself, in place of a file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the ids of a text: one line, separated by spaces. The text is read as a stream."""
    from tokmill.text.tokenizers.tokenizer import Tokenizer

    loaded = Tokenizer.from_file(tokenizer)
    with _open_text(file, text) as chunks:
        ids = loaded.encode_iterable(chunks, "plain")
        if as_json:
            print_json(list(ids))
        else:
            separator = ""
            for number in ids:
                sys.stdout.write(f"{separator}{number}")
                separator = " "
            sys.stdout.write("\n")


@app.command()
def decode(
    tokenizer: Tok,
    ids: Annotated[
        list[str] | None, typer.Argument(help="Ids; none reads them from stdin.")
    ] = None,
    out: Annotated[str | None, typer.Option("-o", "--out", help="Write the exact bytes.")] = None,
) -> None:
    """Print the text of ids; invalid UTF-8 becomes U+FFFD (with -o the bytes stay)."""
    from tokmill.text.tokenizers.tokenizer import Tokenizer

    loaded = Tokenizer.from_file(tokenizer)
    text = " ".join(ids) if ids else sys.stdin.read()
    words = text.replace(",", " ").strip("[] \n").split()
    if odd := [one for one in words if not (one.isascii() and one.isdigit() and len(one) < 19)]:
        raise UsageError(f"{odd[0][:40]!r} is no id", hint="whole numbers with spaces between them")
    numbers = [*map(int, words)]
    if out is not None:
        write_file(out, loaded.decode_bytes(numbers))
        return
    print_text(loaded.decode(numbers))
    if sys.stdout.isatty():
        sys.stdout.write("\n")


def _specials(special: list[str] | None, no_special: bool) -> list[str]:
    if no_special and special:
        raise UsageError("--special and --no-special exclude each other", hint="leave one out")
    return [] if no_special else special or ["<|endoftext|>"]


def _check_model(model: str, of_bpe: dict[str, bool], of_wordpiece: dict[str, bool]) -> None:
    others = {"bpe": of_wordpiece, "wordpiece": of_bpe}
    if model not in others:
        raise UsageError(f"no model is called {model!r}", hint=nearest(model, others))
    without = [option for option, is_given in others[model].items() if is_given]
    if without:
        raise UsageError(
            f"{without[0]} has no effect on a tokenizer with {model}", hint="leave it out"
        )


def _options(kind: str, values: list[str] | None, fields: list[str] | None) -> dict[str, Any]:
    options = overrides(values or [])
    if kind == "tsv" and "label_column" not in options:
        options["unlabelled"] = True
    named = {"sentences" if kind == "tsv" else "fields": fields} if fields else {}
    return merge(options, named, once="")


class Seen:
    """An iterator over texts that counts them."""

    def __init__(self, texts: Iterator[str]) -> None:
        self.texts = texts
        self.records = 0
        self.characters = 0

    def __iter__(self) -> Iterator[str]:
        for text in self.texts:
            self.records += 1
            self.characters += len(text)
            yield text


def _kind(inputs: list[str]) -> str:
    suffixes = {"jsonl": "jsonl", "ndjson": "jsonl", "parquet": "parquet", "arrow": "parquet"}
    suffixes |= {"tsv": "tsv"}
    kinds = set()
    for name in inputs:
        path = Path(name)
        names = [p.name for p in path.rglob("*") if p.is_file()][:1000] if path.is_dir() else [name]
        for each in names:
            stem, _, last = each.lower().rpartition(".")
            last = stem.rpartition(".")[2] if f".{last}" in MAGIC else last
            kinds.add(suffixes.get(last, "text"))
    if len(kinds) > 1:
        raise UsageError(
            f"the inputs are of several kinds: {', '.join(sorted(kinds))}",
            hint="--kind text (or jsonl, parquet), and inputs of that kind",
        )
    return kinds.pop() if kinds else "text"


@contextmanager
def _open_text(file: str, text: str | None) -> Iterator[Iterator[str]]:
    if text is not None and file != "-":
        raise UsageError("a file and --text exclude each other", where=file, hint="leave one out")
    if text is not None:
        yield iter([text])
    elif file == "-":
        yield _decoded(sys.stdin.buffer, "stdin")
    else:
        if not Path(file).is_file():
            raise TokmillError(
                "this is a folder" if Path(file).is_dir() else "there is no such file",
                where=file,
                hint="name a text file, or - for standard input",
            )
        with machine_errors("read", file), open(file, "rb") as handle:
            yield _decoded(handle, file)


def _decoded(handle: Any, where: str) -> Iterator[str]:
    import codecs

    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    try:
        while block := handle.read(1 << 20):
            if not done and (name := encoding_of(block[:HEAD])):
                raise TokmillError(
                    f"the text is {name}, not UTF-8", where=where, hint="convert it with iconv"
                )
            text = decoder.decode(block)
            # Without a byte order mark, as a build reads text.
            yield text if done else text.removeprefix("\ufeff")
            done += len(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise TokmillError(
            f"the text is not UTF-8: {error.reason}",
            where=f"{where}: near byte {done + error.start}",
            hint="convert it with iconv",
        ) from None
