"""Programs to records: what stands in them is what the program holds, however it is cut."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokmill
from tokmill.base.errors import TokmillError, UsageError
from tokmill.builds.plan import BuildRecipe, How, prepare
from tokmill.report.describe.shown_records import Reader, matching
from tokmill.store.checks.validate import validate
from tokmill.store.schema import Records, Strings, each_drop
from tokmill.store.store import Store
from tokmill.x86 import records as records_module
from tokmill.x86.features.function_features import SHAPE, functions_of
from tokmill.x86.graph import Edge, Graph
from tokmill.x86.graphs.graph_files import write_graph
from tokmill.x86.graphs.lifting import lift_files
from tokmill.x86.image.program import Key
from tokmill.x86.lift.cfg import lift
from tokmill.x86.program_source import X86Source
from tokmill.x86.records import NO_INSTRUCTION, Cutting, records_of
from tokmill.x86.tokens.rules import COLUMNS, align, tokenize_bytes
from tokmill.x86.tokens.templates import Templates
from tokmill.x86.tokens.vocabularies.vocabulary import closed, counted
from tokmill.x86.walks import Walking
from x86_graphs import NOP, Block, graph_of
from x86_programs import C_SOURCE, compiles, stripped, symbols

STRAIGHT = "int straight(int x) {" + "x = x * 3 ^ x >> 2;" * 40 + "return x; }"
"""A block of more than 64 tokens."""
KEY = Key("p", "prog", "1", "gcc", "O2")


@pytest.fixture(scope="session")
def program(built: Path) -> Path:
    return compiles(built, "records", C_SOURCE + STRAIGHT, "-O2", "-g0")


@pytest.fixture(scope="session")
def graph(program: Path) -> Graph:
    return lift(program)


def build(out: Path, *inputs: Path, **options: Any) -> Store:
    return tokmill.build("x86", inputs, out, **options)


def streams(store: Store, number: int) -> dict[str, list[str]]:
    """Return the six streams of a record as tokens."""
    record = store.record(number)
    lists = Reader(store).lists
    return {column: [lists[column][i] for i in record[column].tolist()] for column in COLUMNS}


def wanted(graph: Graph, first_block: int, last_block: int, **options: Any) -> dict[str, list[str]]:
    """Return the six streams of some blocks, an instruction at a time."""
    code = graph.code[graph.block_bytes[first_block] : graph.block_bytes[last_block]]
    found: dict[str, list[str]] = {column: [] for column in COLUMNS}
    for tokens in tokenize_bytes(code.tobytes(), 0, bits=graph.bits, **options):
        for column, stream in align(tokens).items():
            found[column] += stream
    return found


def test_functions_are_records(tmp_path: Path, program: Path, graph: Graph) -> None:
    store = build(tmp_path / "s", program)
    assert not validate(store).problems
    assert store.records == len(graph.function_address) > 15
    for number in range(store.records):
        begin, end = graph.function_blocks[number : number + 2].tolist()
        assert streams(store, number) == wanted(graph, begin, end)
        record = store.record(number)
        border = record["border"]
        assert (border & 2 > 0).sum() == end - begin
        assert (border & 1 > 0).sum() == np.diff(graph.block_instructions[[begin, end]])
        assert record["address"] == graph.function_address[number]
        assert record["function"] == graph.function_name[number]
        assert record["program"] == program.name and record["part"] == 0
        assert {record[name] for name in ("project", "version", "compiler", "level")} == {"unknown"}
    assert store.manifest.notes == {
        "programs": 1,
        "functions": store.records,
        "blocks": len(graph.block_address),
        "instructions": len(graph.lengths),
    }


RARE = r"""
#include <stdexcept>
#include <string>
#include <vector>

extern "C" __attribute__((noinline)) int rare(std::vector<int> &all, unsigned at, const char *t) {
    std::string text(t), more(t + at);
    if (at >= all.size()) throw std::out_of_range("no such place");
    try { all.push_back(all[at]); } catch (const std::bad_alloc &) { return -7; }
    return all[at] * 3 + text.size() + more.size();
}

int main(int count, char **words) {
    std::vector<int> all(count);
    return rare(all, count / 2, words[0]);
}
"""


@pytest.mark.parametrize("by", ["g++", "clang++"])
def test_a_record_begins_where_its_function_does(tmp_path: Path, built: Path, by: str) -> None:
    """Rare code that the compiler put before it comes last, and is not a loop."""
    path = compiles(built, f"{by}-rare", RARE, "-O2", by=by)
    graph, at = lift(path, facts=True), symbols(path)
    number = graph.function_name.index("rare")
    blocks = range(*graph.function_blocks[number : number + 2].tolist())
    addresses = graph.block_address[blocks].tolist()
    rest = addresses[1:]
    if by == "g++":
        assert at["rare.cold"] < at["rare"]
        rest = rest[: rest.index(at["rare.cold"])]
    assert addresses[0] == at["rare"] < min(rest) and len(rest) > 5
    store = build(tmp_path / "s", path)
    (record,) = matching(store, ["function=rare"])
    entry = wanted(graph, addresses.index(at["rare"]) + blocks.start, blocks.start + 1)["asm"]
    assert entry and streams(store, record)["asm"][: len(entry)] == entry
    assert functions_of(graph).shape[number, SHAPE.index("loops")] == 0


def test_a_function_is_found_and_shown_as_instructions(tmp_path: Path, program: Path) -> None:
    store = build(tmp_path / "s", program)
    (number,) = matching(store, ["function=checked"])
    address = int(store.column("address")[number])
    assert list(matching(store, [f"address={address:#x}"])) == [number]
    assert list(matching(store, ["function ~ ^chec", "length < 100"])) == [number]
    shown = Reader(store).show(number)
    assert "\nRET" in shown["text"] and shown["function"] == "checked"
    nameless = build(tmp_path / "n", stripped(program))
    assert list(matching(nameless, [f"function=sub_{address:x}"]))


def test_blocks_are_records(tmp_path: Path, program: Path, graph: Graph) -> None:
    store = build(tmp_path / "s", program, unit="block")
    assert store.records == len(graph.block_address)
    assert store.column("address").tolist() == graph.block_address.tolist()
    names = [store.record(number)["function"] for number in range(store.records)]
    assert names == np.repeat(graph.function_name, np.diff(graph.function_blocks)).tolist()
    for number in range(0, store.records, 7):
        assert streams(store, number) == wanted(graph, number, number + 1)
        assert store.record(number)["border"][0] == 3


@pytest.mark.parametrize("unit", ["function", "block"])
def test_what_is_too_long_is_cut_between_instructions(
    tmp_path: Path, program: Path, unit: Any
) -> None:
    whole = build(tmp_path / "w", program, unit=unit)
    store = build(tmp_path / "s", program, unit=unit, max_tokens=64)
    parts, lengths = store.column("part").tolist(), np.diff(store.offsets())
    assert lengths.max() <= 64 and max(parts) > 0
    begins = [i for i, part in enumerate(parts) if part == 0] + [store.records]
    assert len(begins) - 1 == whole.records
    for number in range(whole.records):
        mine = range(begins[number], begins[number + 1])
        assert [parts[i] for i in mine] == list(range(len(mine)))
        for name in ("asm", "eflag", "border"):
            joined = np.concatenate([store.record(i)[name] for i in mine])
            assert joined.tolist() == whole.record(number)[name].tolist()
        assert all(store.record(i)["border"][0] & 1 for i in mine)
        # Each part is as long as it can be.
        for i in mine[:-1]:
            following = store.record(i + 1)["border"] & 1
            next_one = int(np.flatnonzero(np.append(following[1:], 1))[0]) + 1
            assert lengths[i] + next_one > 64


def test_walks_are_records_of_one_function(tmp_path: Path, program: Path, graph: Graph) -> None:
    options = {"unit": "walk", "walks": 2, "walk_tokens": 80, "min_tokens": 40}
    store = build(tmp_path / "s", program, **options)
    lengths = np.diff(store.offsets())
    assert 40 <= lengths.min() < lengths.max() <= 80
    blocks = [wanted(graph, block, block + 1)["asm"] for block in range(len(graph.block_address))]
    place = {int(address): i for i, address in enumerate(graph.block_address)}
    walks = set()
    for number in range(store.records):
        record = store.record(number)
        asm = streams(store, number)["asm"]
        begins = [*np.flatnonzero(record["border"] & 2).tolist(), len(asm)]
        assert asm[: begins[1]] == blocks[place[int(record["address"])]][: begins[1]]
        for begin, end in zip(begins[:-1], begins[1:], strict=True):
            assert any(block[: end - begin] == asm[begin:end] for block in blocks)
        walks.add((record["function"], int(record["walk"])))
    assert len(walks) == store.records
    notes, skipped = store.manifest.notes, store.manifest.skipped["too short"]
    assert store.records + skipped == 2 * len(graph.block_address)
    assert 0 < notes["blocks walked"] < notes["blocks"]
    assert 0 < notes["edges walked"] < notes["edges"]
    assert build(tmp_path / "t", program, **options).fingerprint == store.fingerprint
    other = build(tmp_path / "o", program, **options, seed=1)
    assert other.column("walk").tolist() != store.column("walk").tolist()


def test_a_separator_ends_each_instruction(tmp_path: Path, program: Path) -> None:
    store = build(tmp_path / "s", program, separator=True)
    plain = build(tmp_path / "p", program)
    record, bare = store.record(3), plain.record(3)
    ends = np.append(record["border"][1:] & 1, 1) > 0
    for column in COLUMNS:
        assert (record[column][ends] == store.vocabularies[column].role("sep")).all()
        assert record[column][~ends].tolist() == bare[column].tolist()


def flat(batches: list[Records]) -> list[Any]:
    """Return what records hold, whatever batches they came in and whatever numbers phrases have."""
    found = []
    for batch in batches:
        phrases = batch.phrases
        assert phrases is not None
        for i in range(len(batch)):
            ids = phrases.ids[phrases.offsets[i] : phrases.offsets[i + 1]]
            tokens = []
            for number in ids.tolist():
                row = number & 0x7FFFFFFF
                place = slice(*phrases.table_offsets[row : row + 2].tolist())
                tokens.append((number >> 31, phrases.table["asm"][place].tolist()))
            columns = {
                name: value.take(slice(i, i + 1)).decoded()[0]
                if isinstance(value, Strings)
                else int(value[i])
                for name, value in batch.columns.items()
            }
            found.append((tokens, columns, int(batch.starts[i])))
    return found


@pytest.mark.parametrize("unit", ["function", "block", "walk"])
def test_portions_do_not_matter(graph: Graph, unit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cutting = Cutting(unit, 64, 20, Walking(walk_tokens=64))
    one = list(records_of(graph, KEY, Templates("tokmill", 64, closed()), cutting))
    monkeypatch.setattr(records_module, "AT_ONCE", 50)
    many = list(records_of(graph, KEY, Templates("tokmill", 64, closed()), cutting))
    assert len(many) > len(one) and flat(many) == flat(one)
    for name in ("notes", "skipped"):
        sums: list[dict[str, int]] = [{}, {}]
        for total, batches in zip(sums, (one, many), strict=True):
            for batch in batches:
                for key, count in getattr(batch, name).items():
                    total[key] = total.get(key, 0) + count
        assert sums[0] == sums[1]


def test_bytes_that_are_no_instruction_cost_their_function() -> None:
    good = {0x10: [Block(0x10, [NOP, b"\xc3"]), Block(0x12, [b"\x55"])], 0x30: [Block(0x30)]}
    bad = {0x20: [Block(0x20), Block(0x21, [NOP, b"\x06"])], 0x40: [Block(0x40, [b"\x0f"])]}
    graph = graph_of(dict(sorted((good | bad).items())))
    for unit in ("function", "block", "walk"):
        cutting = Cutting(unit, min_tokens=1)
        batches = list(records_of(graph, KEY, Templates("tokmill", 64, closed()), cutting))
        clean = records_of(graph_of(good), KEY, Templates("tokmill", 64, closed()), cutting)
        assert flat(batches) == flat(list(clean)) != []
        drops = [drop for batch in batches for drop in each_drop(batch.drops)]
        assert [(drop.offset, drop.reason, drop.rejected) for drop in drops] == [
            (address, NO_INSTRUCTION, True) for address in (0x20, 0x40)
        ]
        alone = list(records_of(graph_of(bad), KEY, Templates("tokmill", 64, closed()), cutting))
        assert sum(len(list(each_drop(batch.drops))) for batch in alone) == 2 and not flat(alone)
        assert sum(batch.notes.get("programs", 0) for batch in alone) == 1


def test_coverage_counts_what_stands_in_the_walks() -> None:
    """Blocks of 3 tokens: of 7 the third has no room, as its only instruction has 3."""
    push = b"\x55"
    chain = [Block(at, [push], [(Edge.FALL, at + 1)]) for at in range(0x10, 0x14)]
    templates = Templates("tokmill", 64, closed())
    walking = Walking(walk_tokens=7, walk_from="entry")
    cutting = Cutting("walk", min_tokens=1, walking=walking)
    batches = list(records_of(graph_of({0x10: chain}), KEY, templates, cutting))
    assert [len(tokens) for tokens, _, _ in flat(batches)] == [2]
    notes = batches[-1].notes
    assert (notes["blocks walked"], notes["edges walked"], notes["edges"]) == (2, 1, 3)


def test_a_program_or_function_without_instructions_gives_no_record() -> None:
    templates = Templates("tokmill", 64, closed())
    for functions in ({}, {0x10: []}, {0x10: [Block(0x10, [])]}):
        for unit in ("function", "block", "walk"):
            batches = list(records_of(graph_of(functions), KEY, templates, Cutting(unit)))
            assert sum(map(len, batches)) == 0


def test_addresses_above_two_to_the_63(tmp_path: Path) -> None:
    top = 0xFFFFFFFF81000000
    path = tmp_path / "kernel.parquet"
    write_graph(graph_of({top: [Block(top, [NOP])]}, ["start"]), path)
    store = build(tmp_path / "s", path)
    assert store.column("address").tolist() == [top]
    assert list(matching(store, [f"address = {top:#x}"])) == [0]


def test_graphs_give_the_records_of_their_programs(tmp_path: Path, built: Path) -> None:
    program = compiles(built, "debugged", C_SOURCE, "-O1", "-g")
    lift_files([str(program)], tmp_path / "graphs")
    for unit in ("function", "block", "walk"):
        one = build(tmp_path / f"p-{unit}", program, unit=unit)
        two = build(tmp_path / f"g-{unit}", tmp_path / "graphs", unit=unit)
        assert one.records == two.records > 0
        assert one.shard(0).path.read_bytes() == two.shard(0).path.read_bytes()
        assert one.record(0)["level"] == "O1" and one.record(0)["compiler"].startswith("gcc-")


def test_what_cannot_be_lifted_is_rejected_and_what_is_no_program_is_left_out(
    tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a-good").write_bytes(program.read_bytes())
    (folder / "b-cut").write_bytes(program.read_bytes()[:2000])
    (folder / "notes.txt").write_text("no program")
    (folder / "table.parquet").write_bytes(b"PAR1 no graph PAR1")
    (tmp_path / "script").write_text("#!/bin/sh\n")
    inputs = (str(folder), str(tmp_path / "script"))
    plan = prepare(BuildRecipe(source="x86", inputs=inputs)).plan
    assert plan.left_out == {"file that is no program": 2}
    store = build(tmp_path / "s", *map(Path, inputs))
    assert len(store.manifest.rejected) == 2 and store.manifest.notes["programs"] == 1
    assert "not a program" in store.manifest.rejected
    assert store.records == build(tmp_path / "g", program).records
    none = How(quiet=True, max_rejects=0)
    with pytest.raises(TokmillError, match="2 of 3 items were rejected"):
        tokmill.build("x86", inputs, tmp_path / "n", how=none)
    half = How(quiet=True, max_rejects=0.7)
    assert tokmill.build("x86", inputs, tmp_path / "n", how=half).records == store.records

    def broken(path: Path, *, facts: bool) -> Graph:
        raise IndexError(path)

    monkeypatch.setattr("tokmill.x86.lift.cfg.lift", broken)
    with pytest.raises(TokmillError, match="the lifter failed: IndexError"):
        build(tmp_path / "b", program)


def test_pickles_are_refused_and_say_what_makes_graphs_of_them(tmp_path: Path) -> None:
    path = tmp_path / "saved_index.pkl"
    path.write_bytes(pickle.dumps({}))
    with pytest.raises(TokmillError, match=r"tokmill cfg .*saved_index\.pkl -o GRAPHS"):
        build(tmp_path / "s", path)


def test_other_rules_need_vocabularies(tmp_path: Path, program: Path, graph: Graph) -> None:
    with pytest.raises(UsageError, match="vocab build x86 INPUT… --rules semanticbbv"):
        build(tmp_path / "s", program, rules="semanticbbv")
    templates = Templates("semanticbbv")
    counts = templates.counts(templates.numbers(graph.code, graph.lengths))
    folder = tmp_path / "vocab"
    folder.mkdir()
    lists = counted(counts, "semanticbbv", 2)
    for column, tokens in lists.items():
        (folder / f"{column}.json").write_bytes(tokens.to_json())
    store = build(tmp_path / "s", program, rules="semanticbbv", vocab=str(folder))
    assert store.manifest.notes["tokens of asm replaced by unk"] == sum(
        count for token, count in counts["asm"].items() if token not in lists["asm"].ids
    )
    mne = streams(store, 5)["mne"]
    known = wanted(graph, *graph.function_blocks[5:7].tolist(), rules="semanticbbv")["mne"]
    assert [token for token in mne if token != "[UNK]"] == [
        token for token in known if token in lists["mne"].ids
    ]
    with pytest.raises(TokmillError, match="semanticbbv"):
        build(tmp_path / "t", program, vocab=str(folder))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rules": "semanticbv"}, "semanticbbv"),
        ({"max_tokens": 40_000}, "max_tokens: expected `int` <= 32768"),
        ({"walks": 2}, "--unit walk"),
        ({"min_tokens": 5}, "--unit walk"),
        ({"unit": "walk", "walk_tokens": 80}, "100 \\(min_tokens\\)"),
        ({"unit": "walk", "walks": 0}, "walks: expected `int` >= 1"),
        ({"layout": "{projct}/x"}, "not a template"),
        ({"layout": "{project}/{program}"}, "no path fits"),
    ],
)
def test_options_that_do_not_fit(
    tmp_path: Path, program: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        build(tmp_path / "s", program, **options)


def test_the_recipe_names_what_decides_the_records(program: Path) -> None:
    def recipe(**options: Any) -> dict[str, Any]:
        chosen = BuildRecipe(source="x86", inputs=(str(program),), options=options)
        found: dict[str, Any] = prepare(chosen).plan.recipe["config"]
        return found

    plain = recipe()
    assert "native" in plain["lifter"] and "iced-x86" in plain["lifter"]
    assert plain["rules"].startswith("tokmill 1, iced-x86 ")
    assert plain["walks"] is None and recipe(unit="walk")["walks"] == 1


def test_a_layout_reads_the_key_of_a_program(tmp_path: Path, program: Path) -> None:
    for path in ("zlib/gcc-12-O2/bin/minigzip", "zlib/clang-O0/example", "other"):
        (tmp_path / "in" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / path).write_bytes(program.read_bytes() + path.encode())
    store = build(tmp_path / "s", tmp_path / "in", layout="{project}/{compiler}-{level}/{program}")
    keys = {
        tuple(store.record(number)[field] for field in Key._fields)
        for number in range(store.records)
    }
    assert keys == {
        ("zlib", "bin/minigzip", "unknown", "gcc-12", "O2"),
        ("zlib", "example", "unknown", "clang", "O0"),
        ("unknown", "other", "unknown", "unknown", "unknown"),
    }
    assert store.manifest.notes["programs whose path does not fit the layout"] == 1


def test_a_program_with_very_many_records_is_committed_in_parts(
    tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = build(tmp_path / "p", program, unit="block")
    monkeypatch.setattr(records_module, "AT_ONCE", 50)
    monkeypatch.setattr(X86Source, "part_bytes", 400)
    store = build(tmp_path / "s", program, unit="block")
    assert len(store.shards) > 2 and store.manifest.notes == plain.manifest.notes
    assert [store.record(i)["asm"].tolist() for i in range(store.records)] == [
        plain.record(i)["asm"].tolist() for i in range(plain.records)
    ]
    before = {path: path.read_bytes() for path in (tmp_path / "s").glob("[ms]*/*")}
    manifest = (tmp_path / "s" / "manifest.json").read_bytes()
    # As a kill after the first part leaves it.
    (tmp_path / "s" / "manifest.json").unlink()
    for entry in store.shards[1:]:
        (tmp_path / "s" / "shards" / f"{entry.name}.json").unlink()
    build(tmp_path / "s", program, unit="block")
    assert {path: path.read_bytes() for path in (tmp_path / "s").glob("[ms]*/*")} == before
    assert (tmp_path / "s" / "manifest.json").read_bytes() == manifest
