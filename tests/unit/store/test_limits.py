"""The numbers of docs/how-long.md at their edges; large files are holes."""

from fractions import Fraction
from pathlib import Path

import msgspec
import numpy as np
import pytest

from making import change_sealed, token_store
from tokmill.base.headers import tensor_header_bytes
from tokmill.feed.feed import Feed
from tokmill.feed.order import Order, permute
from tokmill.feed.rows import Mix, Windows
from tokmill.store.store import Store


def test_a_shard_of_more_tokens_than_32_bits_count(tmp_path: Path) -> None:
    """A record that begins beyond 2^32 tokens, in a shard of more than 8 GB."""
    store, tokens = token_store(tmp_path, [[[7, 8]]]), (1 << 32) + 3
    entry = msgspec.to_builtins(store.shards[0])
    path = tmp_path / f"shards/{entry[0]}.safetensors"
    head = tensor_header_bytes(
        [("offsets", "U64", [3]), ("start", "U64", [2]), ("item", "U32", [2]),
         ("token", "U16", [tokens])], {},
    )  # fmt: skip
    with path.open("wb") as file:
        file.write(head + np.asarray([0, tokens - 3, tokens, 0, 9], "<u8").tobytes())
        file.write(np.zeros(2, "<u4").tobytes())
        file.truncate(size := len(head) + 48 + 2 * tokens)
        file.seek(size - 6)
        file.write(np.asarray([4, 5, 6], "<u2").tobytes())
    assert path.stat().st_blocks * 512 < 1 << 20, "the file is no hole"
    shards = [[entry[0], 2, tokens, size, entry[4]]]
    change_sealed(tmp_path / "manifest.json", records=2, tokens=tokens, shards=shards)
    opened = Store(tmp_path)
    assert opened.record(1)["token"].tolist() == [4, 5, 6]
    feed = Feed(Windows(opened, 128), 1, shuffle=False)
    assert len(feed) == (tokens + 127) // 128
    assert feed.batch(len(feed) - 1).columns["token"][0, :3].tolist() == [4, 5, 6]


@pytest.mark.parametrize("n", [(1 << 32) + 1, (1 << 53) - 1, (1 << 53) + 1, 1 << 62])
def test_orders_of_more_rows_than_floats_count(n: int) -> None:
    places = np.asarray([0, 1, n // 2, n - 2, n - 1])
    rows = permute(places, n, 5)
    assert len({*rows.tolist()}) == 5 and rows.min() >= 0 and rows.max() < n
    assert permute(rows, n, 5, inverse=True).tolist() == places.tolist()
    order = Order(np.asarray([n]), 5)
    numbers = order.numbers(0, order.rows(n - 3, n)[1])
    assert numbers.tolist() == [n - 3, n - 2, n - 1]


@pytest.mark.parametrize("first", [(1 << 32) - 5, (1 << 53) - 5, (1 << 62) - 5])
def test_mixes_after_many_rows(first: int) -> None:
    mix = Mix([Fraction(1, 3), Fraction(1, 7), Fraction(11, 21)])
    found = mix.split(first, first + 10)
    assert sum(len(slots) for slots, _ in found) == 10
    for source, (slots, start) in enumerate(found):
        rows = range(start, start + len(slots))
        assert mix.slots(source, rows) == (first + slots).tolist()
