"""The report of a finished build."""

from __future__ import annotations

import shlex
from typing import Any

from tokmill.cli.facts import notes_in_words, unknown_warning
from tokmill.cli.output import print_json, say
from tokmill.progress import human_bytes, human_count, human_share
from tokmill.store.store import Store


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
