"""Check that the engines of several stores gave equal texts equal ids."""

from __future__ import annotations

from collections.abc import Sequence

from tokmill.store.checks.probe import Probe, compare, read_probe
from tokmill.store.store import Store


def same_engine(stores: Sequence[Store]) -> None:
    """Refuse stores with the same vocabulary whose engines gave the probe's texts different ids.

    Ids that a build puts before and after each text may differ. Stores without a probe (imported
    ones) are not checked.
    """
    first: dict[str, tuple[Store, Probe]] = {}
    for store in stores:
        vocabulary = store.vocabularies.get("token")
        if vocabulary is None or not isinstance(store.manifest.probe, str):
            continue
        probe = read_probe(store.path)
        other, first_probe = first.setdefault(vocabulary.sha256, (store, probe))
        if first_probe.texts() == probe.texts():
            compare(
                first_probe.bare(),
                probe.bare(),
                where=str(store.path),
                who=f"its engine gave other ids than that of {other.path}",
                hint="build one of the two again (--fresh) with the packages of the other",
            )
