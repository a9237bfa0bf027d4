"""`tokmill store` as a person types it, in child processes."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from making import TOKENIZER, files_of, jsonl, quick_build
from tokmill.builds import plan
from tokmill.store.store import Store


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards in `s`, their inputs beside it."""
    folder = tmp_path_factory.mktemp("built")
    (folder / "in").mkdir()
    for name in "abcd":
        rows = [{"text": f"text {i % 9} of {name}", "id": f"{name}{i}"} for i in range(10)]
        jsonl(folder / f"in/{name}.jsonl", rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "SHARD_BYTES", 1)
        store = quick_build("jsonl", folder / "in", folder / "s", keep=["id"])
    assert len(store.shards) == 4
    return folder


@pytest.fixture
def store(tmp_path: Path, built: Path) -> Path:
    shutil.copytree(built / "s", tmp_path / "s")
    return tmp_path / "s"


def test_validate(tokmill: Any, store: Path) -> None:
    assert "s: ok, complete, 40 records" in tokmill("store", "validate", "s").stdout
    report = json.loads(tokmill("store", "validate", "s", "--json").stdout)
    assert (report["ok"], report["shards"], report["problems"]) == (True, 4, [])
    done = tokmill("store", "validate", "s", "--deep", "2")
    assert "2 made again" in done.stdout
    assert [path.name for path in (store / "cache").iterdir()] == ["stamps.jsonl"]


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_what_validate_says_mends_a_store(here: Any, store: Path, built: Path) -> None:
    whole = files_of(store)
    shards = sorted((store / "shards").glob("*.safetensors"))
    damage(shards[0])
    shards[1].unlink()
    shards[2].with_suffix(".json").write_text("{")
    _, said = here("store", "validate", store, code=1)
    hints = [line for line in said.splitlines() if line.startswith("hint: ")]
    assert sorted(hints[0].removeprefix("hint: rm ").split()) == [str(one) for one in shards[:3]]
    assert hints[1:] == ["hint: the same `tokmill build` makes again what is damaged or missing"]
    before = shards[3].stat().st_mtime_ns
    for path in shards[:3]:
        path.unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "SHARD_BYTES", 1)
        quick_build("jsonl", built / "in", store, keep=["id"])
    assert files_of(store) == whole
    assert shards[3].stat().st_mtime_ns == before


def test_export(tmp_path: Path, tokmill: Any, store: Path) -> None:
    done = tokmill("store", "export", "bin", "s", "-o", "x.bin", "--json")
    json.loads(done.stdout)
    ids = np.fromfile(tmp_path / "x.bin", "<u2")
    assert ids.tolist() == [i for record in Store(store) for i in record["token"].tolist()]
    (store / "manifest.json").unlink()
    done = tokmill("store", "export", "bin", "s", "-o", "y.bin", code=1)
    assert "not complete" in done.stderr
    assert not (tmp_path / "y.bin").exists()


def test_rejects_lists_what_was_left_out(tmp_path: Path, tokmill: Any, here: Any) -> None:
    jsonl(tmp_path / "a.jsonl", [{"text": "one"}, "{broken", {"text": ""}, {"text": "two"}])
    quick_build("jsonl", tmp_path / "a.jsonl", tmp_path / "s")
    out, err = here("store", "rejects", "s")
    assert "line 2, byte" in out
    assert "rejected, json" in out
    assert "1 left out, 1 listed" in out
    assert "--explain" in err and "1 more were skipped by rule: --skipped lists them" in err
    assert "more were" not in here("store", "rejects", "s", "--skipped")[1]
    found = json.loads(here("store", "rejects", "s", "--skipped", "--json")[0])
    assert [one["line"] for one in found["first"]] == [2, 3]
    assert found["skipped"] == {"empty": 1}
    for option in (("rejects", "s", "--most"), ("validate", "s", "--deep")):
        assert "is not in the range x>=0" in here("store", *option, -1, code=2)[1]
    assert ", 1 made again" in here("store", "validate", "s", "--deep", 5)[0]
    assert "--width goes with --stats" in here("inspect", "s", "--width", 64, code=2)[1]
    here("store", "export", "bin", "s", "-o", "s.bin")
    assert "--deep is for stores" in here("store", "validate", "s.bin", "--deep", 1, code=2)[1]


def test_a_folder_of_npz_files_of_others_is_validated(tmp_path: Path, here: Any) -> None:
    folder = tmp_path / "kit"
    folder.mkdir()
    ids = np.asarray([[1, 2, 301], [3, 0, 0]], np.int32)
    np.savez_compressed(folder / "a.npz", input_ids=ids, attention_mask=np.ones_like(ids))
    out, _ = here("store", "validate", "kit")
    assert out == f"kit: ok, export (npz of another program), 1 file, {out.split()[-2]} B\n"
    out, said = here("store", "validate", "kit", "--tokenizer", TOKENIZER, code=1)
    assert "a.npz, row 0, position 2: the id 301 is none of 0 to 299" in out and "hint: " in said
    np.savez_compressed(folder / "b.npz", input_ids=ids)
    out, _ = here("store", "validate", "kit", "--json", code=1)
    found = json.loads(out)
    assert not found["ok"] and [Path(p["where"]).name for p in found["problems"]] == ["b.npz"]
    _, said = here("store", "validate", ".", "--tokenizer", TOKENIZER, code=2)
    assert "--tokenizer is for .npz files" in said
