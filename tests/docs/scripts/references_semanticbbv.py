"""What SemanticBBV's documentation says, computed a second way, and inputs of its forms.

Nothing here uses tokmill: instructions are decoded by iced-x86, functions read by pyelftools, and
graphs are networkx's. The rules are described in docs/x86-tokens.md.
"""

from __future__ import annotations

import gzip
import json
import pickle
import re
import subprocess
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import iced_x86
import networkx
import numpy as np
from elftools.elf.elffile import ELFFile
from iced_x86 import Decoder, FlowControl, Formatter, FormatterSyntax, InstructionInfoFactory

STREAMS = ("asm", "mne", "type", "reg", "rw", "eflag")
SPECIALS = ["[PAD]", "[SEP]", "[CLS]", "[UNK]", "[MASK]"]
WORD = re.compile(r"0X[0-9A-F]+H(?!\w)|[0-9][0-9A-F]*H(?!\w)|[0-9]+|[A-Z_]\w*|[-+*/:{}]")
FLAGS = ["OF", "SF", "ZF", "AF", "PF", "CF", "DF", "IF", "AC", "UIF", "C0", "C1", "C2", "C3"]
FLAG_GROUPS = ("read", "written", "cleared", "set", "undefined")


def names_of(module: Any) -> dict[int, str]:
    return {value: name for name, value in vars(module).items() if name.isupper()}


MNEMONICS = names_of(iced_x86.Mnemonic)
REGISTERS = {
    value: name for value, name in names_of(iced_x86.Register).items() if "DONTUSE" not in name
}
NUMBERS = {name: value for value, name in REGISTERS.items()}
# NASM's names of the 8-bit registers.
NUMBERS |= {f"R{n}B": NUMBERS[f"R{n}L"] for n in range(8, 16)}
KINDS, ACCESSES = names_of(iced_x86.OpCodeOperandKind), names_of(iced_x86.OpAccess)
FORMATTER, INFOS = Formatter(FormatterSyntax.NASM), InstructionInfoFactory()

Tokens = dict[str, Any]
MASK = 2**64 - 1


def tokens_of(instruction: iced_x86.Instruction) -> Tokens:
    """Return the six streams of an instruction; every NOP is `NOP` alone."""
    mnemonic = FORMATTER.format_mnemonic(
        instruction, iced_x86.FormatMnemonicOptions.NO_PREFIXES
    ).upper()
    text = FORMATTER.format_all_operands(instruction).upper()
    if MNEMONICS[instruction.mnemonic] == "NOP":
        mnemonic, text = "NOP", ""
    operands = [WORD.findall(operand) for operand in text.split(",")] if text else []
    whole = iced_x86.RegisterExt.full_register
    used = [(one.register, one.access) for one in INFOS.info(instruction).used_registers()]
    asm, reg = [mnemonic], ["[PAD]"]
    shown = set()
    for token in (token for operand in operands for token in operand):
        number = NUMBERS.get(token)
        asm.append("IMM" if number is None and token[0].isdigit() else token)
        if number is None:
            reg.append("[PAD]")
            continue
        same = [register for register, _ in used if whole(register) == whole(number)]
        shown.add(whole(number))
        reg.append(REGISTERS[same[0] if same else number])
    implicit = [(one, access) for one, access in used if whole(one) not in shown]
    first = ("[PAD]", 1)
    if len(implicit) == 1:
        reg[0], first = REGISTERS[implicit[0][0]], (ACCESSES[implicit[0][1]], 1)
    code, info = instruction.op_code(), INFOS.info(instruction)
    places = list(range(len(operands)))
    if len(operands) == 2 and instruction.op_count == 3:
        places = [0, 2]
    kinds = [KINDS[code.op_kind(place)] for place in places]
    accesses = [ACCESSES[info.op_access(place)] for place in places]
    flags = []
    for group in FLAG_GROUPS:
        bits = getattr(instruction, f"rflags_{group}")
        flags += [
            f"{group.upper()}_{flag}" for flag in FLAGS if bits & getattr(iced_x86.RflagsBits, flag)
        ]
    return {
        "asm": asm,
        "mne": MNEMONICS[instruction.mnemonic],
        "type": [("[PAD]", 1), *runs(kinds, operands)],
        "reg": reg,
        "rw": [first, *runs(accesses, operands)],
        "eflag": ",".join(flags) or "[PAD]",
    }


def runs(names: Sequence[str], operands: Sequence[Sequence[str]]) -> Iterator[tuple[str, int]]:
    for name, operand in zip(names, operands, strict=True):
        yield ("[PAD]" if name == "NONE" else name), len(operand)


def decoded(raw: bytes, address: int = 0) -> list[iced_x86.Instruction]:
    return list(Decoder(64, raw, ip=address))


def sequence(raw: bytes, address: int = 0) -> list[Tokens]:
    return [tokens_of(instruction) for instruction in decoded(raw, address)]


def aligned(dicts: Iterable[Tokens]) -> dict[str, list[str]]:
    """Return the streams with an entry for each token of `asm`."""
    found: dict[str, list[str]] = {stream: [] for stream in STREAMS}
    for tokens in dicts:
        for stream in STREAMS:
            value = tokens[stream]
            if stream in ("mne", "eflag"):
                found[stream] += [value] * len(tokens["asm"])
            elif stream in ("type", "rw"):
                found[stream] += [name for name, times in value for _ in range(times)]
            else:
                found[stream] += value
    return found


def counted(dicts: Iterable[Tokens]) -> dict[str, Counter[str]]:
    """Return {stream: {token: frequency}}; `mne` and `eflag` count once an instruction."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for tokens in dicts:
        streams = aligned([tokens])
        for stream in STREAMS:
            found[stream].update(
                [tokens[stream]] if stream in ("mne", "eflag") else streams[stream]
            )
    return found


# Programs, and graphs of their functions.

SOURCES = {
    "first": r"""
unsigned checksum(const unsigned char *text, int n) {
    unsigned a = 1, b = 0;
    for (int i = 0; i < n; i++) {
        a = (a + text[i]) % 65521;
        b = (b + a) % 65521;
        if (b & 64)
            a ^= b << 3;
    }
    return b << 16 | a;
}
int search(const int *sorted, int n, int key) {
    int low = 0, high = n - 1;
    while (low <= high) {
        int middle = (low + high) / 2;
        if (sorted[middle] == key)
            return middle;
        if (sorted[middle] < key)
            low = middle + 1;
        else
            high = middle - 1;
    }
    return -1;
}
int entry(int n) {
    static int table[64];
    for (int i = 0; i < 64; i++)
        table[i] = i * n;
    return search(table, 64, n) + (int)checksum((unsigned char *)table, 256);
}
""",
    "second": r"""
struct node { int key; struct node *left, *right; };
int depth(const struct node *tree) {
    if (!tree)
        return 0;
    int l = depth(tree->left), r = depth(tree->right);
    return 1 + (l > r ? l : r);
}
int words(const char *text) {
    int n = 0, inside = 0;
    for (; *text; text++) {
        if (*text == ' ' || *text == '\n')
            inside = 0;
        else if (!inside)
            inside = 1, n++;
    }
    return n;
}
void sort(int *values, int n) {
    for (int i = 1; i < n; i++)
        for (int j = i; j && values[j - 1] > values[j]; j--) {
            int kept = values[j];
            values[j] = values[j - 1];
            values[j - 1] = kept;
        }
}
int entry(int n) {
    struct node leaf = {1, 0, 0}, root = {n, &leaf, 0};
    int values[4] = {n, 3, n ^ 5, 1};
    sort(values, 4);
    return depth(&root) + words("two words") + values[0];
}
""",
}
COMPILERS, LEVELS = ("gcc", "clang"), ("O0", "O2")
FLAGS_OF_ALL = (
    "-nostdlib", "-static", "-no-pie", "-fno-pic", "-Wl,-e,entry", "-fno-stack-protector",
    "-fcf-protection=none", "-fno-jump-tables", "-fno-tree-vectorize", "-fno-builtin",
    "-fno-optimize-sibling-calls",
)  # fmt: skip


def compile_programs(folder: Path) -> dict[tuple[str, str, str], Path]:
    """Compile the sources without a library, as PROJECT/COMPILER-LEVEL/tool."""
    found = {}
    for project, source in SOURCES.items():
        for compiler in COMPILERS:
            for level in LEVELS:
                program = folder / project / f"{compiler}-{level}" / "tool"
                program.parent.mkdir(parents=True)
                flags = [flag for flag in FLAGS_OF_ALL if compiler == "gcc" or "tree" not in flag]
                subprocess.run(
                    [compiler, "-xc", "-", "-w", f"-{level}", *flags, "-o", str(program)],
                    input=source, text=True, check=True,
                )  # fmt: skip
                found[project, compiler, level] = program
    return found


def functions_of(program: Path) -> dict[str, tuple[int, bytes]]:
    """Return name → address, code of the functions in the symbol table."""
    with program.open("rb") as handle:
        elf = ELFFile(handle)
        text = elf.get_section_by_name(".text")
        found = {}
        for symbol in elf.get_section_by_name(".symtab").iter_symbols():
            if symbol["st_info"]["type"] == "STT_FUNC":
                at = symbol["st_value"] - text["sh_addr"]
                found[symbol.name] = (
                    symbol["st_value"], text.data()[at : at + symbol["st_size"]],
                )  # fmt: skip
        return found


def graph_of(address: int, raw: bytes, calls_end: bool = False) -> networkx.DiGraph[int]:
    """Return the control flow of a function: nodes with `raw`, as BinaryCorp records them.

    `calls_end`: a call ends a block.
    """
    instructions = decoded(raw, address)
    end = address + len(raw)
    begins = {address}
    for one in instructions:
        if one.flow_control in (FlowControl.CONDITIONAL_BRANCH, FlowControl.UNCONDITIONAL_BRANCH):
            begins |= {one.near_branch_target, one.next_ip}
        elif one.flow_control == FlowControl.RETURN or (
            calls_end and one.flow_control == FlowControl.CALL
        ):
            begins.add(one.next_ip)
    begins -= {end}
    assert begins <= {one.ip for one in instructions}
    graph: networkx.DiGraph[int] = networkx.DiGraph()
    borders = [*sorted(begins), end]
    for begin, stop in zip(borders[:-1], borders[1:], strict=True):
        graph.add_node(begin, raw=raw[begin - address : stop - address], asm=["?"])
    for one in instructions:
        if one.next_ip not in borders:
            continue
        block = max(begin for begin in begins if begin <= one.ip)
        if one.flow_control in (FlowControl.CONDITIONAL_BRANCH, FlowControl.UNCONDITIONAL_BRANCH):
            graph.add_edge(block, one.near_branch_target)
        if one.flow_control in (
            FlowControl.CONDITIONAL_BRANCH, FlowControl.NEXT, FlowControl.CALL,
        ):  # fmt: skip
            graph.add_edge(block, one.next_ip)
    return graph


Graphs = dict[str, list[list[Any]]]


def recorded(programs: Iterable[Path]) -> Graphs:
    """Return what a saved_index.pkl holds: name → a function of each program."""
    found: Graphs = defaultdict(list)
    for program in programs:
        for name, (address, raw) in functions_of(program).items():
            found[name].append([address, ["?"], raw, graph_of(address, raw), None])
    return dict(found)


def put(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(value, 4))


def got(path: Path | str) -> Any:
    return pickle.loads(Path(path).read_bytes())  # noqa: S301 (written by the tests)


def reachable(graph: networkx.DiGraph[int]) -> networkx.DiGraph[int]:
    """Return the part of a graph that its lowest address leads to: without padding."""
    entry = min(graph)
    return graph.subgraph({entry} | networkx.descendants(graph, entry))


def instructions_of(graph: networkx.DiGraph[int]) -> Iterator[tuple[bytes, iced_x86.Instruction]]:
    """Yield the bytes and the instructions of the blocks by their addresses."""
    for node in sorted(graph):
        raw = graph.nodes[node]["raw"]
        for one in decoded(raw, node):
            yield raw[one.ip - node : one.next_ip - node], one


Block = list[tuple[str, ...]]


def block_tokens(graph: networkx.DiGraph[int]) -> dict[int, Block]:
    """Return node → its tokens, each with its six streams."""
    return {
        node: list(zip(*aligned(sequence(facts["raw"], node)).values(), strict=True))
        for node, facts in graph.nodes(data=True)
    }


def is_walk(graph: networkx.DiGraph[int], first: int, blocks: Sequence[Block]) -> bool:
    """Whether blocks of tokens follow each other in a graph; the last one may be cut."""
    tokens, here = block_tokens(graph), {first}
    for block in blocks[:-1]:
        here = {after for node in here if tokens[node] == block for after in graph.successors(node)}
    last = blocks[-1]
    return any(tokens[node][: len(last)] == last for node in here)


DS_CONFIG = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.02}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "last_batch_iteration": -1,
            "total_num_steps": 80,
            "warmup_min_lr": 0,
            "warmup_max_lr": 1e-4,
            "warmup_num_steps": 4,
        },
    },
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "zero_optimization": {"stage": 2, "contiguous_gradients": True, "reduce_bucket_size": 5e7},
    "gradient_clipping": 0.5,
    "wall_clock_breakdown": False,
    "logging": {"level": "warning"},
    "dataloader_settings": {"num_workers": 4, "pin_memory": True},
    "activation_checkpointing": {"partition_activations": True},
    "communication_data_type": "bf16",
}
"""What the script's file sets, with other values."""


# Executions.


def put_trace(path: Path, intervals: int = 60, blocks: int = 24) -> list[dict[int, int]]:
    """Write basic block vectors as BbTracker does: three phases that come again."""
    draw = np.random.default_rng(3)
    phases = draw.integers(1, 400, (3, blocks)) * (draw.random((3, blocks)) < 0.5)
    vectors = []
    for number in range(intervals):
        noisy = phases[number // 5 % 3] + draw.integers(0, 30, blocks)
        vectors.append({block + 1: int(n) for block, n in enumerate(noisy) if n})
    lines = ["T" + "   ".join(f":{b}:{n}" for b, n in one.items()) + " \n" for one in vectors]
    path.write_bytes(gzip.compress("".join(lines).encode()))
    return vectors


def put_cpi(folder: Path, vectors: Sequence[dict[int, int]]) -> list[float]:
    """Write the CPI of each interval as CSV, and as the timeline that gem5 writes."""
    instructions = [sum(one.values()) for one in vectors]
    cycles = np.random.default_rng(4).integers(800, 4000, len(vectors))
    values = [int(c) / int(i) for c, i in zip(cycles, instructions, strict=True)]
    lines = [f"{number},{value!r}" for number, value in enumerate(values)]
    (folder / "cpi.csv").write_text("\n".join(["interval,cpi", *lines]) + "\n")
    timeline = {
        "board.processor.start.core.numCycles": cycles.tolist(),
        "simInsts": np.cumsum(instructions).tolist(),
    }
    (folder / "bbt_timeline_full.json").write_text(json.dumps(timeline))
    return values


def trace_of(path: Path | str) -> list[dict[int, int]]:
    """Read it again as the script does."""
    with gzip.open(path, "rt") as handle:
        return [
            {int(b): int(n) for b, n in re.findall(r":(\d+):(\d+)", line)}
            for line in handle
            if line.startswith("T")
        ]


def cosines(vectors: Sequence[dict[int, int]]) -> np.ndarray[Any, Any]:
    """Return the cosines of all pairs of intervals, projected at random to 100 numbers.

    A block's random numbers are those of splitmix64 begun with the mixed id, from -1 to 1.
    """

    def mixed(value: Any) -> Any:
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
        value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
        return value ^ value >> 31

    def row(block: int) -> list[float]:
        steps = (mixed(block) + n * 0x9E3779B97F4A7C15 & MASK for n in range(1, 101))
        return [(mixed(step) >> 32) / 2**31 - 1 for step in steps]

    rows = {block: np.array(row(block)) for one in vectors for block in one}
    sums = np.array([sum(n * rows[block] for block, n in one.items()) for one in vectors])
    sums /= np.linalg.norm(sums, axis=1, keepdims=True)
    found: np.ndarray[Any, Any] = sums @ sums.T
    return found


def put_triplets(folder: Path) -> None:
    """Write pickles of triplets of intervals: vectors of blocks and weights, three times."""
    draw = np.random.default_rng(5)
    blocks = draw.normal(size=(30, 8)).astype(np.float32)
    for name, entries in (("a", 60), ("b", 40)):
        rows = []
        for _ in range(entries):
            row: list[Any] = []
            for size in draw.integers(1, 6, 3):
                row.append([blocks[int(one)] for one in draw.integers(0, 30, size)])
                row.append(sorted(int(one) for one in draw.integers(1, 2**40, size)))
            rows.append(tuple(row))
        put(folder / f"{name}.pkl", rows)


def plain(value: Any) -> Any:
    """Return entries of pickles with tuples for arrays and lists, so that they can be compared."""
    if isinstance(value, np.ndarray):
        assert value.dtype == np.float32
        value = value.tolist()
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value


def put_inputs(folder: Path) -> None:
    """Write every input that the page names."""
    programs = compile_programs(folder / "binaries")
    for project in SOURCES:
        of_project = {key: path for key, path in programs.items() if key[0] == project}
        put(folder / f"cfg/{project}/saved_index.pkl", recorded(of_project.values()))
        for (_, compiler, level), program in of_project.items():
            if compiler == "gcc":
                index = {name: found[0] for name, found in recorded([program]).items()}
                digest = f"{abs(zlib.crc32(program.read_bytes())):032x}"
                put(folder / f"extracts/{project}-tool-{level}-{digest}_extract.pkl", index)
    sequences = [
        [sequence(raw, at) for at, raw in functions_of(program).values()]
        for program in programs.values()
    ]
    for number, some in enumerate(sequences):
        put(folder / f"dataset/tokens_{number}.pkl", some)
    (folder / "pickles.txt").write_text("dataset/tokens_1.pkl\ndataset/tokens_6.pkl\n")
    levels = {
        name: {level: sequence(*reversed(functions_of(programs[project, "gcc", level])[name]))
               for level in LEVELS}
        for project in SOURCES
        for name in functions_of(programs[project, "gcc", "O0"])
    }  # fmt: skip
    put(folder / "blame/tool_blame.pkl", list(levels.values()))
    put(
        folder / "functions-of-levels/saved_func_tokens.pkl",
        {k: list(v.values()) for k, v in levels.items()},
    )
    put(folder / "levels/tool.pkl", levels)
    put_cpi(folder, put_trace(folder / "bbt.gz"))
    put_triplets(folder / "triplets-pkl")
    put(folder / "tokens.pkl", {"MOV", "RAX", "ADD", "[PAD]", "IMM"})
    (folder / "assemble_tokens.txt").write_text(
        "[PAD]\n[SEP]\n[CLS]\n[UNK]\n[MASK]\nmov\nadd\ndword [rax+0x10]\ndword [rbx+0x18]\n"
        "qword [rsp]\n0x10\n77\n"
    )
    (folder / "ds_config.json").write_text(json.dumps(DS_CONFIG))
