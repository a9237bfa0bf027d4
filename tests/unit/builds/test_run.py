"""Builds: same plan and same bytes in give the same store, however it comes about."""

import itertools
import json
import shutil
from pathlib import Path

import pytest

from making import TOKENIZER, files_of, here, ids_of, jsonl, mixed_lines, quick_build
from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.locks import locked
from tokmill.base.progress import parse_bytes, parse_seconds
from tokmill.builds import build as run_module
from tokmill.builds import plan
from tokmill.builds.make_shard import ShardJob, Terms, Work, make_shards
from tokmill.builds.plan import Amount, How, choose
from tokmill.store.checks.validate import validate
from tokmill.store.store import Store

SMALL = 1 << 12
"""Input bytes of a shard in these tests, so that a few files make several shards."""


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "SHARD_BYTES", SMALL)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixed_lines(tmp_path_factory.mktemp("inputs") / "in")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "SHARD_BYTES", SMALL)
        out = tmp_path_factory.mktemp("reference") / "store"
        store = quick_build("jsonl", inputs, out, keep=["id"])
    assert len(store.shards) >= 4
    return out


@pytest.mark.parametrize(
    "amount",
    [
        Amount(workers=2, preset="memory"),
        Amount(workers=0, preset="speed"),
        Amount(workers=0, engine="tokenizers"),
        Amount(workers=0, engine="gigatoken"),
    ],
    ids=["memory", "speed", "tokenizers", "gigatoken"],
)
def test_same_bytes_for_any_amount(
    tmp_path: Path, inputs: Path, reference: Path, amount: Amount
) -> None:
    quick_build("jsonl", inputs, tmp_path / "s", keep=["id"], how=How(quiet=True, amount=amount))
    assert files_of(tmp_path / "s") == files_of(reference)


@pytest.mark.parametrize("block_bytes", [1, 64, 1000])
def test_same_bytes_for_any_block_size(
    tmp_path: Path,
    inputs: Path,
    reference: Path,
    monkeypatch: pytest.MonkeyPatch,
    block_bytes: int,
) -> None:
    from tokmill.builds.plan import BLOCK_BYTES
    from tokmill.text import record_blocks as blocks

    monkeypatch.setitem(BLOCK_BYTES, "balanced", block_bytes)
    monkeypatch.setattr(blocks, "READ", 50)
    quick_build("jsonl", inputs, tmp_path / "s", keep=["id"])
    assert files_of(tmp_path / "s") == files_of(reference)


def test_nothing_is_dropped_without_being_counted(inputs: Path, reference: Path) -> None:
    store = Store(reference)
    lines = sum(path.read_bytes().count(b"\n") for path in inputs.iterdir())
    manifest = store.manifest
    assert manifest.skipped == {"blank line": 24, "placeholder": 24}
    assert manifest.rejected == {"json": 24, "type": 24, "utf8": 24}
    counted = sum(manifest.skipped.values()) + sum(manifest.rejected.values())
    assert len(store) + counted == lines
    for number in range(len(store.shards)):
        receipt = store.receipt(number)
        assert receipt.rejects == sorted(receipt.rejects, key=lambda run: (run.item, run.first))
        for i, item in enumerate(receipt.items):
            mine = [run for run in receipt.rejects if run.item == i]
            assert item.rejected == sum(run.count for run in mine)
        assert sum(item.rejected for item in receipt.items) == sum(receipt.rejected.values())
        assert sum(item.skipped for item in receipt.items) == sum(receipt.skipped.values())
        assert sum(item.records for item in receipt.items) == receipt.records
        assert sum(item.tokens for item in receipt.items) == receipt.tokens
    assert manifest.input_bytes == sum(path.stat().st_size for path in inputs.iterdir())
    assert validate(store).ok


def test_growth_makes_what_is_new_and_nothing_else(
    tmp_path: Path, inputs: Path, reference: Path
) -> None:
    shutil.copytree(inputs, tmp_path / "in")
    shutil.copytree(reference, tmp_path / "s")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "s/shards").iterdir()}
    jsonl(tmp_path / "in/35.jsonl", [{"id": 1, "text": "new " * 300}] * 3)
    grown = quick_build("jsonl", tmp_path / "in", tmp_path / "s", keep=["id"])
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "s/shards").iterdir()}
    assert len(grown) == len(Store(reference)) + 3
    kept = {name for name in after if before.get(name) == after[name]}
    assert len(before.keys() - kept) <= 2
    assert len(after.keys() - kept) <= 4
    quick_build("jsonl", tmp_path / "in", tmp_path / "again", keep=["id"])
    assert files_of(tmp_path / "again") == files_of(tmp_path / "s")


@pytest.mark.parametrize("change", ["removed", "changed"])
def test_changed_and_removed_inputs_need_a_yes(
    tmp_path: Path, inputs: Path, reference: Path, change: str
) -> None:
    shutil.copytree(inputs, tmp_path / "in")
    shutil.copytree(reference, tmp_path / "s")
    path = tmp_path / "in/3.jsonl"
    if change == "removed":
        path.unlink()
    else:
        jsonl(path, [{"id": 0, "text": "other"}])
    before = files_of(tmp_path / "s")
    with pytest.raises(TokmillError, match=rf"{change}: 3\.jsonl") as caught:
        quick_build("jsonl", tmp_path / "in", tmp_path / "s", keep=["id"])
    assert "--yes" in caught.value.hint
    assert files_of(tmp_path / "s") == before
    how = How(quiet=True, amount=here(), yes=True)
    quick_build("jsonl", tmp_path / "in", tmp_path / "s", keep=["id"], how=how)
    quick_build("jsonl", tmp_path / "in", tmp_path / "again", keep=["id"])
    assert files_of(tmp_path / "again") == files_of(tmp_path / "s")


def test_another_recipe_is_refused_with_its_difference(
    tmp_path: Path, inputs: Path, reference: Path
) -> None:
    shutil.copytree(reference, tmp_path / "s")
    before = files_of(tmp_path / "s")
    with pytest.raises(TokmillError, match=r"config\.strip: false → true") as caught:
        quick_build("jsonl", inputs, tmp_path / "s", keep=["id"], strip=True)
    assert "--fresh" in caught.value.hint
    assert files_of(tmp_path / "s") == before
    how = How(quiet=True, amount=here(), fresh=True)
    quick_build("jsonl", inputs, tmp_path / "s", keep=["id"], strip=True, how=how)
    quick_build("jsonl", inputs, tmp_path / "again", keep=["id"], strip=True)
    assert files_of(tmp_path / "again") == files_of(tmp_path / "s")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_time_limit_leaves_a_partial_store_that_completes_to_the_same_bytes(
    tmp_path: Path, inputs: Path, reference: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "grace_of", lambda limit: 60.0)
    how = How(quiet=True, amount=Amount(workers=workers), limit_seconds=0)
    partial = quick_build("jsonl", inputs, tmp_path / "s", keep=["id"], how=how)
    assert partial.partial
    assert 1 <= len(partial.shards) < len(Store(reference).shards)
    assert 0 < len(partial) < len(Store(reference))
    whole = files_of(reference)
    assert set(files_of(tmp_path / "s")) < set(whole)
    assert validate(partial).ok
    quick_build("jsonl", inputs, tmp_path / "s", keep=["id"])
    assert files_of(tmp_path / "s") == whole


def test_workers_that_have_only_begun_at_the_limit_are_given_up(
    tmp_path: Path,
    inputs: Path,
    reference: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run_module, "grace_of", lambda limit: 0.0)
    how = How(amount=Amount(workers=2), limit_seconds=0)
    partial = quick_build("jsonl", inputs, tmp_path / "s", keep=["id"], how=how)
    assert partial.partial and len(partial) == 0
    assert "before one record was whole" in (said := capsys.readouterr().err)
    assert "--workers 0" in said
    quick_build("jsonl", inputs, tmp_path / "s", keep=["id"])
    assert files_of(tmp_path / "s") == files_of(reference)


def test_parts_make_the_same_store_in_any_order(
    tmp_path: Path, inputs: Path, reference: Path
) -> None:
    for part in (3, 1, 2):
        how = How(quiet=True, amount=here(), part=(part, 3))
        store = quick_build("jsonl", inputs, tmp_path / "s", keep=["id"], how=how)
        assert store.partial == (part != 2)
    assert files_of(tmp_path / "s") == files_of(reference)


def test_too_many_rejects_end_the_build(tmp_path: Path) -> None:
    good, bad = [{"text": f"text {i}"} for i in range(980)], ["{"] * 20
    few = quick_build("jsonl", jsonl(tmp_path / "few.jsonl", [*good[:500], *bad]), tmp_path / "a")
    assert (len(few), few.manifest.rejected) == (500, {"json": 20})
    many = jsonl(tmp_path / "many.jsonl", [*good, *bad])
    with pytest.raises(TokmillError, match="20 of 1,000 records were rejected") as caught:
        quick_build("jsonl", many, tmp_path / "b")
    assert caught.value.exit_code == 1
    assert "many.jsonl, byte" in str(caught.value)
    assert "--max-rejects" in caught.value.hint
    assert not (tmp_path / "b/manifest.json").exists()
    how = How(quiet=True, amount=here(), max_rejects=0.02)
    assert len(quick_build("jsonl", many, tmp_path / "b", how=how)) == 980
    # Where none is allowed one is too many, however few were seen.
    one = jsonl(tmp_path / "one.jsonl", [*good[:5], "{"])
    how = How(quiet=True, amount=here(), max_rejects=0)
    with pytest.raises(TokmillError, match="1 of 6 records were rejected"):
        quick_build("jsonl", one, tmp_path / "c", how=how)
    for no_share in (float("nan"), -1, 1.5):
        with pytest.raises(UsageError, match="is not a share"):
            quick_build("jsonl", many, tmp_path / "d", how=How(max_rejects=no_share))


def test_a_build_that_fails_where_it_began_leaves_no_store(tmp_path: Path) -> None:
    wrong = jsonl(tmp_path / "wrong.jsonl", [{"txt": "one"}, "{"])
    right = jsonl(tmp_path / "right.jsonl", [{"text": "one"}])
    (tmp_path / "there").mkdir()
    for amount in (Amount(workers=0), Amount(workers=1)):
        for out in (tmp_path / "new/store", tmp_path / "there"):
            with pytest.raises(TokmillError, match="no record was found"):
                quick_build("jsonl", wrong, out, how=How(quiet=True, amount=amount))
        assert not (tmp_path / "new").exists()
        assert list((tmp_path / "there").iterdir()) == []
    # Nothing of it stands in the way of the next one.
    assert len(quick_build("jsonl", right, tmp_path / "there")) == 1


def test_a_build_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    right = jsonl(tmp_path / "right.jsonl", [{"text": "one"}])
    quick_build("jsonl", right, tmp_path / "s")
    before = files_of(tmp_path / "s")
    with pytest.raises(TokmillError, match="another recipe"):
        quick_build("jsonl", right, tmp_path / "s", strip=True)
    assert files_of(tmp_path / "s") == before
    # A tokenizer that was learned for it took its time.
    wrong = jsonl(tmp_path / "wrong.jsonl", ["{"])
    learned = tmp_path / "t/vocab"
    learned.mkdir(parents=True)
    for name in ("tokenizer.json", "learned.json"):
        (learned / name).write_bytes(TOKENIZER.read_bytes())
    with locked(tmp_path / "t/.lock", "", ""):
        pass
    with pytest.raises(TokmillError, match="no record was found"):
        quick_build("jsonl", wrong, tmp_path / "t")
    found = {path.relative_to(tmp_path / "t").as_posix() for path in (tmp_path / "t").rglob("*")}
    assert found == {".lock", "vocab", "vocab/tokenizer.json", "vocab/learned.json"}
    # Of parts no one knows what the others do.
    how = How(quiet=True, amount=here(), part=(1, 1))
    with pytest.raises(TokmillError, match="no record was found"):
        quick_build("jsonl", wrong, tmp_path / "p", how=how)
    assert (tmp_path / "p/plan.json").exists()


def work_of(inputs: Path, out: Path) -> tuple[Work, list[ShardJob]]:
    from tokmill.builds.remake import work_of as stored

    work, tasks = stored(out)
    return work, list(tasks.values())


def test_executors_tell_of_items_before_their_shard_is_done(
    tmp_path: Path, inputs: Path, reference: Path
) -> None:
    shutil.copytree(reference, tmp_path / "s")
    work, tasks = work_of(inputs, tmp_path / "s")
    task = max(tasks, key=lambda task: len(task.items))
    sizes = list(itertools.accumulate(item.size for item in task.items))
    told: list[int] = []
    list(make_shards(work, Terms(report=told.append), iter([task])))
    assert told == sizes and len(sizes) > 1
    told.clear()
    list(make_shards(work, Terms(2, report=told.append), iter(tasks)))
    assert told == sorted(told) and told[-1] == sum(task.size for task in tasks)


def test_streams_resume_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever receipts a kill leaves, the build goes on to the same bytes."""
    import gzip

    from tokmill.text import record_blocks as blocks

    monkeypatch.setattr(blocks, "MAX_ITEM", 700)
    monkeypatch.setattr(blocks, "READ", 100)
    folder = tmp_path / "in"
    folder.mkdir()
    for name in "abc":
        lines = [json.dumps({"text": f"{name} {i} " + "x" * (i % 40)}) for i in range(60)]
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    for shard_bytes in (1, 1 << 30):
        monkeypatch.setattr(plan, "SHARD_BYTES", shard_bytes)
        out = tmp_path / f"s{shard_bytes}"
        store = quick_build("jsonl", folder, out)
        assert len(store) == 180
        assert len({entry.name.partition("-")[0] for entry in store.shards}) == (
            3 if shard_bytes == 1 else 1
        )
        assert len(store.shards) > 5
        whole = files_of(out)
        for kept in (1, 2, len(store.shards) - 1):
            again = tmp_path / f"again-{shard_bytes}-{kept}"
            shutil.copytree(out, again)
            (again / "manifest.json").unlink()
            for entry in store.shards[kept:]:
                (again / f"shards/{entry.name}.json").unlink()
                (again / f"shards/{entry.name}.safetensors").unlink()
            quick_build("jsonl", folder, again)
            assert files_of(again) == whole
        assert validate(Store(out)).ok
        assert ids_of(Store(out)) == ids_of(store)


def test_amounts() -> None:
    assert parse_bytes("2GB") == 2 * 10**9
    assert parse_bytes("1.5 KiB") == 1536
    assert parse_bytes("7") == 7
    assert parse_seconds("1.5h") == 5400
    assert parse_seconds("90") == parse_seconds("90s") == parse_seconds("1.5m")
    for text in ("", "x", "2XB", "-1"):
        with pytest.raises(UsageError):
            parse_bytes(text)
    for text in ("", "x", "2w", "-1"):
        with pytest.raises(UsageError):
            parse_seconds(text)
    assert choose(Amount(workers=8), 3)[0] == 3
    assert choose(Amount(preset="memory"), 100)[0] == 0
    with pytest.raises(UsageError, match="too little"):
        choose(Amount(memory=1 << 20), 1)
    workers, resources = choose(Amount(workers=8, memory=parse_bytes("1GB")), 100)
    assert 1 <= workers < 8
    assert resources.block_bytes == 1 << 20


@pytest.mark.parametrize(
    ("share", "said"), [(0.011, "0.05"), (0.04, "0.1"), (0.333, "1"), (1, "1")]
)
def test_the_share_that_is_suggested_is_enough(share: float, said: str) -> None:
    from tokmill.builds.finish import enough

    assert enough(share) == said and float(said) >= share
