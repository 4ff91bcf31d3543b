"""Texts without what may be a secret, or names a person: for errors, and for what a user hands to others."""

from __future__ import annotations

import os
import re
from pathlib import Path

_SECRET_VARIABLE = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL", re.IGNORECASE)
_VALUE = r"(?:\"[^\"\n]*\"|'[^'\n]*'|[^&\s,;)]+)"
_SECRETS = re.compile(
    r"((?:(?:signature|credential|secret|password|api_?key)\w*|(?<![a-z])(?:\w{0,40}[_-])?sig|authorization)[\"']?\s*[=:]\s*"
    rf"(?:(?:bearer|basic)\s+)?){_VALUE}"
    r"|((?:tokens?|keys?)\d*[\"']?\s*[=:]\s*)"
    rf"(?![\[{{]|[-+\d.e]+(?:[\],\s}}]|$)|true|false|null){_VALUE}"
    r"|(://)[^\s\"']+(?=@)"
    r"|()\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abp]-|AKIA|eyJ)[\w.-]{12,}",
    re.IGNORECASE,
)
"""Values of parameters and entries with such names, unless a token or key is a number; the user of a URL; what begins
as tokens of known services do.
"""


def redacted(text: str) -> str:
    """Return ``text`` with ``***`` for each value of a secret environment variable, and for what ``_SECRETS`` finds."""
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET_VARIABLE.search(name):
            text = text.replace(value, "***")
    return _SECRETS.sub(lambda found: f"{next(filter(None, found.groups()), '')}***", text)


def without_names(text: str) -> str:
    """Return ``text`` with ``~`` for the home directory, and USER in paths for this user and those of other homes."""
    if (home := Path.home()).name:
        text = re.sub(rf"{re.escape(str(home))}(?![\w.-])", "~", text)
        text = re.sub(rf"(?<=/){re.escape(home.name)}(?![\w.-])", "USER", text)
    return re.sub(r"(/(?:home|Users)/)[^/\s\"']+", r"\1USER", text)
