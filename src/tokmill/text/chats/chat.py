"""Chats in JSON Lines: a template writes the roles; the column `loss` marks the learned tokens."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np

from tokmill.base import recipe
from tokmill.base.errors import TokmillError, UsageError
from tokmill.builds.scan import FolderOptions
from tokmill.builds.source import Frozen, Request, Resources
from tokmill.store.mask import LOSS
from tokmill.store.schema import Column, Drop, Schema, drops_of
from tokmill.store.vocab import Vocabulary
from tokmill.text.chats.chat_encode import EncodeChats, any_of, control_tokens
from tokmill.text.chats.chat_template_files import BUILT_IN, KINDS, find, is_text, special_tokens
from tokmill.text.chats.chat_templates import CLOSE, MARKS, OPEN, PROMPT, How, Template
from tokmill.text.jsonl import JsonlSource, as_text, why_nothing
from tokmill.text.make_document import Documents, Paths
from tokmill.text.record_blocks import MAX_RECORD, Block
from tokmill.text.tokenizers.tokenizer_json import added_tokens

USUAL = ("messages", "conversations")
"""Default keys of the list of messages."""
BESIDE = ("system", "tools")
"""Other keys that are read."""
TOKENS = {"eot": "eos_token", "bos": "bos_token", "pad": "pad_token", "unk": "unk_token"}
"""Role of a token → its name in templates."""
ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
ROLES |= {"human": "user", "gpt": "assistant"}
"""Role in files → role in templates."""
CALLS = ("tool_calls", "function_call", "tool_call_id")
READ = {"role", "from", "content", "value"}


class Refused(Exception):
    """A chat that does not enter the store: the reason, and whether it is rejected or skipped."""

    def __init__(self, reason: str, rejected: bool = True) -> None:
        super().__init__(reason)
        self.reason, self.rejected = reason, rejected


class ChatConfig(FolderOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of chats."""

    messages: str = ""
    """Path of the list of messages; by default `messages` or `conversations`."""
    chat_template: str = ""
    """How messages become text: chatml, plain, a .jinja file or a tokenizer_config.json;
    by default the template beside the tokenizer."""
    learn: Literal["assistant", "last", "all"] = "assistant"
    """What is learned: all turns of the assistant, its last turn, everything."""
    specials_in_text: Literal["reject", "special"] = "reject"
    """Meaning of `<|im_end|>` inside a message: a reject, or the special token (as in transformers;
    a message can then forge a turn)."""
    date: str = ""
    """The date that a template gets as today, such as 2026-01-31."""
    tokens: dict[str, str] = {}
    """Values of bos_token, eos_token and so on for the template; by default those in the files
    beside the tokenizer."""
    keep: tuple[str, ...] = ()
    """Fields that are kept as string columns."""


class ChatSource(JsonlSource):
    """Chats in JSON Lines."""

    Config: ClassVar[type[msgspec.Struct]] = ChatConfig
    version: ClassVar[int] = 5
    """5: names of special tokens in messages are rejects; marks of turns need the template's."""
    hints: ClassVar[dict[str, str]] = {
        **JsonlSource.hints,
        "no mask": "put {% generation %} and {% endgeneration %} around the answer in a copy of "
        "the template, or --learn all",
        "number": "templates get integers of 64 bits: write larger ones as text",
        "nothing to learn": "the assistant says nothing in them: --learn all learns everything",
        "template": "the template refuses such chats, or is for another kind: another "
        "--chat-template",
        "tool calls": "--chat-template FILE with a template that writes calls of tools",
        "role": "roles are system, developer, user or human, assistant or gpt, and tool",
        "special token": "a message holds the name of a special token: --specials-in-text special "
        "takes it for the token",
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
        text = BUILT_IN.get(config.chat_template, config.chat_template)
        if not is_text(text):
            raise UsageError(
                "no chat template was named, and there is no tokenizer that has one",
                hint="`tokmill build chat … --vocab-size N` trains a tokenizer on chats",
            )
        data, names = {}, {"eos_token": "<|endoftext|>"}
        if self.frozen is not None:
            data = msgspec.json.decode(self.frozen.data)
            names = self._names(self.frozen, data)
        named = any_of(control_tokens(data, text))
        # A special token, and the white space after it at the end of a text.
        ends = f"({named.pattern})\\s*\\Z"
        self.template = Template(text, names | config.tokens, config.date, ends)
        if config.learn != "all" and not self.template.has_turns:
            raise UsageError(
                "the chat template does not say what an answer is: it has no {% generation %}, and "
                f"no {PROMPT}",
                hint=self.hints["no mask"],
            )
        self.reader = Reader(text, None if config.specials_in_text == "special" else named)

    @classmethod
    def resolve(cls, config: ChatConfig, request: Request) -> ChatConfig:
        """Return the options with the text of the template and its names of special tokens.

        So both are part of the recipe, and a file that changes later gives another recipe.
        """
        template, names = find(config.chat_template, request.tokenizer)
        text = BUILT_IN.get(template, template)
        # Names that the template does not use are no part of the recipe.
        used = {key: name for key, name in names.items() if key in text}
        tokens = dict(sorted((used | config.tokens).items()))
        return msgspec.structs.replace(config, chat_template=template, tokens=tokens)

    @classmethod
    def why_nothing(cls, config: Any, paths: Sequence[str]) -> str:
        """Return a hint if no line of the files makes a record, or very few do."""
        lists = [config.messages] if config.messages else USUAL
        reason = why_nothing(paths, lists)
        if any(f"(the list {name})" in reason for name in lists):
            return "a chat is a list of messages: objects with role and content, or from and value"
        reason = reason.replace("build them with `tokmill build chat`", "name it with --messages")
        return reason.replace("--field", "tokmill build jsonl --field")

    def _names(self, frozen: Frozen, data: Mapping[str, Any]) -> dict[str, str]:
        """Return the default names in templates of tokens with a role.

        Raises `TokmillError` if the tokenizer lacks special tokens of a built-in template.
        """
        there = added_tokens(data)
        needed = special_tokens(self.config.chat_template)
        if absent := [name for name in needed if name not in there]:
            raise TokmillError(
                f"the template {self.config.chat_template} writes {' '.join(absent)}, which the "
                "tokenizer does not have as one token",
                where=frozen.vocabulary.file,
                hint="--chat-template plain needs none; or train a tokenizer with "
                + " ".join(f"--special '{name}'" for name in absent),
            )
        roles, by_id = frozen.vocabulary.roles, {number: name for name, number in there.items()}
        return {name: by_id[roles[r]] for r, name in TOKENS.items() if roles.get(r) in by_id}

    @property
    def schema(self) -> Schema:
        """Tokens, whether each is learned, the bytes of each chat, and the kept fields."""
        schema = super().schema
        if LOSS in schema:
            raise UsageError(
                f"a field to keep would be the column {LOSS!r}",
                hint="keep it under another name, or leave it out of --keep",
            )
        return {"token": schema.pop("token"), LOSS: Column("u1"), **schema}

    def _documents(self, block: Block) -> Documents:
        records, starts, drops = self._decode(block)
        columns = [self.paths.values(records, path) for path in (*self.lists, *BESIDE)]
        left: list[Drop] = []
        chats: dict[int, tuple[Any, Any]] = {}
        for i, (*lists, system, tools) in enumerate(zip(*columns, strict=True)):
            value = next((one for one in lists if one is not None), None)
            try:
                chats[i] = self.reader.chat(value, system, tools)
            except Refused as why:
                left.append(Drop(int(starts[i]), why.reason, why.rejected))
            except RecursionError:
                left.append(Drop(int(starts[i]), "depth", True))
        how: How = "whole" if self.config.learn == "all" else "turns"
        rendered = self.template.render(how, list(chats.values()))
        texts: dict[int, str] = {}
        for i, (text, failed) in zip(chats, rendered, strict=True):
            try:
                if failed:
                    raise Refused("no mask" if failed == "no mask" else "template")
                texts[i] = self._learned(text)
            except Refused as why:
                left.append(Drop(int(starts[i]), why.reason, why.rejected))
        carried = {
            name: [as_text(values[i]) for i in texts]
            for name, values in ((n, self.paths.values(records, n)) for n in self.config.keep)
        }
        # Without a tokenizer, one learns from them.
        marked = [MARKS.sub("", text) if self.frozen is None else text for text in texts.values()]
        places = starts[np.fromiter(texts, np.int64, len(texts))]
        left.sort(key=lambda drop: drop.offset)
        drops += drops_of([*left, *(Drop(place, "too long", True) for place in block.too_long)])
        notes = dict(self.reader.notes)
        self.reader.notes.clear()
        return Documents(marked, places, drops, carried, block.ends_part, block.done, notes)

    def _learned(self, text: str) -> str:
        """Return a text with marks around what is learned, by the marks of the template."""
        # Every second piece is within marks.
        pieces = text.replace(CLOSE, OPEN).split(OPEN)
        if self.config.learn == "all":
            pieces = ["", "".join(pieces), ""]
        if len(pieces) == 1:
            raise Refused("nothing to learn", rejected=False)
        kept = len(pieces) - 2
        for turn in range(1, len(pieces), 2):
            if turn == kept or self.config.learn != "last":
                pieces[turn] = f"{OPEN}{pieces[turn]}{CLOSE}"
        text = "".join(pieces)
        if len(text) > MAX_RECORD // 4 and len(text.encode()) > MAX_RECORD:
            raise Refused("too long")
        return text

    def encoder(self, resources: Resources) -> EncodeChats:
        assert self.frozen is not None
        return EncodeChats(self.frozen, self.template.text, resources)


class Reader:
    """Values of lines → messages for a template.

    Both shapes are read: `{"role", "content"}` (OpenAI's) and `{"from", "value"}` (ShareGPT's).
    Keys that do not occur in the template cannot be written. `named` matches names of special
    tokens, which messages must not hold; None: they may.
    """

    def __init__(self, template: str, named: re.Pattern[str] | None) -> None:
        self.template, self.named = template, named
        self.notes: Counter[str] = Counter()
        """Counts of what is left out."""

    def chat(self, value: Any, system: Any, tools: Any = None) -> tuple[list[dict[str, Any]], Any]:
        """Return the messages of a chat, and its tools.

        `system` and `tools` are the values of these keys beside the messages. Raises `Refused`.
        """
        if value is None:
            raise Refused("missing", rejected=False)
        if not isinstance(value, list) or not isinstance(system, str | None):
            raise Refused("type")
        chat = [self._message(given) for given in value]
        if not any(message.get("content") or len(message) > 2 for message in chat):
            raise Refused("empty", rejected=False)
        if tools and "tools" not in self.template:
            self.note("the key 'tools' of chats, which the template does not write")
            tools = None
        if system and chat[0]["role"] != "system":
            chat.insert(0, {"role": "system", "content": system})
        self._check([system, tools])
        return chat, tools or None

    def note(self, what: str) -> None:
        """Count something for the notes of the build."""
        self.notes[what if what in self.notes or len(self.notes) < 20 else "other keys"] += 1

    def _message(self, given: Any) -> dict[str, Any]:
        if not isinstance(given, dict):
            raise Refused("type")
        name = given.get("role", given.get("from"))
        role = ROLES.get(name) if isinstance(name, str) else None
        if role is None:
            raise Refused("role")
        message: dict[str, Any] = {"role": role}
        for key, value in given.items() if len(given) > 2 else ():
            if key in READ or value is None or value == []:
                continue
            if key == "weight":
                if value != 1:
                    raise Refused("weight")
            elif key in self.template:
                message[key] = value
            elif key in CALLS:
                raise Refused("tool calls")
            else:
                self.note(f"the key {key!r} of messages, which the template does not write")
        if role == "tool" and "tool" not in self.template:
            raise Refused("tool calls")
        content = given.get("content", given.get("value"))
        if content is None and len(message) == 1 or not isinstance(content, str | None):
            raise Refused("content")
        if content is not None:
            message["content"] = content
        self._check(list(message.values()))
        return message

    def _check(self, values: Sequence[Any]) -> None:
        """Refuse marks and names of special tokens, and numbers that no template gets."""
        for value in values:
            text = value
            if not isinstance(value, str):
                text = msgspec.json.encode(value).decode()
                try:
                    # As values reach the child that renders: without larger integers.
                    msgspec.msgpack.encode(value)
                except OverflowError:
                    raise Refused("number") from None
            if not text.isascii() and MARKS.search(text):
                raise Refused("noncharacter")
            if self.named is not None and self.named.search(text):
                raise Refused("special token")


SHAPE = 'such as [{"role": "user", "content": "Hi"}]'
ASKED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


class ChatPrompts:
    """Writes messages as a store of chats does, up to the beginning of the assistant's answer."""

    def __init__(self, data: bytes, vocabulary: Vocabulary, config: ChatConfig) -> None:
        resources = Resources(threads=False)
        self.source = ChatSource(config, [], {"token": Frozen(vocabulary, data)}, resources)
        self.encoder = self.source.encoder(resources)

    def ids(self, messages: Any, where: str = "") -> list[int]:
        """Return the ids of messages and of the beginning of an answer.

        Names of special tokens in messages are text, as in the store.

        Raises `UsageError` for invalid messages, or messages that the template refuses.
        """
        try:
            chat, _ = self.source.reader.chat(messages, None)
        except Refused as why:
            what = f"these messages cannot be read: {why.reason}"
            raise UsageError(what, where=where, hint=SHAPE) from None
        [(text, failed)] = self.source.template.render("prompt", [(chat, None)])
        if failed:
            raise UsageError(
                f"the chat template refuses the messages: {failed}",
                where=where,
                hint="it may want other roles, or the user's turn last",
            )
        ids: list[int] = self.encoder.encode([text])[0].tolist()
        return ids

    def ends(self) -> list[int]:
        """Return the id of the token that ends a turn of the assistant, if there is one."""
        [(text, _)] = self.source.template.render("turns", [(ASKED, None)])
        answer = text.rpartition(OPEN)[2].partition(CLOSE)[0]
        names = [name for name in self.encoder.control if name in answer]
        last = max(names, key=lambda name: answer.rfind(name) + len(name), default="")
        return [self.encoder.control[last]] if last else []


def load_prompts(
    data: bytes,
    vocabulary: Vocabulary,
    kept: Sequence[Mapping[str, Any]],
    template: str,
    where: str,
) -> ChatPrompts:
    """Return the writer of prompts for a run with the tokenizer.json `data`.

    `kept`: options of the stores from which it learned. `template`: a chat template in place of
    theirs. Raises `TokmillError` if there is none, or it does not fit the tokenizer.
    """

    def has_template(options: Mapping[str, Any]) -> bool:
        named = str(options.get("chat_template", ""))
        return named in BUILT_IN or is_text(named)

    options = next(filter(has_template, kept), None)
    if options is None and not template:
        raise TokmillError(
            "the run has no chat template: its store was not made by `tokmill build chat`, or from "
            "chats with different templates",
            where=where,
            hint=f"name one: --chat-template {KINDS}",
        )
    config = recipe.convert(ChatConfig, dict(options or {}), "options of the store")
    if template:
        named = ChatConfig(chat_template=template, date=config.date, tokens=config.tokens)
        config = ChatSource.resolve(named, Request(inputs=()))
    return ChatPrompts(data, vocabulary, config)
