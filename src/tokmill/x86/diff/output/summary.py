"""A diff in figures, and the functions that changed most."""

import msgspec
import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.diff.output.diff_json import REASONS
from tokmill.x86.diff.result import Diff
from tokmill.x86.diff.same import all_names
from tokmill.x86.graph import Graph

ARROW = " → "
"""Stands between the names of a function in the old and in the new program."""
MOST_REFERENCES = 8
"""Most references of one function that are named."""
REMOVED, ADDED = "removed or inlined", "new or no longer inlined"
"""What may be the reason why a function of the old or of the new program has no partner."""
NOT_SAME = 0.9999
"""The largest similarity of programs that differ: 1 is only for the same code."""


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of functions of two programs that are the same, changed, and so on."""

    same: int
    changed: int
    """Those with a partner that is not the same."""
    references_only: int
    """Changed functions with the same instructions, but operands that refer to something else."""
    nothing_equal: int
    """Changed functions without an equal block, as where one was written anew."""
    deleted: int
    """Functions of the old program without a partner: removed or inlined."""
    inserted: int
    """Those of the new program: new or no longer inlined."""
    similarity: float
    """Mean similarity of functions, weighted by their instructions; 1 only if nothing differs."""
    reasons: dict[str, int]
    """Reason of a match → number of matches."""


class Changed(msgspec.Struct, frozen=True):
    """A matched function that is not the same."""

    name: str
    """Name in the program that has one, `old → new` where both differ; without a
    symbol `sub_401000`, of the new program."""
    a: int
    """Address."""
    b: int
    similarity: float
    instructions_a: int
    instructions_b: int
    blocks: int
    """Blocks that changed, were deleted or inserted."""
    reason: str
    confidence: float
    """As of `Diff`."""
    references_only: bool
    """Whether the instructions are the same."""
    references: list[str]
    """What operands of equal instructions refer to, each `old → new` once; at most a few."""


def counts_of(a: Graph, b: Graph, diff: Diff) -> Counts:
    changed = int(diff.changed.sum())
    size_a, size_b = instructions(a), instructions(b)
    both = size_a[diff.function_a] + size_b[diff.function_b]
    total = int(size_a.sum() + size_b.sum())
    similar = float((both * diff.similarity.astype(np.float64)).sum())
    reasons = np.bincount(diff.reason, minlength=len(REASONS)).tolist()
    named = sorted(zip(reasons, REASONS, strict=True), reverse=True)
    return Counts(
        same=len(diff.function_a) - changed,
        changed=changed,
        references_only=int(diff.references_only.sum()),
        nothing_equal=int((diff.changed & (diff.similarity == 0)).sum()),
        deleted=len(diff.deleted),
        inserted=len(diff.inserted),
        similarity=1.0 if diff.same or not total else min(round(similar / total, 4), NOT_SAME),
        reasons={name: count for count, name in named if count},
    )


def changed_most(a: Graph, b: Graph, diff: Diff, most: int) -> list[Changed]:
    """Return the changed matches, at most so many: first those with other instructions.

    Of these first the ones with the most instructions that are not similar.
    """
    size_a, size_b = instructions(a), instructions(b)
    dissimilar = (size_a[diff.function_a] + size_b[diff.function_b]) * (1 - diff.similarity)
    chosen = np.flatnonzero(diff.changed)
    chosen = chosen[np.lexsort((-dissimilar[chosen], diff.references_only[chosen]))][:most]
    sizes = size_a[diff.function_a].tolist(), size_b[diff.function_b].tolist()
    return [
        _changed(a, b, diff, match, (sizes[0][match], sizes[1][match])) for match in chosen.tolist()
    ]


def instructions(graph: Graph) -> Array:
    return np.diff(graph.block_instructions[graph.function_blocks])


def _both_names(a: Graph, one: int, b: Graph, other: int) -> str:
    old, new = a.function_name[one], b.function_name[other]
    if old and new and old != new:
        # One address may have several names.
        shared = all_names(a, one) & all_names(b, other)
        return min(shared) if shared else f"{old}{ARROW}{new}"
    return new or old or b.names([other])[0]


def _changed(a: Graph, b: Graph, diff: Diff, match: int, sizes: tuple[int, int]) -> Changed:
    one, other = int(diff.function_a[match]), int(diff.function_b[match])
    pairs = slice(*diff.match_blocks[match : match + 2].tolist())
    changed = int((diff.block_similarity[pairs] < 1).sum())
    matched = len(diff.block_a[pairs])
    for graph, function in ((a, one), (b, other)):
        low, high = graph.function_blocks[function : function + 2].tolist()
        changed += high - low - matched
    return Changed(
        _both_names(a, one, b, other),
        int(a.function_address[one]),
        int(b.function_address[other]),
        float(diff.similarity[match]),
        *sizes,
        changed,
        REASONS[diff.reason[match]],
        round(float(diff.confidence[match]), 4),
        bool(diff.references_only[match]),
        references_of(diff, match)[:MOST_REFERENCES],
    )


def references_of(diff: Diff, match: int) -> list[str]:
    """Return what the operands of a match refer to in both programs, `old → new`, each once."""
    references = diff.references
    low, high = np.searchsorted(references.match, [match, match + 1]).tolist()
    pairs = zip(references.old[low:high], references.new[low:high], strict=True)
    return list(dict.fromkeys(f"{old}{ARROW}{new}" for old, new in pairs))
