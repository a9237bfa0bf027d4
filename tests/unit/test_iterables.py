"""Public functions take what can be iterated over once, wherever they take several of something."""

from typing import Any

import numpy as np
import pytest

import tokmill
from tokmill.base.errors import UsageError

TEXTS = ["one two three\n", "two two two\n", "three one\n"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokmill.train_tokenizer(iter(TEXTS), 270, iter(["<|endoftext|>"]))


@pytest.fixture(scope="module")
def stores(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> list[tokmill.Store]:
    folder = tmp_path_factory.mktemp("stores")
    tokenizer.save(folder / "tokenizer.json")
    made = []
    for name in ("a", "b"):
        paths = [folder / f"{name}{n}.txt" for n in (0, 1)]
        for path in paths:
            path.write_text("".join(TEXTS) * (3 if name == "a" else 1))
        given: dict[str, Any] = {"tokenizer": folder / "tokenizer.json"}
        made.append(tokmill.build("text", iter(paths), folder / name, **given))
        again = tokmill.build("text", paths, folder / f"{name}-list", **given)
        assert made[-1].fingerprint == again.fingerprint and made[-1].tokens > 0
    return made


def test_a_tokenizer(tokenizer: Any) -> None:
    again = tokmill.train_tokenizer(TEXTS, 270, ["<|endoftext|>"])
    assert tokenizer.to_json() == again.to_json()
    parts = (tokenizer.vocab, tokenizer.merges, list(tokenizer.specials))
    made = tokmill.Tokenizer(parts[0], iter(parts[1]), iter(parts[2]))
    assert made.to_json() == tokmill.Tokenizer(*parts).to_json()
    assert list(made.encode_iterable(iter(TEXTS))) == made.encode("".join(TEXTS))
    assert made.decode(iter(made.encode(TEXTS[0]))) == TEXTS[0]


def test_a_feed(stores: list[tokmill.Store]) -> None:
    rows = [tokmill.Windows(store, 5) for store in stores]
    plain = tokmill.Feed(rows, 4, weights=[1, 3], columns=["token"]).batch(2)
    once = tokmill.Feed(iter(rows), 4, weights=iter([1, 3]), columns=iter(["token"])).batch(2)
    np.testing.assert_array_equal(once.columns["token"], plain.columns["token"])
    # A store is iterated over by its records, which are not rows.
    with pytest.raises(UsageError, match="say how the store is cut"):
        tokmill.Feed(stores[0], 4)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="there are none"):
        tokmill.Feed(iter(()), 4)


def test_a_dataset(stores: list[tokmill.Store]) -> None:
    pytest.importorskip("torch", reason="needs the extra train")
    dataset = tokmill.TokenDataset(stores[0], 5)
    once, plain = dataset.__getitems__(iter([1, 0])), dataset.__getitems__([1, 0])
    assert [item["input_ids"].tolist() for item in once] == [
        item["input_ids"].tolist() for item in plain
    ]


def test_x86_tokens() -> None:
    tokenizer = tokmill.X86Tokenizer()
    ids = tokenizer.encode_bytes(bytes.fromhex("55 4889e5 c3"))["asm"].tolist()
    assert tokenizer.decode(iter(ids)) == tokenizer.decode(ids) != []
