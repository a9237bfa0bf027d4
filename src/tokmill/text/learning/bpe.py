"""Training of byte pair encoding in readable Python: the reference for the engines' trainers.

The trainer counts distinct words once. After a merge it updates the counts of pairs only at the
places that change (Sennrich et al. 2016, with byte units as in GPT-2). Counts are Python integers,
so they do not overflow.
"""

import heapq
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError
from tokmill.text.encoding.guards import Panic, no_panic
from tokmill.text.tokenizers.patterns import GPT2, safe_cut, segments
from tokmill.text.tokenizers.tokenizer_json import BYTE_ORDER

TieBreak = Literal["first", "greatest-bytes"]
TIE_BREAKS: tuple[str, ...] = get_args(TieBreak)

MOST_IDS = 2**32 - 1
"""Largest vocabulary: stores and engines have ids of 32 bits."""
_BLOCK = 1 << 20
"""Characters of a text that are cut into words at a time."""
_INVERTED = bytes(255 - byte for byte in range(256))


def check_request(vocab_size: int, special_tokens: Sequence[str]) -> None:
    """Raise `UsageError` for an impossible vocabulary: too small, a special token twice."""
    for token, times in Counter(special_tokens).items():
        if not token:
            raise UsageError("a special token is empty", hint="give it a name: <|endoftext|>")
        if times > 1:
            raise UsageError(
                f"the special token {token!r} is given {times} times",
                hint="each special token has one id: name it once",
            )
        if len(token) == 1:
            raise UsageError(
                f"the special token {token!r} is one character, which text uses too",
                hint=f"use a longer name: <|{token}|>",
            )
    least = 256 + len(special_tokens)
    if vocab_size < least:
        raise UsageError(
            f"a vocabulary of {vocab_size} is too small: 256 bytes and {len(special_tokens)} "
            "special tokens",
            hint=f"--vocab-size {least} or more",
        )
    if vocab_size > MOST_IDS:
        raise UsageError(
            f"a vocabulary of {vocab_size:,} is too large: ids have 32 bits",
            hint="usual are 8192 to 262144",
        )


def word_splitter(pattern: str) -> Any:
    """Return the step of `tokenizers` that cuts text into words."""
    library = plugins.require("tokenizers")
    try:
        return library.pre_tokenizers.Split(library.Regex(pattern), "isolated")
    except Exception as error:
        raise UsageError(
            f"the pattern {pattern!r} cannot be read: {error}",
            hint="a pattern is a regular expression of the library Oniguruma",
        ) from None


def pattern_error(why: object, pattern: str) -> TokmillError:
    """Return the error of a pattern that `tokenizers` could not follow to the end."""
    return TokmillError(
        f"tokenizers gave up: {why}",
        where=f"pattern {pattern!r}",
        hint="a pattern such as (a+)+ takes endless time: write it without one + in another",
    )


def count_words(
    texts: Iterable[str], special_tokens: Sequence[str], pattern: str = GPT2
) -> Counter[bytes]:
    """Count the words of texts; memory grows with the distinct words, and the longest text whose
    pattern is not well known.
    """
    splitter = word_splitter(pattern)
    words: Counter[str] = Counter()
    for text in texts:
        blocks = (text[start : start + _BLOCK] for start in range(0, len(text), _BLOCK))
        for piece, is_special in segments(blocks, special_tokens, safe_cut(pattern)):
            if is_special:
                continue
            try:
                with no_panic():
                    words.update(word for word, _ in splitter.pre_tokenize_str(piece))
            except Panic as error:
                raise pattern_error(error, pattern) from None
            except (TypeError, UnicodeEncodeError):
                raise TokmillError(
                    f"a record holds a lone surrogate: {piece[:40]!r}",
                    hint="read the text with errors='replace'",
                ) from None
    return Counter({word.encode(): count for word, count in words.items()})


def train_words(
    words: Mapping[bytes, int],
    vocab_size: int,
    special_tokens: Sequence[str],
    tie_break: TieBreak,
    known: Sequence[tuple[bytes, bytes]] = (),
    spelled: Iterable[Sequence[int]] | None = None,
) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]]]:
    """Learn a byte-level BPE vocabulary from distinct words and their counts.

    `known` are the first merges, if another trainer has learned them, each with a token of its own;
    `spelled` has the ids of each word after these.

    `tie_break`: of pairs with equal counts, `greatest-bytes` takes the lexicographically greatest
    pair of byte strings (the rule of CS336), `first` the pair with the smallest ids (the rule of
    Hugging Face `tokenizers`).

    Returns id → bytes, and the merges in the order in which they were learned. Ids are special
    tokens, then bytes in `BYTE_ORDER`, then merges. Fewer tokens than asked when no pair is left.
    """
    tokens = [token.encode() for token in special_tokens]
    byte_id = {byte: len(tokens) + place for place, byte in enumerate(BYTE_ORDER)}
    tokens += [bytes([byte]) for byte in BYTE_ORDER]
    tokens += [left + right for left, right in known]
    number_of_token = {token: number for number, token in enumerate(tokens)}
    if spelled is None:
        spelled = ([byte_id[byte] for byte in word] for word in words)

    spelling = _Spelling(spelled, words.values())
    pairs = spelling.pairs
    order: list[int] | list[str] = (
        list(range(len(tokens))) if tie_break == "first" else [_descending(t) for t in tokens]
    )
    queue = [(-count, order[a], order[b], a, b) for (a, b), count in pairs.items()]
    heapq.heapify(queue)
    merges = list(known)
    while len(tokens) < vocab_size and queue:
        negative, _, _, a, b = heapq.heappop(queue)
        count = pairs[a, b]
        if count != -negative:
            # A count that fell is corrected when it is taken from the queue; for a count that
            # rose there is a second entry.
            if 0 < count < -negative:
                heapq.heappush(queue, (-count, order[a], order[b], a, b))
            continue
        if count <= 0:
            break
        joined = tokens[a] + tokens[b]
        if joined not in number_of_token:
            number_of_token[joined] = len(tokens)
            tokens.append(joined)
            order.append(len(order) if tie_break == "first" else _descending(joined))  # type: ignore[arg-type]
        merges.append((tokens[a], tokens[b]))
        for c, d in spelling.join(a, b, number_of_token[joined]):
            heapq.heappush(queue, (-pairs[c, d], order[c], order[d], c, d))
    return dict(enumerate(tokens)), merges


class _Spelling:
    """All distinct words in a row, as linked lists of ids; a merge visits only its own places."""

    def __init__(self, words: Iterable[Sequence[int]], counts: Iterable[int]) -> None:
        self.ids, self.before, self.after = array("i"), array("i"), array("i")
        """`before`, `after`: the neighbour's place in the same word, or -1."""
        self.counts: list[int] = []
        """How often the word of each place occurs."""
        self.pairs: defaultdict[tuple[int, int], int] = defaultdict(int)
        """Pair of neighbours → how often it occurs."""
        self.places: defaultdict[tuple[int, int], array[int]] = defaultdict(lambda: array("i"))
        """Pair → where it begins, and places where it has been."""
        for word, count in zip(words, counts, strict=True):
            first, stop = len(self.ids), len(self.ids) + len(word)
            self.ids.extend(word)
            self.before.extend([-1, *range(first, stop - 1)])
            self.after.extend([*range(first + 1, stop), -1])
            self.counts += [count] * len(word)
            for place, pair in enumerate(pairwise(word), first):
                self.pairs[pair] += count
                self.places[pair].append(place)

    def join(self, a: int, b: int, joined: int) -> set[tuple[int, int]]:
        """Replace a pair by one id wherever it is; return the pairs that occur more often now."""
        ids, before, after, pairs, places = (
            self.ids, self.before, self.after, self.pairs, self.places,
        )  # fmt: skip
        risen: set[tuple[int, int]] = set()
        # From left to right, as in `aaa` only the first two are a pair.
        for place in sorted(places.pop((a, b))):
            second = after[place]
            if ids[place] != a or second < 0 or ids[second] != b:
                continue
            count = self.counts[place]
            left, right = before[place], after[second]
            if left >= 0:
                pairs[ids[left], a] -= count
                pairs[ids[left], joined] += count
                places[ids[left], joined].append(left)
                risen.add((ids[left], joined))
            if right >= 0:
                pairs[b, ids[right]] -= count
                pairs[joined, ids[right]] += count
                places[joined, ids[right]].append(place)
                risen.add((joined, ids[right]))
                before[right] = place
            ids[place], ids[second], after[place] = joined, -1, right
        del pairs[a, b]
        return {pair for pair in risen if pairs[pair] > 0}


def _descending(token: bytes) -> str:
    # Strings that sort in the opposite order of the bytes. A longer token must come before its own
    # prefix, so an end mark is added that is greater than any inverted byte.
    return token.translate(_INVERTED).decode("latin-1") + "\u0100"
