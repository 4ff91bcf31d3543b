"""Which chat templates' tool calls an agent gets: all that trl ships and that write calls, each with its own form.

    python -m benchmarks.template_calls

The model's answer is a call as the template itself writes it. *Read*: the agent gets it as a call. *Continued*: the
request with the tool's answer goes on with the sampled tokens; *rewritten*: it is rendered anew. *Refused*: a request
with tools is, by name.
"""

from __future__ import annotations

import numpy as np

from tests.data.public_templates import names
from tests.extensions.agents.test_conversations import ASKED, RESULT, SUM, TOOLS, Chat, continues

COLUMNS = ("read", "continued", "rewritten", "refused")


def outcome(name: str) -> tuple[str, ...] | None:
    """Return those of ``COLUMNS`` that are so for a template. None: it writes no calls."""
    chat = Chat(name)
    if chat.renderer.form is None:
        return ("refused",) if chat.writes_calls else None
    if not chat.renderer.reads_tools:
        return ("refused",)
    prompt, token_ids, message = chat.answer([ASKED], chat.written(SUM), TOOLS)
    if [call["function"]["name"] for call in message.get("tool_calls", ())] != ["add"]:
        return ()
    after = chat.known.prompt([ASKED, message, RESULT], TOOLS)
    return ("read", "continued" if continues(prompt, np.asarray(token_ids), after) else "rewritten")


def main() -> None:
    """Print the table."""
    found = {name: are for name in names() if (are := outcome(name)) is not None}
    print(f"| template | {' | '.join(COLUMNS)} |\n|{'---|' * (1 + len(COLUMNS))}")
    for name, are in found.items():
        print(f"| `{name}` | {' | '.join('yes' if column in are else '' for column in COLUMNS)} |")
    print(f"read: {sum('read' in are for are in found.values())} of {len(found)}")


if __name__ == "__main__":
    main()
