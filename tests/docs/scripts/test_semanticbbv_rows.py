"""Each row about SemanticBBV: its commands run, and what they make equals a second computation."""

import csv
import importlib
import json
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile
from page import Played, commands, run, scripts_without_row, section, smaller
from references_semanticbbv import (
    DS_CONFIG,
    SPECIALS,
    STREAMS,
    aligned,
    counted,
    decoded,
    functions_of,
    got,
    instructions_of,
    is_walk,
    sequence,
)
from semanticbbv_section import (
    blocks_of,
    checks,
    multiset,
    named,
    numbers_of,
    played_here,
    program_graphs,
    programs,
    recorded_graphs,
    records,
    streams_of,
)

import ktrans
import tokmill
from tokmill.report.pages.plot import plot
from tokmill.x86.tokens.rules import DecodeError

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="its programs are compiled for this machine"
)
# Most kinds of instructions: implicit registers, prefixes, masks, rounding, operands not printed.
INSTRUCTIONS = """
    55 4889e5 4883ec20 8b45f8 c70424ff000000 488d0508000000 e820000000 74f0 eb10 c3 c9 90 6690
    0f1f440000 f3aa f0480fb10f 48f7e1 f7f9 99 4898 31c0 c1e004 d3e0 428b4c8310 64488b042528000000
    4188c0 88e0 4000c5 6bc005 69c0b179379e 0fb6c0 480fbec2 0f94c0 0f44c8 ff2500100000 ffd0
    a10000000000000001 d94508 d8c1 dec9 f20f10442408 660fefc0 c5f1c2c200 c5fc58c1 62f17ccb5800
    62f17c58584001 62f17c5858c1 660f3a44c101 0f05 cd80 f4 0fa2 f3480fb8c1 8f00 ff742408 3effe0 48a5
    9c 0fae38 8d4408ff 660f1f440000 480f1f00 c60001 62f17c185800 98 f0480fb10f
"""


@pytest.fixture
def done(play: Callable[..., Played], monkeypatch: pytest.MonkeyPatch) -> Played:
    return played_here(play, monkeypatch)


# The page itself.


def test_every_script_has_a_row_and_every_row_a_test() -> None:
    assert not scripts_without_row("SemanticBBV")
    importlib.import_module("test_semanticbbv_triplets")
    assert not checks.missing()
    documents = [row.document for row in section("SemanticBBV")]
    assert len(documents) >= 48 and len(set(documents)) == len(documents)
    assert all(row.here for row in section("SemanticBBV"))


def test_every_command_of_the_section_runs(done: Played) -> None:
    assert not done.failed, "\n".join(f"{one}\n{why}" for one, why in done.failed.items())
    assert done.output.keys() == {one for one in done.every if one.startswith("tokmill ")}
    named = commands(section("SemanticBBV"))
    assert len(named) > 70


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("vocab build x86 --binary-dir binaries -o new", "tokmill vocab build x86 INPUT"),
        ("vocab export vocab --output-dir new", "-o PATH"),
        ("vocab import --input tokens_fine -o new", "tokmill vocab import "),
        ("cfg --cfg-dir cfg -o new", "tokmill cfg INPUT"),
        ("build x86 graphs --vocab-dir vocab -o new", "--vocab FOLDER"),
        ("build select --input-dir walks -o new", "tokmill build select INPUTS"),
        ("build select walks --sample-ratio 0.2 -o new", "--ratio 0.2"),
        ("build token-dicts --directory dataset -o new", "tokmill build token-dicts INPUTS"),
    ],
)
def test_old_options_are_answered_with_the_new_ones(command: str, hint: str) -> None:
    assert hint in run(f"tokmill {command}", code=2).rpartition("hint: ")[2]


# Steps 1 to 6.


@checks("Step 1, `tokenizer.py`")
def test_six_streams_of_an_instruction(done: Played) -> None:
    code = {bytes.fromhex(one): one for one in INSTRUCTIONS.split()}
    for _, _, graph in program_graphs():
        code |= {raw: str(one) for raw, one in instructions_of(graph)}
    wrong = {
        name: raw.hex()
        for raw, name in code.items()
        if tokmill.tokenize_binary_instruction(raw, 0x401000, rules="semanticbbv")
        != sequence(raw, 0x401000)[0]
    }
    assert not wrong and len(code) > 400
    shown = [one for one in done.every if one.startswith(("tokmill.tokenize", "tokmill.align"))]
    assert done.value(shown[0]) == sequence(b"\x48\x89\xe5")[0]
    assert done.value(shown[1]) == sequence(b"\x55\x48\x89\xe5")
    for bad in (b"\x06", b"\x48\x89", b"\x55\xc3", b""):
        with pytest.raises(DecodeError, match="401000"):
            tokmill.tokenize_binary_instruction(bad, 0x401000, rules="semanticbbv")


@pytest.mark.long
def test_six_streams_of_a_library(done: Played) -> None:
    """Of each different instruction of libc: tens of thousands."""
    said = subprocess.run(["ldd", shutil.which("ls") or ""], capture_output=True, text=True)
    (library,) = re.findall(r"(/\S+/libc\.so\S*)", said.stdout)
    with Path(library).open("rb") as handle:
        code = ELFFile(handle).get_section_by_name(".text").data()
    seen = {code[one.ip : one.next_ip]: one for one in decoded(code) if not one.is_invalid}
    for raw, one in seen.items():
        tokens = tokmill.tokenize_binary_instruction(raw, one.ip, rules="semanticbbv")
        assert tokens == sequence(raw)[0], one
    assert len(seen) > 20_000


@checks("Step 1, the six dimensions")
def test_the_aligned_form() -> None:
    for code in INSTRUCTIONS.split():
        tokens = tokmill.tokenize_binary_instruction(bytes.fromhex(code), 0, rules="semanticbbv")
        assert tokmill.align(tokens) == aligned(sequence(bytes.fromhex(code)))


def own_counts() -> dict[str, Counter[str]]:
    return counted(
        tokens
        for _, _, graph in program_graphs()
        for node in graph
        for tokens in sequence(graph.nodes[node]["raw"], node)
    )


@checks("Step 2, `collect_tokens_fine.py", "Step 2, `asm_tokens_dict.pkl`")
def test_counts_of_tokens(done: Played) -> None:
    counts = own_counts()
    instructions = counts["mne"].total()
    assert f"8 programs, {instructions:,} instructions" in next(iter(done.output.values()))
    for stream in STREAMS:
        assert got(f"tokens_fine/{stream}_tokens_dict.pkl") == counts[stream]
    assert sum(got("tokens_fine/eflag_tokens_dict.pkl").values()) == instructions


@checks("Step 2, angr loads")
def test_functions_are_those_of_the_symbol_table(done: Played) -> None:
    store = tokmill.Store("built")
    found = {(row["project"], row["compiler"], row["level"], row["function"]) for row in store}
    assert found == {
        (project, by, level, name)
        for project, by, level, path in programs()
        for name in functions_of(path)
    }


@checks("Step 3, `export_tokens.py`", "Step 3, `--input", "Step 3, special tokens")
def test_lists_begin_with_the_special_tokens_and_are_sorted(done: Played) -> None:
    for stream, counts in own_counts().items():
        wanted = SPECIALS + sorted(counts.keys() - set(SPECIALS))
        text = "".join(f"{one}\n" for one in wanted).encode()
        assert Path(f"lists/{stream}_tokens.txt").read_bytes() == text
        if stream == "asm":
            assert Path("one-list/asm_tokens.txt").read_bytes() == text
    (shown,) = [one for one in done.every if one.endswith(".tokens[:5]")]
    assert list(done.value(shown)) == SPECIALS


@checks("Step 4, `asm_dataset_generator.py")
def test_walks_are_paths_of_the_graphs(done: Played) -> None:
    graphs = {(p, n, i): graph for p, n, i, graph in recorded_graphs()}
    for name in ("walks", "walks-5"):
        store = tokmill.Store(name)
        for record in store:
            project, number = re.fullmatch(r"(\w+?)-.*?(\d+)", record["program"]).groups()  # type: ignore[union-attr]
            graph = graphs[project, record["function"], int(number)]
            blocks = blocks_of(store, record)
            assert is_walk(graph, int(record["address"]), blocks)
            assert len(record["asm"]) <= 512
            assert len(blocks) <= 5 if name == "walks-5" else len(record["asm"]) >= 100
    (command,) = [one for one in done.every if one.endswith("--vocab vocab -o walks")]
    short = int(re.search(r"(\d+) too short", done.output[command])[1])  # type: ignore[index]
    assert len(tokmill.Store("walks")) + short == sum(map(len, graphs.values()))
    assert len(tokmill.Store("walks-5")) == len(graphs)


@checks("Step 4, input")
def test_graphs_of_pickles_and_of_programs(done: Played) -> None:
    sequences = {}
    for path in Path("extracts").iterdir():
        project, program, level = path.name.split("-")[:3]
        for name, function in got(path).items():
            dicts = [
                t for n in sorted(function[3]) for t in sequence(function[3].nodes[n]["raw"], n)
            ]
            sequences[project, program, level, name] = aligned(dicts)
    store = tokmill.Store("functions")
    assert len(store) == len(sequences) == 14
    for record in store:
        key = record["project"], record["program"], record["level"], record["function"]
        assert named(store, record) == sequences[key]
    # Programs themselves: blocks end at calls, and padding is in none.
    graphs = {(str(path.relative_to("binaries")), n): graph for path, n, graph in program_graphs()}
    store = tokmill.Store("walks-of-programs")
    assert len(store) > 100
    for record in store:
        graph = graphs[record["program"], record["function"]]
        assert is_walk(graph, int(record["address"]), blocks_of(store, record))


@checks("Step 4, output", "Pickles and UTF-8")
def test_scattered_pickles_are_the_store(done: Played) -> None:
    paths = sorted(Path("dataset-walks").glob("tokens_*.pkl"), key=lambda p: int(p.stem[7:]))
    pickles = [got(path) for path in paths]
    assert {len(one) for one in pickles[:-1]} == {20} and len(pickles[-1]) <= 20
    sequences = [one for many in pickles for one in many]
    assert streams_of(sequences) == records("walks")
    assert {type(tokens) for one in sequences for tokens in one} == {dict}
    store = tokmill.Store("walks")
    for one, record in zip(sequences, store, strict=True):
        lengths = np.diff(np.flatnonzero(record["border"]), append=len(record["border"]))
        assert [len(tokens["asm"]) for tokens in one] == lengths.tolist()
        assert all(tokens.keys() == set(STREAMS) for tokens in one)
    assert paths[0].read_bytes()[:2] == b"\x80\x04"
    assert Path("lists/asm_tokens.txt").read_text("utf-8").isascii()


@checks("Step 5, `merge_tokens.py", "Step 5, length filter")
def test_length_and_ratio(done: Played, tmp_path: Path) -> None:
    walks, filtered = records("walks"), records("filtered")
    assert filtered == [one for one in walks if 120 <= len(one["asm"]) <= 300]
    assert any(len(one["asm"]) > 300 for one in walks)
    assert not multiset(records("sampled")) - multiset(walks)
    shares = []
    for seed in range(12):
        run(
            f"tokmill build select walks --ratio 0.2 --seed {seed} -o {tmp_path}/{seed} --workers 0"
        )
        shares.append(len(tokmill.Store(tmp_path / str(seed))) / len(walks))
    assert np.mean(shares) == pytest.approx(0.2, abs=0.03)
    old = [one for path in sorted(Path("dataset").iterdir()) for one in streams_of(got(path))]
    assert multiset(records("old")) == multiset(old)
    fitting = [one for one in old if 50 <= len(one["asm"]) <= 2048]
    drawn = records("sampled-old")
    assert 0 < len(drawn) < len(fitting) / 2 and not multiset(drawn) - multiset(fitting)


@checks("Step 5, output", "Step 5, chunked merging")
def test_one_pickle_or_chunks(done: Played) -> None:
    whole = got("merged_dataset.pkl")
    assert streams_of(whole) == records("sampled")
    paths = sorted(Path("chunks").glob("*.pkl"), key=lambda p: int(p.stem.rpartition("_")[2]))
    assert [path.name for path in paths] == [f"merged_dataset_{n}.pkl" for n in range(len(paths))]
    chunks = [got(path) for path in paths]
    assert [one for many in chunks for one in many] == whole
    assert max(map(len, chunks)) == 5


@checks("Step 6, `merge_pickle_files.py", "Step 6, a text file", "Step 6, `--merge-type list`")
def test_merged_pickles(done: Played) -> None:
    def own(*files: int) -> list[dict[str, list[str]]]:
        return [one for n in files for one in streams_of(got(f"dataset/tokens_{n}.pkl"))]

    assert streams_of(got("final_train_dataset.pkl")) == own(0, 1, 2)
    assert multiset(records("listed")) == multiset(own(1, 6))
    both = multiset(records("sampled")) | multiset(records("filtered"))
    assert multiset(records("merged")) == Counter(set(both))
    levels, merged = got("levels/tool.pkl"), got("final_dict.pkl")
    assert merged.keys() == levels.keys()
    for name, wanted in levels.items():
        assert merged[name].keys() == wanted.keys()
        for level in wanted:
            assert streams_of(merged[name][level]) == [aligned(wanted[level])]


# Steps 7 to 9.


@checks("Step 7, `asm_dataset_preprocessed_fine.py`", "Step 7, a PyTorch", "Step 7, batches")
def test_ids_as_a_dataset_and_as_batches(done: Played) -> None:
    lists = {name: Path(f"lists/{name}_tokens.txt").read_text().split("\n") for name in STREAMS}
    wanted = [
        {name: [lists[name].index(token) for token in one[name]] for name in STREAMS}
        for one in streams_of(got("merged_dataset.pkl"))
    ]
    (first,) = [one for one in done.every if one.endswith(".record(0)")]
    assert all(done.value(first)[name].tolist() == wanted[0][name] for name in STREAMS)

    (shown,) = [one for one in done.every if one.startswith("tokmill.TokenDataset")]
    item = done.value(shown)
    dataset = tokmill.TokenDataset("sampled", 512, rows="whole")
    assert len(dataset) == len(wanted)
    for number, ids in enumerate(wanted):
        for name in STREAMS:
            row = dataset[number][name].tolist()
            assert row == ids[name][:512] + [0] * (512 - len(ids[name]))
    assert all(item[name].equal(dataset[0][name]) for name in STREAMS)

    (shown,) = [one for one in done.every if one.startswith("tokmill.Feed")]
    batch = done.value(shown)
    for name in STREAMS:
        assert batch.columns[name].shape == (8, 512)
    rows = {tuple(ids["asm"]) for ids in wanted}
    lengths = (batch.document >= 0).sum(1)
    assert all(
        tuple(row[:n].tolist()) in rows
        for row, n in zip(batch.columns["asm"], lengths, strict=True)
    )


@checks("Step 8, `train_rwkv7_deepspeed.py`", "Step 8, checkpoints", "Step 8, logs")
def test_training_learns_six_streams(done: Played) -> None:
    import torch
    from safetensors.torch import load_file

    lines = [json.loads(line) for line in Path("rwkv7/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        parts = [line[f"loss_{name}"] for name in STREAMS]
        assert line["loss"] == pytest.approx(sum(parts), rel=1e-6)
    assert any(f"val_loss_{STREAMS[0]}" in line for line in lines)
    kept, exported = (
        load_file("rwkv7/model/model.safetensors"),
        torch.load("rwkv7.pt", weights_only=True),
    )
    assert kept.keys() == exported.keys() and all(kept[k].equal(exported[k]) for k in kept)
    evaluated = done.output["tokmill eval rwkv7 walks --rows 8"]
    assert all(re.search(rf"^{name} ", evaluated, re.M) for name in STREAMS)
    assert Path("loss.svg").read_text().startswith("<?xml")


@checks("Step 8, mixed precision", "Step 8, `ds_config.json`", "Step 8, ZeRO", "Step 9")
def test_settings_of_trainings(done: Played) -> None:
    def output(out: str) -> str:
        return next(text for one, text in done.output.items() if f" -o {out} " in one)

    run_section = json.loads(Path("bf16/recipe.json").read_text())["run"]
    assert run_section["precision"] == "bf16" and run_section["micro_tokens"] == 4096
    several, zero = output("several").splitlines()[-1], output("zero").splitlines()[-1]
    assert several.startswith("torchrun ") and "--nproc-per-node=8" in several
    assert "--nproc-per-node=2" in zero and "zero_optimization.stage=2" in zero
    recipe = json.loads(Path("configured/recipe.json").read_text())
    rows, micro = DS_CONFIG["train_batch_size"], DS_CONFIG["train_micro_batch_size_per_gpu"]
    assert recipe["data"]["batch"] == rows
    assert recipe["run"]["micro_tokens"] == micro * recipe["task"]["length"]
    assert (recipe["run"]["engine"], recipe["run"]["precision"]) == ("deepspeed", "bf16")
    rates = {key: recipe["optim"][key] for key in ("lr", "weight_decay", "warmup", "clip")}
    assert rates == {"lr": 1e-4, "weight_decay": 0.02, "warmup": 4, "clip": 0.5}
    assert (recipe["optim"]["schedule"], recipe["optim"]["floor"]) == ("linear", 0)
    written = json.loads(Path("configured/ds_config.json").read_text())
    assert written["zero_optimization"].items() >= DS_CONFIG["zero_optimization"].items()
    notes = output("configured").replace("\n", " ")
    unused = ("logging", "dataloader_settings", "activation_checkpointing")
    assert all(name in notes.partition("without effect")[2] for name in unused)


@pytest.mark.long
def test_zero_in_two_processes(done: Played, tmp_path: Path) -> None:
    """The command of the page without --dry-run."""
    (command,) = [one for one in done.every if " -o zero " in one]
    command = command.replace("-o zero", f"-o {tmp_path}/zero").replace(" --dry-run", "")
    words = shlex.split(smaller(command))
    subprocess.run([sys.executable, "-m", *words], check=True, capture_output=True)
    settings = json.loads((tmp_path / "zero/ds_config.json").read_text())
    assert settings["zero_optimization"]["stage"] == 2
    lines = (tmp_path / "zero/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if '"loss"' in line] == [1, 2]


# Tools.


@checks("`analyze_sequence_length.py`", "`analyze_sequences.py`")
def test_lengths(done: Played) -> None:
    lengths = [len(one["asm"]) for one in records("sampled")]
    text = done.output["tokmill inspect sampled --stats"]
    assert re.search(rf"^shortest, longest +{min(lengths)}, {max(lengths)} tokens", text, re.M)
    average = f"{np.mean(lengths):,.1f}, {statistics.median(lengths):,.1f} tokens"
    assert re.search(rf"^mean, median +{average}", text, re.M)
    (expression,) = [one for one in done.every if one.startswith("numpy.diff")]
    assert done.value(expression).tolist() == lengths
    listed = list(csv.DictReader(Path("lengths-of-files.csv").read_text().splitlines()))
    assert len(listed) == sum(len(got(f"dataset/tokens_{number}.pkl")) for number in (0, 1))

    of_pickle = [len(one["asm"]) for one in streams_of(got("dataset/tokens_0.pkl"))]
    shown = numbers_of(done.output["tokmill inspect dataset/tokens_0.pkl"], "lengths")
    assert shown["min"] == min(of_pickle) and shown["max"] == max(of_pickle)
    assert shown["mean"] == pytest.approx(np.mean(of_pickle), abs=0.5)
    assert shown["median"] == pytest.approx(statistics.median(of_pickle), abs=0.5)

    pickles = [Path(f"dataset/tokens_{number}.pkl") for number in (0, 1)]
    with plot("lengths", pickles, Path("several.csv")).open() as handle:
        rows = list(csv.DictReader(handle))
    for number in (0, 1):
        own = [len(one["asm"]) for one in streams_of(got(f"dataset/tokens_{number}.pkl"))]
        named = [row for row in rows if row["series"] == f"tokens_{number}.pkl"]
        assert [int(row["length"]) for row in named] == own
    assert Path("lengths.svg").stat().st_size > 1000
    assert Path("several.pdf").read_bytes().startswith(b"%PDF")


@checks("Input `*_blame.pkl`")
def test_pickles_of_levels(done: Played) -> None:
    levels = got("blame/tool_blame.pkl")
    store = tokmill.Store("blamed")
    found = {(row["function"], row["level"]): named(store, row) for row in store}
    assert found == {
        (str(number), level): aligned(one)
        for number, of_function in enumerate(levels)
        for level, one in of_function.items()
    }


@checks("`inspect_pkl_structure.py`")
def test_structure_of_a_pickle(done: Played) -> None:
    text = done.output["tokmill inspect cfg/first/saved_index.pkl --head 2"]
    assert "functions of 4 programs (BinaryCorp); nothing of it was run" in text
    name, (function, *_) = next(iter(got("cfg/first/saved_index.pkl").items()))
    assert f"{name!r}: list of 4 list" in text and f"bytes of {len(function[2])}" in text
    assert all(f"{node}: dict of" in text for node in list(function[3])[:3])


@checks("`plot_token_frequency.py`")
def test_frequencies(done: Played) -> None:
    assert "<svg" in Path("frequency.svg").read_text()


@checks("`pickle_token_to_dict.py`", "`sort_tokens.py`")
def test_pickles_of_tokens_as_text(done: Played) -> None:
    tokens = got("tokens.pkl")
    wanted = SPECIALS + sorted(tokens - set(SPECIALS))
    assert Path("controlled/asm_tokens.txt").read_text().splitlines() == wanted
    for stream in STREAMS:
        name = f"{stream}_tokens.txt"
        assert Path("sorted-lists", name).read_bytes() == Path("lists", name).read_bytes()


# Text, vocabularies, parsers.


@checks("`asm_text_collect_iced.py`")
def test_unique_instructions(done: Played) -> None:
    occurs: Counter[str] = Counter()
    inside: dict[str, set[tuple[str, int]]] = {}
    for project, _, number, graph in recorded_graphs():
        for raw, _ in instructions_of(graph):
            occurs[raw.hex()] += 1
            inside.setdefault(raw.hex(), set()).add((project, number))
    with Path("instructions.csv").open() as handle:
        rows = list(csv.DictReader(handle))
    assert {row["bytes"]: int(row["count"]) for row in rows} == occurs
    assert {row["bytes"]: int(row["programs"]) for row in rows} == {
        code: len(programs) for code, programs in inside.items()
    }


@checks("`asm_text_collect_tokenizer.py`")
def test_tokenized_sequences(done: Played) -> None:
    own = [
        aligned(t for n in sorted(graph) for t in sequence(graph.nodes[n]["raw"], n))
        for *_, graph in recorded_graphs()
    ]
    assert multiset(streams_of(got("sequences.pkl"))) == multiset(own)


@checks("`asm_text_collect_tokenizer_ktrans.py`")
def test_ktrans(done: Played, tmp_path: Path) -> None:
    names: Counter[str] = Counter()
    ktrans.main(["cfg", str(tmp_path)])
    for path in tmp_path.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            function = json.loads(line)
            names[function.pop("function")] += 1
            function.pop("address")
            assert len(function) == 7 and len({len(stream) for stream in function.values()}) == 1
    assert names == Counter(name for _, name, *_ in recorded_graphs())


@checks("`collect_tokens.py`", "`compress_vocabulary.py`")
def test_smaller_vocabularies(done: Played) -> None:
    for stream, counts in own_counts().items():
        if stream in ("mne", "eflag"):
            continue  # lists count these once a token
        kept = SPECIALS + sorted(one for one, n in counts.items() if n >= 2 and one not in SPECIALS)
        assert json.loads(Path(f"frequent/{stream}.json").read_bytes())["tokens"] == kept
    before = Path("assemble_tokens.txt").read_text().splitlines()
    after = json.loads(Path("compressed/asm.json").read_bytes())["tokens"]
    ids = json.loads(Path("compressed/ids.json").read_bytes())["asm"]

    def compressed(token: str) -> str:
        if re.fullmatch(r"0x[0-9a-f]+|\d+", token):
            return "IMM"
        memory = re.fullmatch(r"(\w+) \[(\w+)(\+\w+)?\]", token)
        return f"MEM_{memory[1]}[REG{'+IMM' if memory[3] else ''}]" if memory else token

    assert [after[one] for one in ids] == [compressed(token) for token in before]


@checks("`program_parser.py`", "`program_parser_func.py`")
def test_the_tokenizer_from_python(done: Played) -> None:
    (walks,) = [one for one in done.every if one.startswith("list(")]
    path = "binaries/first/gcc-O2/tool"
    graphs = {str(name): graph for file, name, graph in program_graphs() if str(file) == path}
    store = tokmill.Store("walks-of-programs")
    found = done.value(walks)
    assert len(found) > 5
    for one in found:
        assert is_walk(graphs[one.function], one.address, blocks_of(store, one.columns))
    functions = list(tokmill.X86Tokenizer("vocab").encode_program(path))
    of_store = [row for row in tokmill.Store("two-workers") if row["program"] == path[9:]]
    for function, row in zip(functions, of_store, strict=True):
        assert all((function.columns[name] == row[name]).all() for name in STREAMS)
    (decode,) = [one for one in done.every if ").decode(" in one]
    wanted = [" ".join(one["asm"]) for one in sequence(b"\x55\x48\x89\xe5\xc3")]
    assert list(done.value(decode)) == wanted


# Conventions.


@checks("iced-x86, angr, PyTorch, DeepSpeed")
def test_what_is_installed() -> None:
    text = run("tokmill doctor")
    assert all(name in text for name in ("iced-x86", "torch", "deepspeed"))


@checks("Several processes", "Chunks against memory", "At most 32K tokens")
def test_workers_memory_and_lengths(done: Played, tmp_path: Path) -> None:
    common = "tokmill build x86 binaries --rules semanticbbv --vocab vocab --quiet"
    run(f"{common} --workers 0 --preset memory -o {tmp_path}/one")
    one, two = tokmill.Store(tmp_path / "one"), tokmill.Store("two-workers")
    assert one.fingerprint == two.fingerprint

    run(f"{common} --workers 0 --max-tokens 100 -o {tmp_path}/cut")
    whole: dict[tuple[str, int], list[str]] = {}
    cut = tokmill.Store(tmp_path / "cut")
    for row in cut:
        assert 0 < len(row["asm"]) <= 100 and row["border"][0]
        parts = whole.setdefault((row["program"], int(row["address"])), [])
        assert (row["part"] == 0) == (not parts)
        parts += named(cut, row)["asm"]
    assert list(whole.values()) == [one["asm"] for one in records("two-workers")]
    defaults = run("tokmill build x86 --help")
    assert "[32768]" in defaults and re.search(r"--min-tokens(?:.|\n)*?\[100\]", defaults)
