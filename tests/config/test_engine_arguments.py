"""``generator.engine``: what vLLM's engine may get, and by whom."""

from __future__ import annotations

import pytest

from async_rl.config.engine_arguments import is_operators
from tests.config.made import a_config, copy_of, refusal

REFUSED = {
    "max_model_len": "sampling.max_prompt_tokens and sampling.max_new_tokens set it",
    "hf_overrides": "model.path sets it",
    "logits_processors": "log-probabilities must be those of the distribution that was sampled",
    "spec_method": "with it vLLM's CPU build samples at wrong temperatures, and no GPU has run it yet",
    "trust_remote_code": "generators run no code of models",
    "kv_transfer_config": "it shares keys and values with engines whose weights may be older",
    "data_parallel_size_local": "no GPU has run it yet",
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_breaks_a_promise_is_refused_with_the_reason(name: str):
    told = f"generator.engine.{name}: expected no value, got 2; leave it out: {REFUSED[name]}"
    assert told in refusal(generator={"engine": {name: 2}})


def test_what_makes_another_policy_or_another_pace_is_taken_as_it_is():
    given = {"kv_cache_dtype": "fp8", "max_num_batched_tokens": 4096, "of_the_next_release": {"a": [1]}}
    assert copy_of(a_config(generator={"engine": given})).generator.engine == given
    assert not any(map(is_operators, given))
    code_or_files = "worker_cls model_class_overrides io_processor_plugin log_config_file otlp_traces_endpoint"
    assert all(map(is_operators, (*code_or_files.split(), "compilation_config", "allowed_local_media_path")))
