"""Rows laid out together give what each gives alone."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from making import token_store
from tokmill.store.gather import Gather, Spans
from tokmill.store.store import Store

LENGTHS = st.lists(st.lists(st.integers(0, 7), max_size=5), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(LENGTHS.filter(lambda shards: any(shards)), st.data())
def test_places_of_records(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[list[int]], data: st.DataObject
) -> None:
    store = token_store(
        tmp_path_factory.mktemp("places"), [[[1] * n for n in shard] for shard in lengths]
    )
    wanted = [
        (number, local, sum(shard[:local]))
        for number, shard in enumerate(lengths)
        for local in range(len(shard))
    ]
    records = data.draw(st.lists(st.integers(0, len(wanted) - 1), max_size=9))
    for known in (False, True):
        opened = Store(store.path)
        if known:
            opened.offsets()
        found = opened.places(np.asarray(records, np.int64))
        assert all(part.dtype == np.int64 for part in found)
        assert list(zip(*(part.tolist() for part in found), strict=True)) == [
            wanted[record] for record in records
        ]
        # Without the offsets of all, only what is asked for is opened.
        if not known:
            assert set(opened._mapped) == {wanted[record][0] for record in records}


def test_runs_end_with_their_shard(tmp_path: Path) -> None:
    """The second span goes on at the place where the first ends, but in another shard."""
    store = token_store(tmp_path, [[[1, 2, 3], [4]], [[5, 6, 7], [8, 9]]])
    one = np.zeros(2, np.int64)
    spans = Spans(one, np.asarray([0, 3]), np.arange(2), one, np.asarray([3, 2]))
    found = np.zeros((1, 5), np.uint16)
    Gather(store, spans, 1, 5).copy(0, 1, {"token": found}, np.zeros(1, np.int64))
    assert found.tolist() == [[1, 2, 3, 8, 9]]
