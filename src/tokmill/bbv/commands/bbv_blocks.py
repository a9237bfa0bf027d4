"""`tokmill bbv cluster` and `rewrite`: fewer, larger blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from tokmill.base.errors import UsageError
from tokmill.base.files import write_file
from tokmill.base.progress import elapsed, human_count, human_share
from tokmill.terminal.options import Json, Quiet
from tokmill.terminal.output import check_outputs, print_json, say

TORN = "the last line does not end: the file may be cut off"


def cluster(
    vectors: Annotated[
        Path,
        typer.Argument(
            metavar="F.npy|STORE",
            help="Vectors of blocks: row 0 is the first id; or a store of blocks (--vectors).",
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="MAP", help="The map, CSV.")],
    num_clusters: Annotated[
        int, typer.Option("--num-clusters", min=1, metavar="K", help="Number of clusters.")
    ],
    named: Annotated[
        str,
        typer.Option(
            "--vectors", metavar="OVERLAY|F.npy", help="For a store: vectors of its records."
        ),
    ] = "",
    id_base: Annotated[
        int, typer.Option(min=0, max=1, help="Id of the first row of an .npy file.")
    ] = 1,
    restarts: Annotated[int, typer.Option(min=1, help="Starts of k-means; the best counts.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first centres.")] = 0,
    json: Json = False,
) -> None:
    """Cluster blocks by the cosines of their vectors, and write a map of blocks to clusters."""
    from tokmill.bbv import block_map as maps

    check_outputs({"--out": out}, [vectors])
    if vectors.is_dir():
        if not named:
            raise UsageError(
                "a store has no vectors of its own",
                where=str(vectors),
                hint="--vectors OVERLAY (of `tokmill embed`), or an .npy file with a row a record",
            )
        from tokmill.store.store import Store

        store = Store(vectors)
        from tokmill.builds.mining.vector_table import VectorTable

        table = VectorTable(store, named)
        key, blocks = "record", np.arange(len(store))
        matrix = table.units(blocks)
    else:
        if named:
            raise UsageError("--vectors is of a store", hint="leave it out for an .npy file")
        from tokmill.builds.selection.overlay_values import open_arrays

        array = open_arrays(vectors, "vectors")
        matrix = next(iter(array.values()))
        from tokmill.similarity.vector_rows import check_matrix

        check_matrix(matrix, len(matrix), str(vectors))
        key, blocks = "id", np.arange(len(matrix)) + id_base
    with elapsed(f"{human_count(num_clusters, 'cluster')} of {human_count(len(blocks), 'block')}"):
        labels = maps.cluster_blocks(matrix, num_clusters, seed=seed, restarts=restarts)
    made = maps.BlockMap(key, blocks, labels)
    write_file(out, made.text())
    if made.size < num_clusters:
        say(f"only {made.size:,} vectors differ")
    facts = {"map": str(out), "blocks": len(blocks), "clusters": made.size, "key": key}
    if json:
        print_json(facts)
    else:
        print(f"{out}: {human_count(len(blocks), 'block')} in {human_count(made.size, 'cluster')}")


def rewrite(
    trace: Annotated[Path, typer.Argument(metavar="BBV", help="File of basic block vectors.")],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="File to write; .gz, .xz and .zst are compressed.")
    ],
    block_map: Annotated[
        Path, typer.Option("--clusters", metavar="MAP", help="Map of `tokmill bbv cluster`.")
    ],
    blocks: Annotated[
        Path | None,
        typer.Option(metavar="STORE", help="Of a map of records: their store of blocks."),
    ] = None,
    pc: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where blocks lie; else BBV's .pc.")
    ] = None,
    mapped: Annotated[
        Path | None,
        typer.Option("--map", metavar="FILE", help="/proc/PID/maps; else BBV's .map."),
    ] = None,
    id_base: Annotated[
        int | None, typer.Option(min=0, max=1, help="Smallest id of a block; else it is detected.")
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Write a trace whose blocks are clusters of blocks; instructions are added up."""
    from tokmill.bbv import block_map as maps
    from tokmill.bbv.traces.block_vectors import BlockVectors, lines, packed
    from tokmill.bbv.traces.read import pieces

    check_outputs({"--out": out}, [trace, block_map])
    found = maps.read_map(block_map)
    of: Callable[[np.ndarray], Any] = found.of
    if found.key == "record":
        addresses, records = _records(trace, blocks, pc, mapped)

        def of_records(ids: np.ndarray) -> Any:
            rows = addresses.find(ids)
            return found.of(np.where(rows < 0, -1, records[rows]))

        of = of_records

    elif blocks is not None:
        raise UsageError("the map is of ids, not of records", hint="leave --blocks out")
    told: list[Any] = []
    torn = False

    def chunks() -> Iterator[bytes]:
        nonlocal torn
        piece: BlockVectors
        read = pieces(trace, id_base=id_base, quiet=quiet)
        for piece, done in maps.rewrite(read, of, found.size):
            told[:] = [done]
            torn = piece.torn
            yield from lines(piece)

    write_file(out, packed(out, chunks()))
    (done,) = told
    if torn:
        say(f"note: {trace}: {TORN}")
    if json:
        print_json({"trace": str(out), **vars(done), "torn": torn})
        return
    print(
        f"{out}: {human_count(done.entries, 'entry', 'entries')} became {done.left:,}, of "
        f"{human_count(done.clusters, 'cluster')}"
    )
    if done.unmapped:
        share = done.unmapped_instructions / max(done.instructions, 1)
        say(
            f"{done.unmapped:,} entries ({human_share(share, 2)} of the instructions) are of "
            "blocks without a cluster: they are one more block, the last"
        )


def _records(
    trace: Path, blocks: Path | None, pc: Path | None, mapped: Path | None
) -> tuple[Any, np.ndarray]:
    """Return the addresses of a trace's blocks, and the record of each in a store of blocks."""
    from tokmill.bbv.join import join
    from tokmill.bbv.store_blocks import open_blocks
    from tokmill.bbv.traces.addresses import read_addresses, read_maps
    from tokmill.bbv.traces.trace_files import stem_of

    if blocks is None:
        raise UsageError(
            "the map is of records of a store of blocks", hint="--blocks STORE, the same as then"
        )
    stem = stem_of(trace)
    addresses = read_addresses(pc or stem.with_name(f"{stem.name}.pc"))
    beside = mapped or stem.with_name(f"{stem.name}.map")
    places = read_maps(beside) if mapped or beside.is_file() else []
    return addresses, join(addresses, open_blocks(str(blocks)), places).records
