"""What a build prints at its end."""

import re
from collections.abc import Mapping
from typing import Any

from tokmill.base.errors import shell_word
from tokmill.base.progress import human_bytes, human_count, human_share
from tokmill.store.store import Store
from tokmill.terminal.output import print_json, print_line, say

REPLACED = re.compile(r"tokens of (\w+) replaced by unk")
MUCH = 0.05
"""A larger share of unknown tokens means that the vocabulary is for other code or other rules."""


def notes_in_words(notes: Mapping[str, int], tokens: int) -> str:
    """Return the notes of a build; unknown tokens also as a share of all `tokens`."""
    shown = []
    for note, count in notes.items():
        # A note begins with a noun in the plural.
        nouns, space, rest = note.partition(" ")
        share = f" ({human_share(count / tokens)})" if REPLACED.fullmatch(note) else ""
        shown.append(f"{human_count(count, nouns.removesuffix('s'), nouns)}{space}{rest}{share}")
    return ", ".join(shown)


def unknown_warning(notes: Mapping[str, int], tokens: int) -> str:
    shares = {m[1]: n / tokens for note, n in notes.items() if (m := REPLACED.fullmatch(note))}
    much = [f"{human_share(share)} of {column}" for column, share in shares.items() if share > MUCH]
    return f"warning: unknown to the vocabulary: {', '.join(much)}" if much else ""


def empty_columns(store: Store) -> list[str]:
    """Return the kept fields of which no record has a value, as those of a name with a slip."""
    kept = store.manifest.source in ("jsonl", "parquet") and store.records > 0
    left = [name for name, column in store.schema.items() if kept and column.dtype == "utf8"]
    for number, entry in enumerate(store.shards if left else ()):
        shard = store.shard(number)
        left = [name for name in left if not len(shard.text(name, 0, entry.records).data)]
    return left


def summary(store: Store) -> dict[str, Any]:
    manifest = store.manifest
    return {
        "store": store.place,
        "complete": manifest.complete,
        **manifest.counts(),
        "left_out": manifest.left_out or {},
        "fingerprint": manifest.fingerprint,
    }


def report(store: Store, *, json: bool) -> None:
    facts = summary(store)
    if warning := unknown_warning(store.manifest.notes, store.manifest.tokens):
        say(warning, "hint: is the vocabulary for the same rules, and for such code?")
    if empty := empty_columns(store):
        say(
            f"warning: no record has a value of {', '.join(empty)}",
            "hint: check the names; two fields are --keep A --keep B",
        )
    if json:
        print_json(facts)
        return
    manifest = store.manifest
    state = "" if manifest.complete else " (partial)"
    made_of_a_store = manifest.source in ("select", "embed", "mine")
    print_line(
        f"{store.place}{state}: {human_count(manifest.records, 'record')}, "
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
            f"`tokmill store rejects {shell_word(store.place)}` lists them"
        )
    if manifest.notes:
        print(f"notes: {notes_in_words(manifest.notes, manifest.tokens)}")
    print(f"fingerprint {manifest.fingerprint}")
    if not manifest.complete:
        say("the store is not complete: the same command resumes")
