"""List each record that is not in a store, by reading its inputs again."""

from __future__ import annotations

from collections.abc import Iterator

from tokmill.builds.make_shard import Content, check_unchanged
from tokmill.builds.repair.repair import work_of
from tokmill.store.checks.locate import LeftOut, input_paths, line_of
from tokmill.store.schema import each_drop
from tokmill.store.store import Store


def each_left_out(store: Store, *, rejected_only: bool = True) -> Iterator[LeftOut]:
    """Yield each record that was left out, in the order of the inputs.

    Raises `TokmillError` if an input has changed since the build.
    """
    work, tasks = work_of(store.path)
    source = work.source()
    paths = input_paths(store)
    for shard in dict.fromkeys(entry.name.partition("-")[0] for entry in store.shards):
        for item in tasks[shard].items:
            check_unchanged(item)
            path = paths.get(item.name, "")
            for batch in source.read(item, Content()):
                for drop in each_drop(batch.drops):
                    if drop.rejected or not rejected_only:
                        line = line_of(path, drop.offset)
                        yield LeftOut(
                            item.name, path, drop.offset, line, drop.reason, drop.rejected
                        )
