"""Rollouts of agents: each rollout of a lease is a session, whose calls join the running batch of the backend.

A session's key is made when its lease begins, and ends with it. The agent is a process of the ``EnvironmentPool``, or
what that process starts; it gets the key and the endpoint's address, and calls as often as it likes. Each call is a
request to the backend beside all others: the same sampler, versions and updates of weights in mid-answer.
``session_tokens`` turns the calls into sequences. When the agent has ended, the rollout has the reward that the agent
returned, or that of the run's reward functions.

While the agent works by itself its rollout holds no slot of the backend. Its lease counts in the queue's admission all
the same, and does not expire as long as the session keeps its limits: ``environment.timeout_s`` without a running call,
and ``environment.session_timeout_s`` in all.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
from msgspec import to_builtins
from msgspec.structs import replace

from async_rl.config.generator import MAX_SESSION_CALLS, EnvironmentConfig
from async_rl.environments.pool import EnvironmentPool, Event
from async_rl.extensions.agents.calls import others_in, reply_to, request_of, wrong_in
from async_rl.extensions.agents.front.messages import (
    NO_LINE,
    Accept,
    Answered,
    Call,
    Claimed,
    ClosedFor,
    Delivered,
    Ended,
    Finish,
    OfPrograms,
    Outside,
    Piece,
    Refuse,
)
from async_rl.extensions.agents.front.process import Front, FrontLost
from async_rl.extensions.agents.outside_programs import OutsidePrograms
from async_rl.extensions.agents.session import KEY_BYTES, OpenSession, Outcome
from async_rl.extensions.agents.session_tokens import Limits, MustWaitError, NoRoomError, SessionTokens
from async_rl.generator.backend import Sampled, TellingBackend
from async_rl.generator.environment_rollouts import prompt_text, start_message
from async_rl.generator.rollouts import Graded, Pending, Played, ThreadGrader, turns_of
from async_rl.process.fault_points import fault_point
from async_rl.queue.messages import Failure
from async_rl.records import FinishReason, Lease, Rollout, Sampling

logger = logging.getLogger(__name__)

SESSIONS_PER_SLOT = 4
"""A generator has at most this many sessions for each sequence that its backend runs at once."""
_CHECK_S = 0.1
"""Time between two looks for silent agents and for what was sampled of streamed answers. The loop calls ``collect`` in
each turn, so it must cost little."""
_NO_LOGPROB = -9999.0
"""What vLLM reports where it has no log-probability."""


class Engine(Protocol):
    """The methods of ``generator.backend.Backend`` that sessions use."""

    @property
    def max_running(self) -> int: ...
    def submit(self, lease: Lease, prompt_ids: np.ndarray) -> None: ...
    def cancel(self, lease_id: str) -> None: ...
    def progress(self) -> dict[str, int]: ...


Render = Callable[[Sequence[Mapping[str, str]]], str]


class AgentRollouts:
    """Plays leases with agents. It implements ``generator.rollouts.RolloutSource``.

    Args:
        engine: samples the answers.
        pool: runs the agents, or offers their sessions to programs elsewhere.
        front: the HTTP front.
        grader: scores the rollouts whose agents return no reward.
        render: returns the messages of a row as text.
        config: the section ``[environment]``.
        trained: the settings of training. A call in an evaluation may name them, and is sampled with the evaluation's.
        vocab_size: token ids must be below it; None for no limit.
        judged_by: the fields that the run's reward functions need of a row.
        max_abs: a rollout with a larger reward, in absolute value, fails.
        clock: returns the time in seconds.
    """

    pending: Pending = "environment"

    def __init__(
        self, engine: Engine, pool: EnvironmentPool | OutsidePrograms, front: Front, grader: ThreadGrader,
        render: Render, config: EnvironmentConfig, trained: Sampling, *, vocab_size: int | None = None,
        judged_by: Collection[str] = (), max_abs: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._engine, self._pool, self._front, self._grader, self._render = engine, pool, front, grader, render
        self._config, self._vocab_size, self._max_abs, self._clock = config, vocab_size, max_abs, clock
        self._judged_by, self._trained = judged_by, trained
        self._noted: set[str] = set()
        self._sessions: dict[str, OpenSession] = {}
        self._by_key: dict[str, OpenSession] = {}
        self._by_request: dict[str, tuple[OpenSession, int]] = {}
        self._by_call: dict[int, OpenSession] = {}
        self._streamed: dict[str, int] = {}
        """How many tokens were told of the answer to a request that is streamed."""
        self._ended: list[OpenSession] = []
        self._check_at_s = -math.inf
        self._may_begin = False
        self._done: list[Graded] = []
        self._counts: Counter[str] = Counter()
        self._sampling_s = self._own_s = 0.0
        self._num_beats = 0

    @property
    def num_open(self) -> int:
        calling = sum(bool(one.requests or one.waiting) or one.is_unclaimed for one in self._sessions.values())
        running = len(self._by_request)
        spare = (SESSIONS_PER_SLOT - 1) * self._engine.max_running
        return max(running, calling, len(self._sessions) - spare)

    @property
    def num_pending(self) -> int:
        calling = {session.rollout_key for session, _ in self._by_request.values()}
        return len(self._sessions) - len(calling) + self._grader.num_pending

    @property
    def trouble(self) -> str:
        """Why agents don't start; empty if nothing is known to be wrong."""
        return self._pool.trouble

    @property
    def num_waiting(self) -> int:
        """The number of rollouts that wait for another process without a time limit: for a program elsewhere."""
        return sum(session.is_offered for session in self._sessions.values())

    def counters(self) -> Mapping[str, int]:
        """Return how many calls the sessions that have ended made, by how they relate to the calls before, what was
        lost, how many tools were called, and the sums of their seconds with and without a call.
        """
        counts = {f"agent/{name}": number for name, number in self._counts.items()}
        if counts:
            counts |= {"agent/sampling_s": int(self._sampling_s), "agent/own_s": int(self._own_s)}
        return counts

    def encode(self, lease: Lease) -> np.ndarray:
        """Return no tokens: an agent makes its prompts itself."""
        return np.zeros(0, np.int32)

    def submit(self, lease: Lease, prompt_ids: np.ndarray) -> None:
        """Open a session for each rollout of the lease, and start its agent."""
        prompt = prompt_text(lease.prompt.messages, self._render)
        new = [self._new_session(lease, index) for index in range(lease.group_size)]
        self._front.open(session.key for session in new)
        # The front takes the calls of a lease's sessions, their agents are not started.
        fault_point("generator.session_opened")
        for session in new:
            url = f"{self._front.url}/s/{session.key}/v1"
            endpoint = {
                "base_url": url, "api_key": session.key, "command": list(self._config.command),
                "finish_key": session.finish_key, "sandbox": self._config.sandbox,
            }  # fmt: skip
            start = start_message(self._config, lease, session.index, prompt)
            self._pool.start(session.rollout_key, {**start, "endpoint": endpoint})

    def cancel(self, lease_id: str) -> None:
        for session in [one for one in self._sessions.values() if one.lease.lease_id == lease_id]:
            self._pool.cancel(session.rollout_key)
            self._close(session, "stopped")
        self._grader.forget(lease_id)

    def take(self, sampled: Iterable[Sampled]) -> None:
        for sample in sampled:
            found = self._by_request.pop(sample.lease_id, None)
            if found is None:
                continue
            session, call = found
            del session.requests[call]
            self._may_begin = True
            session.note_calls(self._clock())
            if not np.isfinite(sample.logprobs).all() or (sample.logprobs == _NO_LOGPROB).any():
                self._pool.cancel(session.rollout_key)
                self._fail(session, "the engine returned a log-probability that is missing or not finite")
                continue
            session.tokens.answer(call, sample)
            # An answer is in its session's sequences, the front does not have it.
            fault_point("generator.call_answered")
            self._front.reply(reply_to(call, sample))
        self._begin_waiting()

    def collect(self) -> list[Graded]:
        for message in self._front.poll():
            if isinstance(message, FrontLost):
                self._lose_all()
            elif isinstance(message, Call):
                self._receive(message)
            elif isinstance(message, Finish):
                self._receive_reward(message)
            elif isinstance(message, OfPrograms):
                self._follow_program(message)
            elif isinstance(message, Answered):
                session = self._by_call.get(message.call)
                if session is not None and (said := session.said.pop(message.call, None)) is not None:
                    session.transcript.add(said, message)
            elif (session := self._by_call.pop(message.call, None)) is not None:
                if isinstance(message, Delivered):
                    session.tokens.deliver(message.call)
                else:
                    self._lose(session, message.call)
        for event in self._pool.poll():
            if (session := self._sessions.get(event.key)) is not None:
                self._end(session, event)
        for session in [one for one in self._ended if not one.tokens.doubtful]:
            assert session.outcome is not None
            self._finish(session, session.outcome)
        self._begin_waiting()
        if (now_s := self._clock()) >= self._check_at_s:
            self._check_at_s = now_s + _CHECK_S
            for session in list(self._sessions.values()):
                self._check_silence(session, now_s)
            self._tell()
        done, self._done = self._done, []
        return done + self._grader.collect()

    def progress(self) -> dict[str, int]:
        """Return for each lease id a count that grows while a session of the lease is open, which has limits of its
        own.
        """
        self._num_beats += 1
        sampled = self._engine.progress()
        counts: dict[str, int] = {}
        for session in self._sessions.values():
            running = sum(sampled.get(request, 0) for request in session.requests.values())
            found = counts.get(session.lease.lease_id, self._num_beats)
            counts[session.lease.lease_id] = found + session.tokens.num_sampled + running
        return counts

    def _new_session(self, lease: Lease, index: int) -> OpenSession:
        sampling = lease.sampling
        longest = sampling.max_prompt_tokens + sampling.max_new_tokens
        limits = Limits(
            first_prompt=sampling.max_prompt_tokens, sampled=sampling.max_new_tokens, sequence=longest,
            rollout=self._config.max_rollout_tokens or longest, answer=self._config.max_turn_tokens,
        )  # fmt: skip
        now_s = self._clock()
        session = OpenSession(
            f"{lease.lease_id}/{index}", secrets.token_urlsafe(KEY_BYTES), lease, index, SessionTokens(limits),
            begin_s=now_s, quiet_since_s=now_s, is_offered=isinstance(self._pool, OutsidePrograms),
        )  # fmt: skip
        self._sessions[session.rollout_key] = self._by_key[session.key] = session
        return session

    # Calls.

    def _receive(self, call: Call) -> None:
        session = self._by_key.get(call.key)
        if session is None:
            return  # the front has got the session's end meanwhile, and answers with it
        self._by_call[call.call] = session
        if session.num_received == MAX_SESSION_CALLS:
            self._refuse(call, f"a session has at most {MAX_SESSION_CALLS} calls", "too_many_calls", "")
            return
        session.num_received += 1
        session.note_without_effect(call.without_effect)
        if (wrong := wrong_in(call, self._vocab_size)) is not None:
            self._refuse(call, *wrong)
            return
        used, is_eval = session.lease.sampling, session.lease.kind == "eval"
        others = others_in(call, {"eval": used, "sampling": self._trained} if is_eval else {"sampling": used})
        if others and call.is_trained and self._config.other_settings == "refuse":
            name, text = next(iter(others.items()))
            text = f"{text}: the run can't train on what is sampled otherwise; leave it out, or set "
            self._refuse(call, f"{text}environment.other_settings", "unsupported", name)
            return
        call = self._settled(call, others)
        session.note_without_effect(name for name in others if name not in call.settings)
        session.waiting.append(call)
        session.note_calls(self._clock())
        self._may_begin = True

    def _settled(self, call: Call, others: Mapping[str, str]) -> Call:
        """Return a call with the settings that it is sampled with beside the run's. Log ``others`` of them once."""
        is_trained = call.is_trained and not (others and self._config.other_settings == "untrained")
        for name in others.keys() - self._noted if call.is_trained else ():
            self._noted.add(name)
            what = "the run's is used" if is_trained else "such calls are not trained on"
            logger.warning("agents' calls: %s; %s (environment.other_settings)", others[name], what)
        asked = {} if is_trained else {name: call.settings[name] for name in others}
        if "top_k" in asked:
            asked["top_k"] = max(0, int(asked["top_k"]))
        return replace(call, is_trained=is_trained, settings=asked)

    def _receive_reward(self, given: Finish) -> None:
        """Take a session's reward, which counts when its agent ends without one. It may be repeated."""
        session = self._by_key.get(given.key)
        if session is None:
            return
        outcome = Outcome(given.reward, given.score)
        if not secrets.compare_digest(given.finish_key.encode(), session.finish_key.encode()):
            text = "expected the session's second key as the API key, which its agent does not hold, got another one"
            self._front.reply(Refuse(given.call, 401, text, "wrong_finish_key"))
        elif session.reported not in (None, outcome):
            self._front.reply(Refuse(given.call, 409, "this session has another reward already", "finished"))
        else:
            session.reported = outcome
            fault_point("generator.reward_reported")  # a session's reward is noted, the one who reported it is not told
            self._front.reply(Accept(given.call))

    def _begin_waiting(self) -> None:
        """Begin calls while the backend has free slots. A session with few running calls comes first, so that one that
        calls often keeps no other one waiting. The calls of a session begin in their order.
        """
        if not self._may_begin:
            return
        self._may_begin = False
        ready = [session for session in self._sessions.values() if session.waiting]
        while ready and len(self._by_request) < self._engine.max_running:
            session = min(ready, key=lambda one: len(one.requests))
            if not self._begin_first(session) or not session.waiting:
                ready.remove(session)

    def _begin_first(self, session: OpenSession) -> bool:
        """Begin or refuse the first waiting call of a session. Return False if it must wait for others."""
        call = session.waiting[0]
        ids = np.frombuffer(call.token_ids, np.int32)
        try:
            if call.is_trained:
                line = NO_LINE if call.said is None else call.said.line
                room = session.tokens.begin(call.call, ids, call.max_tokens, line)
            else:
                room = session.tokens.begin_untrained(call.call, len(ids), call.max_tokens)
        except MustWaitError:
            return False
        except NoRoomError as error:
            self._refuse_for_room(session, session.waiting.popleft(), error)
            session.note_calls(self._clock())
            return True
        session.waiting.popleft()
        self._sample(session, call, ids, room)
        return True

    def _sample(self, session: OpenSession, call: Call, ids: np.ndarray, max_tokens: int) -> None:
        request = request_of(session, call, max_tokens)
        session.num_begun += 1
        session.requests[call.call] = request.lease_id
        if call.is_answer:
            session.tokens.named = call.call
        if call.said is not None:
            session.said[call.call] = call.said
        self._by_request[request.lease_id] = session, call.call
        if call.is_streamed:
            self._streamed[request.lease_id] = 0
        self._engine.submit(request, ids)
        fault_point("generator.call_begun")  # the engine has a call, and has sampled nothing for it

    def _tell(self) -> None:
        """Tell the front what was sampled of streamed answers since the last time."""
        self._streamed = {one: count for one, count in self._streamed.items() if one in self._by_request}
        if not self._streamed or not isinstance(self._engine, TellingBackend):
            return
        for request, token_ids in self._engine.tokens_after(self._streamed).items():
            if len(token_ids):
                self._streamed[request] += len(token_ids)
                self._front.reply(Piece(self._by_request[request][1], token_ids.astype("<i4").tobytes()))

    def _refuse(self, call: Call, message: str, code: str, param: str) -> None:
        self._by_call.pop(call.call, None)
        self._front.reply(Refuse(call.call, 400, message, code, param))

    def _refuse_for_room(self, session: OpenSession, call: Call, error: NoRoomError) -> None:
        sampling = session.lease.sampling
        longest = sampling.max_prompt_tokens + sampling.max_new_tokens
        # OpenAI's words: clients tell by them, not by the code, that to call again is of no use.
        text = f"This model's maximum context length is {longest} tokens, and the rollout has its limits: {error}"
        self._refuse(call, text, "context_length_exceeded", "token_ids")
        if error.key == "sampling.max_prompt_tokens":
            # As for an environment: the row is too long for this run.
            self._pool.cancel(session.rollout_key)
            self._close(session, "ended")
            self._done.append(Graded(session.lease, session.index, None, Failure("prompt_too_long", str(error))))
        session.is_cut |= call.is_trained

    def _lose(self, session: OpenSession, call: int) -> None:
        """End a call whose client has gone, at whatever stage it is."""
        session.waiting = deque(one for one in session.waiting if one.call != call)
        if (request := session.requests.pop(call, None)) is not None:
            del self._by_request[request]
            self._engine.cancel(request)
        session.said.pop(call, None)
        session.tokens.lose(call)
        session.note_calls(self._clock())
        self._may_begin = True

    def _lose_all(self) -> None:
        """End all calls, because the front has died with their connections."""
        calls, self._by_call = self._by_call, {}
        for call, session in calls.items():
            self._lose(session, call)
        if isinstance(self._pool, OutsidePrograms):
            for session in [one for one in self._sessions.values() if not one.is_offered and one.outcome is None]:
                text = "the HTTP front has died, by which the session's program, on another machine, made its calls"
                self._end(session, Event(session.rollout_key, {"type": "failed", "error": text, "is_transient": True}))

    def _follow_program(self, message: OfPrograms) -> None:
        """Note what a program elsewhere has done: it has taken a session, given it back, or ended."""
        assert isinstance(self._pool, OutsidePrograms)
        if isinstance(message, Outside):
            self._pool.problem = message.problem
        elif (session := self._by_key.get(message.key)) is None:
            return
        elif isinstance(message, Claimed):
            session.is_offered = not message.is_taken
            session.begin_s = session.quiet_since_s = self._clock()
            self._pool.note(session.rollout_key, is_taken=message.is_taken)
        elif isinstance(message, Ended):
            self._pool.cancel(session.rollout_key)
            said = to_builtins(message) | {"type": "failed" if message.error else "ended"}
            self._end(session, Event(session.rollout_key, said))

    # Ends.

    def _end(self, session: OpenSession, event: Event) -> None:
        """Note that the agent has ended. What it still asks for is stopped."""
        said = event.message
        if event.type != "ended" and session.is_cut and session.tokens.num_sampled:
            # It had no room for another call, and did not catch that. A row may have nothing to judge its answer by.
            is_judged = all(name in session.lease.prompt.reward_data for name in self._judged_by)
            event = Event(event.key, {"type": "ended"} | ({} if is_judged else {"reward": 0.0}))
            said = event.message
        if event.type != "ended":
            self._counts[f"failed_{said.get('kind', 'other')}"] += 1
            texts = {key: str(said.get(key, "")) for key in ("error", "detail", "place")}
            self._fail(
                session, texts["error"], texts["detail"], texts["place"], is_transient=bool(said.get("is_transient"))
            )
            return
        returned = Outcome(said.get("reward"), said.get("score"), said.get("metrics") or {})
        session.outcome = returned if session.reported is None else session.reported
        self._ended.append(session)
        self._front.close_session(session.key, "ended")
        self._by_key.pop(session.key, None)
        for call in [*session.requests, *(one.call for one in session.waiting)]:
            self._by_call.pop(call, None)
            self._lose(session, call)
        # An agent has ended and its calls are stopped, its rollout is not judged.
        fault_point("generator.session_ended")

    def _check_silence(self, session: OpenSession, now_s: float) -> None:
        """Fail a session whose agent has not called for too long, or, elsewhere, plays for too long."""
        if session.outcome is not None or session.is_offered:
            return
        if isinstance(self._pool, EnvironmentPool) and self._pool.awaits_fork(session.rollout_key):
            session.begin_s = session.quiet_since_s = now_s
            return
        longest_s = self._config.session_timeout_s
        if isinstance(self._pool, OutsidePrograms) and now_s - session.begin_s > longest_s:
            error = f"the agent played for environment.session_timeout_s = {longest_s:g} s; raise the key"
            self._fail(session, error, reason="expired")
            return
        if session.requests or session.waiting:
            return
        key = "first_reset_timeout_s" if session.is_unclaimed else "timeout_s"
        limit_s = getattr(self._config, key)
        if now_s - session.quiet_since_s > limit_s:
            what = "made no call" if session.is_unclaimed else "made no further call"
            error = f"the agent {what} for environment.{key} = {limit_s:g} s; raise the key, or make the agent faster"
            self._pool.cancel(session.rollout_key)
            self._fail(session, error, reason="expired")

    def _finish(self, session: OpenSession, outcome: Outcome) -> None:
        tokens, lease = session.tokens, session.lease
        if not tokens.num_sampled:
            what = "a cache of its own, as DSPy's by default, may have answered"
            if num_untrained := tokens.kinds["untrained"]:
                what = f"{num_untrained} were, and are not trained on (their models' names or settings)"
            text = "the agent ended without an answer: it made no call that was answered"
            self._fail(session, f"{text}; {what}")
            return
        last = tokens.last
        reason: FinishReason = "length" if session.is_cut else last.finish_reason
        sequences = tokens.sequences()
        if outcome.reward is None:
            sampled = np.concatenate([one.token_ids[one.loss_mask] for one in sequences])
            turns = tuple(tokens.turn_tokens)
            self._close(session, "ended")
            played = Played(
                session.index, last.text, sampled, reason, sequences, turns,
                transcript=session.transcript.messages(last.call), session=session.summary(self._clock()),
                prompt_opened=last.prompt_opened,
            )  # fmt: skip
            self._grader.submit(lease, played)
            return
        reward, score = outcome.reward, outcome.reward if outcome.score is None else outcome.score
        if max(abs(reward), abs(score)) > self._max_abs:
            self._fail(
                session,
                f"expected a reward and a score of at most reward.max_abs = {self._max_abs:g}, got {reward:g} and "
                f"{score:g}",
            )
            return
        self._close(session, "ended")
        rollout = Rollout(
            sequences, {"environment": reward}, min(1.0, max(0.0, score)), reason,
            turns=turns_of(tokens.turn_tokens, reward, score), session=session.summary(self._clock()),
            metrics=outcome.metrics,
        )  # fmt: skip
        self._done.append(Graded(lease, session.index, rollout, text=last.text))

    def _fail(
        self, session: OpenSession, error: str, detail: str = "", place: str = "", *, is_transient: bool = False,
        reason: ClosedFor = "ended",
    ) -> None:  # fmt: skip
        """End a rollout that failed. Log ``error``; report ``detail`` (by default ``error``) and the rest."""
        where = session.lease.prompt.position
        logger.warning("an agent failed on position %d, %s: %s", where, session.rollout_key, error)
        self._close(session, reason)
        failure = Failure("environment_error", detail or error, place, is_transient)
        failed = Rollout(session.tokens.sequences(), {"environment": 0.0}, 0.0, "error")
        self._done.append(Graded(session.lease, session.index, failed, failure, text=session.tokens.last.text))

    def _close(self, session: OpenSession, reason: ClosedFor) -> None:
        """Forget a session: its key is refused from now on, and its calls are stopped."""
        self._front.close_session(session.key, reason)
        for request in session.requests.values():
            del self._by_request[request]
            self._engine.cancel(request)
        for call in (*session.requests, *(one.call for one in session.waiting), *session.tokens.doubtful):
            self._by_call.pop(call, None)
        session.requests.clear()
        session.waiting.clear()
        self._may_begin = True
        self._by_key.pop(session.key, None)
        self._sessions.pop(session.rollout_key, None)
        if session.outcome is not None:
            self._ended.remove(session)
        found = session.summary(self._clock())
        self._counts.update(found.calls, sessions=1, tool_calls=sum(found.tools.values()))
        self._sampling_s += found.sampling_s
        self._own_s += found.agent_s
