"""The tests that run each row of docs/predecessors.md: feature -> their names below ``tests/``.

Three of them take the settings from all rows that have some of their keys (``OF_EVERY_ROW``). The tests of ``LAUNCH``
take the settings of the rows that they name. A row that needs a GPU or vLLM has a test marked so, and at least one
other where the machine does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping

TRAINED = "learner/test_predecessors_training.py::test_a_setting_of_a_row_changes_what_it_promises"
GRPO = "learner/test_predecessors_training.py::test_a_run_of_colossal_s_grpo_has_the_figures_that_its_rows_promise"
FILTERED = "learner/test_predecessors_training.py::test_dapo_samples_other_groups_for_those_it_filters_and_rl2_does_not"
BATCHES = "learner/test_predecessors_training.py::test_batches_are_of_the_size_that_their_row_says"
GIVEN = "extensions/offline/test_predecessors_run.py::test_a_row_about_training_on_given_rows_trains"
READ = "extensions/offline/test_predecessors_run.py::test_a_row_about_data_reads_rows"
OF_EVERY_ROW = (TRAINED, GIVEN, READ)

LAUNCH = "end_to_end/test_predecessors_launch.py::"
MATH = f"{LAUNCH}test_colossal_s_math_run"
EXACT = f"{LAUNCH}test_the_exact_reward_with_xml_points_and_eight_answers_a_row"
TAGS = f"{LAUNCH}test_answers_in_tags_end_at_the_stop_string_and_keep_it"
PROMPTS = f"{LAUNCH}test_prompts_are_text_or_messages"
PROGRAMS = f"{LAUNCH}test_programs_are_judged_by_a_verifier_over_http"
PLAYED = f"{LAUNCH}test_environments_are_played"
CRITIC = f"{LAUNCH}test_ppo_with_a_critic"
QUANTISED = f"{LAUNCH}test_adapters_over_a_base_of_4_bits_with_an_8_bit_optimizer"
LAYOUTS = "end_to_end/test_layout_runs.py::test_a_run_samples_trains_evaluates_and_exports_under_every_layout"
GATHERS = "learner/engine/test_fsdp_engine.py::test_resharding_says_how_often_parameters_are_gathered"
TURNS = "generator/test_environment_rollouts.py::"
GPU = "benchmarks/test_gpu_smoke.py::test_a_case_passes_on_this_machine"
WANDB = (
    "extensions/ops/sinks/test_loggers.py::test_wandb_gets_the_mode_the_project_and_every_row",
    "extensions/ops/sinks/test_wandb_run.py::test_every_row_arrives_without_a_key_a_prompt_or_a_network",
)
RANKS = "end_to_end/test_roles.py::test_two_ranks_train_while_generators_die_and_join"
RESUMED = "end_to_end/test_launch_run.py::test_nothing_is_left_when_launch_is_killed_and_the_same_command_goes_on"
SAMPLES_ITSELF = "end_to_end/test_generating_learner.py::test_a_learner_alone_is_the_whole_system"
EVALUATED = "end_to_end/test_launch_run.py::test_real_gsm8k_rows_go_through_every_stage"
OWN_REWARD = "end_to_end/test_own_reward.py::test_a_run_with_rewards_of_the_user_s_own_over_a_table"

NOT_PLANNED: tuple[str, ...] = ()
"""A row that says why there is no such feature."""

RUN_BY: Mapping[str, tuple[str, ...]] = {
    # Colossal-RL
    "producer/consumer split": (
        RANKS,
        "launch/test_launch.py::test_every_rank_gets_its_place_its_devices_and_the_rendezvous",
        "launch/test_launch.py::test_generators_are_dealt_their_devices_in_order",
    ),
    "single-node / multi-node Ray": (
        "end_to_end/test_namespace.py::test_a_generator_that_sees_only_the_network_joins_and_is_trained_on",
        "queue/test_server.py::test_the_advertised_address_is_what_others_are_told",
    ),
    "vLLM rollout backend": ("vllm/test_processes.py::test_the_quickstart_learns_with_vllm_on_the_cpu", TRAINED),
    "transformers rollout backend": (TAGS,),
    "rollout TP": (
        "vllm/test_tensor_parallel.py::"
        "test_logprobs_are_exact_before_and_after_a_swap_with_two_workers_and_another_dtype",
    ),
    "trainer TP, PP, ZeRO 0/1/2": (LAYOUTS, GATHERS, TRAINED),
    "grad clip, bf16, flash-attn, checkpointing": (
        TRAINED,
        "learner/model/test_recomputation.py::"
        "test_selective_keeps_the_outputs_of_products_and_full_the_inputs_of_layers",
    ),
    "batch flags ibs, imbs, tbs, tMbs, tmbs, g": (
        BATCHES,
        TRAINED,
        "generator/test_fake_backend.py::test_sequences_wait_for_slots_and_carry_a_version_for_each_token",
    ),
    "constraint validation": (
        "config/test_contradictions.py::test_each_example_is_refused_by_its_row_and_needs_all_its_settings",
        "cli/test_cli.py::test_a_bad_key_names_itself_what_was_expected_and_what_was_got",
    ),
    "weight sync schedule": (
        GRPO,
        "learner/loop/test_trainer.py::test_every_second_version_is_published_and_the_last_one_always",
    ),
    "per-stage weight broadcast": (
        GPU,
        "weights/test_collective.py::test_a_broadcast_brings_the_bytes_chunk_by_chunk",
        LAYOUTS,
    ),
    "shared buffer of groups": (
        GRPO,
        MATH,
        "queue/test_server.py::test_a_restarted_server_goes_on_on_its_old_port_with_every_group_and_lease",
    ),
    "GRPO preset": (GRPO, TRAINED),
    "DAPO preset": (FILTERED, TRAINED, MATH),
    "advantage": (TRAINED,),
    "filter_range": (FILTERED, TRAINED, MATH),
    "dynamic_batching": (FILTERED, TRAINED, MATH),
    "clip_eps_low/high": (TRAINED,),
    "skip_threshold": (TRAINED,),
    "loss token_level": (TRAINED,),
    "loss sample_level": (TRAINED,),
    "soft overlong punishment": (
        MATH,
        "rewards/test_math.py::test_zero_at_limit_takes_what_a_cut_answer_earned_and_no_more",
    ),
    "cache_length": (MATH,),
    "filter_truncated_response": (TRAINED, FILTERED),
    "KL + reference": (
        GRPO,
        TRAINED,
        "learner/engine/test_fsdp_engine.py::test_without_a_kl_coefficient_no_reference_is_loaded",
    ),
    "lr schedule": (GRPO, TRAINED),
    "temperature annealing": (
        GRPO,
        TRAINED,
        "end_to_end/test_sampling_run.py::"
        "test_every_ratio_of_a_run_on_policy_is_1_under_top_p_and_a_falling_temperature",
    ),
    "reward think_answer_tags": (TAGS,),
    "reward boxed": (MATH,),
    "reward code": (PROGRAMS, "end_to_end/test_code_run.py::test_code_rows_are_sampled_graded_and_trained_on"),
    "code verifier service": (PROGRAMS,),
    "math equality": (
        "rewards/test_math.py::test_boxed_answers_may_be_compared_as_text",
        "learner/loop/test_evaluations.py::test_votes_are_taken_as_the_run_compares_answers",
    ),
    "multiple reward functions": (EXACT,),
    "math / code JSONL": (MATH, READ, PROGRAMS),
    "system prompt": (MATH,),
    "max_prompt_tokens": (MATH,),
    "evaluation in training": (MATH, READ),
    "eval files": (MATH,),
    "rollout log": (MATH,),
    "wandb metrics": WANDB,
    "save": (GRPO, MATH),
    "resume": (RESUMED,),
    "RLOO; REINFORCE++ baseline": (TRAINED,),
    "entropy metric, weight decay, profiling": (MATH, GRPO, TRAINED),
    "n_behind": ("end_to_end/test_fixed_lag.py::test_every_token_is_exactly_fixed_lag_versions_old", TRAINED),
    "zero-bubble async": (TRAINED,),
    "agentic tools": (f"{LAUNCH}test_a_tool_is_called_as_the_template_shows_it",),
    "NPU": NOT_PLANNED,
    "PPO critic; AGPO": (CRITIC, TRAINED),
    # RL2
    "SFT trainer": (GIVEN,),
    "RM trainer": (f"{LAUNCH}test_a_reward_model_is_trained_evaluated_and_served", GIVEN),
    "DPO trainer": (GIVEN,),
    "PPO trainer": (TRAINED, CRITIC),
    "file types": (READ, "data/test_data_files.py::test_every_kind_of_file_gives_the_same_rows"),
    "raw text + messages formats": (PROMPTS, READ),
    "max_length": (
        GIVEN,
        "extensions/offline/test_sft_rows.py::test_long_rows_are_cut_on_the_right_and_counted",
        "extensions/offline/test_pairs.py::test_text_is_used_without_a_template_and_cut_on_the_right",
        "extensions/offline/test_rm.py::test_all_forms_of_a_pair_give_the_same_tokens",
    ),
    "FSDP ZeRO-3": (GATHERS, TRAINED),
    "ddp_size HSDP": (LAYOUTS,),
    "TP": (LAYOUTS,),
    "sp_size CP": (LAYOUTS,),
    "max_length_per_device": (TRAINED,),
    "balanced packing": (
        TRAINED,
        "learner/data/test_packing.py::test_pack_keeps_every_sequence_once_within_budget_and_balanced",
    ),
    "exact global loss normalisation": ("learner/layouts/test_layouts.py::test_a_step_is_the_same_under_every_layout",),
    "optimizer/model offload": (
        GPU,
        "learner/engine/test_fsdp_engine.py::test_an_offloaded_engine_takes_the_same_steps",
    ),
    "Liger, gradient checkpointing": (
        TRAINED,
        "learner/model/test_logprobs.py::test_no_more_rows_than_a_chunk_ever_reach_the_head",
    ),
    "env step": (f"{LAUNCH}test_the_guessing_game_is_played",),
    "env reset / no dataset": (PLAYED, READ),
    "env_path": (PLAYED,),
    "multi-turn, max_turns": (PLAYED,),
    "prefix rule": (f"{TURNS}test_the_prefix_rule_decides_between_one_sequence_and_several",),
    "token-in token-out": (
        f"{TURNS}test_what_was_sampled_is_kept_token_by_token_and_what_was_told_is_off_the_mask",
        PLAYED,
    ),
    "trajectory of many sequences": (
        f"{TURNS}test_the_prefix_rule_decides_between_one_sequence_and_several",
        PLAYED,
    ),
    "reward vs score": (f"{TURNS}test_scripted_games_get_their_rewards_and_signs_of_advantage", PLAYED),
    "GEM": (
        f"{LAUNCH}test_a_game_of_gem_is_played",
        "environments/test_examples.py::test_gems_own_guess_the_number_is_played",
        "environments/test_examples.py::test_the_gem_adapter_keeps_the_conversation_and_the_seed",
    ),
    "search, countdown, math envs": (
        "environments/test_examples.py::test_local_search_finds_passages_and_scores_answers",
        "environments/test_examples.py::test_countdown_rewards_form_and_right_equations",
        MATH,
    ),
    "SGLang async + TP": (
        "end_to_end/test_uniform_backend.py::test_the_command_in_the_example_of_a_backend_works",
        "generator/test_backends.py::test_an_own_backend_is_code_that_generators_must_allow",
    ),
    "stop strings, no_stop_trim": (TAGS,),
    "dynamic filtering": (FILTERED, TRAINED),
    "Dr. GRPO default": (TRAINED,),
    "global_norm, norm_var": (TRAINED,),
    "leave-one-out": (TRAINED,),
    "GAE": (
        CRITIC,
        TRAINED,
        "learner/losses/test_credit.py::test_a_critic_gives_credit_across_turns_and_sequences",
    ),
    "KL reward/loss, k1 k2 k3": (
        TRAINED,
        "learner/test_predecessors_training.py::test_a_choice_that_a_row_calls_refused_is_refused",
    ),
    "avg_level, clip, entropy, temperature": (
        TRAINED,
        "end_to_end/test_sampling_run.py::"
        "test_every_ratio_of_a_run_on_policy_is_1_under_top_p_and_a_falling_temperature",
    ),
    "update_per_rollout": (TRAINED,),
    "TIS": (TRAINED,),
    "freeze_steps": (CRITIC, TRAINED),
    "value clipping": (CRITIC, TRAINED),
    "checkpoint/resume incl. `latest`": (
        RESUMED,
        "learner/checkpoints/test_resume.py::test_a_latest_that_names_nothing_is_replaced_by_the_newest_whole_checkpoint",
    ),
    "final HF export; RM as seq-cls": (
        GIVEN,
        "end_to_end/test_roles.py::test_an_exported_run_loads_as_a_hugging_face_model",
        f"{LAUNCH}test_a_reward_model_is_trained_evaluated_and_served",
    ),
    "use_wandb off, timing metrics": (EXACT, PROMPTS),
    "test during PPO": (
        CRITIC,
        "generator/test_transformers_backend.py::test_greedy_equals_a_plain_loop_of_full_forward_passes",
    ),
    "shipped examples": (
        "config/test_recipes.py::test_a_recipe_loads_and_its_commands_exist",
        "end_to_end/test_launch_run.py::test_a_shrunken_gpu_recipe_trains_two_steps_on_the_cpu",
    ),
    "validation split, key names, apply_chat_template": (READ, PROMPTS),
    "Megatron 5D": (f"{LAUNCH}test_eight_ranks_in_three_dimensions_train_as_one", LAYOUTS),
    "router, bucketed weight sync": (PROMPTS,),
    "partial rollout": (
        PROMPTS,
        "generator/test_transformers_backend.py::test_new_weights_score_from_the_next_step_on_and_keep_the_cache",
    ),
    "eval_only, rollout dump": (EXACT, EVALUATED),
    "custom generate function": (PLAYED,),
    "LoRA; multi-agent; privileged critic; mid-training": (
        TRAINED,
        PLAYED,
        GIVEN,
        "extensions/offline/test_row_forms.py::test_a_run_on_any_form_of_the_same_rows_gives_the_same_weights",
    ),
    "GSPO, Kimi, on-policy distillation": (
        TRAINED,
        "end_to_end/test_own_loss.py::test_a_run_with_the_soft_clip_and_advantages_by_age",
        "end_to_end/test_distill_run.py::test_a_student_comes_nearer_to_its_teacher_under_every_layout",
    ),
    # DistRL-LLM
    "actors + generating learner": (
        SAMPLES_ITSELF,
        "vllm/test_generating_learner.py::test_a_learner_that_samples_with_vllm_is_the_whole_system",
    ),
    "chunk split rule": ("end_to_end/test_generating_learner.py::test_ranks_sample_in_every_layout_that_is_allowed",),
    "idle learner (0)": (SAMPLES_ITSELF, MATH),
    "learner pg": (TRAINED,),
    "learner grpo": (TRAINED,),
    "topk": (TRAINED, "learner/losses/test_advantages.py::test_best_k_keeps_the_best_after_the_baseline_of_all"),
    "train_batch_size accumulation": (TRAINED,),
    "4-bit + LoRA + 8-bit Adam": (QUANTISED, TRAINED),
    "adapter hand-off": ("end_to_end/test_lora_run.py::test_a_run_with_adapters_trains_and_exports", TRAINED),
    "MATH-500, R1 prompt, xml reward": (READ, EXACT),
    "eval pass@1(mean n), BoN": (EXACT,),
    "custom dataset/reward hook": (OWN_REWARD, READ),
    "checkpoint, metrics": (RESUMED, *WANDB),
    "multi-learner": (LAYOUTS,),
    "w/ and w/o vLLM option": (PROMPTS,),
}
