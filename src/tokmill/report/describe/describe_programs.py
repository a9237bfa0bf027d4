"""Recognises programs, graphs of their control flow, and vocabularies of x86 columns."""

from __future__ import annotations

from typing import Any

from tokmill import plugins
from tokmill.base.errors import MissingExtraError, TokmillError
from tokmill.base.files import read_file
from tokmill.report.describe.recogniser import Facts, Look

PROGRAMS = {b"\x7fELF": "an ELF program or library", b"MZ": "a Windows program or library"}
GRAPH = b"PAR1"
"""First bytes of Parquet files."""
SHOWN = 20


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
    """The frozen vocabulary of one x86 column."""
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
    """A folder of x86 vocabularies, in any of their forms."""
    files = plugins.require("tokmill.x86.tokens.vocabularies.vocabulary")
    if not files.is_vocabulary(look.path):
        return None
    facts: Facts = {"kind": "vocabulary", "what": "vocabularies of x86 code"}
    try:
        found = files.find_lists(look.path)
    except TokmillError as error:
        return {**facts, "problem": str(error)}
    lists = [
        {"column": column, "found": one.convention, **_facts(one.tokens)}
        for column, one in found.items()
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
