"""Store → foreign file → store: the same ids, and the same borders where the format has them."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from making import EOT, TOKENIZER, ids_of, quick_build, token_store, write_store
from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError
from tokmill.builds.source import Resources
from tokmill.store.schema import Column

WITH_BORDERS = {
    # export: (source, output, input, options of the source)
    "bin": ("bin", "out/t.bin", "out/t.bin", {"separator_id": EOT, "dtype": "u2"}),
    "npz": ("npz", "out", "out", {}),
}
EXPORT_OPTIONS = {"npz": {"max_length": 80, "stride": 80, "pad_id": 7, "windows_per_file": 3}}


def write(kind, store, out, **options):
    part = plugins.load(plugins.EXPORTS, kind)
    return part(part.Config(**options)).write(store, out)


def ended(documents):
    """Documents as a text build leaves them: no EOT inside, one at the end."""
    return [[*(i for i in document if i != EOT), EOT] for document in documents]


ids = st.integers(0, 299)
shards = st.lists(
    st.lists(st.lists(ids, max_size=60), min_size=1, max_size=6),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("kind", WITH_BORDERS)
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(shards=shards)
def test_a_round_trip_keeps_ids_and_borders(kind, shards):
    source, out, inputs, options = WITH_BORDERS[kind]
    shards = [ended(shard) for shard in shards]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = token_store(folder / "store", shards)
        written = write(kind, store, folder / out, **EXPORT_OPTIONS.get(kind, {}))
        again = quick_build(source, folder / inputs, folder / "again", **options)
        assert ids_of(again) == [document for shard in shards for document in shard]
        assert written["tokens"] == store.tokens == again.tokens
        assert written["bytes"] == sum(Path(f).stat().st_size for f in written["files"])


@pytest.mark.parametrize("kind", WITH_BORDERS)
def test_a_tokenizer_gives_the_store_its_vocabulary(kind, tmp_path):
    source, out, inputs, options = WITH_BORDERS[kind]
    options = {k: v for k, v in options.items() if k != "separator_id"}  # its role says it
    store = token_store(tmp_path / "store", [[[5, 6, EOT], [7, EOT]]])
    write(kind, store, tmp_path / out, **EXPORT_OPTIONS.get(kind, {}))
    again = quick_build(source, tmp_path / inputs, tmp_path / "a", tokenizer=TOKENIZER, **options)
    assert again.vocabularies["token"].size == 300
    assert again.schema["token"] == Column("u2", vocab="token")
    assert ids_of(again) == ids_of(store)
    with pytest.raises(TokmillError, match="the id 7 is none of 0 to 6"):
        quick_build(source, tmp_path / inputs, tmp_path / "b", vocab_size=7, **options)
    with pytest.raises(UsageError, match="vocab_size = 7, but the tokenizer has 300"):
        quick_build(
            source, tmp_path / inputs, tmp_path / "c", tokenizer=TOKENIZER, vocab_size=7, **options
        )
    narrow = quick_build(source, tmp_path / inputs, tmp_path / "d", vocab_size=256, **options)
    assert narrow.schema["token"] == Column("u1")


@pytest.mark.parametrize("kind", WITH_BORDERS)
def test_equal_stores_give_equal_bytes_and_blocks_do_not_matter(kind, tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    rows = [random.integers(0, 300, n).tolist() for n in random.integers(0, 40, 30)]
    store = token_store(tmp_path / "store", [rows[:17], rows[17:]])
    files = []
    for number, block in enumerate((1, 50, 1 << 20)):
        monkeypatch.setattr("tokmill.formats.notes.BLOCK", block)
        monkeypatch.setattr("tokmill.formats.notes.blocks.__defaults__", (block,))
        options = EXPORT_OPTIONS.get(kind, {})
        written = write(kind, store, tmp_path / f"{number}" / "x.y", **options)
        files.append(
            [Path(f).read_bytes() for f in written["files"] if not f.endswith("stats.json")]
        )
    assert files[0] == files[1] == files[2]


@pytest.mark.parametrize("kind", WITH_BORDERS)
def test_another_column_can_be_exported(kind, tmp_path):
    schema = {"asm": Column("u2", phrase=True), "side": Column("u1"), "score": Column("f4")}
    table = {"asm": [[3, 4, 5], [6], [7, 8]]}
    phrases = [[(0, True), (1, False)], [], [(2, True), (2, False), (0, True)]]
    rows = [
        {"phrases": p, "side": [1] * n, "score": [0.5] * n}
        for p, n in zip(phrases, (4, 0, 7), strict=True)
    ]
    store = write_store(tmp_path / "store", schema, [rows[:2], rows[2:]], table=table)
    expected = [3, 4, 5, 6, 7, 8, 7, 8, 3, 4, 5]
    options = {**EXPORT_OPTIONS.get(kind, {}), "column": "asm"}
    written = write(kind, store, tmp_path / "out", **options)
    first = written["files"][0] if kind == "bin" else tmp_path / "out"
    again = quick_build(kind, first, tmp_path / "again")
    assert [i for record in ids_of(again) for i in record] == expected
    with pytest.raises(UsageError, match="no column 'token'"):
        write(kind, store, tmp_path / "b", **EXPORT_OPTIONS.get(kind, {}))
    with pytest.raises(UsageError, match="does not hold one id per token"):
        write(kind, store, tmp_path / "c", **{**options, "column": "score"})


def test_borders_of_phrases_can_be_exported(tmp_path):
    schema = {"asm": Column("u2", phrase=True), "border": Column("u1", phrase=True)}
    rows = [{"phrases": [(0, True), (1, False), (1, True)]}]
    store = write_store(tmp_path / "s", schema, [rows], table={"asm": [[3, 4, 5], [6]]})
    write("bin", store, tmp_path / "b.bin", column="border")
    assert np.fromfile(tmp_path / "b.bin", "<u2").tolist() == store.record(0)["border"].tolist()


@pytest.mark.parametrize("kind", WITH_BORDERS)
def test_the_content_digest_does_not_depend_on_blocks(kind, tmp_path, monkeypatch):
    source, out, inputs, options = WITH_BORDERS[kind]
    random = np.random.default_rng(0)
    rows = ended(random.integers(0, 300, n).tolist() for n in random.integers(0, 60, 40))
    store = token_store(tmp_path / "store", [rows])
    write(kind, store, tmp_path / out, **EXPORT_OPTIONS.get(kind, {}))
    stores = []
    for block in (1, 100, 1 << 20):
        monkeypatch.setattr(
            "tokmill.builds.build.choose",
            lambda amount, tasks, b=block: (0, Resources(block_bytes=b)),
        )
        stores.append(quick_build(source, tmp_path / inputs, tmp_path / f"s{block}", **options))
    assert len({s.fingerprint for s in stores}) == 1
    assert len({s.shards[0].sha256 for s in stores}) == 1
