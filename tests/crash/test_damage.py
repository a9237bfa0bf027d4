"""Damage to a finished store: `store validate` finds it, the same build mends it and no more."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from crash_stores import contents, copy, identities, is_clean, write_inputs
from forked import Forked


def shards(store: Path) -> list[Path]:
    return sorted((store / "shards").glob("*.safetensors"))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def array_place(path: Path, name: str) -> int:
    """Return where an array's last byte lies in a shard."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return 8 + length + int(json.loads(data[8 : 8 + length])[name]["data_offsets"][1]) - 1


def edit(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    value = json.loads(path.read_bytes())
    change(value)
    path.write_text(json.dumps(value))


SHARD_DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda shard: shard.write_bytes(shard.read_bytes()[:-100]),
    "emptied": lambda shard: shard.write_bytes(b""),
    "longer": lambda shard: shard.write_bytes(shard.read_bytes() + b"\0"),
    "flipped in the length": lambda shard: flip(shard, 0),
    "flipped in the header": lambda shard: flip(shard, 30),
    "flipped in the offsets": lambda shard: flip(shard, array_place(shard, "offsets") - 7),
    "flipped in the tokens": lambda shard: flip(shard, array_place(shard, "token")),
    "missing": lambda shard: shard.unlink(),
    "without its receipt": lambda shard: shard.with_suffix(".json").unlink(),
    "with an empty receipt": lambda shard: shard.with_suffix(".json").write_bytes(b""),
    "with a foreign receipt": lambda shard: shard.with_suffix(".json").write_bytes(b"\xff\xfe{}"),
    "with an edited receipt": lambda shard: edit(
        shard.with_suffix(".json"), lambda receipt: receipt.update(tokens=1)
    ),
    "swapped for another": lambda shard: shard.write_bytes(
        next(other for other in shards(shard.parent.parent) if other != shard).read_bytes()
    ),
}
MANIFEST_DAMAGE: dict[str, Callable[[dict[str, object]], object]] = {
    "a total": lambda manifest: manifest.update(tokens=1),
    "the fingerprint": lambda manifest: manifest.update(fingerprint="0" * 64),
    "a range": lambda manifest: manifest.update(ranges={"token": [0, 9]}),
    "the rejects": lambda manifest: manifest.update(rejected={"json": 3}),
    "a shard's digest": lambda manifest: manifest["shards"][1].__setitem__(4, "0" * 64),
    "a shard's tokens": lambda manifest: manifest["shards"][0].__setitem__(2, 7),
    "a shard left out": lambda manifest: manifest["shards"].pop(),
    "a shard too many": lambda manifest: manifest["shards"].append(["0" * 24, 0, 0, 0, "0" * 64]),
    "the order of shards": lambda manifest: manifest["shards"].reverse(),
}


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Path, forked: Forked
) -> tuple[Path, tuple[object, ...]]:
    """A finished store that tests copy, and the command that made it (its folder comes last)."""
    folder = tmp_path_factory.mktemp("damage")
    write_inputs(folder / "in", 3)
    command = ("build", "jsonl", folder / "in", "--tokenizer", tokenizer, "--workers", 0,
               "--quiet", "-o")  # fmt: skip
    assert forked(*command, folder / "whole").code == 0
    return folder / "whole", command


@pytest.fixture
def store(whole: tuple[Path, tuple[object, ...]], fast_path: Path) -> Path:
    """A copy of the finished store."""
    copy(whole[0], fast_path / "store")
    return fast_path / "store"


def test_a_sound_store_is_ok(
    store: Path, whole: tuple[Path, tuple[object, ...]], forked: Forked
) -> None:
    before = contents(store)
    ran = forked("store", "validate", store, "--deep", 3)
    assert ran.code == 0 and "ok, complete" in ran.out
    assert forked(*whole[1], store).code == 0
    assert contents(store) == before


@pytest.mark.parametrize("kind", SHARD_DAMAGE)
def test_a_damaged_shard_is_found_and_made_again_alone(
    kind: str, store: Path, whole: tuple[Path, tuple[object, ...]], forked: Forked
) -> None:
    hurt = shards(store)[1]
    SHARD_DAMAGE[kind](hurt)
    files = identities(store)
    found = forked("store", "validate", store, "--json")
    assert found.code == 1
    report = json.loads(found.out)
    assert not report["ok"]
    assert [problem["remove"] for problem in report["problems"]] == [str(hurt)]
    assert f"hint: rm {hurt}" in found.err and "same `tokmill build`" in found.err
    hurt.unlink(missing_ok=True)
    mended = forked(*whole[1], store)
    assert mended.code == 0, mended.out + mended.err
    assert contents(store) == contents(whole[0])
    after = identities(store)
    assert all(after[name] == files[name] for name in files if not name.startswith(hurt.stem))
    assert forked("store", "validate", store).code == 0


@pytest.mark.parametrize("what", MANIFEST_DAMAGE)
def test_an_edited_manifest_is_found_and_written_anew(
    what: str, store: Path, whole: tuple[Path, tuple[object, ...]], forked: Forked
) -> None:
    """No shard is touched: plan and receipts say what the manifest should."""
    files = identities(store)
    edit(store / "manifest.json", MANIFEST_DAMAGE[what])
    found = forked("store", "validate", store)
    assert found.code == 1 and "Traceback" not in found.err
    mended = forked(*whole[1], store)
    assert mended.code == 0, mended.out + mended.err
    assert contents(store) == contents(whole[0])
    after = identities(store)
    data = [name for name in files if name.endswith(".safetensors")]
    assert all(after[name] == files[name] for name in data)


@pytest.mark.parametrize("rubbish", [b"", b"{", b"\xff\xfe\x00", b"[]"])
@pytest.mark.parametrize("name", ["manifest.json", "plan.json", "inputs.jsonl"])
def test_rubbish_for_a_json_file_is_a_clear_refusal(
    name: str, rubbish: bytes, store: Path, forked: Forked
) -> None:
    """Whatever reads it: the file is named, and there is a hint."""
    (store / name).write_bytes(rubbish)
    for command in ("validate", "rejects"):
        ran = forked("store", command, store)
        assert ran.code in (0, 1), ran.err
        assert "Traceback" not in ran.err
        if ran.err.startswith("error"):
            assert is_clean(ran.err) and name in ran.err


@pytest.mark.parametrize("name", ["manifest.json", "inputs.jsonl"])
def test_a_lost_json_file_is_written_again_by_the_build(
    name: str, store: Path, whole: tuple[Path, tuple[object, ...]], forked: Forked
) -> None:
    files = identities(store)
    (store / name).unlink()
    ran = forked(*whole[1], store)
    assert ran.code == 0, ran.err
    assert contents(store) == contents(whole[0])
    assert identities(store) == files


@pytest.mark.parametrize("damage", ["emptied", "cut", "of another build", "rubbish", "a path"])
def test_damaged_inputs_are_found_and_written_again(
    damage: str, store: Path, whole: tuple[Path, tuple[object, ...]], forked: Forked
) -> None:
    path = store / "inputs.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(
        {
            "emptied": b"",
            "cut": lines[0],
            "of another build": b"".join(lines).replace(b"a.jsonl", b"b.jsonl"),
            "rubbish": b"\x00\xff",
            "a path": b"".join(lines).replace(b"/in/", b"/on/"),
        }[damage]
    )
    found = forked("store", "validate", store)
    assert found.code == 1 and "inputs.jsonl" in found.out
    files = identities(store)
    ran = forked(*whole[1], store)
    assert ran.code == 0, ran.err
    assert contents(store) == contents(whole[0])
    assert identities(store) == files


def test_inputs_that_moved_are_found_where_they_are_now(
    fast_path: Path, tokenizer: Path, forked: Forked
) -> None:
    """Where a file lies is not a part of any identity: the same build there makes nothing again."""
    write_inputs(fast_path / "old", 2)
    store = fast_path / "store"
    command = ("--tokenizer", tokenizer, "--workers", 0, "--quiet", "-o", store)
    assert forked("build", "jsonl", fast_path / "old", *command).code == 0
    files = identities(store)
    (fast_path / "old").rename(fast_path / "new")
    assert forked("build", "jsonl", fast_path / "new", *command).code == 0
    assert identities(store) == files


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("how", ["flipped", "lost", "emptied"])
def test_a_damaged_plan_is_written_again_by_the_build(
    how: str, finished: bool, store: Path, whole: tuple[Path, tuple[object, ...]], forked: Forked,
) -> None:  # fmt: skip
    """The names of the shards say that the recipe is the same."""
    path = store / "plan.json"
    if how == "lost":
        path.unlink()
    elif how == "emptied":
        path.write_bytes(b"")
    else:
        flip(path, 300)
    if not finished:
        (store / "manifest.json").unlink()
    files = identities(store)
    found = forked("store", "validate", store)
    assert (found.code == 0) == (finished and how == "lost")
    assert forked(*whole[1], store).code == 0
    assert contents(store) == contents(whole[0])
    made = {name for name in files if name.startswith("shards/")}
    assert {name: identities(store)[name] for name in made} == {name: files[name] for name in made}


def test_a_damaged_plan_of_another_recipe_is_a_refusal(
    store: Path, whole: tuple[Path, tuple[object, ...]], forked: Forked
) -> None:
    for damage in (lambda path: flip(path, 300), Path.unlink):
        damage(store / "plan.json")
        files = identities(store)
        ran = forked(*whole[1], store, "--strip")
        assert ran.code == 1 and is_clean(ran.err) and "--fresh" in ran.err
        assert identities(store) == files


def test_with_a_damaged_plan_inputs_that_vanished_are_listed(
    store: Path, whole: tuple[Path, tuple[object, ...]], tmp_path: Path, forked: Forked
) -> None:
    words = [*map(str, whole[1])]
    inputs = Path(words[2])
    flip(store / "plan.json", 300)
    gone = sorted(path for path in inputs.rglob("*") if path.is_file())[0]
    data = gone.read_bytes()
    gone.unlink()
    try:
        ran = forked(*whole[1], store)
        assert ran.code == 1 and "removed" in ran.err
    finally:
        gone.write_bytes(data)


@pytest.mark.parametrize("how", ["missing", "changed"])
def test_a_damaged_vocabulary_is_found_and_mended(
    how: str, store: Path, whole: tuple[Path, tuple[object, ...]], forked: Forked
) -> None:
    path = store / "vocab" / "tokenizer.json"
    if how == "missing":
        path.unlink()
    else:
        flip(path, 100)
    found = forked("store", "validate", store)
    assert found.code == 1 and "tokenizer.json" in found.out
    shards(store)[0].unlink()
    ran = forked(*whole[1], store)
    assert ran.code == 0, ran.err
    assert contents(store) == contents(whole[0])


def test_a_learned_vocabulary_is_learned_again(fast_path: Path, forked: Forked) -> None:
    write_inputs(fast_path / "in", 1)
    store = fast_path / "store"
    command = ("build", "jsonl", fast_path / "in", "--vocab-size", 280, "-q", "--workers", 0, "-o")
    assert forked(*command, store).code == 0
    whole = contents(store)
    flip(store / "vocab" / "tokenizer.json", 100)
    assert forked("store", "validate", store).code == 1
    refused = forked(*command, store)
    assert refused.code == 2 and "remove it" in refused.err
    (store / "vocab" / "tokenizer.json").unlink()
    assert forked(*command, store).code == 0
    assert contents(store) == whole


def test_the_log_is_no_part_of_the_store(store: Path, forked: Forked) -> None:
    (store / "events.jsonl").write_bytes(b"torn")
    assert forked("store", "validate", store).code == 0


def test_a_stray_shard_is_found_and_dropped(
    store: Path, whole: tuple[Path, tuple[object, ...]], forked: Forked
) -> None:
    """A file of another name is somebody's own."""
    (store / "shards" / f"{'0123' * 6}.safetensors").write_bytes(b"stray")
    assert forked("store", "validate", store).code == 1
    command = (*whole[1], store)
    assert forked(*command).code == 0
    (store / "shards" / "notes.txt").write_bytes(b"mine")
    assert forked("store", "validate", store).code == 0
    assert forked(*command).code == 0
    (store / "shards" / "notes.txt").unlink()
    assert contents(store) == contents(whole[0])
