"""The doctor's checks of what a run trains: data sets, model files, tokenizer, chat template, reward, loss, and parity.

Parity means that the generators' engine and the learner compute the same log-probabilities with the same weights.
``check_parity`` loads both in one process. The engine samples answers to the first prompts, and the learner scores
them. Then both score the same token sequences. If the scores differ, the finding names the likely cause.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from async_rl.config.config import Config
from async_rl.config.generator import has_model
from async_rl.config.loading import config_to_toml, machine_overrides, parse_config
from async_rl.config.reward import reward_type
from async_rl.data.chat import (
    check_causal_lm,
    check_model,
    load_tokenizer,
    model_directory,
    model_files,
    quiet_progress_bars,
    render_prompt,
    vocabulary_size,
)
from async_rl.data.dataset import Row, load_rows_of, load_train_rows
from async_rl.data.spellings import GUARD, control_of
from async_rl.data.turn_end import turn_ends
from async_rl.data.vocabulary import num_beyond
from async_rl.doctor.findings import Finding
from async_rl.errors import DataError, ModelError, RewardError, SandboxError, UserError
from async_rl.generator.backend import Backend, Sampled
from async_rl.generator.parity import answer_probe
from async_rl.generator.start.backends import build_backend
from async_rl.generator.start.worker import generator_config, scratch_directory, write_files
from async_rl.launch.agent_trial import try_agent
from async_rl.launch.environment_trial import NUM_ROWS, try_environment
from async_rl.launch.preflight import (
    check_code,
    check_judge,
    check_lengths,
    check_tokenizer,
    check_train_is_set,
)
from async_rl.output import size_text
from async_rl.process.user_code import describe_error
from async_rl.queue.core.admission import train_sampling
from async_rl.queue.parity import Probe, compare, parity_limit
from async_rl.queue.server.settings import settings_of
from async_rl.records import TEXT_ROLE, Lease, Prompt
from async_rl.rewards.conformance import example_of, rollout_of
from async_rl.rewards.records import UNJUDGED, RewardOutput
from async_rl.weights.adapters import ADAPTER_BASE, BaseWeights

_SHOWN_CHARS = 2000
_SAMPLE_ROWS = 3
_SHOWN_ANSWER = 40
_Grade = tuple[str | None, float, float, str | None]

_PROMPTS = 4
_GROUP_SIZE = 2
_NEW_TOKENS = 32
_ASKED: tuple[Mapping[str, str], ...] = ({"role": "user", "content": "1 + 1 = ?"},)
_FIX = 'remove the cause, because a run would stop here too; weights.parity = "warn" only logs the difference'


def check_data(config: Config) -> list[Finding]:
    """Check that the training set and all evaluation sets can be loaded. Return one finding for each set."""
    check_train_is_set(config)
    rows: list[Finding] = []
    sources = {"data.train": None, **{f"data.eval.{name}": source for name, source in config.data.eval.items()}}
    for key, source in sources.items():
        try:
            loaded = load_train_rows(config) if source is None else load_rows_of(config, source)
        except DataError as error:
            fix = "correct the file, or set data.columns or data.on_bad_row"
            rows.append(Finding(key, "FAIL", str(error), fix=fix))
            continue
        found = f"{len(loaded.rows)} rows"
        if loaded.num_skipped:
            found = f"{found}, skipped {loaded.num_skipped} bad rows, the first: {loaded.first_skipped}"
            rows.append(Finding(key, "WARN", found, fix="correct the file if these rows matter"))
        else:
            rows.append(Finding(key, "OK", found))
    return rows


def check_model_files(config: Config) -> list[Finding]:
    """Check that the model's weights, tokenizer and chat template are there and work.

    One finding shows the first prompt of the training set, rendered with the chat template.
    """
    try:
        directory = model_directory(config.model.path)
    except ModelError as error:
        return [
            Finding(
                "model",
                "FAIL",
                str(error),
                fix="set model.path to a model directory, or to a hub id that can be downloaded",
            )
        ]
    try:
        check_causal_lm(directory)
    except ModelError as error:
        return [Finding.of_error("model", error)]
    if not any(directory.glob("*.safetensors")):
        fix = "save the model there with save_pretrained, in the safetensors format"
        weights = Finding("model", "FAIL", f"expected *.safetensors in {directory}, got none", fix=fix)
    else:
        weights = Finding("model", "OK", f"{directory}, vocabulary of {vocabulary_size(directory)}")
    is_chat = config.data.prompt_format == "chat"
    try:
        tokenizer = load_tokenizer(directory, needs_template=is_chat)
    except ModelError as error:
        fix = "put tokenizer.json, tokenizer_config.json and a chat template next to config.json"
        return [weights, Finding("tokenizer", "FAIL", str(error), fix=fix)]
    ends = _ends_row(config, directory, tokenizer)
    return [weights, *_tokenizer_rows(config, tokenizer), ends, _template_row(config, tokenizer)]


def _tokenizer_rows(config: Config, tokenizer: Any) -> list[Finding]:
    found = f"{type(tokenizer).__name__}, {len(tokenizer)} tokens"
    if number := num_beyond(tokenizer, vocabulary_size(config.model.path)):
        found += f", {number} of them without a row in the model's embedding, so that no text may contain them"
    try:
        rows = load_train_rows(config).rows
    except UserError:  # the findings about the data say it
        rows = ()
    try:
        problem = check_tokenizer(config, rows)
    except ModelError as error:
        return [Finding.of_error("tokenizer", error)]
    except UserError:  # the findings about the template say it
        problem = ""
    chats = [(f"row {number}", row.messages) for number, row in enumerate(rows) if config.data.prompt_format == "chat"]
    spelling = spelling_rows("data.train", chats, config, tokenizer)
    if not problem:
        return [Finding("tokenizer", "OK", found), *spelling]
    unknown, _, fix = problem.rpartition("; ")
    return [Finding("tokenizer", "WARN", f"{found}; {unknown}", fix=fix), *spelling]


def spelling_rows(key: str, chats: Iterable[tuple[str, Any]], config: Config, tokenizer: Any) -> list[Finding]:
    """Return a warning if messages of the dataset ``key`` spell control tokens.

    ``chats`` are pairs of a row's place and its messages.
    """
    safe = control_of(tokenizer).guarded_message
    places = [where for where, chat in chats if GUARD in json.dumps([*map(safe, chat)], ensure_ascii=False)]
    if not places:
        return []
    mode = config.data.special_tokens_in_content
    found = f"{len(places)} rows of {key} spell control tokens in a content, read as {mode} (first: {places[0]})"
    fix = f'data.special_tokens_in_content = "{"token" if mode == "text" else "text"}" if they are meant otherwise'
    return [Finding("special tokens", "WARN", found, fix=fix)]


def _ends_row(config: Config, directory: Path, tokenizer: Any) -> Finding:
    """Return the finding about the tokens that end a turn of the model."""
    try:
        ends = turn_ends(tokenizer, directory, config.data.template_arguments)
    except ModelError as error:
        return Finding.of_error("end of turn", error)
    if not ends.ids:
        found = "no token ends an answer, so each runs to sampling.max_new_tokens"
        fix = "set eos_token in tokenizer_config.json, or eos_token_id in generation_config.json"
        return Finding("end of turn", "FAIL", found, fix=fix)
    if config.data.prompt_format == "chat" and ends.of_template is None:
        found = f"the chat template writes no end token after an answer; {ends.describe(tokenizer)}"
        fix = (
            "if the model was trained with another one (such as the mark of the next role), add it to eos_token_id in "
            "generation_config.json; sft, dpo and rm put eos_token after the answer"
        )
        return Finding("end of turn", "WARN", found, fix=fix)
    return Finding("end of turn", "OK", ends.describe(tokenizer))


def _template_row(config: Config, tokenizer: Any) -> Finding:
    try:
        row = load_train_rows(config).rows[0]
    except UserError:
        return Finding("template", "skip", "data.train has no row to render")
    if not row.messages:
        return Finding("template", "skip", "the environment writes the prompts")
    try:
        ids = render_prompt(tokenizer, row.messages, config.data.template_arguments)
        check_model(config.model.path, row.messages, arguments=config.data.template_arguments)
    except ModelError as error:
        fix = "set data.system_prompt or data.chat_template_kwargs, or correct chat_template.jinja"
        return Finding("template", "FAIL", str(error), fix=fix)
    text = str(tokenizer.decode(ids))
    limit = config.sampling.max_prompt_tokens
    found = f"first prompt: {len(ids)} tokens (limit {limit}), shown below"
    if row.messages[0].get("role") == TEXT_ROLE:
        found = f"plain text, {found}"
    if len(ids) > limit:
        fix = 'raise sampling.max_prompt_tokens, or set data.on_long_prompt = "truncate"'
        return Finding("template", "WARN", found, fix=fix, details=text[:_SHOWN_CHARS])
    return Finding("template", "OK", found, details=text[:_SHOWN_CHARS])


def check_prompt_lengths(config: Config) -> list[Finding]:
    """Check that the longest rollout fits the learner, the model and the queue, and that not all prompts are too
    long.
    """
    try:
        rows = load_train_rows(config).rows
    except UserError as error:
        return [Finding("lengths", "skip", f"there are no rows: {error}")]
    check_lengths(config, rows)
    longest = config.sampling.max_prompt_tokens + config.sampling.max_new_tokens
    found = f"rollouts of up to {longest} tokens fit the learner, the model and the queue"
    return [Finding("lengths", "OK", found), *_bytes_rows(config)]


def _bytes_rows(config: Config) -> list[Finding]:
    """Return a warning if ``queue.max_bytes`` allows fewer groups in flight than the staleness bound."""
    settings = settings_of(config)
    if settings.bytes_for_bound <= settings.max_bytes:
        return []
    found = (
        f"{size_text(settings.max_bytes)} hold {settings.max_bytes // settings.worst_case_bytes} groups in flight, "
        f"each of up to {size_text(settings.worst_case_bytes)}; queue.max_staleness = {settings.max_staleness} allows "
        f"{settings.bytes_for_bound // settings.worst_case_bytes}, so generators may wait for room"
    )
    fix = f"queue.max_bytes = {settings.bytes_for_bound}, or a lower sampling.max_new_tokens"
    return [Finding("queue.max_bytes", "WARN", found, fix=fix)]


def check_reward(config: Mapping[str, Any]) -> list[Finding]:
    """Check the reward: it must accept a right answer and reject a wrong one to each of the first training rows.

    ``config`` is the config as JSON data. ``CheckProcess`` runs this function in a separate process.
    """
    from async_rl.rewards.registry import build_reward

    resolved = parse_config(dict(config), "the doctor's config")
    if resolved.environment.is_set:
        return _environment_rows(resolved)
    try:
        check_judge(resolved)
    except UserError as error:
        return [Finding.of_error("reward", error)]
    name = resolved.reward.right_by
    judge = reward_type(name)
    if judge.asks_scorer or judge.asks_judge or name == "none":
        return [Finding("reward", "skip", f"{name} calls no answer right or wrong")]
    try:
        rows = load_train_rows(resolved).rows[:_SAMPLE_ROWS]
    except UserError as error:
        return [Finding("reward", "skip", f"there are no rows: {error}")]
    try:
        check_code(resolved)
        reward = build_reward(resolved, has_scorers=False)
    except SandboxError as error:
        fix = "run generators where programs can be isolated, or set reward.code.endpoint to an `async-rl verifier`"
        return [Finding("sandbox", "FAIL", str(error), fix=fix)]
    except UserError as error:
        return [
            Finding("reward", "FAIL", str(error), fix="name the code in generator.allow_code, and make it importable")
        ]
    try:
        graded = [_grade(resolved, reward, row) for row in rows]
    except RewardError as error:
        return [Finding("reward", "FAIL", f"can't grade: {error}", fix="correct the row or the reward function")]
    except Exception as error:  # the user's code raises what it likes
        found = f"can't grade: {describe_error(error)[0]}"
        return [Finding("reward", "FAIL", found, fix="correct the row or the reward function")]
    finally:
        reward.close()
    sandbox = [_sandbox_row(resolved)] if resolved.reward.runs_programs else []
    if not (judged := [one for one in graded if one is not None]):
        found = f"{name} judges no answer to the first {len(graded)} rows: it returned None"
        return [*sandbox, Finding("reward", "WARN", found, fix="ignore this if it judges answers to other rows")]
    return [*sandbox, *_verdict(name, judged, is_user_code=judge.is_user_code)]


def _environment_rows(config: Config) -> list[Finding]:
    if config.environment.relay is not None:
        return [Finding("environment", "skip", "agents are programs that start elsewhere (environment.relay)")]
    try:
        rows = load_train_rows(config).rows
    except UserError as error:
        return [Finding("environment", "skip", f"there are no rows: {error}")]
    check_code(config)
    if problem := (try_agent if config.has_agents else try_environment)(config, rows):
        found, _, fix = problem.rpartition("; ")
        return [Finding("environment", "WARN", found or problem, fix=fix if found else "")]
    found = f"{config.environment.shown} was played on {min(NUM_ROWS, len(rows))} rows, with an answer that solves none"
    return [Finding("environment", "OK", found)]


def _sandbox_row(config: Config) -> Finding:
    code = config.reward.code
    if code.endpoint is not None:
        return Finding("sandbox", "OK", f"the verifier at {code.endpoint} judges programs")
    if code.allow_unsafe:
        fix = "set reward.code.allow_unsafe = false to make sure that programs are isolated"
        return Finding("sandbox", "WARN", "programs run without a sandbox if this machine can't isolate them", fix=fix)
    return Finding("sandbox", "OK", "programs run isolated")


def _grade(config: Config, reward: Any, row: Row) -> _Grade | None:
    """Grade a right and a wrong answer to one dataset row.

    Returns:
        The right answer's text (None if it is unknown), its accuracy, the accuracy of the wrong answer, and what the
        reward found in the right one. None if the reward judges neither.

    Raises:
        RewardError: the row can't be graded.
    """
    is_mathematics = config.reward.equality == "math"
    example = example_of(reward_type(config.reward.right_by), row.reward_data, is_mathematics=is_mathematics)

    def output_of(text: str | None) -> RewardOutput:
        if text is None:
            return UNJUDGED
        return reward(rollout_of(text, row.reward_data, config.sampling.max_new_tokens, row.messages))

    right, wrong = output_of(example.right), output_of(example.wrong)
    if not (right.is_judged or wrong.is_judged):
        return None
    return example.right, float(right.accuracy), float(wrong.accuracy), right.extracted


def _verdict(name: str, graded: Sequence[_Grade], *, is_user_code: bool) -> list[Finding]:
    known = [(text, accuracy) for text, accuracy, *_ in graded if text is not None]
    refused = [text for text, accuracy in known if accuracy < 1]
    accepted = [index for index, (_, _, wrong, _) in enumerate(graded) if wrong > 0]
    if accepted:
        found = f"{name} accepts a wrong answer on row {accepted[0]}"
        if is_user_code and all(wrong < 1 for _, _, wrong, _ in graded):
            found = f"{name} gives part of the points for a wrong answer on row {accepted[0]}"
            fix = "ignore this if it rewards something else; reward.accuracy can name what tells right from wrong"
            return [Finding("reward", "WARN", found, fix=fix)]
        fix = "check the reward, and gt_answer or test_cases of this row, because any answer might be rewarded"
        return [Finding("reward", "FAIL", found, fix=fix)]
    if refused and is_user_code:
        fix = "ignore this if the reward expects another form of answer; otherwise check how it reads the answer"
        found = f"{name} gave the right answer {refused[0]!r} an accuracy below 1"
        return [Finding("reward", "WARN", found, fix=fix)]
    if refused:
        fix = "check gt_answer of this row, and reward.equality, because no answer could be right"
        return [Finding("reward", "FAIL", f"{name} rejects the right answer {refused[0]!r}", fix=fix)]
    if not known:
        found = f"{name} rejects a wrong answer on each of {len(graded)} rows; no right answer is known here"
        return [Finding("reward", "OK", found)]
    found = f"{name} accepts the right answer of {len(known)} rows and rejects a wrong one"
    read = ", ".join(repr(answer[:_SHOWN_ANSWER]) for *_, answer in graded if answer is not None)
    return [Finding("reward", "OK", f"{found}; it reads the rows' answers as {read}" if read else found)]


def check_parity(config: Mapping[str, Any]) -> list[Finding]:
    """Check that the generators' engine and the learner compute the same log-probabilities with the same weights.

    ``config`` is the config as JSON data. Return one finding about tokens that the engine sampled, and one about token
    sequences that both only score. ``CheckProcess`` runs this function in a separate process.
    """
    resolved = parse_config(dict(config), "the doctor's config")
    if not has_model(resolved.generator.backend):
        return [
            Finding(
                "parity",
                "skip",
                f'generator.backend = "{resolved.generator.backend}" uses no model, so nothing can differ',
            )
        ]
    if resolved.lora.base_bits is not None and resolved.lora.publishes_adapters:
        text = f"the learner's frozen weights have {resolved.lora.base_bits} bits, those of generators do not"
        return [Finding("parity", "skip", f"{text}, so their log-probabilities differ")]
    quiet_progress_bars()
    with ExitStack() as stack:
        return _compared(resolved, stack)


def _compared(config: Config, stack: ExitStack) -> list[Finding]:
    from async_rl.learner.engine.fsdp_engine import FsdpEngine
    from async_rl.learner.loop.parity import cause_of_sampled, joined, probe_sequence_of, to_train
    from async_rl.learner.ranks import compute_dtype, init_ranks

    directory = stack.enter_context(scratch_directory())
    write_files(directory, model_files(config.model.path))
    if config.lora.publishes_adapters:
        write_files(directory, {ADAPTER_BASE: BaseWeights.of(config.model.path).to_json()})
    engine_config = generator_config(config_to_toml(config), machine_overrides(config))
    backend = stack.enter_context(closing(build_backend(engine_config, directory)))
    ranks = init_ranks(config)
    learner = stack.enter_context(closing(FsdpEngine(config, ranks)))
    learner.self_test()
    dtype = str(compute_dtype(config, ranks.device)).removeprefix("torch.")
    weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in learner.gather()}
    backend.activate(0, weights)
    samples = _sample(config, backend)
    sequences = [_to_sequence(index, sample, config.sampling.temperature) for index, sample in enumerate(samples)]
    behavior = np.concatenate([sample.logprobs for sample in samples])
    scored = joined(sequences, learner.score(sequences, of="policy"))
    engine_dtype = getattr(backend, "dtype", dtype)
    limit = parity_limit(config.experimental.parity_limit, (dtype, engine_dtype))
    found = compare(behavior, scored)
    sides = f"{getattr(backend, 'name', 'engine')} ({engine_dtype}) and learner ({dtype})"
    rows: list[Finding] = []
    if found.mean <= limit:
        rows.append(Finding("parity, sampled", "OK", f"{sides}: {found}"))
    else:
        cause = (
            cause_of_sampled(learner, sequences, behavior, found, limit)
            or "unknown, because the sampled tokens alone do not show it"
        )
        text = f"{sides}: {found}, limit {limit:g}. Likely cause: {cause}"
        rows.append(Finding("parity, sampled", "FAIL", text, fix=_FIX))
    given = [probe_sequence_of(sequence) for sequence in sequences]
    trained = [to_train(index, one, 0, config.sampling.temperature) for index, one in enumerate(given)]
    scores = learner.score(trained, of="policy")
    logprobs = tuple(np.asarray(scores[s.sequence_id], np.float32) for s in trained)
    probe = Probe(
        "doctor", 0, config.sampling.temperature, tuple(given), logprobs, dtype, config.experimental.parity_limit
    )
    return [*rows, _given_row(backend, probe, weights, sides, limit)]


def _given_row(backend: Backend, probe: Probe, weights: Mapping[str, Any], sides: str, limit: float) -> Finding:
    answer = answer_probe(backend, probe, weights)
    if answer.logprobs is None:
        return Finding("parity, probe", "skip", f"{answer.backend} can't score tokens that it did not sample")
    found = compare(answer.logprobs, np.concatenate(probe.logprobs))
    if found.mean <= limit:
        return Finding("parity, probe", "OK", f"{sides}: {found}")
    cause = answer.cause or "unknown, because the engine's experiments did not find it"
    excluded = f" Excluded: {'; '.join(answer.excluded)}." if answer.excluded else ""
    return Finding(
        "parity, probe", "FAIL", f"{sides}: {found}, limit {limit:g}. Likely cause: {cause}.{excluded}", fix=_FIX
    )


def _sample(config: Config, backend: Backend) -> list[Sampled]:
    """Let ``backend`` sample short answers to the first prompts, with the run's sampling settings. Return them."""
    own = train_sampling(config)
    sampling = structs.replace(own, max_new_tokens=min(_NEW_TOKENS, own.max_new_tokens))
    for index, messages in enumerate(_prompts(config)):
        prompt = Prompt(index, index, 0, messages, {})
        ids = backend.encode_prompt(messages)[-own.max_prompt_tokens :]
        backend.submit(Lease(f"{index}", "train", prompt, _GROUP_SIZE, sampling, "doctor", 0, 0, 0, index), ids)
    finished: list[Sampled] = []
    while backend.num_running:
        finished += backend.step()
    return finished


def _prompts(config: Config) -> Sequence[tuple[Mapping[str, str], ...]]:
    try:
        rows = load_train_rows(config).rows[:_PROMPTS]
    except UserError:
        rows = ()
    return [row.messages for row in rows if row.messages] or [_ASKED]


def _to_sequence(index: int, sample: Sampled, temperature: float) -> Any:
    from async_rl.learner.sequences import TrainSequence

    num_prompt, num_sampled = len(sample.prompt_ids), len(sample.token_ids)
    size = num_prompt + num_sampled
    behavior = np.zeros(size, np.float32)
    behavior[num_prompt:] = sample.logprobs
    return TrainSequence(
        sequence_id=index,
        token_ids=np.concatenate([sample.prompt_ids, sample.token_ids]).astype(np.int32),
        loss_mask=np.arange(size) >= num_prompt,
        behavior_logprobs=behavior,
        versions=np.zeros(size, np.int32),
        advantages=np.zeros(size, np.float32),
        temperature=temperature,
        sampling_mask=sample.sampling_mask,
    )
