"""One record a row, against a slow twin."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rows import LENGTHS, rows_of, store_of

from tokmill.feed.feed import Feed
from tokmill.feed.order import shard_groups
from tokmill.feed.rows import Whole


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 9), st.integers(0, 4), st.integers(0, 2))
def test_whole_against_the_slow_twin(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[list[int]],
    length: int,
    shards: int,
    seed: int,
) -> None:
    store, records = store_of(tmp_path_factory.mktemp("whole"), lengths)
    rows = Whole(store, length, shards=shards, seed=seed)
    first = np.cumsum([0, *map(len, lengths)]).tolist()
    groups = [
        [record for shard in group for record in records[first[shard] : first[shard + 1]] if record]
        for group in shard_groups(len(lengths), shards, seed)
    ]
    wanted = [[(token, 0) for token in record[:length]] for group in groups for record in group]
    assert len(rows) == len(wanted)
    assert rows.groups.tolist() == [len(group) for group in groups]
    assert rows_of(rows) == wanted
    assert rows.shared(np.arange(len(rows))).tolist() == [0] * len(wanted)
    cut = [record[length:] for record in records if len(record) > length]
    assert (rows.cut_records, rows.cut_tokens) == (len(cut), sum(map(len, cut)))
    assert rows.tokens == sum(map(len, wanted))


def test_rows_are_padded_to_their_length(tmp_path: Path) -> None:
    store, _ = store_of(tmp_path, [[2, 0], [5]])
    batch = Feed(Whole(store, 4), 2, shuffle=False).batch(0)
    assert batch.columns["token"].tolist() == [[1, 2, 0, 0], [3, 4, 5, 6]]
    assert batch.document.tolist() == [[0, 0, -1, -1], [0, 0, 0, 0]]
