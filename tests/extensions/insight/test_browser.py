"""The page in Chromium, if it is installed: what it draws, filters, shows, and what it refuses to run."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl.extensions.insight.report.report import write_report
from async_rl.extensions.insight.report.serve import start_server
from async_rl.output import Progress
from tests.extensions.insight.chromium import Chromium, find_chromium
from tests.extensions.insight.runs import step_row

from .pages import a_rollout, a_run, an_answer, write_answers, write_rollouts, write_tokens
from .test_page import HOSTILE, a_summary

PROGRAM = find_chromium()
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed (apt-get install chromium)"),
]
SHOWN = "document.querySelector('#rollout').textContent"
OPEN = "document.querySelector('#browser tbody tr').click(); new Promise((go) => setTimeout(go, 300))"


@pytest.fixture(params=[1280, 400])
def browser(request: pytest.FixtureRequest) -> Iterator[Chromium]:
    assert PROGRAM
    with Chromium(PROGRAM, width=request.param) as found:
        yield found
        assert found.errors == []


@pytest.fixture
def page(tmp_path: Path) -> str:
    run = a_run(tmp_path / "run", num_steps=30)
    records = [a_rollout(index=i, reward=i / 10, num_tokens=10 * i, response=HOSTILE) for i in range(8)]
    write_rollouts(run, 1, records)
    write_rollouts(run, 2, [a_rollout(row=9, finish_reason="length")])
    write_tokens(run, 2, position=3, texts=["a", " b", HOSTILE])
    write_report([run], tmp_path / "page.html", progress=Progress(quiet=True))
    return (tmp_path / "page.html").as_uri()


def test_the_page_draws_and_nothing_overflows(browser: Chromium, page: str):
    browser.open(page)
    assert browser.run("document.documentElement.dataset.failed") is None
    assert browser.run("document.querySelector('select[aria-label=Metric]').value") == "reward/mean"
    assert browser.run("document.querySelectorAll('figure svg').length") >= 8
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    controls = "[...document.querySelectorAll('svg, input, button, select')]"
    unnamed = "!(one.getAttribute('aria-label') || one.textContent.trim() || one.closest('label'))"
    assert browser.run(f"{controls}.filter((one) => {unnamed}).length") == 0


def test_the_first_rollout_with_a_text_is_open_and_those_without_come_last(browser: Chromium, tmp_path: Path):
    run = a_run(tmp_path / "run")
    write_rollouts(run, 1, [a_rollout(position=5, index=1)])
    (run / "rollouts" / "summaries.jsonl").write_text(a_summary(1))
    write_report([run], tmp_path / "page.html", progress=Progress(quiet=True))
    browser.open((tmp_path / "page.html").as_uri())
    assert browser.run("browser.found") == [2, 0, 1]
    assert browser.run(SHOWN).endswith("Answer2")


def test_filters_and_the_order_act_on_the_list(browser: Chromium, page: str):
    browser.open(page)
    browser.run("const box = document.querySelector('[name=reward-min]'); box.value = '0.55'")
    browser.run("box.dispatchEvent(new Event('input'))")
    assert browser.run("browser.found.length") == 3  # rewards 0.6, 0.7 and 1
    assert browser.run("document.querySelectorAll('#browser tbody tr').length") == 3
    browser.run("document.querySelector('#browser thead th:nth-child(3) button').click()")
    assert browser.run("browser.found.map((i) => browser.index.reward[i])") == [0.6, 0.7, 1]
    browser.run("document.querySelector('#browser thead th:nth-child(3) button').click()")
    assert browser.run("browser.found.map((i) => browser.index.reward[i])") == [1, 0.7, 0.6]


def test_hostile_text_is_shown_as_text_and_a_script_that_got_in_would_not_run(browser: Chromium, page: str):
    browser.open(page)
    browser.run(OPEN)
    assert "<img src=x onerror=alert(2)>U+202Egnp.exeU+001B[2JU+2028" in browser.run(SHOWN)
    assert browser.run("document.querySelectorAll('#rollout img, #rollout script').length") == 0
    script = (
        "const one = document.createElement('script'); one.textContent = 'window.bad = 1'; document.body.append(one)"
    )
    browser.run(script)  # which would not run if it got in
    image = "<img src=x onerror=window.bad=1>"
    browser.run(f"document.body.insertAdjacentHTML('beforeend', '{image}')")
    assert browser.run("new Promise((go) => setTimeout(() => go(window.bad === undefined), 200))")
    browser.errors.clear()  # of the policy, which has refused both


def test_tokens_are_coloured_and_read_by_keys(browser: Chromium, page: str):
    browser.open(page)
    browser.run("openRollout(8)")
    assert browser.run("document.querySelectorAll('#rollout .tok').length") == 3
    heads = browser.run("[...document.querySelectorAll('#rollout .say .who')].map((one) => one.textContent)")
    assert heads == ["context: 1 tokens", "assistant, target: 1 tokens", "assistant, untrained: stale: 1 tokens"]
    assert browser.run("document.querySelectorAll('#rollout .tok.left, #rollout .tok.given').length") == 2
    for mode in ("version", "staleness", "ratio", "difference", "advantage", "entropy", "surprise", "outcome"):
        browser.run(f"document.querySelector('[name=mode][value={mode}]').click()")
        painted = browser.run(
            "[...document.querySelectorAll('#rollout .tok')].filter((one) => one.style.background).length"
        )
        assert painted == {"outcome": 1, "version": 2, "staleness": 2, "ratio": 2, "difference": 2, "surprise": 2}.get(
            mode, 3
        )
    browser.run("document.querySelector('#rollout .say[role=group]').focus()")
    for _ in range(2):
        browser.run("document.activeElement.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight' }))")
    shown = browser.run("document.querySelector('#tip').textContent")
    assert shown.splitlines()[:3] == ['" b" (id 1)', "outcome: trained", "version 2, 2 old"]
    assert "ratio 1" in shown


def test_a_served_page_follows_the_run(browser: Chromium, tmp_path: Path):
    run = a_run(tmp_path / "run")
    write_rollouts(run, 1, [a_rollout()])
    with start_server([run]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.open(f"http://127.0.0.1:{server.server_port}/")
        browser.run(OPEN)
        assert browser.run(SHOWN).endswith("Answer2")
        with (run / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps(step_row(5)) + "\n")
        write_rollouts(run, 5, [a_rollout(), a_rollout(index=1)])
        seen = "browser.index.step.length === 3 && DATA.runs[0].columns.step.length"
        wait = f"new Promise((go) => {{ const look = () => {seen} === 5 ? go(true) : setTimeout(look, 50); look(); }})"
        assert browser.run(wait)
        assert "step 5" in browser.run("document.querySelector('.status').textContent")
        assert browser.run("browser.open") == 0
        server.shutdown()


def test_a_link_opens_its_rollout_whatever_is_filtered(browser: Chromium, page: str):
    browser.open(f"{page}#rollout=1.3.5")
    assert browser.run(SHOWN).startswith("Step 1, dataset row 7, rollout 5 link")
    assert browser.run("document.querySelector('tr[aria-selected=true]').dataset.i") == "5"
    assert browser.run("document.querySelector('#rollout h3 a').getAttribute('href')") == "#rollout=1.3.5"
    browser.run("browser.form.elements['reward-min'].value = '0.9'; filter(); location.hash = '#rollout=1.3.2'")
    browser.run("new Promise((go) => setTimeout(go, 300))")
    assert browser.run(SHOWN).startswith("Step 1, dataset row 7, rollout 2 link")
    browser.run("location.hash = '#rollout=1.3.99'; new Promise((go) => setTimeout(go, 300))")
    assert browser.run(SHOWN) == "#rollout=1.3.99 names no rollout of this report."


def test_an_evaluation_shows_how_a_row_s_answer_changed(browser: Chromium, tmp_path: Path):
    run = a_run(tmp_path / "run")
    write_rollouts(run, 1, [a_rollout()])
    write_answers(run, "math", 0, [an_answer(3, accuracy=0.0, response=HOSTILE), an_answer(4)])
    unanswered = {"row": 4, "messages": [], "response": None, "accuracy": 0.0, "finish_reason": "unanswered"}
    write_answers(run, "math", 4, [an_answer(3), unanswered])
    write_report([run], tmp_path / "page.html", progress=Progress(quiet=True))
    browser.open((tmp_path / "page.html").as_uri())
    assert browser.run("browser.found.length") == 1  # training comes first
    browser.run("browser.form.elements.set.value = 'math'; filter()")
    assert browser.run("document.querySelector('.pager span').textContent") == "4 of 4 answers · page 1 of 1"
    assert browser.run("document.querySelector('[data-of=stale]').hidden")  # no answer has a staleness to filter
    browser.run(OPEN)
    assert browser.run(SHOWN).startswith("Evaluation math at step 0, dataset row 3, answer 0 link")
    assert "<img src=x onerror=alert(2)>" in browser.run(SHOWN)
    steps = "[...document.querySelectorAll('#rollout .modes button')]"
    assert browser.run(f"{steps}.map((one) => one.textContent)") == ["0: 0", "4: 1"]
    seen = browser.run("[...document.querySelectorAll('#rollout .beside > div')].map((one) => one.textContent)")
    assert seen[0].startswith("step 0 accuracy 0, 3 tokens</script><script>alert(1)")
    assert seen[1:] == ["step 4 accuracy 1, 3 tokens2"]
    assert browser.run("document.querySelectorAll('#rollout img, #rollout script').length") == 0
    browser.run(f"{steps}[1].click(); new Promise((go) => setTimeout(go, 300))")
    assert browser.run(SHOWN).startswith("Evaluation math at step 4, dataset row 3")
    browser.run("browser.form.elements.set.value = ''; filter(); location.hash = '#rollout=4.4.0.0.math'")
    browser.run("new Promise((go) => setTimeout(go, 300))")
    assert browser.run("browser.form.elements.set.value") == "math"
    assert browser.run(SHOWN).endswith("step 4 accuracy 0No answer.")
