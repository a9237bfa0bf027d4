"""Made by scripts/build_stub.py of the options of the sources."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from tokmill.builds.plan import How
from tokmill.store.store import Store

class Build:
    def __call__(
        self,
        kind: str,
        inputs: Iterable[str | Path] | str | Path,
        out: str | Path = "",
        *,
        tokenizer: str | Path | None = None,
        roles: Mapping[str, str] | None = None,
        how: How | None = None,
        **options: Any,
    ) -> Store:
        """From a kind of source by name."""

    def text(
        self,
        inputs: Iterable[str | Path] | str | Path,
        out: str | Path = "",
        *,
        tokenizer: str | Path | None = None,
        roles: Mapping[str, str] | None = None,
        how: How | None = None,
        suffix: tuple[str, ...] | list[str] = (),
        glob: tuple[str, ...] | list[str] = (),
        specials_in_text: Literal["plain", "special", "reject"] = "plain",
        end_of_record: Literal["eot", "none"] = "eot",
        template: Literal["refuse", "add", "none"] = "refuse",
        record: Literal["separator", "line"] = "separator",
        separator: str = "<|endoftext|>",
        strip: bool = False,
        invalid_utf8: Literal["reject", "replace"] = "reject",
    ) -> Store:
        """From plain text files."""

    def jsonl(
        self,
        inputs: Iterable[str | Path] | str | Path,
        out: str | Path = "",
        *,
        tokenizer: str | Path | None = None,
        roles: Mapping[str, str] | None = None,
        how: How | None = None,
        suffix: tuple[str, ...] | list[str] = (),
        glob: tuple[str, ...] | list[str] = (),
        specials_in_text: Literal["plain", "special", "reject"] = "plain",
        end_of_record: Literal["eot", "none"] = "eot",
        template: Literal["refuse", "add", "none"] = "refuse",
        fields: tuple[str, ...] | list[str] = ("title", "text"),
        join: str = "\n",
        strip: bool = False,
        placeholders: tuple[str, ...] | list[str] = ("[deleted]", "[removed]"),
        keep: tuple[str, ...] | list[str] = (),
    ) -> Store:
        """From JSON Lines files."""

    def parquet(
        self,
        inputs: Iterable[str | Path] | str | Path,
        out: str | Path = "",
        *,
        tokenizer: str | Path | None = None,
        roles: Mapping[str, str] | None = None,
        how: How | None = None,
        suffix: tuple[str, ...] | list[str] = (),
        glob: tuple[str, ...] | list[str] = (),
        specials_in_text: Literal["plain", "special", "reject"] = "plain",
        end_of_record: Literal["eot", "none"] = "eot",
        template: Literal["refuse", "add", "none"] = "refuse",
        fields: tuple[str, ...] | list[str] = ("title", "text"),
        join: str = "\n",
        strip: bool = False,
        placeholders: tuple[str, ...] | list[str] = ("[deleted]", "[removed]"),
        keep: tuple[str, ...] | list[str] = (),
    ) -> Store:
        """From Parquet and Arrow files."""

    def corpus(
        self,
        inputs: Iterable[str | Path] | str | Path,
        out: str | Path = "",
        *,
        tokenizer: str | Path | None = None,
        roles: Mapping[str, str] | None = None,
        how: How | None = None,
        suffix: tuple[str, ...] | list[str] = (),
        glob: tuple[str, ...] | list[str] = (),
        specials_in_text: Literal["plain", "special", "reject"] = "plain",
        end_of_record: Literal["eot", "none"] = "none",
        template: Literal["refuse", "add", "none"] = "none",
        words: str = "",
        min_count: int = 1,
    ) -> Store:
        """From walks as text, a walk per line."""

    def tsv(
        self,
        inputs: Iterable[str | Path] | str | Path,
        out: str | Path = "",
        *,
        tokenizer: str | Path | None = None,
        roles: Mapping[str, str] | None = None,
        how: How | None = None,
        suffix: tuple[str, ...] | list[str] = (),
        glob: tuple[str, ...] | list[str] = (),
        sentences: tuple[str, ...] | list[str] = (),
        label_column: str = "",
        labels: tuple[str, ...] | list[str] = (),
        unlabelled: bool = False,
        header: bool = True,
        max_tokens: int = 512,
        specials_in_text: Literal["plain", "special", "reject"] = "plain",
    ) -> Store:
        """From tables of labelled sentences, such as GLUE."""

    def x86(
        self,
        inputs: Iterable[str | Path] | str | Path,
        out: str | Path = "",
        *,
        how: How | None = None,
        suffix: tuple[str, ...] | list[str] = (),
        glob: tuple[str, ...] | list[str] = (),
        unit: Literal["function", "block", "walk"] = "function",
        rules: str = "tokmill",
        vocab: str = "",
        separator: bool = False,
        lifter: str = "native",
        layout: str = "",
        max_tokens: int = 32768,
        min_tokens: int = 100,
        seed: int = 0,
        walks: int = 1,
        walk_from: Literal["every", "entry", "random"] = "every",
        walk_tokens: int = 512,
        walk_blocks: int = 0,
        weight: Literal["uniform", "degree"] = "uniform",
    ) -> Store:
        """From x86 programs, or graphs of them."""

    def pairs(
        self,
        inputs: Iterable[str | Path] | str | Path,
        out: str | Path = "",
        *,
        how: How | None = None,
        suffix: tuple[str, ...] | list[str] = (),
        glob: tuple[str, ...] | list[str] = (),
        pair: tuple[str, ...] | list[str] = (),
        all_pairs: bool = False,
        rules: str = "tokmill",
        vocab: str = "",
        streams: tuple[str, ...] | list[str] = (),
        layout: str = "",
        seed: int = 0,
        walks: int = 2,
        walk_tokens: int = 512,
        walk_blocks: int = 0,
        min_tokens: int = 1,
        weight: Literal["uniform", "degree"] = "uniform",
    ) -> Store:
        """From pairs of graphs of programs: walks through both."""

    def bbv(
        self,
        inputs: Iterable[str | Path] | str | Path,
        out: str | Path = "",
        *,
        how: How | None = None,
        suffix: tuple[str, ...] | list[str] = (),
        glob: tuple[str, ...] | list[str] = (),
        blocks: tuple[str, ...] | list[str] = (),
        shared_ids: bool = False,
        pc: tuple[str, ...] | list[str] = (),
        map: tuple[str, ...] | list[str] = (),
        cpi: tuple[str, ...] | list[str] = (),
        program: str = "",
        min_joined: float = 0.5,
    ) -> Store:
        """From basic block vectors of executions, and CPI."""

    def mlir(
        self,
        inputs: Iterable[str | Path] | str | Path,
        out: str | Path = "",
        *,
        how: How | None = None,
        suffix: tuple[str, ...] | list[str] = (),
        glob: tuple[str, ...] | list[str] = (),
        schedules: int = 0,
        seed: int = 0,
    ) -> Store:
        """From MLIR modules, ONNX models: operations as policies see them."""

    def select(
        self,
        inputs: Iterable[str | Path] | str | Path,
        out: str | Path = "",
        *,
        tokenizer: str | Path | None = None,
        roles: Mapping[str, str] | None = None,
        how: How | None = None,
        min_length: int = 0,
        max_length: int | None = None,
        where: tuple[str, ...] | list[str] = (),
        ratio: float = 1.0,
        rest: bool = False,
        seed: int = 0,
        by: str = "",
        unique: bool = False,
        near_unique: float = 0.0,
        shingle: int = 5,
        not_in: tuple[str, ...] | list[str] = (),
        partial: bool = False,
        map_oov: str = "",
    ) -> Store:
        """From other stores: filter, sample, split, merge."""

    def mine(
        self,
        inputs: Iterable[str | Path] | str | Path,
        out: str | Path = "",
        *,
        how: How | None = None,
        what: Literal["triplets", "groups", "bbv"] = "triplets",
        seed: int = 0,
        same: tuple[str, ...] | list[str] = (),
        differ: tuple[str, ...] | list[str] = (),
        apart: tuple[str, ...] | list[str] = (),
        nameless: str = "sub_[0-9a-f]+|",
        count: int = 1,
        negatives: Literal["random", "semi-hard"] = "random",
        margin: float = 0.2,
        members: int = 8,
        dimensions: int = 100,
        above: float = 0.5,
        below: float = 1.0,
        neighbours: int = 0,
        cpi: bool = False,
        across: bool = False,
    ) -> Store:
        """From a store of functions or intervals: entries for contrastive learning."""

    def overlay(
        self,
        inputs: Iterable[str | Path] | str | Path,
        out: str | Path = "",
        *,
        how: How | None = None,
        values: str = "",
        name: str = "",
        column: str = "",
        per: Literal["auto", "record", "token"] = "auto",
        refer: tuple[str, ...] | list[str] = (),
    ) -> Store:
        """From a store, and numpy files with more columns for it."""

    def embed(
        self,
        inputs: Iterable[str | Path] | str | Path,
        out: str | Path = "",
        *,
        how: How | None = None,
        run: str = "",
        pool: Literal["mean", "last", "signature"] | Literal["auto"] = "auto",
        at: str = "",
        name: str = "",
        device: str = "auto",
        batch_tokens: int = 16384,
    ) -> Store:
        """From a store and a run: a vector per record."""

    def npz(
        self,
        inputs: Iterable[str | Path] | str | Path,
        out: str | Path = "",
        *,
        tokenizer: str | Path | None = None,
        roles: Mapping[str, str] | None = None,
        how: How | None = None,
        suffix: tuple[str, ...] | list[str] = (),
        glob: tuple[str, ...] | list[str] = (),
        vocab_size: int | None = None,
        ids_name: str = "input_ids",
        mask_name: str = "attention_mask",
    ) -> Store:
        """From npz files of padded windows."""

    def bin(
        self,
        inputs: Iterable[str | Path] | str | Path,
        out: str | Path = "",
        *,
        tokenizer: str | Path | None = None,
        roles: Mapping[str, str] | None = None,
        how: How | None = None,
        suffix: tuple[str, ...] | list[str] = (),
        glob: tuple[str, ...] | list[str] = (),
        vocab_size: int | None = None,
        dtype: Literal["auto", "u2", "u4"] = "auto",
        separator_id: int | None = None,
        record_tokens: int | None = None,
    ) -> Store:
        """From headerless token files."""

    def token_dicts(
        self,
        inputs: Iterable[str | Path] | str | Path,
        out: str | Path = "",
        *,
        how: How | None = None,
        suffix: tuple[str, ...] | list[str] = (),
        glob: tuple[str, ...] | list[str] = (),
        vocab: str = "",
        min_count: int = 1,
        rules: str = "semanticbbv",
        separator: bool = False,
    ) -> Store:
        """From pickles of x86 token dicts."""

    def triplets(
        self,
        inputs: Iterable[str | Path] | str | Path,
        out: str | Path = "",
        *,
        how: How | None = None,
        suffix: tuple[str, ...] | list[str] = (),
        glob: tuple[str, ...] | list[str] = (),
        width: int | None = None,
        cpi: bool | None = None,
        vectors: Literal["f4", "f8"] | None = None,
        weights: Literal["u8", "f8"] | None = None,
        blocks: str = "",
    ) -> Store:
        """From pickles of triplets of intervals."""

build: Build
