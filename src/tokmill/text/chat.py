"""Chats in JSON Lines: a template writes the roles; the column `loss` marks the learned tokens."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

import msgspec
import numpy as np

from tokmill.builds.scan import FolderOptions
from tokmill.builds.source import Frozen, Request, Resources
from tokmill.errors import TokmillError, UsageError
from tokmill.store.mask import LOSS
from tokmill.store.probe import Probe
from tokmill.store.schema import (
    Array,
    Column,
    Drop,
    Drops,
    Records,
    Schema,
    drops_of,
    id_dtype,
)
from tokmill.store.strings import Strings
from tokmill.text import chat_template_files, chat_templates
from tokmill.text import tokenizer_json as files
from tokmill.text.blocks import MAX_RECORD, Block
from tokmill.text.chat_encode import ChatEncoder, control_tokens
from tokmill.text.chat_messages import Reader, Refused
from tokmill.text.chat_sandbox import CLOSE, OPEN
from tokmill.text.chat_templates import BREAK, MARKS, NoMask, TemplateFailed, TooMany
from tokmill.text.documents import column_name, surround
from tokmill.text.jsonl import JsonlSource, as_text
from tokmill.text.paths import Paths
from tokmill.text.prepare import Documents, select
from tokmill.text.probe import make_probe
from tokmill.text.seen_keys import why_nothing

USUAL = ("messages", "conversations")
"""Default keys of the list of messages."""
BESIDE = ("system", "tools")
"""Other keys that are read."""
PROMPT = "add_generation_prompt"
"""Variable by which a template writes what stands before an answer, which is not learned."""


class ChatConfig(FolderOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of chats."""

    messages: str = ""
    """Path of the list of messages; by default `messages` or `conversations`."""
    chat_template: str = ""
    """How messages become text: chatml, llama3, plain, a .jinja file or a tokenizer_config.json;
    by default the template beside the tokenizer."""
    learn: Literal["assistant", "last", "all"] = "assistant"
    """What is learned: all turns of the assistant, its last turn, everything."""
    specials_in_text: Literal["plain", "special", "reject"] = "plain"
    """Meaning of `<|im_end|>` inside a message: ordinary text, the special token (as in
    transformers; a message can then forge a turn), a reject."""
    end_of_record: Literal["eot", "none"] = "none"
    """Whether the `eot` token is added after the text of the template; it is not learned, unless
    everything is."""
    date: str = ""
    """The date that a template gets as today, such as 2026-01-31."""
    tokens: dict[str, str] = {}
    """Values of bos_token, eos_token and so on for the template; by default those in the files
    beside the tokenizer."""
    keep: tuple[str, ...] = ()
    """Fields that are kept as string columns."""


@dataclass(slots=True)
class Chats(Documents):
    """Chats as texts, and the same texts with marks in them."""

    marked: Sequence[str] = ()
    notes: dict[str, int] = field(default_factory=dict)

    def take(self, chosen: Sequence[int], drops: Sequence[Drops]) -> Self:
        """Return some of the chats, and further drops."""
        # Not `super()`: a dataclass with slots is another class than the one in the closure.
        taken = Documents.take(self, chosen, drops)
        taken.marked = [self.marked[i] for i in chosen]
        return taken


class ChatSource(JsonlSource):
    """Chats in JSON Lines."""

    Config: ClassVar[type[msgspec.Struct]] = ChatConfig
    hints: ClassVar[dict[str, str]] = {
        **JsonlSource.hints,
        "no mask": "put {% generation %} and {% endgeneration %} around the answer in a copy of "
        "the template, or --learn all",
        "nothing to learn": "the assistant says nothing in them: --learn all learns everything",
        "template": "the template refuses such chats, or is for another kind: another "
        "--chat-template",
        "tool calls": "--chat-template FILE with a template that writes calls of tools",
        "role": "roles are system, developer, user or human, assistant or gpt, and tool",
        "too many turns": "{% generation %} in a copy of the template marks any number of turns",
    }
    """Reason → hint, if it is the most frequent reason in a build that ends."""
    config: ChatConfig  # type: ignore[assignment]

    def __init__(
        self,
        config: ChatConfig,
        inputs: Sequence[str],
        vocabularies: Mapping[str, Frozen],
        resources: Resources,
    ) -> None:
        self.config, self.inputs, self.resources = config, inputs, resources
        self.frozen = vocabularies.get("token")
        self._encode = None
        self.lists = (config.messages,) if config.messages else USUAL
        self.paths = Paths((), (*self.lists, *BESIDE, *config.keep))
        self.decoder = self.paths.decoder
        self.built_in = config.chat_template in chat_template_files.BUILT_IN
        text = config.chat_template
        if self.built_in:
            text, needed = chat_template_files.BUILT_IN[config.chat_template]
            self._check_tokens(needed)
        elif not chat_template_files.is_text(text):
            raise UsageError(
                "no chat template was named, and there is no tokenizer that has one",
                hint="`tokmill build chat … --vocab-size N` trains a tokenizer on chats",
            )
        data = msgspec.json.decode(self.frozen.data) if self.frozen is not None else {}
        control = control_tokens(data, text)
        names = self._names(data) | config.tokens
        self.template = chat_templates.Template(text, names, config.date)
        self.notes: Counter[str] = Counter()
        self.ends = _turn_ends(control)
        self._names_in_text = _any_of(control)
        self._prefixes = tuple({name[:2] for name in control})
        self.reader = Reader(text, self._guard, self.built_in, self.notes)

    @classmethod
    def resolve(cls, config: ChatConfig, request: Request) -> ChatConfig:
        """Return the options with the text of the template and its names of special tokens.

        So both are part of the recipe, and a file that changes later gives another recipe.
        """
        found = chat_template_files.find(config.chat_template, request.tokenizer)
        text, _ = chat_template_files.BUILT_IN.get(found.template, (found.template, ()))
        # Names that the template does not use are no part of the recipe.
        names = {key: name for key, name in found.names.items() if key in text}
        tokens = dict(sorted((names | config.tokens).items()))
        return msgspec.structs.replace(config, chat_template=found.template, tokens=tokens)

    @classmethod
    def why_nothing(cls, config: Any, paths: Sequence[str]) -> str:
        """Return a hint if no line of the files makes a record, or very few do."""
        lists = [config.messages] if config.messages else USUAL
        said = why_nothing(paths, lists)
        if any(f"(the list {name})" in said for name in lists):
            return "a chat is a list of messages: objects with role and content, or from and value"
        if "JSON Lines" in said:
            return said
        if "tokmill build chat" in said:
            return said.replace("build them with `tokmill build chat`", "name it with --messages")
        return said.partition(": ")[2].replace("--field", "tokmill build jsonl --field")

    def _check_tokens(self, needed: Sequence[str]) -> None:
        if self.frozen is None:
            return
        there = files.added_tokens(msgspec.json.decode(self.frozen.data))
        absent = [name for name in needed if name not in there]
        if absent:
            raise TokmillError(
                f"the template {self.config.chat_template} writes {' '.join(absent)}, which the "
                "tokenizer does not have as one token",
                where=self.frozen.vocabulary.file,
                hint="--chat-template plain needs none; or train a tokenizer with "
                + " ".join(f"--special '{name}'" for name in absent),
            )

    def _names(self, data: Mapping[str, Any]) -> dict[str, str]:
        """Return the default names in templates of tokens with a role."""
        by_id = {number: name for name, number in files.added_tokens(data).items()}
        roles = self.frozen.vocabulary.roles if self.frozen is not None else {}
        calls = {"eot": "eos_token", "bos": "bos_token", "pad": "pad_token", "unk": "unk_token"}
        names = {calls[role]: by_id[i] for role, i in roles.items() if role in calls and i in by_id}
        return names if self.frozen is not None else {"eos_token": "<|endoftext|>"}

    @property
    def schema(self) -> Schema:
        """Tokens, whether each is learned, the bytes of each chat, and the kept fields."""
        schema: Schema = {}
        for name, column in super().schema.items():
            if name == LOSS:
                raise UsageError(
                    f"a field to keep would be the column {LOSS!r}",
                    hint="keep it under another name, or leave it out of --keep",
                )
            schema[name] = column
            if name == "token":
                schema[LOSS] = Column("u1")
        return schema

    def _guard(self, text: str) -> str:
        """Put a mark into names of special tokens in a text, so that they stay text."""
        if not text.isascii() and MARKS.search(text):
            raise Refused("noncharacter")
        if self.config.specials_in_text == "special":
            return text
        if not any(prefix in text for prefix in self._prefixes):
            return text
        broken, count = self._names_in_text.subn(lambda m: m[0][0] + BREAK + m[0][1:], text)
        if count:
            if self.config.specials_in_text == "reject":
                raise Refused("special token")
            self.reader.note("names of special tokens in messages, which stay text")
        return broken

    def _documents(self, block: Block) -> Chats:
        records, starts, drops = self._decode(block)
        lists = [self.paths.values(records, path) for path in self.lists]
        system, tools = (self.paths.values(records, path) for path in BESIDE)
        marked: list[str] = []
        kept: list[int] = []
        left: list[Drop] = []
        for i, place in enumerate(starts.tolist()):
            value = next((values[i] for values in lists if values[i] is not None), None)
            try:
                marked.append(self._marked(value, system[i], tools[i]))
                kept.append(i)
            except Refused as why:
                left.append(Drop(place, why.reason, why.rejected))
            except RecursionError:
                left.append(Drop(place, "depth", True))
        left += [Drop(place, "too long", True) for place in block.too_long]
        drops += drops_of(left)
        texts = [MARKS.sub("", text) for text in marked]
        carried = {
            name: [as_text(values[i]) for i in kept]
            for name, values in ((n, self.paths.values(records, n)) for n in self.config.keep)
        }
        notes, places = dict(self.notes), starts[np.asarray(kept, np.int64)]
        self.notes.clear()
        return Chats(texts, places, drops, carried, block.ends_part, block.done, marked, notes)

    def _marked(self, value: Any, system: Any, tools: Any) -> str:
        messages, learned = self.reader.chat(value, system)
        if tools is not None and tools != []:
            if "tools" not in self.template.text:
                self.reader.note("the key 'tools' of chats, which the template does not write")
                tools = None
            else:
                tools = self.reader.guarded(tools)
        try:
            if self.config.learn == "all":
                text = re.sub(f"[{OPEN}{CLOSE}]", "", self.template.render(messages, tools or None))
                text = f"{OPEN}{text}{CLOSE}"
            else:
                text = self.template.marked(messages, tools or None, self.ends)
        except TemplateFailed:
            raise Refused("template") from None
        except NoMask:
            raise Refused("no mask") from None
        except TooMany:
            raise Refused("too many turns") from None
        if self._learns_headers(text, messages):
            self.reader.note(f"chats in which headers of answers are learned: no {PROMPT}")
        if not all(learned):
            text = _unlearned(text, messages, learned)
        if OPEN not in text:
            raise Refused("nothing to learn", rejected=False)
        if len(text) > MAX_RECORD // 4 and len(text.encode()) > MAX_RECORD:
            raise Refused("too long")
        return text

    def _learns_headers(self, text: str, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Say whether something stands before an answer that no generation prompt has written."""
        if self.config.learn == "all" or self.template.marks or PROMPT in self.template.text:
            return False
        said = next((m.get("content") for m in messages if m["role"] == "assistant"), None)
        return isinstance(said, str) and not text.partition(OPEN)[2].strip().startswith(
            said.strip()
        )

    def encoder(self, resources: Resources) -> EncodeChats:
        """Return the encoder of chats."""
        assert self.frozen is not None
        return EncodeChats(self.frozen, self.config, self.template.text, resources)


class EncodeChats:
    """Chats to records: ids, and which of them are learned."""

    def __init__(
        self, frozen: Frozen, config: ChatConfig, template: str, resources: Resources
    ) -> None:
        self.config = config
        self.chats = ChatEncoder(frozen.data, template, resources)
        self.engine = self.chats.engine
        self.dtype = np.dtype(id_dtype(frozen.vocabulary.size)).newbyteorder("<")
        self.suffix: list[int] = []
        if config.end_of_record == "eot":
            self.suffix = [frozen.vocabulary.role("eot")]

    def __call__(self, documents: Documents) -> Records:
        """Return the records of a batch of chats."""
        assert isinstance(documents, Chats)
        if not self.chats.in_segments:
            # Such a tokenizer encodes whole texts only; in these a name of a special token is the
            # token.
            reasons = ["special token" if BREAK in text else "" for text in documents.marked]
            documents = select(documents, reasons, rejected=True)
        last = self.config.learn == "last"
        encoded = self.chats(documents.marked, last)
        if (odd := self.chats.odd(documents.marked, encoded)).any():
            reasons = ["special token" if one else "" for one in odd]
            documents = select(documents, reasons, rejected=True)
            encoded = self.chats(documents.marked, last)
        ids, offsets, learned, sizes = encoded
        lengths = np.diff(offsets)
        ids, offsets = surround(ids, lengths, [], self.suffix, self.dtype)
        more = [int(self.config.learn == "all")] * len(self.suffix)
        learned, _ = surround(learned, lengths, [], more, np.uint8)
        columns: dict[str, Array | Strings] = {
            "token": ids,
            LOSS: learned,
            "bytes": sizes,
        }
        for name, values in documents.kept.items():
            columns[column_name(name)] = Strings.of(values)
        notes = documents.notes | {"tokens that are learned": int(learned.sum())}
        return Records(
            offsets,
            columns,
            documents.starts,
            documents.drops,
            notes={note: count for note, count in notes.items() if count},
            ends_part=documents.ends_part,
            done=documents.done,
        )

    def probe(self, texts: Sequence[str]) -> Probe:
        """Return the ids of known texts without the template, which may refuse them; see
        `make_probe`.
        """
        return make_probe(self.chats.plain, 0, 0, texts)


def _unlearned(text: str, messages: Sequence[Mapping[str, Any]], learned: Sequence[bool]) -> str:
    """Return a text without the marks of turns that must not be learned (`weight` 0)."""
    turns = [may for m, may in zip(messages, learned, strict=True) if m["role"] == "assistant"]
    pieces = re.split(f"[{OPEN}{CLOSE}]", text)
    if len(pieces) != 2 * len(turns) + 1:
        raise Refused("weight")
    for turn, may in enumerate(turns):
        if may:
            pieces[2 * turn + 1] = f"{OPEN}{pieces[2 * turn + 1]}{CLOSE}"
    return "".join(pieces)


def _any_of(names: Mapping[str, int]) -> re.Pattern[str]:
    longest = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or r"(?!)")


def _turn_ends(names: Mapping[str, int]) -> re.Pattern[str]:
    """Match a special token and the white space after it at the end of a text."""
    return re.compile(f"((?:{_any_of(names).pattern}))\\s*\\Z")
