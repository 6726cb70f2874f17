"""Which test, in which file of `tests/`, fails where a key of the configuration stays at its default."""

ROLLOUT = "actor_rollout_ref.rollout"

SPREAD = ("fsdp_size", "tensor_parallel_size", "param_offload", "reshard_after_forward")

WITNESSES = {
    "agents/test_agents_environments.py": {
        "actor_rollout_ref.env.tool_manager": "test_a_manager_may_make_tools_of_its_own",
        "actor_rollout_ref.env.use_process_reward": "test_an_env_written_for_rl_factory_runs_unchanged",
    },
    "agents/test_agents_failures.py": {
        f"{ROLLOUT}.max_concurrent_trajectories": "test_what_runs_of_a_useless_group_is_cancelled_and_released",
    },
    "agents/test_agents_manager.py": {
        f"{ROLLOUT}.trajectory_timeout": "test_a_loop_that_ignores_its_end_cannot_sample_on",
    },
    "agents/test_agents_search_r1.py": {
        f"{ROLLOUT}.stop": "test_stop_texts_reach_a_single_turn_and_must_be_texts",
    },
    "agents/test_agents_tool_calls.py": {
        f"{ROLLOUT}.trace.token2text": "test_a_rollout_leaves_its_trace",
        f"{ROLLOUT}.trace.path": "test_a_rollout_leaves_its_trace",
    },
    "testing/test_testing_run.py": {
        f"{ROLLOUT}.multi_turn.tools_in_system": "test_tools_in_the_system_message_of_a_template_that_shows_none",
    },
    "data/test_data_dataset.py": {
        "data.truncation": "test_an_overlong_prompt_is_an_error_when_filtering_is_off",
        "data.prompt_key": "test_another_prompt_key",
    },
    "data/test_data_images.py": {
        "data.image_key": "test_the_places_may_be_in_any_message_and_the_column_have_another_name",
    },
    "workers/test_workers_user_files.py": {
        "reward_model.reward_manager": "test_a_batch_reward_manager_of_the_documents_scores_row_by_row",
    },
    "test_trace.py": {
        f"{ROLLOUT}.trace.sample_rate": "test_a_share_is_traced_always_the_same",
        f"{ROLLOUT}.trace.max_samples_per_step_per_worker": "test_a_number_of_prompts_is_traced_with_all_their_answers",
    },
    "trainer/test_trainer_async.py": {
        "trainer.max_staleness": "test_every_prompt_of_the_plan_is_trained_on_once_and_none_is_too_old",
        "trainer.stall_timeout": "test_a_stalled_tool_is_tried_again_and_the_run_goes_on",
        "trainer.validation_data_dir": "test_validation_is_of_the_weights_of_its_step",
        f"{ROLLOUT}.partial_rollout": "test_an_update_reaches_a_trajectory_in_flight_or_waits_for_its_end",
    },
    "trainer/test_trainer_correction.py": {
        "algorithm.rollout_correction.alarm_threshold": "test_an_engine_far_from_the_trainer_raises_the_alarm_once",
    },
    "trainer/test_trainer_engines.py": {
        f"{ROLLOUT}.name": "test_an_evaluation_by_an_openai_server_is_that_of_the_model",
    },
    "trainer/test_trainer_distillation.py": {
        "distillation.hint": "test_several_teachers_by_data_source_and_the_policy_with_a_hint",
        "distillation.max_concurrent_requests": "test_requests_to_a_server_are_bounded",
        "distillation.server_timeout": "test_a_server_that_hangs_is_one_line",
        "distillation.teacher_sync_steps": "test_the_policys_teacher_follows_it_every_few_steps_and_is_resumed",
        "distillation.teacher_update_rate": "test_the_policys_teacher_follows_it_every_few_steps_and_is_resumed",
    },
    "trainer/test_trainer_acting.py": {
        "env": "test_an_environments_tasks_are_the_rows_and_its_score_the_reward",
    },
    "trainer/test_trainer_environments.py": {
        "actor_rollout_ref.env.name": "test_a_text_environment_trains",
    },
    "trainer/test_trainer_figures.py": {
        "trainer.max_skipped_steps": "test_a_run_whose_steps_are_all_skipped_stops_and_can_go_on",
        "trainer.on_solved": "test_a_solved_task_is_no_error",
        "reward_model.budget": "test_a_run_stops_when_its_judges_cost_too_much_and_goes_on_with_more",
    },
    "trainer/test_trainer_failures.py": {
        "trainer.min_valid_fraction": "test_a_step_without_survivors_changes_nothing_and_is_counted",
    },
    "trainer/test_trainer_learning_signal.py": {
        "trainer.max_infra_failure_share": "test_a_run_whose_infrastructure_mostly_fails_ends_with_a_checkpoint",
    },
    "trainer/test_trainer_images.py": {
        "plugins": "test_the_example",
    },
    "trainer/test_trainer_input.py": {
        "data.filter_overlong_prompts": "test_a_prompt_that_is_too_long_names_its_row",
    },
    "trainer/test_trainer_ray.py": {
        "actor_rollout_ref.hybrid_engine": "test_two_nodes_learn_what_one_process_learns",
        f"{ROLLOUT}.nnodes": "test_two_nodes_learn_what_one_process_learns",
        f"{ROLLOUT}.n_gpus_per_node": "test_two_nodes_learn_what_one_process_learns",
        "trainer.backend": "test_two_nodes_learn_what_one_process_learns",
        "trainer.nnodes": "test_two_nodes_learn_what_one_process_learns",
        "trainer.n_gpus_per_node": "test_more_processes_than_there_are_cpus_are_refused",
        "trainer.min_nnodes": "test_rollouts_stream_on_two_nodes_while_the_policy_learns",
        f"{ROLLOUT}.min_nnodes": "test_rollouts_may_have_fewer_nodes_than_asked_for",
        "ray.node_timeout": "test_after_a_loss_nodes_may_take_a_while_to_come_back",
        "ray.address": "test_two_nodes_learn_what_one_process_learns",
        "ray.init_kwargs": "test_two_nodes_learn_what_one_process_learns",
        "ray.call_timeout": "test_two_nodes_learn_what_one_process_learns",
        "ray.data_plane": "test_batches_may_stay_in_transfer_queue",
    },
    "trainer/test_trainer_restarts.py": {
        "trainer.max_restarts": "test_a_run_that_gets_no_further_ends_in_one_line_and_resumes",
    },
    "trainer/test_trainer_resume.py": {
        "trainer.async_save": "test_a_save_in_the_background_is_of_its_step_and_training_goes_on_meanwhile",
        "trainer.save_freq": "test_a_resumed_run_drops_the_metrics_of_steps_it_does_again",
        "trainer.resume_mode": "test_a_fresh_start_on_request_keeps_the_old_metrics_and_dumps_aside",
        "trainer.resume_from_path": "test_a_run_goes_on_from_a_named_checkpoint",
    },
    "data/test_data_samplers.py": {
        "data.sampler.weights": "test_the_shares_of_a_long_draw_are_the_weights",
    },
    "trainer/test_trainer_samplers.py": {
        "data.sampler.class_path": "test_a_sampler_of_ones_own_draws_and_is_told",
        "data.sampler.floor": "test_the_floor_moves_what_a_curriculum_draws",
        "data.custom_cls.path": "test_a_dataset_class_of_ones_own_makes_the_rows",
        "data.custom_cls.name": "test_a_dataset_class_of_ones_own_makes_the_rows",
    },
    "trainer/test_trainer_objective.py": {
        "algorithm.adv_estimator_kwargs": "test_an_estimator_of_ones_own_gets_a_greedy_rollout_of_each_prompt",
    },
    "trainer/test_trainer_tool_calls.py": {
        f"{ROLLOUT}.trace.backend": "test_a_recorded_run_is_repeated_to_the_bit_without_the_tool",
    },
    "trainer/test_trainer_training.py": {
        f"{ROLLOUT}.mode": "test_a_step_goes_in_the_documented_order_through_groups_alone",
        f"{ROLLOUT}.val_kwargs.do_sample": "test_validation_dumps_and_repeated_answers",
        "trainer.rollout_token_values": "test_a_dump_says_what_the_trainer_had_of_each_token",
        "trainer.rollout_data_dir": "test_a_dump_is_enough_to_score_again",
    },
    "trainer/test_trainer_sentinel.py": {"trainer.sentinel": "test_a_second_scorer_judges_validation_and_never_trains"},
    "trainer/test_trainer_verify.py": {"trainer.verify_every": "test_a_step_is_equal_live_and_from_its_folder_alone"},
    "workers/test_workers_lora.py": {
        f"{section}.{name}": test
        for section, test in {
            "actor_rollout_ref.model": "test_the_keys_choose_rank_scale_and_layers",
            "critic.model": "test_the_critics_keys_are_its_own",
        }.items()
        for name in ("lora_rank", "lora_alpha", "target_modules", "exclude_modules")
    }
    | {
        f"{section}.quantization": "test_weights_that_cannot_be_quantised_are_one_line"
        for section in ("actor_rollout_ref.model", "critic.model")
    },
    "workers/test_workers_experts.py": {
        "actor_rollout_ref.actor.router_aux_loss_coef": "test_the_routers_loss_evens_out_what_the_experts_get",
        f"{ROLLOUT}.enable_rollout_routing_replay": "test_rollouts_say_where_their_tokens_went_and_the_trainer_repeats_it",
    },
    "workers/test_workers_sharded.py": {
        f"{role}.{name}": "test_the_keys_choose_how_a_model_is_spread"
        for role in ("actor_rollout_ref.actor", "critic")
        for name in ("strategy", *(f"fsdp_config.{key}" for key in SPREAD))
    }
    | {
        f"{role}.ulysses_sequence_parallel_size": "test_ranks_of_a_team_get_the_same_rows"
        for role in ("actor_rollout_ref.actor", "critic")
    },
    "workers/test_workers_pretend_gpu.py": {
        "actor_rollout_ref.actor.optim.offload": "test_every_way_learns_as_on_the_cpu_and_seldom_waits",
        "actor_rollout_ref.model.enable_activation_offload": "test_every_way_learns_as_on_the_cpu_and_seldom_waits",
        "critic.optim.offload": "test_every_way_learns_as_on_the_cpu_and_seldom_waits",
        "critic.model.enable_activation_offload": "test_every_way_learns_as_on_the_cpu_and_seldom_waits",
    },
    "workers/test_workers_memory.py": {
        "actor_rollout_ref.model.enable_gradient_checkpointing": "test_checkpointing_keeps_less_and_changes_no_gradient",
        "critic.model.enable_gradient_checkpointing": "test_checkpointing_keeps_less_and_changes_no_gradient",
        "actor_rollout_ref.model.use_liger": "test_ligers_kernels_need_a_gpu",
        "critic.model.use_liger": "test_ligers_kernels_need_a_gpu",
    },
    "workers/test_workers_reward_models.py": {
        "reward_model.model.path": "test_a_language_model_judges_in_the_same_process",
        "reward_model.model.weight": "test_a_run_is_scored_by_the_model_and_by_functions_with_weights",
        "reward_model.response_length": "test_a_users_function_asks_the_language_model",
        "reward_model.max_length": "test_a_runs_reward_model_reads_the_end_of_long_conversations_a_few_at_a_time",
        "reward_model.micro_batch_size_per_gpu": (
            "test_a_runs_reward_model_reads_the_end_of_long_conversations_a_few_at_a_time"
        ),
    },
    "workers/test_workers_engine_link.py": {
        f"{ROLLOUT}.weight_transfer": "test_servers_get_adapters_alone_and_keep_as_many_versions_as_may_be_in_use",
        f"{ROLLOUT}.weight_sync_dir": "test_weights_go_where_the_configuration_says",
        f"{ROLLOUT}.weight_probe_tolerance": "test_a_server_of_another_dtype_needs_a_tolerance_of_its_own",
        f"{ROLLOUT}.free_cache_engine": "test_memory_is_free_between_rollouts",
    },
}

# Seen by none; each with its reason.
UNSEEN = {
    "data.train_files": "every run needs it",
    "trainer.default_local_dir": "every run of the tests sets it, and reads what the run left there",
    "trainer.device": "there is one device where the tests run",
    "trainer.num_threads": "changes speed alone",
    "trainer.project_name": "a name: of the folder by default, and of pages at trackers",
    "trainer.experiment_name": "a name: of the folder by default, and of pages at trackers",
    "trainer.logger": "the trackers' own tests choose them by name; no run shows it yet",
    "trainer.max_actor_ckpt_to_keep": "the checkpoints' own tests see it; no run shows it yet",
    "trainer.report": "tests turn it off; the report's own tests write it",
    "data.val_batch_size": "bounds memory and changes nothing else",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "bounds memory; that it changes nothing else is drawn",
    "critic.ppo_max_token_len_per_gpu": "bounds memory; that it changes nothing else is drawn",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": "bounds memory; that it changes nothing else is drawn",
    f"{ROLLOUT}.do_sample": "training refuses greedy answers; those of validation are val_kwargs.do_sample's",
    f"{ROLLOUT}.prompt_length": "another name of data.max_prompt_length",
    f"{ROLLOUT}.response_length": "another name of data.max_response_length",
    f"{ROLLOUT}.tool_config": "another name of multi_turn.tool_config_path",
    f"{ROLLOUT}.max_turns": "another name of multi_turn.max_assistant_turns",
    "actor_rollout_ref.env.config_path": "another name of multi_turn.tool_config_path",
    "actor_rollout_ref.env.timeout": "no test waits for a slow environment by configuration yet",
    "reward_model.reward_kwargs": "handed to the manager as they are, whose tests see them",
}
