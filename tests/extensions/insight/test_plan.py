"""Rates of a run directory, and the command around the simulation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from async_rl.cli.main import main
from async_rl.errors import ConfigError, RunError
from async_rl.extensions.insight.plan import simulation
from async_rl.extensions.insight.plan.lengths import Lengths
from async_rl.extensions.insight.plan.rates import find_rates, measure
from async_rl.extensions.insight.plan.simulation import Prediction, Setting
from async_rl.extensions.insight.plan.table import advice, choose
from async_rl.launch.checks.learner_memory import shape_of
from async_rl.launch.checks.prediction import engine_of, step_of, tokens_of
from async_rl.learner.cards import Machines
from async_rl.run.directory import RunDir
from benchmarks.memory_table import MODELS
from tests.extensions.insight.runs import write_run


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures are not the subject here, except those of answers with one length."""
    monkeypatch.setattr(simulation, "_MOST_STEPS", 12)


SECTIONS: dict[str, Any] = {
    "learner": {"groups_per_step": 4}, "sampling": {"group_size": 2, "max_new_tokens": 64},
    "generator": {"batch_size": 8, "count": 1},
}  # fmt: skip


def write_config(directory: Path, **sections: dict[str, Any]) -> Path:
    raw = {"run": {"dir": str(directory / "run")}, "model": {"path": "none"}, **SECTIONS, **sections}
    path = directory / "run.toml"
    path.write_text(tomli_w.dumps(raw))
    return path


def make_run(directory: Path, *, num_steps: int = 20, more: Any = None) -> Path:
    """A run of one generator with 8 slots. A step takes 10 s: 3 s of waiting, 6 s of training 80 tokens, 1 s after it.

    The slots are busy for 7.5 of 10 s, so 60 of 80 sequence-seconds; with 8 tokens/s that is 0.75 s for a token. A
    tenth of the time in which sequences run lies between decode steps: 0.9 is running, 0.81 is decoding.
    """
    row = {
        "version": 1, "time/step_s": 10.0, "time/wait_s": 3.0, "time/train_s": 6.0, "tokens/trained": 60,
        "tokens/masked": 20, "time/generate_s": 7.5, "throughput/generated_tokens_per_s": 8.0, "generators": 1,
        "idle/generators": 0.19, "idle/leases": 0.06, "idle/weights": 0.04, "time/transfer_s": 0.5, "time/pause_s": 0.1,
        "weights/bytes": 1000, "length/mean": 10.0, **(more or {}),
    }  # fmt: skip
    rows = [{"step": n, "time_s": 10.0 * n, **row} for n in range(1, num_steps + 1)]
    groups = {"trained": 60, "filtered": 20, "dropped": {}}
    ledger = {"groups": groups, "rollouts": {}, "tokens": {"trained": 0, "masked": {}}}
    run = write_run(directory / "run", rows, bound=1, ledger=ledger, **SECTIONS)
    write_config(directory, queue={"max_staleness": 1})
    (run / "rollouts").mkdir()
    summary = {"step": 1, "positions": [0, 1], "sizes": [2, 2], "tokens": [5, 15, 8, 12]}
    (run / "rollouts" / "summaries.jsonl").write_text(json.dumps(summary) + "\n")
    return run


def test_rates_are_measured_in_the_rows_of_a_run(tmp_path):
    rates = measure(RunDir(make_run(tmp_path)))
    assert rates.decode_step_s == pytest.approx(0.75 * 0.9 / 0.81)
    assert rates.train_token_s == pytest.approx(6 / 80)
    assert (rates.train_s, rates.after_s) == pytest.approx((0, 1))
    assert (rates.transfer_s, rates.pause_s) == pytest.approx((0.5, 0.1))
    assert (rates.version_bytes, rates.filtered) == pytest.approx((1000, 0.25))
    assert (rates.lengths.observed, rates.lengths.mean_tokens) == (((5, 15), (8, 12)), 10)


def test_a_decode_step_is_faster_with_few_sequences_if_the_run_has_measured_that(tmp_path):
    # 0.81 of a slot's time is busy with 60 sequence-seconds in 10 s, so 7.4 sequences run. With 0.3 s a step and 0.1 s
    # a sequence the time of a step of 7.4 is as above.
    run = make_run(tmp_path, more={"time/decode_step_s": 0.3, "time/decode_sequence_s": 0.1})
    rates, running = measure(RunDir(run)), 60 / 8.1
    assert rates.decode_s(1) / rates.decode_s(11) == pytest.approx(0.4 / 1.4)
    assert rates.decode_step_s + rates.decode_sequence_s * running == pytest.approx(0.75 * 0.9 / 0.81)


def test_a_config_takes_the_rates_of_its_run_and_given_ones_replace_them(tmp_path):
    make_run(tmp_path)
    config, rates, source = find_rates(tmp_path / "run.toml", ["queue.max_staleness=3"], ["decode_step_s=2"])
    assert (config.queue.max_staleness, rates.decode_step_s, rates.after_s) == (3, 2, pytest.approx(1))
    assert source == f"measured in {tmp_path / 'run'}"
    lognormal = find_rates(tmp_path / "run", [], sigma=0.5)[1].lengths
    assert lognormal == Lengths(10, 0.5, limit=64)


def test_the_fake_backend_knows_its_rates(tmp_path):
    fake = {"fake": {"mean_tokens": 30.0, "sigma": 0.5, "step_time_s": 0.1}}
    path = write_config(tmp_path, generator={"backend": "fake"}, experimental=fake)
    rates = find_rates(path, [], ["train_s=3"])[1]
    assert (rates.decode_step_s, rates.train_s, rates.lengths) == (0.1, 3, Lengths(30, 0.5, limit=64))


def test_rates_are_those_that_the_doctor_predicts_for_gpus_that_are_not_here(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen2.5 7B"]))
    path = write_config(tmp_path, model={"path": str(tmp_path)}, generator={"batch_size": 8, "count": 3})
    there = Machines.parse("--on", "4xH100")
    config, rates, source = find_rates(path, [], ["after_s=9"], machines=there)
    assert (source, rates.after_s) == ("predicted for 4xH100, confirmed by no card", 9)
    assert rates.lengths == Lengths(0.4 * 64, 0.9, limit=64)
    tokens = tokens_of(config)
    shape, engine = shape_of(tmp_path), engine_of(shape_of(tmp_path), config, there.card, tokens)
    assert 8 / rates.decode_s(8) == pytest.approx(engine.tokens_per_s)
    step = step_of(shape, config, there, tokens)
    assert rates.step_s(tokens.sampled, 1) + step.learner["pause for a version"] == pytest.approx(step.learner_s)
    assert rates.transfer_s == pytest.approx(rates.version_bytes / 40e9) == pytest.approx(2 * 7.62e9 / 40e9, rel=0.01)
    with pytest.raises(ConfigError, match=r"--on: expected a learner and generators that fit GPUs of their own"):
        find_rates(path, ["generator.count=4"], machines=there)


def test_what_is_missing_or_wrong_is_named(tmp_path):
    path = write_config(tmp_path)
    with pytest.raises(ConfigError, match=r"--rate decode_step_s=SECONDS and --rate train_s=SECONDS"):
        find_rates(path, [], mean_tokens=10)
    with pytest.raises(ConfigError, match=r"got 'speed=1'"):
        find_rates(path, [], ["speed=1"], mean_tokens=10)
    with pytest.raises(RunError, match="let it run for longer"):
        measure(RunDir(make_run(tmp_path, num_steps=0)))


def prediction(bound: int, steps_per_s: float, *, generators: int = 1, masked: float = 0.0) -> Prediction:
    setting = Setting(bound, generators, 1, Lengths(10))
    return Prediction(setting, steps_per_s, 0.05, 0.02, {0: 1.0}, 0.0, masked, 0.0)


def test_the_cheapest_setting_that_is_not_clearly_slower_is_chosen():
    # 1.05 times the speed is the limit. Of the bounds 1 and 2, the first trains only 80 % of the tokens.
    found = [prediction(0, 1.0), prediction(1, 2.0, masked=0.2), prediction(2, 2.0), prediction(4, 2.05)]
    assert choose(found).setting.max_staleness == 2
    assert choose([*found, prediction(4, 2.09, generators=2)]).setting.num_generators == 1
    assert choose([*found, prediction(4, 2.2, generators=2)]).setting.num_generators == 2
    assert any("2.00 times" in line for line in advice(found))
    assert "Asynchrony does not help here" in list(advice([prediction(0, 1.0), prediction(4, 1.03)]))[1]


def test_the_command_prints_a_table_and_json(tmp_path, capsys):
    run = make_run(tmp_path)
    words = ["plan", str(run), "--max-staleness", "1", "--generators", "1,2", "--quiet"]
    with pytest.raises(SystemExit, match="0"):
        main(words)
    lines = capsys.readouterr().out.splitlines()
    heads = next(number for number, line in enumerate(lines) if "learner idle" in line)
    settings = [(0, 1), (1, 1), (0, 2), (1, 2)]
    assert [tuple(map(int, line.split()[:2])) for line in lines[heads + 1 : heads + 5]] == settings
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [(one["max_staleness"], one["num_generators"]) for one in found["settings"]] == settings
    assert found["recommended"] in found["settings"]
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--generators", "0,2"])
    assert "--generators: expected whole numbers of at least 1, as in 1,4, got '0,2'" in capsys.readouterr().err
