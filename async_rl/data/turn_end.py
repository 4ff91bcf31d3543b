"""Decides which tokens end a turn of the model, and says why.

Every module that needs to know asks here: the engines that sample, evaluation, the commands that train on given rows,
the export and the doctor.

The end tokens that a model's files list (``generation_config.json``, ``config.json``, the tokenizer's ``eos_token``)
may end a turn. Which one follows an answer is up to the chat template: it writes an end mark after the answer, or the
mark of the next role (GLM). A mark that only the template knows ends a turn too, because a model that is trained with
this template samples it. An answer that nothing ends gets the tokenizer's ``eos_token``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from async_rl.data.chat import plain_ids
from async_rl.data.model_config import read_model_config
from async_rl.data.template import apply_template
from async_rl.data.template_forms import joined_text
from async_rl.data.vocabulary import special_ids
from async_rl.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_CONFIG = "generation_config.json"
_KEY = "eos_token_id"
_QUESTION: Mapping[str, Any] = MappingProxyType({"role": "user", "content": "What is one and one?"})
_ANSWER = "It is two, I think"
_NEXT = "And two and two?"
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_NUM_PROBED = 8
"""Number of tokens after a turn among which the end token is looked for, white space included."""


@dataclass(frozen=True, slots=True)
class TurnEnds:
    """The tokens that end a turn of the model.

    Attributes:
        reasons: token id -> where it comes from, for messages. Sampling stops at each of these tokens.
        of_template: the token that ends an answer in the chat template's text. None if the template has none.
        eos: the tokenizer's ``eos_token``, for an answer that nothing else ends. None if it has none.
    """

    reasons: Mapping[int, tuple[str, ...]]
    of_template: int | None
    eos: int | None

    @property
    def ids(self) -> frozenset[int]:
        """All token ids that end a turn."""
        return frozenset(self.reasons)

    def num_to_end(self, token_ids: Sequence[int]) -> int | None:
        """Return the number of the first tokens of ``token_ids``, an answer in the template's text, up to its end
        token, included. None if it has no end token.

        The template may write more after the end token (a line break, a second end token), which is never sampled.
        """
        for ends in ({self.of_template}, self.ids):
            places = [place for place, token in enumerate(token_ids) if token in ends]
            if places:
                return places[-1] + 1
        return None

    def next_mark(self, token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> int | None:
        """Return the end token with which ``token_ids``, the text after an answer, begin. None if they begin otherwise.

        White space may come first.
        """
        for token in token_ids[:_NUM_PROBED]:
            if token in self.reasons:
                return token
            if str(tokenizer.decode([token])).strip():
                return None
        return None

    def describe(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Return a text that lists the tokens, and says of each why it ends a turn."""
        listed = [
            f"{tokenizer.convert_ids_to_tokens(token)} ({token}: {', '.join(why)})"
            for token, why in sorted(self.reasons.items(), key=lambda item: item[0] != self.of_template)
        ]
        return "; ".join(listed)


def turn_ends(
    tokenizer: PreTrainedTokenizerBase,
    directory: Path | None = None,
    arguments: Mapping[str, Any] = _NOTHING,
) -> TurnEnds:
    """Return the tokens that end a turn of a model.

    Args:
        tokenizer: that of the model. It may have no chat template.
        directory: has the model's ``config.json`` and ``generation_config.json``. None: only the tokenizer is asked.
        arguments: variables of the chat template in addition to the messages.

    Raises:
        ModelError: one of the files can't be read.
    """
    reasons: dict[int, list[str]] = {}
    for source, ids in ({} if directory is None else _listed(directory)).items():
        for token in ids:
            reasons.setdefault(token, []).append(source)
    eos = tokenizer.eos_token_id
    eos = eos if isinstance(eos, int) else None
    if eos is not None:
        reasons.setdefault(eos, []).append("the tokenizer's eos_token")
    of_template, is_next_mark = None, False
    if tokenizer.chat_template:
        of_template, is_next_mark = _end_in_template(tokenizer, arguments, frozenset(reasons))
    if of_template is not None:
        role = "the chat template begins the next role's turn with it"
        reasons.setdefault(of_template, []).append(
            role if is_next_mark else "the chat template writes it after an answer"
        )
    return TurnEnds({token: tuple(why) for token, why in reasons.items()}, of_template, eos)


def mark_after(
    tokenizer: PreTrainedTokenizerBase,
    ends: TurnEnds,
    messages: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any] = _NOTHING,
) -> int | None:
    """Return the token that ends the last of ``messages``, an answer that the template's text leaves open.

    That is the mark of the role that speaks next (a tool after a tool call, else the user) if it may end a turn, else
    the tokenizer's ``eos_token``. None if it has none.

    ``arguments`` are variables of the chat template in addition to the messages.
    """
    role = "tool" if messages[-1].get("tool_calls") else "user"
    closed = str(apply_template(tokenizer, messages, arguments, open_turn=False))
    try:
        more = str(apply_template(tokenizer, [*messages, {"role": role, "content": _NEXT}], arguments, open_turn=False))
    except Exception:  # a template raises whatever its author wrote; it has no mark of a next role
        more = ""
    if more.startswith(closed):
        following = more[len(closed) :]
    else:  # the template drops the answer's thinking when the user goes on
        visible = (joined_text(messages[-1].get("content") or "") or "").rpartition("</think>")[2].strip()
        following = more.rpartition(visible)[2] if visible else ""
    mark = ends.next_mark(plain_ids(tokenizer, following.partition(_NEXT)[0]), tokenizer)
    return ends.eos if mark is None else mark


def write_turn_ends(directory: Path) -> None:
    """Add the end tokens of the model in ``directory`` to its ``generation_config.json``, which other programs read.

    Nothing changes if they are there, or if the directory has no tokenizer or no such file.

    Raises:
        ModelError: the tokenizer or one of the files can't be read.
    """
    from async_rl.data.chat import has_tokenizer, load_tokenizer

    path = directory / GENERATION_CONFIG
    if not path.is_file() or not has_tokenizer(directory):
        return
    found = turn_ends(load_tokenizer(directory, needs_template=False), directory)
    stored = _stored(path)
    listed = _as_list(stored.get(_KEY))
    if added := [token for token in found.reasons if token not in listed]:
        # The first one is what programs use that know a single end token.
        stored[_KEY] = [*listed, *added] if len(listed) + len(added) > 1 else added[0]
        path.write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _end_in_template(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any], listed: frozenset[int]
) -> tuple[int | None, bool]:
    """Return the token that ends an answer in the chat template's text (None if there is none), and whether it is the
    mark of the next role.

    It is among the first special tokens after an answer that ends the conversation: the first one that is listed, or
    else the last of them. Without any it is the mark of the next role, if that is listed.
    """
    answered = [dict(_QUESTION), {"role": "assistant", "content": _ANSWER}]
    closed = _text_after(tokenizer, answered, arguments)
    run = _first_marks(tokenizer, closed, listed | special_ids(tokenizer))
    if run:
        return next((token for token in run if token in listed), run[-1]), False
    following = _text_after(tokenizer, [*answered, {"role": "user", "content": _NEXT}], arguments)
    run = _first_marks(tokenizer, following.removeprefix(closed).partition(_NEXT)[0], listed)
    return (run[0], True) if run else (None, False)


def _text_after(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> str:
    """Return the rendered text after the built-in answer. Empty if the template refuses or changes the messages."""
    try:
        text = str(apply_template(tokenizer, messages, arguments, open_turn=False))
    except Exception:  # a template raises whatever its author wrote; checks of the rows and prompts report it
        return ""
    before, _, after = text.rpartition(_ANSWER)
    return after if before else ""


def _first_marks(tokenizer: PreTrainedTokenizerBase, text: str, marks: frozenset[int]) -> list[int]:
    """Return the first run of tokens in ``text`` that are among ``marks``."""
    token_ids = plain_ids(tokenizer, text)
    first = next((place for place, token in enumerate(token_ids) if token in marks), len(token_ids))
    return list(takewhile(marks.__contains__, token_ids[first:]))


def _listed(directory: Path) -> dict[str, list[int]]:
    """Return the end tokens that the model's files list, by the file's name. ``config.json`` counts with the default of
    its model type.
    """
    path = directory / GENERATION_CONFIG
    found = {GENERATION_CONFIG: _as_list(_stored(path).get(_KEY))} if path.is_file() else {}
    config: Any = read_model_config(directory)
    ids = [*_as_list(getattr(config, _KEY, None)), *_as_list(getattr(config.get_text_config(), _KEY, None))]
    return found | {"config.json": list(dict.fromkeys(ids))}


def _stored(path: Path) -> dict[str, Any]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: expected JSON, got other text: {error}; correct the file") from error
    if not isinstance(stored, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(stored).__name__}; correct the file")
    return stored


def _as_list(ids: Any) -> list[int]:
    return list(ids) if isinstance(ids, list) else [] if ids is None else [ids]
