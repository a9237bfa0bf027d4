"""Stores that are read as one: engines have given all of them equal ids for equal text."""

from __future__ import annotations

from collections.abc import Sequence

from tokmill.store.probe import Probe, compare, read_probe
from tokmill.store.store import Store


def same_engine(stores: Sequence[Store]) -> None:
    """Refuse stores of one vocabulary to whose texts engines have given other ids.

    What a build puts before and after each text is a choice, and may differ. Stores without a
    probe, imported or older ones, are taken as they are.
    """
    first: dict[str, tuple[Store, Probe]] = {}
    for store in stores:
        vocabulary = store.vocabularies.get("token")
        if vocabulary is None or not isinstance(store.manifest.probe, str):
            continue
        probe = read_probe(store.path)
        other, known = first.setdefault(vocabulary.sha256, (store, probe))
        if known.texts() == probe.texts():
            compare(
                known.bare(),
                probe.bare(),
                where=str(store.path),
                who=f"its engine gave other ids than that of {other.path}",
                hint="build one of the two anew (--fresh) with the packages of the other",
            )
