"""Small files that people write or fetch: lists."""

import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from reader import Make, Read
from small_recipes import TEXTS
from whole_stores import make_store


def make_module(folder: Path) -> Iterable[Path]:
    """Write a module of two functions, one of which calls the other, and a loop."""
    from source_cases import write_module

    path = write_module(folder, 0)
    inner = path.read_text().replace("module {", "").rstrip().removesuffix("}")
    path.write_text(
        f"{inner}\nfunc.func @twice(%a: tensor<8x16xf32>, %b: tensor<16x8xf32>, %n: index) {{\n"
        "  %c0 = arith.constant 0 : index\n  %c1 = arith.constant 1 : index\n"
        "  %0 = func.call @main(%a, %b) : (tensor<8x16xf32>, tensor<16x8xf32>) -> tensor<8x8xf32>\n"
        "  scf.for %i = %c0 to %n step %c1 {\n"
        "    %1 = linalg.exp ins(%0 : tensor<8x8xf32>) outs(%0 : tensor<8x8xf32>) -> "
        "tensor<8x8xf32>\n  }\n  return\n}\n"
    )
    return [path]


def make_benchmarks(folder: Path) -> Iterable[Path]:
    """Write a module that times itself."""
    tensor = "tensor<8x8xf32>"
    module = folder / "a.mlir"
    module.write_text(
        "func.func private @nanoTime() -> i64\n"
        f"func.func @main(%a: {tensor}, %c: {tensor}) -> ({tensor}, i64) {{\n"
        "  %0 = func.call @nanoTime() : () -> i64\n"
        f"  %1 = linalg.matmul ins(%a, %a : {tensor}, {tensor}) outs(%c : {tensor}) -> {tensor}\n"
        "  %2 = func.call @nanoTime() : () -> i64\n"
        "  %3 = arith.subi %2, %0 : i64\n"
        f"  return %1, %3 : {tensor}, i64\n}}\n"
    )
    return [module]


def read_benchmarks(folder: Path) -> Any:
    """The modules of a folder, what was refused, and what else is there."""
    from tokmill.mlir.modules import problem

    found = problem.of_folder(folder)
    return [one.text for one in found.problems], len(found.refused), found.left_out


def make_lists(folder: Path) -> Iterable[Path]:
    make_store(folder)
    (folder / "stores.txt").write_text("# what is read\ns\n\ns\n")
    return [folder / "stores.txt"]


def read_stores(folder: Path) -> Any:
    from readers import read_source

    from tokmill.builds.scan import with_lists

    listed = with_lists(None, [str(folder / "stores.txt")])
    return read_source("select", list(map(Path, listed)))


def make_text_lists(folder: Path) -> Iterable[Path]:
    for column, names in (("asm", "MOV RAX RBX IMM"), ("mne", "MOV ADD SUB")):
        words = ["[PAD]", "[UNK]", "[SEP]", "[CLS]", "[MASK]", *names.split()]
        (folder / f"{column}_tokens.txt").write_text("".join(f"{word}\n" for word in words))
        counts = {word: 3 + number for number, word in enumerate(words)}
        (folder / f"{column}_tokens_dict.pkl").write_bytes(pickle.dumps(counts, 4))
    return sorted(folder.iterdir())


def read_text_lists(folder: Path) -> Any:
    from tokmill.x86.tokens.vocabularies.vocabulary import find_lists

    return {
        name: (one.tokens.tokens, one.tokens.counts) for name, one in find_lists(folder).items()
    }


def make_extract(folder: Path) -> Iterable[Path]:
    """An extract of BinaryCorp beside an index whose levels are read from it."""
    from test_saved_index import small

    (folder / "p").mkdir()
    functions = {f"f{i}": small(0x1000 * (i + 1)) for i in range(3)}
    index = {name: [value] for name, value in functions.items()}
    (folder / "p/p-a-O2-0f_extract.pkl").write_bytes(pickle.dumps(functions, 4))
    (folder / "p/saved_index.pkl").write_bytes(pickle.dumps(index, 4))
    return [folder / "p/p-a-O2-0f_extract.pkl", folder / "p/saved_index.pkl"]


def read_extract(folder: Path) -> Any:
    from tokmill.x86.graphs.saved_index import graphs_of

    return [
        (graph.program, graph.block_address.tolist(), graph.code.tobytes())
        for path in sorted((folder / "p").iterdir())
        for graph in graphs_of(path)
    ]


def make_compiled(folder: Path) -> Iterable[Path]:
    from x86_programs import compiles

    source = "int f(int x){return x*3+1;}int g(int x){return x?f(x):2;}void _start(){g(1);}"
    path = compiles(folder, "program", source, "-O1", "-g", "-nostdlib", "-static")
    (folder / "program-source.c").unlink()
    return [path]


def read_compiler(folder: Path) -> Any:
    """The compiler that debug information names."""
    from tokmill.x86.image.program import producer_of

    return producer_of(folder / "program")


def text_of(kind: str) -> Make:
    def make(folder: Path) -> Iterable[Path]:
        text = "\n".join(TEXTS)
        if kind == "jsonl":
            text = "".join(json.dumps({"text": one}) + "\n" for one in TEXTS)
        (folder / "a").write_text(text)
        return [folder / "a"]

    return make


def make_tsv(folder: Path) -> Iterable[Path]:
    from source_cases import wordpiece, write_tsv

    wordpiece(folder)
    return [write_tsv(folder, 0)]


def make_corpus(folder: Path) -> Iterable[Path]:
    """Write walks, and the list of their words."""
    from source_cases import words, write_corpus

    words(folder)
    return [write_corpus(folder, 0), folder / "vocab.txt"]


def make_vocab_txt(folder: Path) -> Iterable[Path]:
    path = folder / "vocab.txt"
    path.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\n##s\nt\n##e\né\n", "utf-8")
    return [path]


def compressed(how: str) -> Make:
    def make(folder: Path) -> Iterable[Path]:
        data = "".join(json.dumps({"text": t}) + "\n" for t in TEXTS).encode()
        import gzip

        import zstandard

        parts = [data[:300], data[300:]]
        pack = (
            gzip.compress if how == "gz" else zstandard.ZstdCompressor(write_checksum=True).compress
        )
        path = folder / f"a.jsonl.{how}"
        path.write_bytes(b"".join(pack(part) for part in parts))
        return [path]

    return make


def make_traces(*names: str) -> Make:
    """Write an execution with the files beside it, compressed too, and a store of its blocks."""

    def make(folder: Path) -> Iterable[Path]:
        import lzma

        from source_cases import block_store, write_trace

        path = write_trace(folder, 0)
        (folder / "0.bb.xz").write_bytes(lzma.compress(path.read_bytes()))
        block_store(folder)
        return [folder / name for name in names]

    return make


def read_trace(name: str) -> Read:
    """Read a trace by itself, and as a build does."""

    def read(folder: Path) -> Any:
        from readers import read_source

        from tokmill.bbv.traces.read import read as read_vectors

        found = read_vectors(folder / name)
        facts = found.instructions.tolist(), found.declared, sorted(found.ignored.items())
        blocks = str(folder / "blocks")
        return facts, read_source("bbv", [folder / name], blocks=[blocks], min_joined=0.0)

    return read


def make_dump(folder: Path) -> Iterable[Path]:
    from test_callgrind import DUMP

    (folder / "dump").write_text(DUMP)
    return [folder / "dump"]


def read_profile_dump(folder: Path) -> Any:
    """A dump of callgrind, and the block vectors of it."""
    from tokmill.bbv.traces.callgrind import Code, read_dump, vectors_of

    code = Code({}, set(), {})
    dump = read_dump(folder / "dump", code)
    vectors, addresses, mapped = vectors_of([dump], code)
    return vectors.counts.tolist(), addresses.at.tolist(), mapped, dump.totals


def make_triplets(folder: Path) -> Iterable[Path]:
    from source_cases import write_triplets

    return [write_triplets(folder, 0)]


def make_functions(folder: Path) -> Iterable[Path]:
    from source_cases import write_functions

    store = write_functions(folder, 0, together=True)
    return sorted(store.glob("shards/*.safetensors"))


def read_mined(folder: Path) -> Any:
    """Triplets and groups of a store of functions."""
    from readers import read_source

    store = [folder / "functions-0"]
    return [read_source("mine", store, what=what) for what in ("triplets", "groups")]
