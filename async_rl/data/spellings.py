"""Tells a control token that a message's content spells from one that the chat template writes.

A tokenizer makes both the same token: a user, a tool or a web page could end a turn and begin another, and an answer
that names the end mark would teach the model to stop in the middle. So ``Control`` puts the character ``GUARD`` into
each control token that a content spells. The text that ``template.apply_template`` returns has these characters, and
``encoded`` makes tokens of what the template wrote, and plain text of what is guarded.

What the assistant says may have marks of thoughts, answers and calls, which stay tokens. Only the marks that open or
end a turn are guarded there. They are found by rendering a conversation. End marks at the very end of an answer stay
tokens, too: people write them to end the turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from async_rl.data.template_forms import joined_text, text_around, text_parts
from async_rl.data.vocabulary import special_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

GUARD = "\U0010ffff"
"""Stands behind the first character of a control token that a content spells. Unicode keeps it for programs' own use,
so texts don't have it."""
PRIVATE = chr(0x100000)
"""The first of the characters, for private use, with which the other names of control tokens begin."""
_PROBES = (("system", "user", "assistant", "user"), ("user", "assistant", "user"), ("user", "assistant", "tool"))


@dataclass(frozen=True, slots=True)
class Control:
    """The control tokens of a tokenizer with its chat template. The patterns find them guarded, too.

    Attributes:
        names: the tokens that decoding leaves out of a text, and those that open or end a turn.
        pattern: finds one of ``names``.
        of_turns: finds a token that opens or ends a turn.
        of_answers: does so too, but for those that end an answer at the end of its text.
    """

    names: frozenset[str]
    pattern: re.Pattern[str]
    of_turns: re.Pattern[str]
    of_answers: re.Pattern[str]

    def guarded(self, value: Any) -> Any:
        """Return JSON data with a guard in each control token that its texts spell."""
        return mapped(value, lambda text: _guarded(self.pattern, text))

    def unguarded(self, value: Any) -> Any:
        """Return guarded data as they were written."""
        return mapped(value, lambda text: self.pattern.sub(lambda found: unguarded(found[0]), text))

    def guarded_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message of a chat with its guards."""
        if message.get("role") != "assistant":
            return self.guarded(message)
        found = mapped(message, lambda text: _guarded(self.of_turns, text))
        content = message.get("content")
        if content and (text := joined_text(content)):
            text = _guarded(self.of_answers, text)
            found["content"] = text if isinstance(content, str) else text_parts(text)
        return found


def control_of(tokenizer: PreTrainedTokenizerBase, ends: frozenset[int] = frozenset()) -> Control:
    """Return the control tokens of ``tokenizer``. ``ends`` are ids that end a turn, too, whatever it and its
    template know.
    """
    return _control(tokenizer, str(tokenizer.chat_template), ends)


@lru_cache(maxsize=32)
def _control(tokenizer: PreTrainedTokenizerBase, template: str, ends: frozenset[int]) -> Control:
    """Find them once for each ``template`` that the tokenizer has had."""
    special, more = (set(tokenizer.convert_ids_to_tokens(sorted(ids))) for ids in (special_ids(tokenizer), ends))
    turns, last = _marks_of_turns(tokenizer)
    # One that must stand alone is none where it touches a word, which no alias shows.
    alone = {str(token.content) for token in tokenizer.added_tokens_decoder.values() if token.single_word}
    names = frozenset(special | turns) - alone
    of_turns, at_end = (_shape((found | more) & names) for found in (turns, last))
    patterns = (_shape(names), of_turns, rf"(?!(?:(?:{at_end})\s*)+\Z)(?:{of_turns})")
    return Control(names, *map(re.compile, patterns))


def _shape(names: Iterable[str]) -> str:
    """Return a pattern that finds ``names``, guarded or not, of several at one place the longest, as tokenizers do.

    A number stands for any number, because a vocabulary may have thousands of unused tokens.
    """
    found = (f"{re.escape(name[0])}{GUARD}?{re.escape(name[1:])}" for name in sorted(names, key=len, reverse=True))
    return "|".join(dict.fromkeys(re.sub(r"\d+", r"\\d+", one) for one in found)) or "(?!)"


def _guarded(pattern: re.Pattern[str], text: str) -> str:
    return pattern.sub(lambda m: m[0] if GUARD in m[0] else m[0][0] + GUARD + m[0][1:], text)


def _marks_of_turns(tokenizer: PreTrainedTokenizerBase) -> tuple[set[str], set[str]]:
    """Return the added tokens that open or end a turn in the chat template's text, and those that end an answer.

    The header of a turn has the marks before its first word that other turns have, too, and the first other one. What
    follows opens an answer (Command R7B), and what ends that stands before the marks that other turns have.
    """
    ends = {str(token) for token in (tokenizer.eos_token, tokenizer.pad_token) if token}
    named = frozenset(ends | {str(token) for token in (tokenizer.bos_token,) if token})
    shape, turns = _shape(str(token.content) for token in tokenizer.added_tokens_decoder.values()), set(named)

    def before_words(text: str) -> list[str]:
        return re.findall(shape, re.sub(rf"((?:\s*(?:{shape}))*).*", r"\1", text, count=1, flags=re.DOTALL))

    template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    around = (text_around(template, roles, tokenizer.special_tokens_map) for roles in _PROBES)
    for parts in filter(None, around):
        *starts, opener, closer = map(before_words, parts[:-1])
        shared = named | set(re.findall(shape, parts[-3])) & set(re.findall(shape, parts[-2]))
        closer = closer[next((place for place, mark in enumerate(closer) if mark in shared), 0) :]
        ends.update(closer[:1])
        turns |= shared.union(*starts)
        for header in (opener, closer):
            turns.update(header[: 1 + len(list(takewhile(shared.__contains__, header)))])
    return turns, ends


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return JSON data with ``change`` of each text in it."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {mapped(key, change): mapped(one, change) for key, one in value.items()}
    return [mapped(one, change) for one in value] if isinstance(value, list | tuple) else value


def unguarded(text: str) -> str:
    """Return guarded ``text`` as people read it."""
    return text.replace(GUARD, "")


def rest_after(text: str, size: int) -> str:
    """Return guarded ``text`` without its first ``size`` characters. Guards do not count."""
    return re.sub(rf"\A(?:{GUARD}*[^{GUARD}]){{{size}}}", "", text)


def encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[int]]:
    """Return the token ids of guarded ``text``, and the character of it at which each token begins.

    The text is encoded in one piece, by a tokenizer that knows each control token under another name.
    """
    control = control_of(tokenizer)
    twin, aliases = _twin(tokenizer, control.names)
    renamed = control.pattern.sub(lambda found: aliases.get(found[0], found[0]), text)
    kept = [place for place, character in enumerate(text) if character != GUARD]
    found = twin.encode(unguarded(renamed), add_special_tokens=False)
    return found.ids, [kept[begin] if begin < len(kept) else len(text) for begin, _ in found.offsets]


@lru_cache(maxsize=8)
def _twin(tokenizer: Any, names: frozenset[str]) -> tuple[Tokenizer, Mapping[str, str]]:
    """Return a copy of ``tokenizer`` that knows each of ``names`` by an alias of its length, and the aliases by name.

    The ids are the same. What the model's own vocabulary has of the names is renamed, too, and not merged from parts:
    so it does not find them in a text.
    """
    from tokenizers import Tokenizer

    aliases = {name: chr(ord(PRIVATE) + number) + name[1:] for number, name in enumerate(sorted(names))}
    stored = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    if merges := stored["model"].get("merges"):
        stored["model"]["merges"] = [pair for pair in merges if not {*pair, "".join(pair)} & names]
    return Tokenizer.from_str(json.dumps(mapped(stored, lambda text: aliases.get(text, text)))), aliases
