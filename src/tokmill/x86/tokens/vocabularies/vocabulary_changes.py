"""Makes smaller and larger vocabularies from others, and maps of their ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tokmill.base.errors import TokmillError
from tokmill.base.files import read_file
from tokmill.formats.pickles.token_dicts_export import ONCE
from tokmill.store.checks.stats import count
from tokmill.store.store import Store
from tokmill.x86.tokens.rules import COLUMNS
from tokmill.x86.tokens.vocabularies.count import Counts
from tokmill.x86.tokens.vocabularies.vocabulary import SPECIALS, UNKNOWN, TokenList, Vocabularies
from tokmill.x86.tokens.vocabularies.vocabulary_files import find_lists, read_list

WAYS = "--min-count N, --used-by STORE or --keep FILE"


def vocabularies_in(store: Store) -> Vocabularies:
    """Return the x86 vocabularies of a store; raises `TokmillError` if it has none."""
    found = {}
    for column in COLUMNS:
        if column in store.schema and (name := store.schema[column].vocab) in store.vocabularies:
            path = store.vocabulary_file(name or column)
            found[column] = TokenList.from_json(read_file(path), str(path))
    if not found:
        raise TokmillError(
            "the store has no vocabulary of an x86 column",
            where=str(store.path),
            hint="stores of `build x86` and `build token-dicts` have",
        )
    return found


def counts_in(store: Store, advance: Callable[[int], None] | None = None) -> Counts:
    """Return the counts of each token of each x86 column in a store, as of `count_programs`."""
    ids = count(store, advance=advance, once=ONCE).ids
    return {
        column: {
            token: number
            for token, number in zip(tokens.tokens, ids[column].tolist(), strict=False)
            if number
        }
        for column, tokens in vocabularies_in(store).items()
    }


def with_counts(vocabularies: Mapping[str, TokenList], counts: Counts) -> Vocabularies:
    """Return the same lists with other counts."""
    return {
        column: TokenList(
            column,
            tokens.rules,
            tokens.tokens,
            [counts.get(column, {}).get(token, 0) for token in tokens.tokens],
        )
        for column, tokens in vocabularies.items()
    }


def pruned(
    vocabularies: Mapping[str, TokenList],
    *,
    min_count: int = 1,
    used: Sequence[Counts] = (),
    keep: Mapping[str, TokenList] | None = None,
) -> Vocabularies:
    """Return lists without some tokens; the others keep their order, special tokens stay.

    Args:
        vocabularies: column → list.
        min_count: tokens that occur less often are removed, by the counts of `used`, else of the
            lists.
        used: counts of stores; tokens that occur in none of them are removed.
        keep: column → tokens that may stay; other columns are not changed.

    Raises:
        TokmillError: `min_count` is above 1, and neither a list nor `used` has counts.
    """
    sums: dict[str, Counter[str]] = {column: Counter() for column in vocabularies}
    for store_counts in used:
        for column in vocabularies:
            sums[column].update(store_counts.get(column, {}))
    made = {}
    for column, tokens in vocabularies.items():
        counts: Mapping[str, int] = sums[column]
        if not used:
            counts = dict(zip(tokens.tokens, tokens.counts or (), strict=False))
        if min_count > 1 and not counts:
            raise TokmillError(
                f"the list of {column} has no counts, so none is below {min_count}",
                hint="--used-by STORE counts the tokens of a store, --keep FILE lists some",
            )
        least = max(min_count, 1) if used else min_count if min_count > 1 else 0
        allowed = None if keep is None or column not in keep else keep[column].ids
        kept = [
            token
            for token in tokens.tokens[len(SPECIALS) :]
            if counts.get(token, 0) >= least and (allowed is None or token in allowed)
        ]
        names = [*SPECIALS, *kept]
        counted = [counts.get(name, 0) for name in names] if counts else None
        made[column] = TokenList(column, tokens.rules, names, counted)
    return made


def lists_to_keep(path: Path | str) -> dict[str, TokenList]:
    """Return column → tokens of a list, or of the lists in a folder, in any form."""
    if Path(path).is_dir():
        return {column: found.tokens for column, found in find_lists(path).items()}
    tokens = read_list(path).tokens
    return {tokens.column: tokens}


def id_map(old: TokenList, new: TokenList) -> list[int]:
    """Return old id → new id; removed tokens have the id of `[UNK]`."""
    return [new.ids.get(token, UNKNOWN) for token in old.tokens]
