"""What `describe` says of files and folders of many kinds."""

import bz2
import gzip
import json
import lzma
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from making import quick_build
from report_stores import write_store
from tokmill.base.errors import TokmillError
from tokmill.report.describe import foreign
from tokmill.report.describe.inspect import describe

TOKENIZER = {
    "added_tokens": [{"id": 2, "content": "<|endoftext|>", "special": True}],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]},
}


def npz(path: Path) -> None:
    with path.open("wb") as handle:
        np.savez(handle, input_ids=np.zeros((3, 8), "i4"), attention_mask=np.ones((3, 8), "i1"))


def llmc(path: Path) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 10
    path.write_bytes(header.tobytes() + np.arange(10, dtype="<u2").tobytes())


def parquet(path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    pq.write_table(pyarrow.table({"text": ["a", "b", "c"]}), path)


def zstd(path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    path.write_bytes(zstandard.compress(b'{"text": "hello"}\n' * 9))


def write_json(value: Any) -> Any:
    return lambda path: path.write_text(json.dumps(value))


FILES: list[tuple[str, Any, dict[str, Any]]] = [
    ("a.npz", npz, {"kind": "npz", "what": "a numpy archive of padded windows"}),
    ("a.npy", lambda p: np.save(p, np.zeros((2, 5), "<u2")), {"kind": "npy", "shape": [2, 5]}),
    ("a.bin", llmc, {"kind": "llm.c tokens", "dtype": "uint16"}),
    ("a.parquet", parquet, {"kind": "parquet", "rows": 3}),
    ("s.bin", lambda p: p.write_bytes(np.arange(99, dtype="<u2").tobytes()),
     {"kind": "raw tokens", "guess": "uint16, 99 tokens", "largest_seen": 97}),
    ("w.bin", lambda p: p.write_bytes(np.arange(90_000, dtype="<u4").tobytes()),
     {"kind": "raw tokens", "guess": "uint32, 90,000 tokens"}),
    ("dna.bin", lambda p: p.write_bytes((np.arange(999, dtype="<u2") ** 3 % 5).tobytes()),
     {"kind": "raw tokens", "guess": "uint16, 999 tokens"}),
    ("long.bin", lambda p: p.write_bytes(np.arange(99, dtype="<i8").tobytes()),
     {"kind": "raw tokens", "problem": "the ids look like int64, which is not read"}),
    ("few.bin", lambda p: p.write_bytes(np.arange(10, dtype="<u4").tobytes()),
     {"kind": "raw tokens", "guess": "uint32, 10 tokens"}),
    ("large.bin", lambda p: p.write_bytes(
        np.append(np.arange(9999) * 5, [3_000_000] * 10).astype("<u4").tobytes()),
     {"kind": "raw tokens", "guess": "uint32, 10,009 tokens"}),
    ("padded.bin", lambda p: p.write_bytes(np.asarray([5000, 900] + [0] * 998, "<u2").tobytes()),
     {"kind": "raw tokens", "guess": "uint16, 1,000 tokens"}),
    ("a.jsonl", lambda p: p.write_text('{"text": "hi", "n": 1}\n{"text": "x"}\n'),
     {"kind": "jsonl", "fields": {"text": "str", "n": "int"}}),
    ("odd", lambda p: p.write_text('{"text": "hi"}\n{"text": "x"}\n'), {"kind": "jsonl"}),
    ("a.jsonl.gz", lambda p: p.write_bytes(gzip.compress(b'{"text": "hi"}\n')),
     {"kind": "gzip", "what": "a gzip stream of jsonl"}),
    ("a.jsonl.xz", lambda p: p.write_bytes(lzma.compress(b'{"text": "hi"}\n')),
     {"kind": "xz", "what": "an xz stream of jsonl"}),
    ("a.tsv.bz2", lambda p: p.write_bytes(bz2.compress(b"a\tb\n")),
     {"kind": "bzip2", "what": "a bzip2 stream of tsv"}),
    ("a.gz", lambda p: p.write_bytes(gzip.compress(b"# x\nT:1:4   :2:6   \nT:1:9\n")),
     {"kind": "gzip", "what": "a gzip stream of basic block vectors",
      "first_record": "T:1:4   :2:6   "}),
    ("a.bb", lambda p: p.write_bytes(b"\nT :1:4\n"), {"kind": "basic block vectors"}),
    ("times.txt", lambda p: p.write_bytes(b"T:30 was the time\n"), {"kind": "text"}),
    ("a.jsonl.zst", zstd, {"kind": "zstd", "what": "a zstd stream of jsonl"}),
    ("a.txt", lambda p: p.write_text("é" * 40_000 + "x<|endoftext|>b"), {"kind": "text"}),
    ("t.json", write_json(TOKENIZER), {"kind": "tokenizer", "size": 3, "roles": {"eot": 2}}),
    ("o.json", write_json({"a": 1}), {"kind": "json", "keys": ["a"]}),
    ("diff.json", write_json({"format": "tokmill.diff", "version": 1}),
     {"kind": "diff", "what": "what `tokmill diff` found"}),
    ("a.onnx", lambda p: p.write_bytes(b"\x08\x08\x12\x07pytorch"),
     {"kind": "onnx", "what": "an ONNX model"}),
    ("a.mlir", lambda p: p.write_text("module {}\n"),
     {"kind": "mlir", "first_record": "module {}"}),
    ("a.tsv", lambda p: p.write_text("a\tb\n"), {"kind": "tsv"}),
    ("a.tsv.gz", lambda p: p.write_bytes(gzip.compress(b"a\tb\n")),
     {"kind": "gzip", "what": "a gzip stream of tsv"}),
    ("l.json", write_json([1, 2]), {"kind": "json", "entries": 2}),
    ("d.json", lambda p: p.write_text('{"a": '), {"kind": "json", "what": "JSON by its name"}),
    ("b.toml", lambda p: p.write_text('source = "text"'),
     {"kind": "recipe", "what": "a recipe of a text build"}),
    ("r.toml", lambda p: p.write_text("[model]\ndim = 8"),
     {"kind": "recipe", "what": "a recipe of a training"}),
    ("x.toml", lambda p: p.write_text("= 3"), {"kind": "toml", "what": "TOML by its name"}),
    ("a.pkl", lambda p: p.write_bytes(pickle.dumps({"a": 1})), {"kind": "pickle"}),
    ("hidden", lambda p: p.write_bytes(pickle.dumps([1])), {"kind": "pickle"}),
    ("prog", lambda p: p.write_bytes(b"\x7fELF" + bytes(60)), {"kind": "program"}),
    ("none.txt", lambda p: p.write_bytes(b""), {"kind": "empty file"}),
    ("noise", lambda p: p.write_bytes(b"\xff\xfe\x00\x01" * 9), {"kind": "unknown"}),
]  # fmt: skip


def test_wide_ids_of_llmc_are_read_as_such(tmp_path: Path) -> None:
    path = tmp_path / "llama3.bin"
    path.write_bytes(np.asarray([20240801, 7, 10] + [0] * 263, "<i4").tobytes())
    found = describe(path)
    assert found["dtype"] == "uint32" and "build bin ids.bin --dtype u4 " in found["next"]


@pytest.mark.parametrize(("name", "write", "expected"), FILES, ids=[f[0] for f in FILES])
def test_files(tmp_path: Path, name: str, write: Any, expected: dict[str, Any]) -> None:
    write(tmp_path / name)
    found = describe(tmp_path / name)
    assert {key: found[key] for key in expected} == expected
    json.dumps(found)


@pytest.mark.parametrize(
    ("ids", "dtype"),
    [([256] * 99, "<u2"), (range(99), "<i8"), (range(1, 100), ">u2"), ([1] * 99, "<u4"),
     (range(10), "<u4"), (range(10), "<u2")],
)  # fmt: skip
def test_inspect_of_flat_ids_says_what_a_build_needs(tmp_path: Path, ids: Any, dtype: str) -> None:
    """Where the build refuses a file, its reason and hint; else the type that was written."""
    path = tmp_path / "ids.bin"
    np.asarray(ids, dtype).tofile(path)
    found = describe(path)
    if "problem" in found:
        with pytest.raises(TokmillError, match=found["problem"]) as caught:
            quick_build("bin", path, tmp_path / "s")
        assert caught.value.hint == found["hint"] and "--dtype u2" in found["hint"]
        return
    assert found["guess"] == f"uint{8 * int(dtype[2])}, {len(ids)} tokens"
    named = {"dtype": "u4"} if "--dtype u4" in found["next"] else {}
    assert quick_build("bin", path, tmp_path / "s", **named).tokens == len(ids)


def test_a_pickle_inside_an_array_is_not_opened(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "sprung"),)

    np.save(tmp_path / "a.npy", np.asarray([Trap()], object), allow_pickle=True)
    np.savez(tmp_path / "a.npz", x=np.asarray([Trap()], object))
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(Trap()))
    assert "will not be opened" in describe(tmp_path / "a.npy")["problem"]
    assert "will not be opened" in describe(tmp_path / "a.npz")["arrays"][0]["problem"]
    assert "nothing of it was run" in describe(tmp_path / "a.pkl")["what"]
    assert not (tmp_path / "sprung").exists()


def test_the_parts_of_a_store(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [[[2, 0]], [[3, 0], [4]]], kept=True)
    found = describe(store.path)
    assert (found["kind"], found["records"], found["tokens"]) == ("store", 3, 5)
    assert found["vocabularies"]["token"]["roles"] == {"eot": 0, "unk": 1}
    assert found["notes"] == store.manifest.notes
    assert {column["name"] for column in found["columns"]} == {"token", "name", "level"}
    name = store.shards[0].name
    shard = describe(store.path / f"shards/{name}.safetensors")
    assert (shard["kind"], shard["records"], shard["committed"]) == ("shard", 1, True)
    assert describe(store.path / "inputs.jsonl")["kind"] == "inputs"


def test_a_damaged_shard(tmp_path: Path) -> None:
    store = write_store(tmp_path, [[[2, 0]]])
    path = store.path / f"shards/{store.shards[0].name}.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "its header says" in describe(path)["problem"]
    path.write_bytes(path.read_bytes()[:40])
    assert "cannot be read" in describe(path)["problem"]


def test_a_partial_store(tmp_path: Path) -> None:
    write_store(tmp_path, [[[2, 0]]], complete=False)
    found = describe(tmp_path)
    assert (found["kind"], found["complete"]) == ("partial store", False)
    assert found["planned"]["shards"] == 1


def test_a_damaged_manifest_names_its_file(tmp_path: Path) -> None:
    write_store(tmp_path, [[[2, 0]]])
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(TokmillError, match="manifest.json"):
        describe(tmp_path)


def test_folders(tmp_path: Path) -> None:
    assert describe(tmp_path)["what"] == "an empty folder"
    (tmp_path / "a.txt").write_text("x")
    assert describe(tmp_path)["suffixes"] == {".txt": 1}
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    assert describe(tmp_path)["kind"] == "tokenizer"


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TokmillError, match="no such"):
        describe(tmp_path / "x")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TokmillError, match="neither"):
        describe(tmp_path / "pipe")


def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokmill.base.errors import MissingExtraError

    def missing(module: str) -> Any:
        raise MissingExtraError("the package 'pyarrow' is not installed", hint="pip install …")

    (tmp_path / "a.parquet").write_bytes(b"PAR1" + bytes(20))
    (tmp_path / "b.parquet").write_bytes(b"PAR1" + b"\xff" * 40 + b"\x20\0\0\0PAR1")
    assert "it cannot be read: Couldn't" in describe(tmp_path / "b.parquet")["problem"]
    monkeypatch.setattr(foreign.plugins, "require", missing)
    found = describe(tmp_path / "a.parquet")
    assert found["kind"] == "parquet"
    assert "pyarrow" in found["problem"]


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["a.jsonl", "b.JSONL", "README"], "jsonl"),
        (["a.md", "b.md", "c.png"], "text"),
        (["a.png", "state.json"], ""),
    ],
)
def test_a_folder_of_inputs_says_what_builds_from_it(
    tmp_path: Path, names: list[str], kind: str
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    following = f"tokmill build {kind} {tmp_path} --vocab-size 8192 -o STORE"
    assert describe(tmp_path).get("next", "") == (following if kind else "")


@pytest.mark.parametrize(
    ("record", "key", "words"),
    [
        ({"data": {"body": "x"}, "n": 1}, "next", "--field data.body --vocab-size"),
        ({"data": {"a.b": "x"}}, "next", "--field 'data.\"a.b\"' --vocab-size"),
        ({"a.b": "x"}, "next", "--field '\"a.b\"' --vocab-size"),
        ({"id": "1", "messages": [{"role": "user", "content": "x"}]}, "hint", "docs/chats.md"),
    ],
)
def test_text_that_is_deeper_in_a_line_is_found(
    tmp_path: Path, record: dict[str, Any], key: str, words: str
) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps(record) + "\n")
    found = describe(tmp_path / "x.jsonl")
    assert words in found[key] and not {"next", "hint"} - {key} & found.keys()


def test_a_text_beside_a_chat_is_built(tmp_path: Path) -> None:
    record = {"text": "x", "conversations": [{"from": "human", "value": "x"}]}
    (tmp_path / "x.jsonl").write_text(json.dumps(record) + "\n")
    facts = describe(tmp_path / "x.jsonl")
    assert "tokmill build jsonl" in facts["next"] and "docs/chats.md" in facts["hint"]


def test_a_folder_of_programs_says_what_builds_from_it(tmp_path: Path) -> None:
    programs = pytest.importorskip("tokmill.x86.image.program")
    shutil.copy("/bin/true", tmp_path / "first")
    (tmp_path / "none").write_bytes(b"\x7fELF")
    programs.open_program(tmp_path / "first")
    assert describe(tmp_path)["next"] == f"tokmill build x86 {tmp_path} -o STORE"
