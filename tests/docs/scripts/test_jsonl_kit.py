"""JSONL kit: texts, ids, windows, .npz files, checks and repairs, row by row."""

import json
import shutil
import statistics
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from page import Checks, Played, scripts_without_row, section
from tokenizers import Tokenizer

import tokmill
from document_formulas import padded, prepared_text, windows
from making import jsonl
from tokenizers_peer import merges_and_ids
from toy import losses

SYSTEM = "JSONL kit"
checks = Checks(SYSTEM)
SPECIALS = ["<|startoftext|>", "<|endoftext|>", "<|pad|>", "<|unk|>"]
EOT, PAD = SPECIALS[1], 2
STATISTICS = {
    "total_sequences", "total_tokens", "avg_sequence_length", "processing_time_seconds",
    "sequences_per_second", "files_processed", "compression_ratio", "memory_usage_mb",
}  # fmt: skip
HARD = [
    {"title": "deleted", "text": "[deleted]"},
    {"title": "[removed]", "text": " [removed] "},
    {"title": "", "text": ""},
    {"text": "alone"},
    {"title": " \u00a0\u2003 of spaces \x1f", "text": "\n\t of others \u2028"},
    {"title": None, "text": "null is no title"},
    {"title": "a special token", "text": "in <|endoftext|> the text"},
    {"title": "[deleted] but not only", "text": "x"},
    {"metadata": "neither"},
]
BUILD = "tokmill build jsonl data/cleaned --tokenizer tokenizer --strip --end-of-record none"


@pytest.fixture(scope="module")
def played(play: Any, corpus: Any) -> Played:
    rows = [
        {"title": title, "text": text[:2000], "subreddit": title.partition(":")[0]}
        for title, text in zip(corpus.titles[60:130], corpus.texts[60:130], strict=True)
    ]

    def put_inputs(folder: Path) -> None:
        (folder / "data/cleaned").mkdir(parents=True)
        for place, name in enumerate("abc"):
            jsonl(folder / f"data/cleaned/{name}.jsonl", [*rows[place::3], *HARD[place::3]])
        (folder / "damaged").mkdir()
        np.savez_compressed(
            folder / "damaged/tokenized_data_part001.npz",
            input_ids=np.asarray([[5, 6, 50300, 7], [8, 9, PAD, PAD]], np.int32),
            attention_mask=np.asarray([[1, 1, 1, 1], [1, 1, 0, 0]], np.int32),
        )

    done: Played = play(SYSTEM, put_inputs)
    return done


def texts(played: Played, name: str = "*") -> list[str]:
    """Return the texts of the inputs as the script prepares them."""
    found = []
    for path in sorted((played.folder / "data/cleaned").glob(f"{name}.jsonl")):
        lines = path.read_text("utf-8").split("\n")
        found += [prepared_text(json.loads(line)) for line in lines if line]
    return [text for text in found if text]


@cache
def script(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path / "tokenizer.json"))


def sequences(played: Played, name: str = "*") -> list[list[int]]:
    """Return the ids of each text. A special token in a text is text here: it is cut in two."""
    peer, found = script(played.folder / "tokenizer"), []
    for text in texts(played, name):
        first, *rest = text.split(EOT)
        assert len(rest) <= 1
        found.append(peer.encode(first).ids if not rest else plain(played, text))
    return found


def plain(played: Played, text: str) -> list[int]:
    """Return the ids of a text in which special tokens are text: by a tokenizer without them."""
    content = json.loads((played.folder / "tokenizer/tokenizer.json").read_text("utf-8"))
    content["added_tokens"] = []
    ids: list[int] = Tokenizer.from_str(json.dumps(content)).encode(text).ids
    return ids


def arrays(folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Return the rows of all files, in the order of their names."""
    ids: list[list[int]] = []
    masks: list[list[int]] = []
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as data:
            assert sorted(data.files) == ["attention_mask", "input_ids"]
            assert data["input_ids"].dtype == data["attention_mask"].dtype == np.int32
            ids += data["input_ids"].tolist()
            masks += data["attention_mask"].tolist()
    return ids, masks


def said(played: Played, words: str) -> str:
    """Return what the first command with these words wrote."""
    return next(played.output[one] for one in played.every if words in one)


def test_the_commands_of_the_section_run(played: Played) -> None:
    assert not played.failed
    assert len(played.every) >= 35


def test_every_row_has_a_test() -> None:
    assert not checks.missing() and not scripts_without_row(SYSTEM)
    assert all(row.here for row in section(SYSTEM))


@checks("`train_tokenizer.py`", '"Tokenizer not found"')
def test_the_tokenizer(played: Played) -> None:
    model = json.loads((played.folder / "tokenizer/tokenizer.json").read_text("utf-8"))["model"]
    rows = [
        json.loads(line)
        for path in sorted((played.folder / "data/cleaned").glob("*.jsonl"))
        for line in path.read_text("utf-8").split("\n")
        if line
    ]
    parts = [[row.get("title") or "", row.get("text") or ""] for row in rows]
    kept = [
        "\n".join(one for one in pair if one and one not in ("[deleted]", "[removed]"))
        for pair in parts
    ]
    # Special tokens are no text to learn from.
    wanted = merges_and_ids([one for text in kept for one in text.split(EOT)], 2000, SPECIALS)
    assert model["vocab"] == wanted[1]
    output = played.run("tokmill build jsonl data/cleaned --tokenizer models/no.json -o x", code=1)
    assert "models/no.json: there is no such tokenizer file" in output and "hint:" in output


@checks("`prepare_text`", "`tokenize_data.py", "`tokenizer.encode(text)")
def test_ids_are_those_of_the_script(played: Played) -> None:
    store = tokmill.Store(played.folder / "tokenized")
    assert [record["token"].tolist() for record in store] == sequences(played)
    # With special tokens in texts, as `encode` has it.
    peer = script(played.folder / "tokenizer")
    same = tokmill.Store(played.folder / "same")
    assert [record["token"].tolist() for record in same] == [
        peer.encode(text).ids for text in texts(played)
    ]
    assert store.manifest.skipped == {"empty": 1, "missing": 1, "placeholder": 1}


@checks("`tokenize_data.py", "`--max-length 1024", "`save_sequences`", "`.npz`")
def test_windows_are_those_of_the_script(played: Played) -> None:
    for name, length, stride in (
        ("data_tokenized", 1024, 512),
        ("windows", 64, 32),
        ("overlapping", 8, 3),
    ):
        wanted = [one for ids in sequences(played) for one in windows(ids, length, stride)]
        assert arrays(played.folder / name) == padded(wanted, PAD)
    ids = played.value('numpy.load("data_tokenized/tokenized_data_part001.npz")["input_ids"]')
    assert ids.shape == (
        len(arrays(played.folder / "data_tokenized")[0]),
        max(map(len, sequences(played))),
    )
    wanted = [one for ids in sequences(played) for one in windows(ids, 1024, 512)]
    assert arrays(played.folder / "wide") == padded(wanted, PAD, 1024)


@checks("`tokenize_text`", "`--max-length 1024")
@pytest.mark.parametrize(
    ("length", "stride"),
    [(1024, 512), (64, 32), (64, 64), (8, 4), (8, 8), (8, 3), (8, 1), (100, 0), (9, 0), (1, 1)],
)
def test_any_windows(played: Played, tmp_path: Path, length: int, stride: int) -> None:
    asked = f"--stride {stride}" if stride else ""
    played.run(f"tokmill store export npz tokenized -o {tmp_path}/x --max-length {length} {asked}")
    # Without a stride it is half of the length.
    step = stride or length // 2
    wanted = [one for ids in sequences(played) for one in windows(ids, length, step)]
    assert arrays(tmp_path / "x") == padded(wanted, PAD)
    assert played.run(f"tokmill store export npz tokenized -o {tmp_path}/y --max-length {length} "
                      f"--stride {length + 1}", code=2)  # fmt: skip


@checks("`--tokenizer-path`")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--tokenizer-path x", "--tokenizer"),
        ("--input x", "tokmill build jsonl INPUTS"),
        ("--output x", "-o PATH"),
        ("--max-minutes 10", "--max-time 10m"),
        ("--max-length 512", "store export npz"),
        ("--stride 256", "store export npz"),
    ],
)
def test_old_names_of_options_lead_to_the_new_ones(played: Played, old: str, new: str) -> None:
    output = played.run(f"tokmill build jsonl data/cleaned {old}", code=2)
    assert new in output.replace(old.split()[0], "")


@checks("`run_full_tokenization.py`", "`MEMORY_OPTIMIZED`", '"MemoryError"', '"Slow processing"')
def test_presets_change_no_byte(played: Played) -> None:
    names = ("tokenized", "full", "fast", "quick")
    stores = [tokmill.Store(played.folder / name) for name in names]
    assert len({store.fingerprint for store in stores}) == 1
    for preset in ("memory", "balanced", "speed"):
        assert "shards" in played.run(f"{BUILD} -o none --dry-run --preset {preset}")


@checks("`test_cloud_tokenization_10min.py", "`resume_tokenization.py`")
@checks("`track_tokenization_progress`", "`implement_checkpointing`")
def test_a_part_is_kept_and_the_rest_follows(played: Played, tmp_path: Path) -> None:
    """At signals too: tests/crash/test_processes.py."""
    output = played.run(f"{BUILD} -o {tmp_path}/part --max-time 0.001s")
    assert "time limit reached" in output and "The whole input would take" in output
    assert "records/s" in output and "B/s" in output
    assert "memory" in output and "on disk" in output
    part = tokmill.Store(tmp_path / "part")
    assert 0 < part.records < len(texts(played))
    shown = played.run(f"tokmill inspect {tmp_path}/part")
    assert "partial store" in shown and "the same `tokmill build` continues it" in shown
    played.run(f"{BUILD} -o {tmp_path}/part")
    assert tokmill.Store(tmp_path / "part").fingerprint == (
        tokmill.Store(played.folder / "tokenized").fingerprint
    )
    assert not list((tmp_path / "part").rglob("*checkpoint*"))


@checks("`fix_tokenization_single_threaded.py`", "Which script")
def test_one_line_is_explained(played: Played) -> None:
    output = said(played, "--explain")
    first = sequences(played, "a")[0]
    assert "a.jsonl, line 1, byte 0" in output
    assert " ".join(map(str, first[:8])) in output
    left_out = played.run("tokmill store rejects tokenized --skipped")
    assert left_out.count("skipped, ") == 3 and "b.jsonl" in left_out
    assert "nothing was left to do" in played.run(f"{BUILD} -o tokenized")


@checks("Input: `text`")
def test_other_fields_are_kept(played: Played, tmp_path: Path) -> None:
    kept = [record["subreddit"] for record in tokmill.Store(played.folder / "kept")]
    lines = [
        json.loads(line)
        for path in sorted((played.folder / "data/cleaned").glob("*.jsonl"))
        for line in path.read_text("utf-8").split("\n")
        if line
    ]
    assert kept == [line.get("subreddit", "") for line in lines if prepared_text(line)]
    rows = [{"meta": {"title": "T"}, "paragraphs": [{"text": "a"}, {"text": "b"}]}]
    jsonl(tmp_path / "nested.jsonl", rows)
    fields = "--field meta.title --field paragraphs[].text"
    played.run(f"tokmill build jsonl {tmp_path}/nested.jsonl {fields} --tokenizer tokenizer "
               f"--end-of-record none -o {tmp_path}/s")  # fmt: skip
    ids = script(played.folder / "tokenizer").encode("T\na\nb").ids
    assert tokmill.Store(tmp_path / "s").record(0)["token"].tolist() == ids
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"text": \n')
    bad = f"tokmill build jsonl {tmp_path}/bad.jsonl --tokenizer tokenizer --max-rejects 0 -o"
    assert "json" in played.run(f"{bad} {tmp_path}/bad", code=1)


@checks("`tokenized_cleaned_data_part001.npz`", "One file for each input")
def test_names_of_files(played: Played, tmp_path: Path) -> None:
    names = ["tokenized_cleaned_data_part001.npz", "tokenization_stats.json"]
    production = played.folder / "data_tokenized_production"
    assert sorted(path.name for path in production.glob("[!.]*")) == sorted(names)
    assert arrays(production) == arrays(played.folder / "data_tokenized")
    asked = "--name cleaned_data --windows-per-file 20"
    played.run(f"tokmill store export npz tokenized -o {tmp_path}/parts {asked}")
    wanted = [one for ids in sequences(played) for one in windows(ids, 1024, 512)]
    for part in range(-(-len(wanted) // 20)):
        with np.load(tmp_path / f"parts/tokenized_cleaned_data_part{part + 1:03}.npz") as data:
            found = data["input_ids"].tolist(), data["attention_mask"].tolist()
        # Each file is as wide as its own longest window.
        assert found == padded(wanted[20 * part :][:20], PAD)
    assert {path.name for path in (played.folder / "each").glob("*.npz")} == {
        f"tokenized_{name}.npz" for name in "abc"
    }
    for name in "abc":
        with np.load(played.folder / f"each/tokenized_{name}.npz") as data:
            lengths = data["attention_mask"].sum(1).tolist()
        assert lengths == [len(ids) for ids in sequences(played, name)]


@checks("`tokenization_stats.json`")
def test_statistics(played: Played) -> None:
    """How they are made of one another: tests/unit/formats/test_npz_files.py."""
    found = json.loads((played.folder / "data_tokenized/tokenization_stats.json").read_text())
    ids, masks = arrays(played.folder / "data_tokenized")
    assert found.keys() == STATISTICS
    assert found["total_sequences"] == len(ids) and found["files_processed"] == 3
    assert found["total_tokens"] == sum(map(sum, masks))
    assert found["avg_sequence_length"] == sum(map(sum, masks)) / len(ids)


@checks("Compressed storage")
def test_a_store_has_two_bytes_a_token(played: Played) -> None:
    assert "\ntoken  u2 " in played.output["tokmill inspect tokenized"]
    tokens = sum(map(len, sequences(played)))
    size = sum(path.stat().st_size for path in (played.folder / "tokenized/shards").iterdir())
    assert 2 * tokens < size < 2 * tokens + 6000


@checks("Fallbacks")
def test_tokens_are_found_by_role(played: Played, tmp_path: Path) -> None:
    wanted = [one for ids in sequences(played) for one in windows(ids, 1024, 512)]
    assert arrays(played.folder / "padded") == padded(wanted, 0)
    played.run(f"tokmill tokenizer train data/cleaned --vocab-size 300 -o {tmp_path}/bare")
    played.run(f"tokmill build jsonl data/cleaned --tokenizer {tmp_path}/bare --end-of-record none "
               f"-o {tmp_path}/s")  # fmt: skip
    output = played.run(f"tokmill store export npz {tmp_path}/s -o {tmp_path}/x", code=1)
    assert "pad" in output and "--pad-id" in output


@checks("`monitor_resources`", "2,800 to 3,200")
def test_resources_are_logged(played: Played, repository: Path) -> None:
    lines = (played.folder / "tokenized/events.jsonl").read_text().splitlines()
    (done,) = [line for line in map(json.loads, lines) if line["event"] == "done"]
    assert done["rate"] > 0 and done["memory"] > 1e6 and done["disk_free"] > 0
    assert "load" in done
    assert "\n## Figures\n" in (repository / "README.md").read_text("utf-8")


@checks("`TokenizedDataset`", "`StreamingTokenizedDataset`", "`DataLoader`")
def test_datasets(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra train")
    monkeypatch.chdir(played.folder)
    whole = played.value('tokmill.TokenDataset("tokenized", 1024, rows="whole")')
    wanted = sequences(played)
    assert len(whole) == len(wanted)
    for number in (0, 5, len(wanted) - 1):
        item, ids = whole[number], wanted[number][:1024]
        assert item["input_ids"].dtype == torch.int64
        assert item["input_ids"].tolist() == ids + [0] * (1024 - len(ids))
        assert item["attention_mask"].tolist() == [1] * len(ids) + [0] * (1024 - len(ids))
    expression = next(one for one in played.every if "across=False" in one)
    batch = played.value(expression).columns["token"].tolist()
    rows, _ = padded([one for ids in wanted for one in windows(ids, 64, 32)], 0, 64)
    assert len(batch) == 8 and all(row in rows for row in batch)
    packed = played.value('tokmill.TokenDataset("tokenized", 1024, rows="packed")')
    counts = [int((packed[n]["input_ids"] != 0).sum()) for n in range(len(packed))]
    assert sum(counts) == sum(sum(1 for one in ids if one) for ids in wanted)
    loader = torch.utils.data.DataLoader(
        played.value('tokmill.TokenDataset("tokenized", 64, rows="windows")'), batch_size=8
    )
    assert next(iter(loader))["input_ids"].shape == (8, 64)


@checks("`TokenizedDataset`", "`DataLoader`")
@pytest.mark.long
def test_the_class_of_the_document_and_the_trainer(played: Played, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra train")
    transformers = pytest.importorskip("transformers", reason="needs transformers")

    class TokenizedDataset(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
        def __init__(self, data_dir: str) -> None:
            self.data_files = list(Path(data_dir).glob("*.npz"))
            self.sequences: list[Any] = []
            self.attention_masks: list[Any] = []
            for file_path in self.data_files:
                data = np.load(file_path)
                self.sequences.extend(data["input_ids"])
                self.attention_masks.extend(data["attention_mask"])

        def __len__(self) -> int:
            return len(self.sequences)

        def __getitem__(self, idx: int) -> dict[str, Any]:
            return {
                "input_ids": torch.tensor(self.sequences[idx], dtype=torch.long),
                "attention_mask": torch.tensor(self.attention_masks[idx], dtype=torch.long),
            }

    dataset = TokenizedDataset(str(played.folder / "windows"))
    ids, masks = arrays(played.folder / "windows")
    assert [row["input_ids"].tolist() for row in dataset] == ids
    assert [row["attention_mask"].tolist() for row in dataset] == masks
    rows = tokmill.TokenDataset(played.folder / "tokenized", 64, rows="windows")
    config = transformers.GPT2Config(
        vocab_size=2000, n_positions=64, n_embd=16, n_layer=1, n_head=2
    )
    arguments = transformers.TrainingArguments(
        str(tmp_path / "hf"), max_steps=2, use_cpu=True, report_to="none"
    )
    trainer = transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config), args=arguments, train_dataset=rows
    )
    assert 5 < trainer.train().training_loss < 10


@checks("`validate_tokenized_data`", '"Token ID 50300')
def test_files_are_checked(played: Played, tmp_path: Path) -> None:
    ids, masks = arrays(played.folder / "data_tokenized")
    found = [record["token"].tolist() for record in tokmill.Store(played.folder / "validated")]
    assert found == [row[: sum(mask)] for row, mask in zip(ids, masks, strict=True)]
    output = played.run(f"tokmill build npz damaged --tokenizer tokenizer -o {tmp_path}/x", code=1)
    assert "part001.npz, row 0, position 2: the id 50300" in output
    for name, some in (
        ("attention_mask", {"input_ids": [[1, 2]]}),
        ("shape", {"input_ids": [[1, 2]], "attention_mask": [[1]]}),
        ("hole", {"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]]}),
    ):
        np.savez(tmp_path / "bad.npz", **{key: np.asarray(value) for key, value in some.items()})
        output = played.run(f"tokmill build npz {tmp_path}/bad.npz -o {tmp_path}/{name}", code=1)
        assert name in output and "bad.npz" in output


@checks("`check_file_integrity`", "Recovery", "One input again")
def test_damaged_files_are_found_and_made_again(played: Played, tmp_path: Path) -> None:
    for name in ("tokenized", "data_tokenized"):
        shutil.copytree(played.folder / name, tmp_path / name)
    (npz,) = (tmp_path / "data_tokenized").glob("*.npz")
    (shard,) = (tmp_path / "tokenized/shards").glob("*.safetensors")
    for path in (npz, shard):
        whole = path.read_bytes()
        flip(path)
        output = played.run(f"tokmill store validate {path.parents[path is shard]}", code=1)
        assert path.name in output
        if path is npz:
            played.run(f"tokmill store export npz tokenized -o {tmp_path}/data_tokenized")
        else:
            assert f"hint: rm {shard}" in output
            shard.unlink()
            played.run(f"{BUILD} -o {tmp_path}/tokenized")
        assert path.read_bytes() == whole
    assert "ok" in said(played, "tokmill store validate data_tokenized")
    # Files of the script have no note of what they were.
    output = played.run("tokmill store validate damaged --tokenizer tokenizer", code=1)
    assert "part001.npz, row 0, position 2: the id 50300" in output and "1 problem" in output
    assert "nothing was left to do" in said(played, "-o tokenized --yes")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-20] ^= 255
    path.write_bytes(content)


@checks("`fix_token_ids`")
def test_ids_out_of_range_become_unk(played: Played) -> None:
    with np.load(played.folder / "damaged/tokenized_data_part001.npz") as data:
        ids, mask = data["input_ids"], data["attention_mask"]
    # As the document's function does.
    ids[ids >= 2000] = SPECIALS.index("<|unk|>")
    assert arrays(played.folder / "repaired") == (ids.tolist(), mask.tolist())
    assert "1 id of token replaced by unk" in said(played, "--map-oov unk")


@checks("`quality_check_tokenized_data`")
def test_figures_of_quality(played: Played) -> None:
    output = said(played, "--stats --width 1024")
    lengths = [len(ids) for ids in sequences(played)]
    figures = {line[:17].strip(): line[19:] for line in output.splitlines()}
    mean, middle = statistics.mean(lengths), statistics.median(lengths)
    assert figures["mean, median"] == f"{mean:,.1f}, {middle:,.1f} tokens"
    assert figures["shortest, longest"] == f"{min(lengths):,}, {max(lengths):,} tokens"
    # Rows of records that are not longer than 1,024, as padded to that width.
    assert max(lengths) <= 1024
    padding = statistics.mean(1 - length / 1024 for length in lengths)
    assert figures["rows of 1,024"] == f"{len(lengths)}, {padding:.2%} padding"
    different = len({one for ids in sequences(played) for one in ids})
    assert f"token: {different:,} ids of 2,000" in output
    assert figures["empty"] == "0 records"


@checks("Next step")
def test_a_training(played: Played) -> None:
    assert losses(played.folder / "run").keys() == {1, 2}
