"""Prints the results of `inspect` as text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from tokmill.base.errors import one_line
from tokmill.base.progress import human_bytes, human_count, human_share
from tokmill.report.describe.shown_records import fact_in_words, input_in_words
from tokmill.store.checks.stats import Statistics
from tokmill.store.store import Store
from tokmill.terminal.output import in_words, print_json, print_table, say

BAR = 40
REPLACED = re.compile(r"tokens of (\w+) replaced by unk")
MUCH = 0.05
"""A larger share of unknown tokens means that the vocabulary is for other code or other rules."""


def print_facts(facts: dict[str, Any]) -> None:
    """Print facts as name and value, and lists of dicts as tables below."""
    tables = {k: v for k, v in facts.items() if isinstance(v, list) and v and _alike(v)}
    rows = []
    for name, value in facts.items():
        if name in tables or name == "recipe" or value in (None, {}, []):
            continue
        if name == "vocabularies":
            shown = [_vocabulary(key, one) for key, one in value.items()]
        elif name.endswith("bytes") and type(value) is int:
            shown = [human_bytes(value)]
        else:
            shown = [_text(value)]
        rows.append((name.replace("_", " "), shown))
    width = max((len(name) for name, _ in rows), default=0)
    for name, shown in rows:
        for number, line in enumerate(shown):
            print(f"{'' if number else name:{width}}  {one_line(line)}")
    for name, value in tables.items():
        headers = list(dict.fromkeys(key for entry in value for key in entry))
        print(f"\n{name.replace('_', ' ')}")
        print_table(headers, [[_text(entry.get(key)) for key in headers] for entry in value])


def note_in_words(note: str, count: int) -> str:
    """Return a note of a build with its count; a note begins with a noun in the plural."""
    nouns, space, rest = note.partition(" ")
    return f"{human_count(count, nouns.removesuffix('s'), nouns)}{space}{rest}"


def notes_in_words(notes: Mapping[str, int], tokens: int) -> str:
    """Return the notes of a build; unknown tokens also as a share of all `tokens`."""
    return ", ".join(
        note_in_words(note, count)
        + (f" ({human_share(count / tokens)})" if REPLACED.fullmatch(note) else "")
        for note, count in notes.items()
    )


def unknown_warning(notes: Mapping[str, int], tokens: int) -> str:
    """Return a warning if many tokens of a column were unknown, else ""."""
    shares = {m[1]: n / tokens for note, n in notes.items() if (m := REPLACED.fullmatch(note))}
    much = [f"{human_share(share)} of {column}" for column, share in shares.items() if share > MUCH]
    return f"warning: unknown to the vocabulary: {', '.join(much)}" if much else ""


def print_records(records: list[dict[str, Any]]) -> None:
    """Print records one below the other."""
    if not records:
        print("no record")
    for i, record in enumerate(records):
        facts = [f"record {record['record']:,}", human_count(record["tokens"], "token")]
        if "from" in record:
            facts.append(input_in_words(record))
        print(("\n" if i else "") + "-- " + ", ".join(facts))
        for name, value in record.items():
            if name in ("record", "tokens", "from", "at"):
                continue
            if isinstance(value, list):
                cut = " …" if 0 < len(value) < record["tokens"] and len(value) == 400 else ""
                print(f"{name}: {' '.join(map(str, value))}{cut}")
            elif name == "text":
                print(value + (" …" if record["tokens"] > 400 else ""))
            else:
                print(fact_in_words(name, value))


def print_statistics(found: Statistics, tokens: Mapping[str, list[str]]) -> None:
    """Print the statistics of a store; `tokens`: column → its tokens by id, if they are known."""
    lengths = found.lengths
    left_out = {**found.skipped, **{f"{k} (rejected)": n for k, n in found.rejected.items()}}
    rows = [
        ["records", f"{found.records:,}"],
        ["tokens", f"{found.tokens:,}"],
        ["shards read", f"{found.shards:,}" + ("" if found.exact else " (a sample)")],
        ["shortest, longest", f"{lengths.min:,}, {human_count(lengths.max, 'token')}"],
        ["mean, median", f"{lengths.mean:,.1f}, {lengths.median:,.1f} tokens"],
        ["90%, 99% up to", f"{lengths.p90:,}, {lengths.p99:,} tokens"],
        [f"rows of {found.width:,}", f"{found.rows:,}, {human_share(found.padding, 2)} padding"],
        [f"longer than {found.width:,}", f"{human_share(found.longer, 2)} of the records"],
        ["empty", human_count(found.empty, "record")],
    ]
    if found.bytes_per_token is not None:
        rows.append(["bytes a token", f"{found.bytes_per_token:.3f}"])
    rows.append(["left out", ", ".join(f"{n:,} {why}" for why, n in left_out.items()) or "nothing"])
    print_table(["figure", ""], rows)
    if lengths.histogram:
        print("\nlengths")
        most = max(n for _, _, n in lengths.histogram)
        labels = [f"{a:,}" if a == b else f"{a:,} to {b:,}" for a, b, _ in lengths.histogram]
        width = max(map(len, labels))
        for label, (_, _, n) in zip(labels, lengths.histogram, strict=True):
            print(f"{label.rjust(width)}  {'#' * round(BAR * n / most):<{BAR}}  {n:,}")
    for name, use in found.columns.items():
        share = "" if use.used is None else f" ({human_share(use.used, 2)})"
        of = "" if use.vocabulary is None else f" of {use.vocabulary:,}{share}"
        print(f"\n{name}: {human_count(use.unique, 'id')}{of}")
        if use.unknown is not None:
            print(f"unknown: {human_share(use.unknown, 4)} of the tokens")
        if use.eot is not None:
            print(f"eot: {human_count(use.eot, 'token')}")
        first = use.frequent[:10]
        columns: dict[str, list[Any]] = {"id": [number for number, _, _ in first]}
        if known := tokens.get(name):
            columns["token"] = [known[i] if i < len(known) else "" for i in columns["id"]]
        columns["tokens"] = [count for _, count, _ in first]
        columns["share"] = [human_share(share, 2) for _, _, share in first]
        print_table(list(columns), [list(row) for row in zip(*columns.values(), strict=True)])
    for name in found.not_counted:
        print(f"\n{name}: its ids are too large to be counted")


def _vocabulary(name: str, facts: dict[str, Any]) -> str:
    roles = ", ".join(f"{role} {number}" for role, number in facts["roles"].items())
    line = f"{name}: {facts['size']:,} ids, {facts['file']}, sha256 {facts['sha256'][:12]}"
    return f"{line}, roles {roles}" if roles else line


def _alike(values: list[Any]) -> bool:
    return all(isinstance(value, dict) for value in values)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_text(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return in_words(value)


def summary(store: Store) -> dict[str, Any]:
    """Return the facts of a store for the report."""
    manifest = store.manifest
    return {
        "store": str(store.path),
        "complete": manifest.complete,
        "records": manifest.records,
        "tokens": manifest.tokens,
        "shards": len(manifest.shards),
        "bytes": manifest.bytes,
        "input_bytes": manifest.input_bytes,
        "skipped": manifest.skipped,
        "rejected": manifest.rejected,
        "notes": manifest.notes,
        "left_out": manifest.left_out or {},
        "fingerprint": manifest.fingerprint,
    }


def report(store: Store, *, json: bool) -> None:
    """Print the report of a store."""
    facts = summary(store)
    if warning := unknown_warning(store.manifest.notes, store.manifest.tokens):
        say(f"{warning}\nhint: is the vocabulary for the same rules, and for such code?")
    if json:
        print_json(facts)
        return
    manifest = store.manifest
    state = "" if manifest.complete else " (partial)"
    made_of_a_store = manifest.source in ("select", "embed", "mine")
    print(
        f"{store.path}{state}: {human_count(manifest.records, 'record')}, "
        f"{human_count(manifest.tokens, 'token')}, {human_bytes(manifest.bytes)} in "
        f"{human_count(len(manifest.shards), 'shard')}"
        + ("" if made_of_a_store else f" from {human_bytes(manifest.input_bytes)}")
    )
    for what in ("skipped", "rejected"):
        counts = facts[what]
        if counts:
            listed = ", ".join(f"{count:,} {reason}" for reason, count in counts.items())
            print(f"{what}: {listed}")
    if rejected := sum(manifest.rejected.values()):
        # A build with few records never ends because of rejects, so their share is shown.
        seen = rejected + manifest.records
        verb = "was" if rejected == 1 else "were"
        say(
            f"{rejected:,} of {seen:,} {verb} rejected ({human_share(rejected / seen)}): "
            f"`tokmill store rejects {shlex.quote(str(store.path))}` lists them"
        )
    if manifest.notes:
        print(f"notes: {notes_in_words(manifest.notes, manifest.tokens)}")
    print(f"fingerprint {manifest.fingerprint}")
    if not manifest.complete:
        say("the store is not complete: the same command continues")
