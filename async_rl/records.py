"""The records that processes send each other. Prompts and leases go to generators, and groups of rollouts come back.

The records have only facts, such as tokens, masks, log-probabilities, versions and rewards. The learner computes
advantages and losses from them. ``T`` is the number of tokens of one sequence, including prompt and environment tokens.
The records are ``msgspec.Struct``s, because msgspec constructs a Struct ten times as fast as a dataclass, and encodes
and checks it in C. This module uses neither torch nor sockets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from async_rl.errors import DataError
from async_rl.routes import RouteArray
from async_rl.sampling_mask import SamplingMask

FinishReason = Literal["stop", "length", "error", "unjudged"]
WITHOUT_REWARD: tuple[FinishReason, ...] = ("error", "unjudged")
"""The finish reasons of rollouts without a reward: they failed, or the reward does not judge them."""
CutLimit = Literal["max_new_tokens", "max_turn_tokens", "context"]
"""What cut an answer: ``sampling.max_new_tokens``, ``environment.max_turn_tokens``, or the end of the context."""
LeaseKind = Literal["train", "eval"]

Count = Annotated[int, msgspec.Meta(ge=0)]
"""The type of a record's field that is an integer of at least 0."""
Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]
Float32Array = npt.NDArray[np.float32]

NO_VERSION = -1
"""The weights version of a token that no policy sampled, such as a prompt token or an environment's token."""


TEXT_ROLE = "text"
"""The ``role`` of the only message of a plain-text prompt, which the model continues without a chat template."""

TOOLS_ROLE = "tool schemas"
"""The ``role`` of a first message that is not part of the chat. Its content is the JSON text of the prompt's tools."""

DROPPED_KEY = "dropped columns"
"""The key of a prompt's ``reward_data`` for what could not be sent: a list of pairs (names from outside in, reason)."""


class RowFields(dict[str, Any]):
    """The fields of a row, as rewards and environments get them. To read a dropped one is an error with its reason."""

    def __init__(self, fields: Mapping[str, Any], dropped: Mapping[str, str]) -> None:
        super().__init__(fields)
        self._dropped = dropped

    def __missing__(self, key: str) -> NoReturn:
        if key in self._dropped:
            raise DataError(
                f"the row's field {key} was dropped when the data was read, because {self._dropped[key]} can't be sent "
                f"to a generator; store it as text"
            )
        raise KeyError(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self or key in self._dropped else default


def row_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``fields``, the data of a prompt, without the list at ``DROPPED_KEY``.

    The object that lacks a dropped field becomes ``RowFields``.
    """
    found = {key: value for key, value in fields.items() if key != DROPPED_KEY}
    if DROPPED_KEY not in fields:
        return found
    here: dict[str, str] = {}
    inside: dict[str, list[Any]] = {}
    for (name, *inner), reason in fields[DROPPED_KEY]:
        if inner:
            inside.setdefault(name, []).append((inner, reason))
        else:
            here[name] = reason
    for name, dropped in inside.items():
        found[name] = row_fields({**found[name], DROPPED_KEY: dropped})
    return RowFields(found, here)


class Prompt(msgspec.Struct, frozen=True):
    """One dataset row, with its position in the order in which the run uses the rows.

    Attributes:
        position: the prompt's index in that order, over all epochs, from 0. It never repeats within a run.
        row: the row's index in the loaded dataset, from 0. Malformed rows are skipped and do not count.
        epoch: the index of the pass over the dataset, or over the row's source, from 0.
        messages: the chat messages, each with ``role`` and ``content``.
        reward_data: the row's data that the reward needs, such as ``gt_answer``. ``row_fields`` makes of it what
            rewards and environments get.
        source: the name of the row's source, a key of the table ``data.train``. Empty if the data has no named sources.
    """

    position: int
    row: int
    epoch: int
    messages: tuple[Mapping[str, str], ...]
    reward_data: Mapping[str, Any]
    source: str = ""


class Sampling(msgspec.Struct, frozen=True):
    """The settings with which a generator samples one rollout. They are those of the config section ``sampling``.

    ``temperature`` 0 means greedy decoding. ``top_p`` 1, ``top_k`` 0 and ``min_p`` 0 switch these limits off.
    ``stop_token_ids`` end a rollout in addition to the model's own end tokens.
    """

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    max_prompt_tokens: int
    stop: tuple[str, ...]
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()

    @property
    def keeps_all(self) -> bool:
        """Whether any token of the vocabulary can be sampled: top-p, top-k and min-p are off, or decoding is greedy."""
        return self.temperature == 0 or (self.top_p == 1 and self.top_k == 0 and self.min_p == 0)


class Lease(msgspec.Struct, frozen=True):
    """A generator's permission to sample one group of rollouts for one prompt.

    ``min_version`` is the oldest weights version that may sample the group. ``max_staleness`` is the limit of
    staleness, in versions, that was in force when the lease was given. ``seed`` and a rollout's index in the group
    determine all random numbers of that rollout, on any generator. ``wants_routes`` asks for the rollouts' routes
    (``async_rl.routes``).
    """

    lease_id: str
    kind: LeaseKind
    prompt: Prompt
    group_size: int
    sampling: Sampling
    lineage: str
    min_version: int
    max_staleness: int
    attempt: int
    seed: int
    wants_routes: bool = False

    @property
    def wants_sampling_mask(self) -> bool:
        """Whether the group needs sampling masks: the lease is for training, and its sampling leaves tokens out."""
        return self.kind == "train" and not self.sampling.keeps_all


class TeacherScores(msgspec.Struct, frozen=True, eq=False):
    """What a teacher says of the sampled tokens of a sequence, at the sampling temperature. S = sampled tokens.

    Attributes:
        logprobs: float32 [S, 1 + K], nats: the teacher's log-probabilities of the sampled token, then of its K
            likeliest tokens.
        top_ids: int32 [S, K], the ids of these.
    """

    logprobs: Float32Array
    top_ids: Int32Array

    @property
    def top_k(self) -> int:
        """K."""
        return self.top_ids.shape[1]


class EngineColumns(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """What an inference engine may say of the tokens of a sequence besides ids, log-probabilities and versions.

    Attributes:
        sampling_mask: for each sampled token, the set of token ids that top-p and top-k left; the behavior
            log-probability is normalised over this set. None if top-p and top-k left every token.
        routes: uint8 or uint16 [P, L, K], the experts that computed the first P tokens (``async_rl.routes``). None
            unless the lease wants routes.
    """

    sampling_mask: SamplingMask | None = None
    routes: RouteArray | None = None


class TokenSequence(EngineColumns, frozen=True, eq=False):
    """One contiguous sequence of tokens: the context that the policy saw and the tokens that it sampled.

    Attributes:
        token_ids: int32 [T].
        loss_mask: bool [T], True on tokens that the policy sampled.
        behavior_logprobs: float32 [T], log-probabilities of the sampled tokens in nats. They are 0 where ``loss_mask``
            is False.
        versions: int32 [T], the weights version that sampled each token. It is ``NO_VERSION`` where ``loss_mask`` is
            False.
        teacher: what the run's teacher says of the sampled tokens. None without a teacher.
    """

    token_ids: Int32Array
    loss_mask: BoolArray
    behavior_logprobs: Float32Array
    versions: Int32Array
    teacher: TeacherScores | None = None

    def __post_init__(self) -> None:
        if misfit := why_columns_misfit(self):
            raise ValueError(f"a token sequence: {misfit}; this is a bug in async-rl, please report it")


class TokenColumn(NamedTuple):
    """How an array of ``TokenSequence`` is sent, and how much room it needs.

    Attributes:
        dtypes: those that it may have.
        per: what has a row of it: every token (then the array is [T]), every sampled token, every token that the engine
            has computed (the first ones), or every word of a sampling mask.
        when: the setting with which it is present. Empty if it always is.
        given: its value for tokens that the policy did not sample, if every token has one.
        num_axes: the number of its axes.
    """

    dtypes: tuple[np.dtype[Any], ...]
    per: Literal["token", "sampled", "computed", "word"] = "token"
    when: str = ""
    given: float = 0
    num_axes: int = 1

    @property
    def dtype(self) -> np.dtype[Any]:
        """The only dtype, or the first."""
        return self.dtypes[0]


_INT32, _FLOAT32 = (np.dtype("<i4"),), (np.dtype("<f4"),)
_EXPERTS = (np.dtype("|u1"), np.dtype("<u2"))
_LIMITS = "sampling.top_p, top_k or min_p"
TOKEN_COLUMNS: Mapping[str, TokenColumn] = MappingProxyType({
    "token_ids": TokenColumn(_INT32),
    "loss_mask": TokenColumn((np.dtype("|b1"),)),
    "behavior_logprobs": TokenColumn(_FLOAT32),
    "versions": TokenColumn(_INT32, given=NO_VERSION),
    "sampling_mask.sizes": TokenColumn(_INT32, "sampled", _LIMITS),
    "sampling_mask.words": TokenColumn(_INT32, "word", _LIMITS),
    "routes": TokenColumn(_EXPERTS, "computed", "model.routing_replay", num_axes=3),
    "teacher.logprobs": TokenColumn(_FLOAT32, "sampled", "distill", num_axes=2),
    "teacher.top_ids": TokenColumn(_INT32, "sampled", "distill", num_axes=2),
})  # fmt: skip
"""The arrays that a rollout carries from the sampler to the learner, by their names: attributes of ``TokenSequence``,
which documents them, or of a record there. The codec, the generators' sequences and the queue's estimates of bytes read
this table. Messages have the arrays in its order."""
PER_TOKEN: Mapping[str, TokenColumn] = MappingProxyType({n: c for n, c in TOKEN_COLUMNS.items() if c.per == "token"})
"""The columns with a value for every token."""
BYTES_PER_TOKEN = sum(column.dtype.itemsize for column in PER_TOKEN.values())
"""Size of these columns in a group's message, in bytes."""
_ALIGNED = tuple(PER_TOKEN)
_UNALIGNED = [(*n.partition(".")[::2], c) for n, c in TOKEN_COLUMNS.items() if c.per in ("sampled", "computed")]


def column_of(sequences: Iterable[TokenSequence], name: str) -> list[np.ndarray]:
    """Return the array with this name in ``TOKEN_COLUMNS`` of each sequence that has one."""
    values: list[Any] = list(sequences)
    for attribute in name.split("."):
        values = [value for each in values if (value := getattr(each, attribute)) is not None]
    return values


def why_columns_misfit(sequence: TokenSequence) -> str:
    """Return why the columns of ``sequence`` are not those of its tokens; empty if they are."""
    shape = (len(sequence.token_ids),)
    for name in _ALIGNED:
        array = getattr(sequence, name)
        if array is not None and array.shape != shape:
            return f"expected {name} of {shape[0]} tokens, got {list(array.shape)}"
    for field, part, column in _UNALIGNED:
        value = getattr(sequence, field)
        if value is None:
            continue
        array = getattr(value, part) if part else value
        is_computed = column.per == "computed"
        limit = shape[0] if is_computed else int(np.count_nonzero(sequence.loss_mask))
        if array.ndim != column.num_axes or len(array) > limit or (not is_computed and len(array) < limit):
            name, rows = f"{field}.{part}".rstrip("."), f"{'at most ' if is_computed else ''}{limit}"
            return f"expected {name} of {rows} {column.per} tokens, got {list(array.shape)}"
    teacher = sequence.teacher
    if teacher is not None and teacher.logprobs.shape[1] != 1 + teacher.top_k:
        return f"expected teacher.logprobs of 1 + {teacher.top_k} tokens, got {list(teacher.logprobs.shape)}"
    return ""


class Turn(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One answer of the policy in a rollout with an environment.

    Attributes:
        num_tokens: the number of tokens that the policy sampled for this answer.
        reward: the environment's reward for this answer. It belongs to the last of these tokens.
        score: a figure from the environment that is only logged.
    """

    num_tokens: Count
    reward: float
    score: float


class Span(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A part of an answer that a reward function has judged by itself (a process reward).

    Attributes:
        end: the number of the rollout's sampled tokens up to the end of the span, from 1 on.
        reward: the span's reward. It belongs to the last of these tokens.
    """

    end: Count
    reward: float


_Name = Annotated[str, msgspec.Meta(max_length=64)]
_Counts = Annotated[dict[_Name, Count], msgspec.Meta(max_length=64)]
_Names = Annotated[tuple[_Name, ...], msgspec.Meta(max_length=64)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class AgentSession(msgspec.Struct, frozen=True):
    """What an agent did in one rollout, for people.

    Attributes:
        calls: the number of its calls by kind: first, continued, branched, rewritten, and lost.
        tools: the number of calls of each tool that the model's answers asked for. Empty without chats.
        sampling_s: seconds in which at least one call waited for its answer.
        agent_s: the other seconds of the session, in which the agent worked by itself.
        without_effect: the fields of its calls that had no effect.
    """

    calls: _Counts
    tools: _Counts
    sampling_s: _Seconds
    agent_s: _Seconds
    without_effect: _Names = ()


class Rollout(msgspec.Struct, frozen=True, eq=False):
    """One complete answer to a prompt, with its rewards.

    Attributes:
        sequences: the token sequences of the answer.
        reward_parts: rewards by name. Their sum is ``reward``.
        accuracy: 1.0 for a correct answer, 0.0 for a wrong answer, a number in between for a partly correct answer.
            Reward shaping does not change it. A number outside 0..1 is the unscaled reward of a reward function without
            an accuracy of its own.
        finish_reason: why sampling ended, or why there is no reward (``WITHOUT_REWARD``).
        extracted: the final answer that was found in the text; None if the text has no final answer.
        turns: the policy's answers in their order if the run has an environment, else empty.
        spans: the parts that a reward function judged by themselves, in order. Their rewards are in ``reward_parts``,
            too. Empty if there are none.
        session: what its agent did; None without one.
        metrics: numbers by name that an agent reported. They are only logged.
    """

    sequences: tuple[TokenSequence, ...]
    reward_parts: Mapping[str, float]
    accuracy: float
    finish_reason: FinishReason
    extracted: str | None = None
    turns: tuple[Turn, ...] = ()
    spans: tuple[Span, ...] = ()
    session: AgentSession | None = None
    metrics: Mapping[str, float] = msgspec.field(default_factory=dict)

    @property
    def score(self) -> float:
        """The sum of the scores of all turns; 0 if the rollout has no turns."""
        return float(sum(turn.score for turn in self.turns))

    @property
    def reward(self) -> float:
        return float(sum(self.reward_parts.values()))

    @property
    def num_sampled(self) -> int:
        return sum(int(np.count_nonzero(s.loss_mask)) for s in self.sequences)

    @property
    def oldest_version(self) -> int:
        """The oldest weights version that sampled a token of the rollout; ``NO_VERSION`` if no token was sampled."""
        oldest = [int(s.versions[s.loss_mask].min()) for s in self.sequences if s.loss_mask.any()]
        return min(oldest, default=NO_VERSION)


def cut_limit(num_sampled: int, last_turn: int, *, max_new_tokens: int, max_turn_tokens: int | None) -> CutLimit:
    """Return which limit cut a rollout whose finish reason is ``length``.

    Args:
        num_sampled: number of tokens that the policy sampled.
        last_turn: number of those in the rollout's last turn, which are all without an environment.
        max_new_tokens: the value of ``sampling.max_new_tokens``.
        max_turn_tokens: the value of ``environment.max_turn_tokens``. None: no limit.
    """
    if num_sampled >= max_new_tokens:
        return "max_new_tokens"
    return "max_turn_tokens" if max_turn_tokens is not None and last_turn >= max_turn_tokens else "context"


def why_parts_misfit(num_sampled: int, turn_tokens: Sequence[int], span_ends: Sequence[int]) -> str:
    """Return why the turns or spans of a rollout of ``num_sampled`` tokens can't be; empty if they can.

    Args:
        num_sampled: number of tokens that the policy sampled.
        turn_tokens: of each turn, the number of its tokens. Empty without an environment.
        span_ends: of each span, the token that it ends with, counted from 1. Empty if there are none.
    """
    if turn_tokens and span_ends:
        return "expected turns or spans, got both"
    if turn_tokens and (min(turn_tokens) < 1 or sum(turn_tokens) != num_sampled):
        return f"expected turns of its {num_sampled} sampled tokens, at least one each, got {list(turn_tokens)}"
    if span_ends and (span_ends[0] < 1 or span_ends[-1] > num_sampled or any(a >= b for a, b in pairwise(span_ends))):
        return f"expected ends of spans from 1 to its {num_sampled} sampled tokens, ascending, got {list(span_ends)}"
    return ""


class Group(msgspec.Struct, frozen=True, eq=False):
    """All rollouts that a generator sampled for one prompt under one lease.

    Groups are delivered whole, advantages are computed within a group, and the queue's ledger counts groups.
    ``weights_digest`` maps each weights version that sampled tokens of the group to the digest of that version's
    weights, as the generator computed it. The learner refuses a group with a digest that it did not publish.
    ``example`` is the end of one answer's text, if the answers say little about each other: they are equally accurate,
    or all cut. Else it is empty. ``kept`` is the answer of ``queue.filter_function``.
    """

    lease_id: str
    kind: LeaseKind
    position: int
    generator_id: str
    lineage: str
    temperature: float
    rollouts: tuple[Rollout, ...]
    weights_digest: Mapping[int, str] = msgspec.field(default_factory=dict)
    sampling_time_s: float = 0.0
    example: str = ""
    kept: bool = True

    @property
    def oldest_version(self) -> int:
        """The oldest weights version that sampled a token of the group; ``NO_VERSION`` if no token was sampled."""
        known = [v for r in self.rollouts if (v := r.oldest_version) != NO_VERSION]
        return min(known, default=NO_VERSION)

    @property
    def num_sampled(self) -> int:
        return sum(r.num_sampled for r in self.rollouts)
