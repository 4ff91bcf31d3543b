"""The reward of a judge: what it is asked, how its verdict is read, and that its absence pauses grading."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.judge import JudgeConfig
from async_rl.errors import ConfigError, RewardError
from async_rl.generator.rollouts import ThreadGrader
from async_rl.rewards.conformance import Example, check_reward
from async_rl.rewards.judge import JudgeReward, read_score
from async_rl.rewards.judge_client import JudgeClient
from async_rl.rewards.records import RewardInput
from async_rl.rewards.registry import RewardSum
from tests.end_to_end.harness import wait_until
from tests.generator.leases import make_lease
from tests.generator.test_grading import sample
from tests.rewards.served_judge import Handler, Judge, Reply, completion, judge

RUBRIC = "Q {prompt} A {answer} R {gt_answer} S {extra_info.style} {other}"
DATA = {"gt_answer": "4", "extra_info": {"style": ["short"]}}


def reward_of(url: str, *, scale: float = 1.0, **settings: Any) -> JudgeReward:
    config = JudgeConfig.model_validate({"endpoint": url, "model": "m", "rubric": "{answer}", **settings})
    return JudgeReward(config, JudgeClient(config, first_pause_s=0.01), scale=scale)


def item(text: str, data: dict[str, Any] | None = None) -> RewardInput:
    return RewardInput(text, DATA if data is None else data, 3, 9, "stop", ({"role": "user", "content": "2+2"},))


def test_the_score_in_the_rubric_s_range_is_the_reward(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("THE_KEY", "secret")
    settings = {"rubric": RUBRIC, "min_score": 1.0, "max_score": 5.0, "api_key_env": "THE_KEY"}
    with (
        judge([completion("Right.\nScore: 4")]) as server,
        closing(reward_of(server.url, scale=2.0, **settings)) as reward,
    ):
        output = reward(item("see {gt_answer}"))
        counted = reward.counters()
    # (4 - 1) / (5 - 1) = 0.75.
    assert (output.parts, output.accuracy) == ({"judge": 1.5}, 0.75)
    ((request, headers),) = server.requests
    assert (headers["path"], headers["Authorization"]) == ("/v1/chat/completions", "Bearer secret")
    (message,) = request["messages"]
    # What the answer contains is not replaced, nor what is no placeholder.
    assert message["content"].startswith('Q 2+2 A see {gt_answer} R 4 S ["short"] {other}\n\nEnd your reply with')
    assert "from 1 (worst) to 5 (best)" in message["content"]
    counts = {"judge_requests": 1, "judge_prompt_tokens": 100, "judge_completion_tokens": 10}
    assert {k: v for k, v in counted.items() if v} == counts


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Score: 7", 7.0),
        ("Good.\n\n**Score: 7.5**\n", 7.5),
        ("The answer says 'Score: 10'.\nScore: 2", 2.0),
        ("<think>\nScore: 9\n</think>\nScore: 3", 3.0),
        ("Score: 11", None),
        ("Score: 7/10", None),
        ("Score: 7\nbecause", None),
        ("Score: 7, Score: 8", None),
        ("", None),
    ],
)
def test_only_a_last_line_with_a_score_in_range_is_a_verdict(reply: str, score: float | None):
    assert read_score(reply, JudgeConfig()) == score


def test_a_judge_that_fails_hangs_and_talks_nonsense_is_asked_until_it_answers():
    hung = threading.Event()

    def hang(request: dict[str, Any]) -> Reply:
        if len(server.requests) == 3:
            hung.set()
            server.closing.wait(30)
        return replies[min(len(server.requests) - 1, len(replies) - 1)]

    nothing = completion("never")
    replies = [(503, "down"), (429, "slow"), nothing, (200, b"<html>"), (200, {"error": "?"}), completion("Score: 10")]
    with judge(hang) as server, closing(reward_of(server.url, timeout_s=0.5)) as reward:
        assert reward(item("a")).accuracy == 1.0
        assert hung.is_set()
        assert (reward.counters()["judge_failed"], reward.counters()["judge_requests"]) == (5, 6)
        assert (reward.trouble, reward.num_waiting) == ("", 0)


def test_grading_pauses_while_the_judge_is_down_and_says_why():
    is_up = threading.Event()
    with judge(lambda _: completion("Score: 5") if is_up.is_set() else (500, "broken")) as server:
        reward = RewardSum(reward_of(server.url), scale=1.0, overlong=None)
        with closing(reward), closing(ThreadGrader(reward, num_threads=2)) as grader:
            lease = make_lease(group_size=2)
            for index in range(2):
                grader.submit(lease, sample(lease, index, f"answer {index}"))
            wait_until("both to wait", lambda: grader.trouble and grader.num_waiting == 2)
            assert f"the judge at {server.url}/chat/completions does not answer: HTTP 500" in grader.trouble
            assert grader.collect() == []
            is_up.set()
            graded: list[Any] = []
            wait_until("both", lambda: graded.extend(grader.collect()) or len(graded) == 2)
            assert [one.rollout.accuracy for one in graded] == [0.5, 0.5]
            assert grader.trouble == ""


def test_an_unreadable_verdict_is_asked_for_again_and_then_fails_visibly():
    replies = [completion("no idea"), completion(None), completion("Score: 1")]
    with judge(replies) as server, closing(reward_of(server.url, max_attempts=3)) as reward:
        assert reward(item("a")).accuracy == pytest.approx(0.1)
        assert reward.counters()["judge_unreadable"] == 2
    with judge([completion("no idea")]) as server, closing(reward_of(server.url, max_attempts=2)) as reward:
        with pytest.raises(RewardError, match=r"whose last line is 'Score: N', N from 0 to 10, got 2 others.*no idea"):
            reward(item("a"))
        assert len(server.requests) == 2


def test_a_reply_that_was_cut_is_no_score():
    # "Score: 10" without its last token.
    cut, whole = (completion("Score: 1", finish_reason=reason) for reason in ("length", "stop"))
    with judge([cut, completion("Score: 10")]) as server, closing(reward_of(server.url)) as reward:
        assert reward(item("a")).accuracy == 1.0
        assert reward.counters()["judge_unreadable"] == 1
    with judge([whole]) as server, closing(reward_of(server.url)) as reward:
        assert reward(item("a")).accuracy == pytest.approx(0.1)
    with judge([cut]) as server, closing(reward_of(server.url, max_attempts=2, max_tokens=64)) as reward:
        with pytest.raises(RewardError, match=r"got 2 others, of which 2 were cut at reward.judge.max_tokens = 64, "):
            reward(item("a"))
        assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        ((401, "wrong key secret"), r"got HTTP 401 Unauthorized: .wrong key \(the key\)"),
        ((302, ""), "got HTTP 302"),
        ((401, b"x" * 497 + b"secret"), r"x{497}\(th;"),  # where an error is cut
    ],
)
def test_a_refusal_fails_at_once_without_the_key(monkeypatch: pytest.MonkeyPatch, reply: Reply, cause: str):
    monkeypatch.setenv("THE_KEY", "secret")
    with judge([reply]) as server, closing(reward_of(server.url, api_key_env="THE_KEY")) as reward:
        with pytest.raises(RewardError, match=cause) as refused:
            reward(item("a"))
        assert "sec" not in str(refused.value)
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"choices": [{"message": {"content": "Score: 1"}}], "usage": {"prompt_tokens": 1e999}}',
        completion("Score: 1", (10**400, 1))[1],
        completion("Score: 1", (-5, 1))[1],
        completion("Score: 1", (1 << 40, 1))[1],
    ],
    ids=["nested", "infinite", "huge", "negative", "more than a counter holds"],
)
def test_a_reply_that_no_service_would_send_is_asked_for_again(body: Any):
    with judge([(200, body), completion("Score: 10")]) as server, closing(reward_of(server.url)) as reward:
        assert reward(item("a")).accuracy == 1.0
        assert (reward.counters()["judge_failed"], reward.counters()["judge_prompt_tokens"]) == (1, 100)


def test_a_judge_that_sends_byte_after_byte_keeps_no_thread():
    class Trickling(Handler):
        def do_POST(self) -> None:  # noqa: N802
            assert isinstance(self.server, Judge)
            if self.server.requests:
                super().do_POST()
                return
            self.server.requests.append(({}, {}))
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):  # the client has given up
                while not self.server.closing.wait(0.02):
                    self.wfile.write(b" ")

    with judge([completion("Score: 10")]) as server, closing(reward_of(server.url, timeout_s=0.3)) as reward:
        server.RequestHandlerClass = Trickling
        assert reward(item("a")).accuracy == 1.0
        assert reward.counters()["judge_failed"] == 1
        names = lambda: [thread.name for thread in threading.enumerate()]  # noqa: E731
        wait_until("the end of the first request", lambda: "judge request" not in names(), deadline_s=10.0)


def test_a_key_that_no_header_can_have_is_refused_unquoted(monkeypatch: pytest.MonkeyPatch):
    for key in ("secret\n", "secr\u00e9t", "se\rcret"):
        monkeypatch.setenv("THE_KEY", key)
        with pytest.raises(ConfigError, match="printable ASCII characters in the environment variable") as refused:
            reward_of("http://127.0.0.1:1/v1", api_key_env="THE_KEY")
        assert "sec" not in str(refused.value)


def test_the_same_answer_is_judged_once_also_by_the_next_process(tmp_path: Path):
    path, counted = str(tmp_path / "cache" / "verdicts.sqlite"), list[int]()
    with judge([completion("Score: 3")]) as server:
        for _ in range(2):
            with closing(reward_of(server.url, cache=path)) as reward:
                assert {reward(item(text)).accuracy for text in "aab"} == {0.3}
            counted.append(reward.counters()["judge_cached"])
        assert (len(server.requests), counted) == (2, [1, 3])
        # Another rubric is another question.
        with closing(reward_of(server.url, cache=path, rubric="Judge {answer}")) as reward:
            reward(item("a"))
        assert len(server.requests) == 3


def test_no_more_requests_run_at_a_time_than_are_allowed():
    lock, running, most = threading.Lock(), [0], [0]
    both = threading.Barrier(2, timeout=10)

    def slow(_: dict[str, Any]) -> Reply:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        both.wait()  # two are here
        with lock:
            running[0] -= 1
        return completion("Score: 1")

    with judge(slow) as server, closing(reward_of(server.url, max_concurrent=2)) as reward:
        assert len(reward.score_group([item(text) for text in "abcd"])) == 4
    assert most[0] == 2


def test_the_reward_conforms():
    def by_text(request: dict[str, Any]) -> Reply:
        return completion("Score: 10" if request["messages"][0]["content"].startswith("42\n") else "Score: 0")

    with judge(by_text) as server, closing(reward_of(server.url)) as reward:
        assert check_reward(reward, Example({"gt_answer": "42"}, "42", "43")) == []


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"api_key_env": "NO_SUCH_KEY"}, "environment variable NO_SUCH_KEY"),
        ({"cache": "/"}, "expected a file that SQLite can open"),
    ],
)
def test_what_a_judge_needs_and_is_not_there_is_named(settings: dict[str, Any], told: str):
    with pytest.raises(ConfigError, match=told):
        reward_of("http://127.0.0.1:1/v1", **settings)
    no_field = pytest.raises(RewardError, match=r"a value for \{extra_info.style\} in the row")
    with closing(reward_of("http://127.0.0.1:1", rubric=RUBRIC)) as reward, no_field:
        reward(item("a", {"gt_answer": "4"}))


def test_a_call_that_waits_for_its_judge_ends_when_the_generator_does():
    with judge(lambda _: (500, "down")) as server, closing(reward_of(server.url)) as reward:
        with ThreadPoolExecutor(1) as threads:
            call = threads.submit(reward, item("a"))
            wait_until("the request", lambda: server.requests)
            assert reward.num_waiting == 1
            reward.interrupt()
            with pytest.raises(RewardError):
                call.result(10)
        assert reward.num_waiting == 0
