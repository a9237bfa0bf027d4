"""Recognises files of other programs: token files, arrays, text, pickles."""

from __future__ import annotations

import codecs
import io
import re
import shlex
import zipfile
from collections.abc import Sequence
from typing import IO, Any

import numpy as np

from tokmill import plugins
from tokmill.base.bounds import bounded
from tokmill.base.errors import MissingExtraError, TokmillError
from tokmill.base.files import machine_errors, read_file
from tokmill.base.headers import ZIP_ERRORS, array_header, arrow_errors, loads_json
from tokmill.base.inflate import head_of, packing
from tokmill.formats.bin import HALVES, layout_hint, wrong_layout
from tokmill.report.describe.pickles import read_pickle
from tokmill.report.describe.recogniser import HEAD, Facts, Look, Recogniser, shorten, tail
from tokmill.text.jsonl import CHATS, chat_key, keys_of
from tokmill.text.make_document import quoted

PROGRAMS = {b"\x7fELF": "an ELF program or library", b"MZ": "a Windows program or library"}
GRAPH = b"PAR1"
"""First bytes of Parquet files."""
SHOWN = 20
COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".xz": "xz", ".bz2": "bzip2"}


def program(look: Look) -> Facts | None:
    """A program; builds read it if it is x86."""
    for magic, what in PROGRAMS.items():
        if look.head.startswith(magic):
            facts: Facts = {"kind": "program", "what": what, "bytes": look.size}
            try:
                plugins.require("tokmill.x86.image.program").open_program(look.path)
            except TokmillError as error:
                why = f"{error.what} ({error.hint})" if error.hint else error.what
                return {**facts, "problem": f"a build will refuse it: {why}"}
            compare = f"tokmill diff {look.quoted} OTHER --html page.html"
            return {**facts, "next": f"tokmill build x86 {look.quoted} -o STORE", "or": compare}
    return None


def graph(look: Look) -> Facts | None:
    """A graph of `tokmill cfg`, where pyarrow is installed."""
    if look.head[:4] != GRAPH:
        return None
    try:
        about: Any = plugins.require("tokmill.x86.graphs.graph_files").read_about(look.path)
    except MissingExtraError:
        return None
    if about is None:
        return None
    return {
        "kind": "graph",
        "what": f"the control flow of {about.program or 'a program'}, {about.bits}-bit code",
        "bytes": look.size,
        "functions": about.functions,
        "blocks": about.blocks,
        "instructions": about.instructions,
        "edges": about.edges,
        "lifter": about.lifter,
        **({"not_complete": list(about.cut_short)} if about.cut_short else {}),
        "not_followed": {reason: len(places) for reason, places in about.unresolved.items()},
        "next": f"tokmill build x86 {look.quoted} -o STORE",
    }


def vocabulary(look: Look) -> Facts | None:
    if not isinstance(look.json, dict) or not {"column", "rules", "tokens"} <= set(look.json):
        return None
    kind = plugins.require("tokmill.x86.tokens.vocabularies.vocabulary").TokenList
    try:
        tokens = kind.from_json(read_file(look.path), str(look.path))
    except TokmillError as error:
        return {"kind": "vocabulary", "what": "a list of tokens", "problem": error.what}
    return {
        "kind": "vocabulary",
        "what": f"the vocabulary of the column {tokens.column} of x86 code",
        "bytes": look.size,
        **_facts(tokens),
        "first": tokens.tokens[:SHOWN],
    }


def vocabulary_folder(look: Look) -> Facts | None:
    files = plugins.require("tokmill.x86.tokens.vocabularies.vocabulary")
    if not files.is_vocabulary(look.path):
        return None
    facts: Facts = {"kind": "vocabulary", "what": "vocabularies of x86 code"}
    try:
        vocabularies = files.find_lists(look.path)
    except TokmillError as error:
        return {**facts, "problem": str(error)}
    lists = [
        {"column": column, "found": one.convention, **_facts(one.tokens)}
        for column, one in vocabularies.items()
    ]
    options = f"--rules {lists[0]['rules']} --vocab {look.quoted}"
    return {**facts, "lists": lists, "next": f"tokmill build x86 INPUT {options} -o STORE"}


def _facts(tokens: Any) -> Facts:
    counts = tokens.counts
    return {
        "rules": tokens.rules,
        "tokens": len(tokens),
        "occurrences": "not counted" if counts is None else sum(counts),
    }


LLMC = {20240520: "uint16", 20240801: "uint32"}
"""Magic number of llm.c → type of a token (karpathy/llm.c, `dev/data/data_common.py`)."""

INTERVAL = re.compile(rb"(?:[ \t]*(?:#[^\n]*)?\r?\n)*[ \t]*(?P<line>T\s*:\d+:\d+[\s:])")
"""Beginning of a file of basic block vectors, after comments."""
LEARN = "--vocab-size 8192"
"""Option of a build that trains a tokenizer first."""
STRINGS = ("string", "large_string")
TEXTS = {
    ".mlir": ("mlir", "an MLIR module", "tokmill build mlir {} -o STORE"),
    ".tsv": (
        "tsv",
        "lines of cells between tabs",
        "tokmill build tsv {} --tokenizer TOKENIZER --sentence NAME --label-column NAME -o STORE",
    ),
    ".csv": (
        "csv",
        "lines of cells between commas, which no build reads",
        'python3 -c "import csv, sys; [print(*row, sep=chr(9)) for row in csv.reader(sys.stdin)]" '
        "< {} > TABLE.tsv",
    ),
}
"""Suffix of texts of a known kind → kind, description, and the command that reads them."""
USUAL = ("content", "body", "document", "raw_content", "code", "story")
"""Usual names of text fields in data sets."""


def empty(look: Look) -> Facts | None:
    return None if look.size else {"kind": "empty file", "what": "a file without content"}


def pickle(look: Look) -> Facts | None:
    """A pickle, read as data; a pickle inside a zip of PyTorch is not read."""
    proto = look.head[1] if look.head[:1] == b"\x80" and len(look.head) > 2 else 0
    named = look.suffix in (".pkl", ".pickle")
    if 2 <= proto <= 5 and tail(look) == b"." and (named or proto < 4 or look.head[2] == 0x95):
        return read_pickle(look, f"a pickle (protocol {proto})")
    if named:
        return read_pickle(look, "a pickle by its name")
    if any(name.endswith("data.pkl") for name in _members(look)):
        what = "a PyTorch file, which holds a pickle; it is not opened"
        return {"kind": "pickle", "what": what, "bytes": look.size}
    return None


def npz(look: Look) -> Facts | None:
    """A numpy archive: its arrays' shapes and types from their headers."""
    names = _members(look)
    if not names or not all(name.endswith(".npy") for name in names):
        return None
    arrays: list[Facts] = []
    with (
        machine_errors("read", look.path),
        bounded(look.path),
        zipfile.ZipFile(look.path) as archive,
    ):
        for name in names:
            try:
                with archive.open(name) as member:
                    header = _array_header(member)
            except ZIP_ERRORS as error:
                header = {"problem": f"it cannot be read: {error}"}
            arrays.append({"name": name.removesuffix(".npy"), **header})
    facts: Facts = {"kind": "npz", "what": "a numpy archive", "bytes": look.size, "arrays": arrays}
    if {"input_ids", "attention_mask"} <= {array["name"] for array in arrays}:
        facts["what"] = "a numpy archive of padded windows"
        facts["next"] = f"tokmill build npz {look.quoted} -o STORE"
    return facts


def npy(look: Look) -> Facts | None:
    if not look.head.startswith(b"\x93NUMPY"):
        return None
    header = _array_header(io.BytesIO(look.head))
    return {"kind": "npy", "what": "a numpy array", "bytes": look.size, **header}


def llmc(look: Look) -> Facts | None:
    if len(look.head) < 1024 or int.from_bytes(look.head[:4], "little") not in LLMC:
        return None
    dtype = LLMC[int.from_bytes(look.head[:4], "little")]
    wide = " --dtype u4" * (dtype == "uint32")
    return {
        "kind": "llm.c tokens",
        "what": "a token file of llm.c: 1,024 bytes of header, then ids",
        "bytes": look.size,
        "dtype": dtype,
        "next": f"tail -c +1025 {look.quoted} > ids.bin, then "
        f"tokmill build bin ids.bin{wide} -o STORE",
    }


def parquet(look: Look) -> Facts | None:
    if look.head[:4] != b"PAR1":
        return None
    facts: Facts = {"kind": "parquet", "what": "a Parquet file", "bytes": look.size}
    try:
        reader = plugins.require("pyarrow.parquet")
    except MissingExtraError as error:
        return {**facts, "problem": f"its columns are not shown: {error.what}", "hint": error.hint}
    try:
        meta = reader.read_metadata(look.path)
        schema = meta.schema.to_arrow_schema()
        columns = [{"name": field.name, "type": str(field.type)} for field in schema]
    except arrow_errors(plugins.require("pyarrow")) as error:
        return {**facts, "problem": f"it cannot be read: {error}"}
    facts |= {"rows": meta.num_rows, "row_groups": meta.num_row_groups, "columns": columns}
    strings = [field.name for field in schema if str(field.type) in STRINGS]
    if strings:
        facts["next"] = f"tokmill build parquet {look.quoted}{_field(strings)} {LEARN} -o STORE"
    return facts


def compressed(look: Look) -> Facts | None:
    if not (packed := packing(look.head)):
        return None
    name = COMPRESSED[packed]
    stream = f"{'an' if name == 'xz' else 'a'} {name} stream"
    try:
        inner = head_of(str(look.path), HEAD, packed)
    except MissingExtraError as error:
        return {"kind": name, "what": stream, "bytes": look.size,
                "problem": error.what, "hint": error.hint}  # fmt: skip
    except TokmillError as error:
        return {"kind": name, "what": f"a damaged {name} stream", "problem": error.what}
    more = len(inner) == HEAD or look.size > HEAD
    hidden = Look(look.path, inner, len(inner) + more)
    body: Facts = next(
        (f for f in (r(hidden) for r in (block_vectors, jsonl, text)) if f), {"kind": "binary data"}
    )
    facts: Facts = {"kind": name, "what": f"{stream} of {body['kind']}", "bytes": look.size}
    # Builds read compressed files, so the next command is the same.
    return facts | {
        key: body[key] for key in ("fields", "first_record", "next", "or") if key in body
    }


def jsonl(look: Look) -> Facts | None:
    head = look.head.removeprefix(b"\xef\xbb\xbf").lstrip()
    line, newline, _ = head.partition(b"\n")
    named = bool({".jsonl", ".ndjson"} & {suffix.lower() for suffix in look.path.suffixes})
    try:
        record = loads_json(line)
    except ValueError as error:
        if not named:
            return None
        cut = not newline and look.size > len(look.head)
        why = f"its first line is longer than {HEAD:,} bytes" if cut else f"line 1: {error}"
        return {"kind": "jsonl", "what": "JSON Lines by its name", "bytes": look.size,
                "problem": why}  # fmt: skip
    if not isinstance(record, dict):
        return None
    facts: Facts = {
        "kind": "jsonl",
        "what": "JSON Lines",
        "bytes": look.size,
        "fields": {key: type(value).__name__ for key, value in record.items()},
        "first_record": shorten(record),
    }
    seen = keys_of([record])
    strings = [quoted(name) for name, kind in facts["fields"].items() if kind == "str"]
    if key := chat_key(seen):
        facts["hint"] = CHATS.format(key)
        strings = [name for name in strings if name in USUAL or name in ("title", "text")]
    if strings := strings or ([] if key else list(seen.texts)):
        facts["next"] = f"tokmill build jsonl {look.quoted}{_field(strings)} {LEARN} -o STORE"
    return facts


def block_vectors(look: Look) -> Facts | None:
    begin = INTERVAL.match(look.head)
    if begin is None:
        return None
    line = look.head[begin.start("line") :].partition(b"\n")[0]
    return {
        "kind": "basic block vectors",
        "what": "basic block vectors, an interval a line",
        "bytes": look.size,
        "first_record": shorten(line.decode("latin-1")),
        "next": f"tokmill build bbv {look.quoted} -o STORE",
        "or": f"tokmill simpoint {look.quoted} -o POINTS",
    }


def text(look: Look) -> Facts | None:
    if b"\x00" in look.head:
        return None
    try:
        decoder = codecs.getincrementaldecoder("utf-8")()
        decoded = decoder.decode(look.head, final=look.size <= len(look.head))
    except UnicodeDecodeError:
        return None
    packed = look.path.name.lower().endswith(tuple(f".tsv{ending}" for ending in COMPRESSED))
    suffix = ".tsv" if packed else look.suffix
    if suffix in TEXTS:
        kind, what, command = TEXTS[suffix]
        return {"kind": kind, "what": what, "bytes": look.size,
                "first_record": shorten(decoded.partition("\n")[0]),
                "next": command.format(look.quoted),
                **({"or": f"tokmill rl search {look.quoted} -o BEST"} if kind == "mlir" else {}),
                }  # fmt: skip
    documents = decoded.split("<|endoftext|>")
    return {
        "kind": "text",
        "what": "text in UTF-8",
        "bytes": look.size,
        "separators": "<|endoftext|>" if len(documents) > 1 else "none seen",
        "first_record": shorten(documents[0]),
        "next": f"tokmill build text {look.quoted} {LEARN} -o STORE",
    }


def onnx(look: Look) -> Facts | None:
    """An ONNX model: a protocol buffer that begins with the version of its format."""
    if look.suffix != ".onnx" or look.head[:1] != b"\x08":
        return None
    return {"kind": "onnx", "what": "an ONNX model", "bytes": look.size,
            "next": f"tokmill build mlir {look.quoted} -o STORE",
            "or": f"tokmill rl tune {look.quoted} -o NAME"}  # fmt: skip


def raw_tokens(look: Look) -> Facts | None:
    """A token file without header: its bytes are read as uint16 or as uint32."""
    if look.suffix not in (".bin", ".npy"):
        return None
    facts: Facts = {"kind": "raw tokens", "what": "a file of bare tokens by its name; it has no "
                    "known header", "bytes": look.size}  # fmt: skip
    if look.path.with_suffix(".idx").exists():
        facts["what"] = "the tokens of a Megatron-LM pair, whose index is not read"
        facts["next"] = f"tokmill build bin {look.quoted} --dtype u2 --separator-id ID -o STORE"
        return facts
    if look.size % 2:
        return {**facts, "problem": "an odd number of bytes holds neither uint16 nor uint32 tokens"}
    short = np.frombuffer(look.head[: len(look.head) // 4 * 4], "<u2")
    why = wrong_layout(short)
    # Of few ids `wrong_layout` says nothing.
    halves = why == HALVES or (not why and short.any() and not short[1::2].any())
    wide = look.size % 4 == 0 and halves
    if why and not wide:
        return {**facts, "problem": why, "hint": layout_hint(why, look.path.name)}
    dtype = "uint32" if wide else "uint16"
    ids = np.frombuffer(look.head[: len(look.head) // 4 * 4], "<u4" if wide else "<u2")
    return {
        **facts,
        "guess": f"{dtype}, {look.size // (4 if wide else 2):,} tokens",
        "largest_seen": int(ids.max()) if len(ids) else 0,
        "first_ids": ids[:16].tolist(),
        "next": f"tokmill build bin {look.quoted}{' --dtype u4' * bool(wide)} -o STORE",
    }


def _field(strings: Sequence[str]) -> str:
    """Return the option that names the field of the documents, if it is not the default one."""
    if {"title", "text"} & set(strings):
        return ""
    usual = [name for name in USUAL if name in strings]
    return f" --field {shlex.quote((usual or strings)[0])}"


def _members(look: Look) -> list[str]:
    if look.head[:4] not in (b"PK\x03\x04", b"PK\x05\x06"):
        return []
    try:
        with machine_errors("read", look.path), zipfile.ZipFile(look.path) as archive:
            return archive.namelist()
    except ZIP_ERRORS:
        return []


def _array_header(stream: IO[bytes]) -> Facts:
    try:
        shape, _, dtype = array_header(stream)
    except ZIP_ERRORS as error:
        return {"problem": f"its header cannot be read: {error}"}
    facts: Facts = {"shape": list(shape), "dtype": str(dtype)}
    if dtype.hasobject:
        facts["problem"] = "it holds Python objects (a pickle), which will not be opened"
    return facts


FOREIGN: list[Recogniser] = [
    empty, npz, npy, pickle, llmc, graph, parquet, program, onnx,
    compressed,
]  # fmt: skip
"""Recognised by first bytes. `LOOSE` is tried last, because many files could be text or tokens."""
LOOSE: list[Recogniser] = [raw_tokens, block_vectors, jsonl, text]
