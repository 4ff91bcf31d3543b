"""Whether the groups that arrive can train the model, and what to tell the user if none of them can.

A group trains nothing if its answers are all wrong, all right, equally rewarded or all cut (``Flaw``). The queue passes
every training group to ``SignalWatch.observe``. A long streak of such groups makes a note: what is the matter, how one
of the answers ends, and the remedy. Status, ``ledger.json`` and ``launch`` show the notes.

A run whose answers are nearly all wrong from its beginning may have a lucky group now and then, which ends a streak. So
the groups of the first three batches are also counted together. From the second batch on it makes a note if most of
them have only wrong answers, and at most one answer in twenty is right.

Until the first group that could train, a streak is long if it has two batches of groups. Afterwards it must also be
longer than chance makes it, because a run that learns filters half of its groups and more; or have eight batches.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal

import msgspec

from async_rl.queue.core.admission import QueueSettings
from async_rl.queue.core.groups import GroupSummary
from async_rl.records import CutLimit, cut_limit

Flaw = Literal["wrong", "right", "equal", "cut", "unjudged"]
"""Why a group trains nothing: its answers are all wrong, or all right; their rewards are equal, or only those of cut
answers differ; all are cut, and ``loss.mask_truncated`` leaves them out; or the reward judges none of them."""

_MIN_GROUPS = 8
_SURE_GROUPS = 64
_CHANCE = 1e-6
"""A streak whose probability is above this may be chance. A run has thousands of groups at which one may begin."""
_MEMORY = 128
"""Number of groups before the streak that say how often a group trains nothing. Older ones count less."""
_MOSTLY = 0.5
_FEW_RIGHT = 0.05
_WORDS = {
    "wrong": "only wrong answers",
    "right": "only right answers",
    "equal": "answers with equal rewards",
    "cut": "only answers that were cut",
    "unjudged": "only answers that the reward does not judge",
}


class Streak(msgspec.Struct):
    """The groups in a row that train nothing, up to now.

    Attributes:
        since_step: the learner's step at the last group that could train; None if there was none.
        flaws: the number of groups by flaw.
        num_answers: the number of answers of these groups.
        cuts: the number of cut answers by the limit that cut them.
        example: the end of an answer of the newest group that has one.
        noted_as: the cause of the note that the streak has made; empty if it has made none.
    """

    since_step: int | None = None
    flaws: Counter[str] = msgspec.field(default_factory=Counter)
    num_answers: int = 0
    cuts: Counter[str] = msgspec.field(default_factory=Counter)
    example: str = ""
    noted_as: str = ""

    @property
    def num_groups(self) -> int:
        return self.flaws.total()


class Beginning(msgspec.Struct):
    """The groups of the first batches.

    Attributes:
        num_groups: the number of groups.
        num_right: the number of right answers, or the sum of accuracies between 0 and 1.
        wrong: those groups that have only wrong answers.
        num_answers: the number of answers of all groups.
    """

    num_groups: int = 0
    num_right: float = 0.0
    num_answers: int = 0
    wrong: Streak = msgspec.field(default_factory=Streak)

    @property
    def is_nearly_all_wrong(self) -> bool:
        """Whether there are right answers, but so few that most groups have none."""
        is_rare = 0 < self.num_right <= _FEW_RIGHT * self.num_answers
        return is_rare and self.wrong.num_groups > _MOSTLY * self.num_groups


class SignalWatch(msgspec.Struct):
    """Counts the groups that train nothing.

    Attributes:
        streak: the present streak.
        beginning: the groups of the first three batches.
        flaws: the number of all groups that train nothing, by flaw.
        num_useful, num_useless: the groups before the streak that could train, and that could not. Older ones count
            less.
        notes: the texts of the notes by their cause.
    """

    streak: Streak = msgspec.field(default_factory=Streak)
    beginning: Beginning = msgspec.field(default_factory=Beginning)
    flaws: Counter[str] = msgspec.field(default_factory=Counter)
    num_useful: float = 0.0
    num_useless: float = 0.0
    notes: dict[str, str] = {}

    def observe(self, flaw: Flaw | None, group: GroupSummary, settings: QueueSettings, step: int) -> None:
        """Count a group that has arrived, with its ``flaw``. The learner has done ``step`` steps."""
        self._observe_beginning(flaw, group, settings)
        streak = self.streak
        if flaw is None:
            self.num_useful += 1
            self.num_useless += streak.num_groups
            if (total := self.num_useful + self.num_useless) > _MEMORY:
                self.num_useful, self.num_useless = (n * _MEMORY / total for n in (self.num_useful, self.num_useless))
            self.streak = Streak(since_step=step)
            return
        self.flaws[flaw] += 1
        _count(streak, flaw, group, settings)
        cause = cause_of(streak)
        # A streak makes one note. As long as its cause stays the same, the note has its newest counts.
        if streak.noted_as in ("", cause) and self._is_long(settings):
            streak.noted_as = cause
            self.notes[cause] = describe(streak, settings)

    def _observe_beginning(self, flaw: Flaw | None, group: GroupSummary, settings: QueueSettings) -> None:
        beginning = self.beginning
        if beginning.num_groups >= max(3 * settings.groups_per_step, _MIN_GROUPS):
            return
        beginning.num_groups += 1
        beginning.num_right += group.accuracy
        beginning.num_answers += group.num_graded
        if flaw == "wrong":
            _count(beginning.wrong, flaw, group, settings)
        # Without mask_truncated, answers that don't end are wrong, and the model learns to be short.
        is_lesson = not settings.mask_truncated and 2 * beginning.wrong.cuts.total() > beginning.wrong.num_answers
        is_known = beginning.num_groups >= max(2 * settings.groups_per_step, _MIN_GROUPS)
        if is_known and beginning.is_nearly_all_wrong and not is_lesson and "wrong" not in self.notes:
            self.notes["wrong"] = describe_beginning(beginning, settings)

    def _is_long(self, settings: QueueSettings) -> bool:
        num_groups = self.streak.num_groups
        if num_groups < max(2 * settings.groups_per_step, _MIN_GROUPS):
            return False
        if not self.num_useful or num_groups >= max(8 * settings.groups_per_step, _SURE_GROUPS):
            return True
        # The probability that the next groups are all useless, if at first every share of useless ones is as likely.
        useless, total = self.num_useless + 1, self.num_useless + self.num_useful + 2
        return math.prod((useless + n) / (total + n) for n in range(num_groups)) < _CHANCE


def _count(streak: Streak, flaw: Flaw, group: GroupSummary, settings: QueueSettings) -> None:
    streak.flaws[flaw] += 1
    streak.num_answers += group.num_graded
    for num_sampled, last_turn in group.cut:
        streak.cuts[_limit(num_sampled, last_turn, settings)] += 1
    streak.example = group.example or streak.example


def flaw_of(group: GroupSummary, settings: QueueSettings, *, fits_filter: bool) -> Flaw | None:
    """Return why a training group trains nothing; None if it can train.

    ``fits_filter`` says whether the group is within ``queue.filter_range``. Without a filter only rewards tell, and
    with a teacher not even they.
    """
    if not (num_graded := group.num_graded):
        return "unjudged"
    if settings.queue.filter_range is None:
        if settings.teacher_bytes or group.rewards_vary or 0.0 < group.accuracy < num_graded:
            return "cut" if _is_all_cut(group, settings) else None
        low, high = 0.0, 1.0
    else:
        if fits_filter:
            return "cut" if _is_all_cut(group, settings) else None
        low, high = settings.queue.filter_range
    accuracy = group.accuracy / num_graded
    if group.rewards_differ is not None:
        return "equal"
    return "wrong" if accuracy <= low else "right" if accuracy >= high else "equal"


def _is_all_cut(group: GroupSummary, settings: QueueSettings) -> bool:
    return settings.mask_truncated and len(group.cut) == group.num_graded


def cause_of(streak: Streak) -> str:
    """Return the flaw that all groups of the streak have, or "mixed"."""
    return next(iter(streak.flaws)) if len(streak.flaws) == 1 else "mixed"


def describe(streak: Streak, settings: QueueSettings) -> str:
    """Return the text of the streak's note: the groups, the share of cut answers, the remedy, and an answer's end."""
    since = f" (since step {streak.since_step})" if streak.since_step else ""
    groups = f"last {streak.num_groups} groups{since}"
    if streak.since_step is None:
        groups = f"{streak.num_groups} groups since the run began"
    if len(streak.flaws) == 1:
        what = f"all {'' if streak.since_step is None else 'of the '}{groups} have {_WORDS[cause_of(streak)]}"
    else:
        listed = ", ".join(f"{count} with {_WORDS[flaw]}" for flaw, count in sorted(streak.flaws.items()))
        what = f"none of the {groups} can train: {listed}"
    return f"{what}{_cut_text(streak, settings)}. {_remedy(streak)}.{_example_text(streak)}"


def describe_beginning(beginning: Beginning, settings: QueueSettings) -> str:
    """Return the text of the note about a run whose answers are nearly all wrong from its beginning."""
    wrong = beginning.wrong
    return (
        f"{wrong.num_groups} of the first {beginning.num_groups} groups have only wrong answers, and "
        f"{beginning.num_right / beginning.num_answers:.0%} of all answers are right{_cut_text(wrong, settings)}. "
        f"{_remedy(wrong)}.{_example_text(wrong)}"
    )


def _cut_text(streak: Streak, settings: QueueSettings) -> str:
    cut = ", ".join(
        f"{count / streak.num_answers:.0%} were cut at {_limit_text(limit, settings)}"
        for limit, count in streak.cuts.most_common()
    )
    return f"; {cut}" if cut else ""


def _example_text(streak: Streak) -> str:
    # It is shown on terminals and in logs, so control characters become spaces.
    shown = " ".join("".join(c if c.isprintable() else " " for c in streak.example).split())
    return f' One answer ends: "{shown}"' if shown else ""


def _remedy(streak: Streak) -> str:
    cause = cause_of(streak)
    if cause == "right":
        return (
            "They teach this model nothing: take harder prompts (data.train), or check that the reward does not accept "
            "every answer (reward.type)"
        )
    limit, count = max(streak.cuts.items(), key=lambda item: item[1], default=("", 0))
    if cause == "cut" or count > _MOSTLY * streak.num_answers:
        other = ", or set loss.mask_truncated = false: it leaves cut answers out of the loss" if cause == "cut" else ""
        return f"{_CUT_REMEDIES[limit]}{other}"
    if cause == "unjudged":
        return (
            "The reward returned None for each of them: let one of its functions judge these rows (reward.type, extra)"
        )
    if cause == "wrong":
        return (
            "Read an answer: if it is right, the reward misreads it (reward.type); if it answers another question, the "
            "chat template is wrong (async-rl doctor shows a rendered prompt); if its form is wrong, say the form in "
            "the prompt, or train it first (async-rl sft); else take easier prompts (data.train)"
        )
    if cause == "equal":
        return (
            "Only differences within a group train: let the reward tell better answers from worse ones, or raise "
            "sampling.temperature"
        )
    return (
        "Only differences within a group train: raise sampling.group_size, or take prompts that the model answers "
        "right now and then (data.train)"
    )


_CUT_REMEDIES: dict[str, str] = {
    "max_new_tokens": "Raise sampling.max_new_tokens, or let the prompt ask for shorter answers; if the answers are "
    "complete and go on, the model does not end its turns (async-rl doctor lists the tokens that end one)",
    "max_turn_tokens": "Raise environment.max_turn_tokens, or let the prompt ask for shorter answers",
    "context": "Raise sampling.max_prompt_tokens or sampling.max_new_tokens: the environment's states fill the context",
}


def _limit(num_sampled: int, last_turn: int, settings: QueueSettings) -> CutLimit:
    return cut_limit(
        num_sampled, last_turn, max_new_tokens=settings.sampling.max_new_tokens,
        max_turn_tokens=settings.max_turn_tokens,
    )  # fmt: skip


def _limit_text(limit: str, settings: QueueSettings) -> str:
    sampling = settings.sampling
    return {
        "max_new_tokens": f"sampling.max_new_tokens = {sampling.max_new_tokens}",
        "max_turn_tokens": f"environment.max_turn_tokens = {settings.max_turn_tokens}",
        "context": f"the context, {sampling.max_prompt_tokens + sampling.max_new_tokens} tokens",
    }[limit]
