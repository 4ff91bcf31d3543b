"""Applies a tokenizer's chat template, with the arguments of ``data.chat_template_kwargs`` and with tool schemas.

Every module that renders a chat calls ``apply_template``: prompts of training and evaluation, environments, supervised
fine-tuning, the checks before a run. transformers and jinja2 are imported inside the functions that need them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from async_rl.config.data import CONTENT_KEY
from async_rl.data.spellings import PRIVATE, control_of, encoded
from async_rl.data.template_forms import adapted, why_lost
from async_rl.errors import ModelError
from async_rl.records import TOOLS_ROLE

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    *,
    tokenize: bool = False,
    open_turn: bool = True,
) -> Any:
    """Return the chat ``messages`` as text, or with ``tokenize`` as a list of token ids.

    The messages get the form that the template reads (``template_forms``).

    Args:
        arguments: further variables of the template, as ``DataConfig.template_arguments`` returns them. A first message
            with the role ``TOOLS_ROLE`` is no message; its content replaces the argument ``tools``.
        open_turn: whether the text ends with the start of the model's answer.

    Raises:
        Exception: whatever the template's author wrote.
    """
    template, chat, names = _given(tokenizer, messages, arguments)
    render = partial(_rendered, tokenizer, template, open_turn=open_turn)
    control = control_of(tokenizer)
    text, (plain, plain_names) = render(chat, names), control.unguarded([chat, names])
    if (plain, plain_names) == (chat, names):
        return tokenizer(text, add_special_tokens=False)["input_ids"] if tokenize else text
    plain_text = render(plain, plain_names)
    if control.unguarded(text) != plain_text or not tokenizer.is_fast or max(plain_text, default="") >= PRIVATE:
        raise ModelError(
            f"expected a content without a control token, or a chat template that does not look for it, a tokenizer "
            f"with a tokenizer.json and characters below U+{ord(PRIVATE):X}, so that it can be read as text, got a "
            f'{type(tokenizer).__name__}; remove it, or set data.special_tokens_in_content = "token"'
        )
    return encoded(tokenizer, text)[0] if tokenize else text


def _rendered(
    tokenizer: PreTrainedTokenizerBase, template: str, chat: Sequence[Any], names: Mapping[str, Any], *, open_turn: bool
) -> str:
    """Return what ``tokenizer.apply_chat_template`` does, which drops a null content that ``template`` may ask for."""
    from transformers.utils.chat_template_utils import render_jinja_template

    render: Any = render_jinja_template
    names = {**tokenizer.special_tokens_map, **names}
    return render([chat], chat_template=template, add_generation_prompt=open_turn, **names)[0][0]


def _given(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Return the template that renders ``messages``, the messages in its form, and its variables. They are guarded
    (``spellings``), unless contents may spell tokens.
    """
    chat, names, is_text = _split(messages, arguments)
    template = tokenizer.get_chat_template(tools=names.get("tools"))
    chat = adapted(template, chat)
    if is_text:
        control = control_of(tokenizer)
        chat, names = [*map(control.guarded_message, chat)], control.guarded(names)
    return template, chat, names


def check_rendered(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> None:
    """Check that the chat template renders something of each of ``messages`` (``template_forms.why_lost``).

    Raises:
        ModelError: it does not.
        Exception: whatever the template's author wrote.
    """
    template, chat, _ = _given(tokenizer, messages, arguments)
    if why := why_lost(template, chat):
        raise ModelError(f"the chat template of {tokenizer.name_or_path or 'the tokenizer'} {why}")


def marked_spans(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> Sequence[tuple[int, int]] | None:
    """Return which characters of the rendered ``messages`` the template marks with ``{% generation %}``, as pairs
    (first, end). None if it has no such marks.

    Raises:
        Exception: whatever the template's author wrote.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    render: Any = render_jinja_template
    template, chat, names = _given(tokenizer, messages, arguments)
    if not _MARKED.search(template):
        return None
    names = {**tokenizer.special_tokens_map, **names}
    _, spans = render([chat], chat_template=template, return_assistant_tokens_mask=True, **names)
    return spans[0]


def _split(
    messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> tuple[Sequence[Mapping[str, Any]], dict[str, Any], bool]:
    """Return the messages of the chat, the template's variables with the tool schemas that ``messages`` begin with,
    and whether what contents spell is text.
    """
    names = dict(arguments)
    is_text = names.pop(CONTENT_KEY, "text") == "text"
    if messages and messages[0].get("role") == TOOLS_ROLE:
        return messages[1:], names | {"tools": json.loads(messages[0]["content"])}, is_text
    return messages, names, is_text


def check_arguments(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any], messages: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Check that the chat template reads every one of ``arguments``, and the tools of the prompt ``messages``.

    A misspelled argument would have no effect, and nobody would notice.

    Raises:
        ModelError: it does not read one. The message names the config key, and lists what the template reads.
    """
    _, names, _ = _split(messages, arguments)
    if not names:
        return
    if not tokenizer.chat_template:
        raise ModelError(
            f"{_keys(names)}: expected a tokenizer with a chat template, which reads it, got one without; leave the "
            f"key out, or put a chat_template.jinja next to tokenizer.json"
        )
    read = variables_of(tokenizer.get_chat_template(tools=names.get("tools")))
    if unread := sorted(names.keys() - read):
        known = ", ".join(sorted(read - {"messages", "add_generation_prompt"})) or "none"
        remedy = "correct or remove the key"
        if "tools" in unread:
            remedy = "use a model whose chat template reads tools, or leave them out (a column of tools: rename it)"
        raise ModelError(
            f"{_keys(unread)}: the chat template of model.path does not read {', '.join(unread)}, so it would have no "
            f"effect; expected variables that the template reads ({known}); {remedy}"
        )


def _keys(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join("data.tools" if name == "tools" else f"data.chat_template_kwargs.{name}" for name in names)


@cache
def variables_of(template: str) -> frozenset[str]:
    """Return the names of all variables that a chat template reads and does not set itself.

    Raises:
        ModelError: ``template`` is not a template.
    """
    from jinja2 import TemplateSyntaxError, ext, meta, nodes, parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """The block ``{% generation %}``, which transformers adds to jinja2's language."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: parser.Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        # It renders nothing, but jinja2 computes with constants when it looks for variables.
        tree = ImmutableSandboxedEnvironment(extensions=[Generation, ext.loopcontrols]).parse(template)
    except TemplateSyntaxError as error:
        raise ModelError(
            f"model.path: can't read the chat template: line {error.lineno}: {error.message}; correct "
            f"chat_template.jinja of the model"
        ) from None
    return frozenset(meta.find_undeclared_variables(tree) | set(_first_set_later(tree, nodes)))


def _first_set_later(tree: Any, nodes: Any) -> Iterator[str]:
    """Yield the variables whose default the template sets itself, as in ``{% if not x is defined %}{% set x = 1 %}``.

    jinja2 does not count them as undeclared.
    """
    for test in tree.find_all(nodes.Test):
        if test.name in ("defined", "undefined") and isinstance(test.node, nodes.Name):
            yield test.node.name
