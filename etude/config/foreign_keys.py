"""Keys of verl, Search-R1 and RL-Factory that Étude's tree does not have.

Invariant: none of them is a key of ours; one that gets a meaning here leaves these tables. There are three kinds: another
name for one of our keys (`ALIASES`), a key without effect on the result (`INERT`, accepted and logged at the start), and a
line that must change (`REPLACED`). `REFUSED_VALUES` are values that mean something else there. Patterns are `fnmatch`
patterns and cover everything below a section; `translation` applies them.
"""

from __future__ import annotations

ALIASES = {
    "actor_rollout_ref.rollout.multi_turn.max_turns": "actor_rollout_ref.rollout.multi_turn.max_assistant_turns",
    "actor_rollout_ref.actor.grad_clip": "actor_rollout_ref.actor.optim.clip_grad",
    "critic.grad_clip": "critic.optim.clip_grad",
    **{
        f"{section}.fsdp_config.optimizer_offload": f"{section.removesuffix('.model')}.optim.offload"
        for section in ("actor_rollout_ref.actor", "critic", "critic.model")
    },
    "critic.model.fsdp_config": "critic.fsdp_config",
    **{
        f"{section}.fsdp_config.ulysses_sequence_parallel_size": f"{section}.ulysses_sequence_parallel_size"
        for section in ("actor_rollout_ref.actor", "critic")
    },
    **{
        f"{section}.optim.{theirs}": f"{section}.optim.{ours}"
        for section in ("actor_rollout_ref.actor", "critic")
        for theirs, ours in {
            "warmup_style": "lr_scheduler_type",
            "lr_decay_style": "lr_scheduler_type",
            "decay_type": "lr_scheduler_type",
            "min_lr_factor": "min_lr_ratio",
        }.items()
    },
    "async_training.partial_rollout": "actor_rollout_ref.rollout.partial_rollout",
    "reward.custom_reward_function": "custom_reward_function",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.reward_kwargs": "reward_model.reward_kwargs",
    **{
        f"reward.{key}": f"reward_model.reward_kwargs.{key}"
        for key in ("max_concurrent", "max_rpm", "max_tpm", "estimated_tokens_per_request", "timeout")
    },
    "reward_model.micro_batch_size": "reward_model.micro_batch_size_per_gpu",
    "reward.reward_model.model_path": "reward_model.model.path",
    "reward_rollout.rollout.model_name": "reward_model.model.path",
    **{
        f"{section}.rollout.response_length": "reward_model.response_length"
        for section in ("reward_model", "reward.reward_model", "reward_rollout")
    },
    "reward_model.overlong_buffer": "reward_model.reward_kwargs.overlong_buffer_cfg",
    "ray_init.address": "ray.address",
    "ray_init": "ray.init_kwargs",
    "ray_kwargs.ray_init.address": "ray.address",
    "ray_kwargs.ray_init": "ray.init_kwargs",
    "distillation.distillation_loss.distillation_loss_coef": "distillation.coef",
    "custom_reward_function.overlong_buffer": "reward_model.reward_kwargs.overlong_buffer_cfg",
}
"""Maps a key, or a section with all keys below it, to its name here."""

TRL_NAMES = {
    "beta": "actor_rollout_ref.actor.kl_loss_coef, with use_kl_loss=true",
    "bf16": "actor_rollout_ref.model.dtype=bfloat16, which auto takes on a GPU,",
    "delta": "actor_rollout_ref.actor.clip_ratio_c",
    "environment_factory": "env, with plugins for its file,",
    "epsilon": "actor_rollout_ref.actor.clip_ratio",
    "epsilon_high": "actor_rollout_ref.actor.clip_ratio_high",
    "eval_dataset": "data.val_files",
    "eval_steps": "trainer.test_freq",
    "eval_strategy": "trainer.test_freq",
    "generation_batch_size": "data.train_batch_size, in prompts,",
    "gradient_accumulation_steps": "data.train_batch_size over actor_rollout_ref.actor.ppo_mini_batch_size",
    "gradient_checkpointing": "actor_rollout_ref.model.enable_gradient_checkpointing",
    "importance_sampling_level": "actor_rollout_ref.actor.policy_loss.loss_mode=gspo, for sequences,",
    "learning_rate": "actor_rollout_ref.actor.optim.lr",
    "log_completions": "trainer.rollout_data_dir",
    "logging_steps": "no key (every step is logged)",
    "loss_type": "actor_rollout_ref.actor.loss_agg_mode, and actor.policy_loss.loss_mode,",
    "mask_truncated_completions": "no key (a cut answer earns what the reward gives it)",
    "max_completion_length": "data.max_response_length",
    "max_grad_norm": "actor_rollout_ref.actor.optim.clip_grad",
    "max_steps": "trainer.total_training_steps",
    "max_tool_calling_iterations": "actor_rollout_ref.rollout.multi_turn.max_assistant_turns",
    "num_generations": "actor_rollout_ref.rollout.n",
    "num_iterations": "actor_rollout_ref.actor.ppo_epochs",
    "num_train_epochs": "trainer.total_epochs",
    "output_dir": "trainer.default_local_dir",
    "peft_config": "actor_rollout_ref.model.lora_rank, lora_alpha and target_modules",
    "per_device_eval_batch_size": "data.val_batch_size",
    "per_device_train_batch_size": "data.train_batch_size, in prompts,",
    "report_to": "trainer.logger",
    "resume_from_checkpoint": "trainer.resume_mode, by default auto,",
    "reward_funcs": "custom_reward_function.path",
    "reward_weights": "custom_reward_function.rewards, each with its weight,",
    "save_steps": "trainer.save_freq",
    "save_total_limit": "trainer.max_actor_ckpt_to_keep",
    "scale_rewards": "algorithm.norm_adv_by_std_in_grpo",
    "steps_per_generation": "data.train_batch_size over actor_rollout_ref.actor.ppo_mini_batch_size",
    "train_dataset": "data.train_files",
    "use_vllm": "actor_rollout_ref.rollout.name=vllm",
    "vllm_gpu_memory_utilization": "no key (a server takes it on its own command line)",
    "vllm_mode": "actor_rollout_ref.rollout.name=vllm, with server_urls for one of your own (docs/engines.md),",
    "vllm_server_base_url": "actor_rollout_ref.rollout.server_urls",
    "warmup_ratio": "actor_rollout_ref.actor.optim.lr_warmup_steps, in steps,",
    "warmup_steps": "actor_rollout_ref.actor.optim.lr_warmup_steps",
}
"""Maps an option of TRL's GRPOConfig or GRPOTrainer to what does the same here: they are not translated, only named."""

SWITCHES = {
    "reward_rollout": "reward_rollout.if_use_reward_rollout",
    "reward.reward_model": "reward.reward_model.enable",
}
"""Maps a section to its switch: if off, none of the section's keys has an effect; if on, the keys say it all."""

INERT = {
    key: why
    for why, keys in {
        "rows are packed by tokens: ppo_max_token_len_per_gpu bounds memory and changes no result": """
            *.ppo_micro_batch_size* *.log_prob_micro_batch_size* *.forward_micro_batch_size*
            *.forward_max_token_len_per_gpu actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu
            actor_rollout_ref.rollout.micro_batch_size* *.use_dynamic_bsz
            *.log_prob_use_dynamic_bsz *.use_remove_padding *.pad_to_length* trainer.balance_batch
        """,
        "one process on one device trains": """
            reward_model.n_gpus_per_node reward.*.n_gpus_per_node
            *.nccl_timeout model_engine
            algorithm.filter_groups.max_inflight_gen_batches data.filter_overlong_prompts_workers
            data.dataloader_num_workers reward_model.nnodes
        """,
        "rollout.n is the number of answers per prompt": "*.rollout_n",
        "all trajectories run at once in one process; rollout.max_concurrent_trajectories bounds them": """
            actor_rollout_ref.rollout.agent.num_workers
        """,
        "PyTorch's FSDP2 is the one engine of sharded training": """
            *.fsdp *.megatron *.veomni *.torchtitan *optim.use_* *optim.*_dtype *.layer_name_map
            *.fsdp_config.wrap_policy *.fsdp_config.forward_prefetch *.fsdp_config.use_orig_params
            *.fsdp_config.turbo_config
            *.fsdp_config.forward_only *.fsdp_config.strategy *.fsdp_config.seed *.fsdp_config.full_determinism
            *.fsdp_config.use_orig_params *.fsdp_config.entropy* *.fsdp_config.qat
        """,
        "gradients are where the optimizer is: optim.offload, and fsdp_config.param_offload for weights too": """
            *.fsdp_config.offload_policy *.fsdp_config.grad_offload
        """,
        "the reference is held as the actor is": """
            actor_rollout_ref.ref.strategy actor_rollout_ref.ref.fsdp_config actor_rollout_ref.ref.param_offload
            actor_rollout_ref.ref.ulysses_sequence_parallel_size reward_model.ulysses_sequence_parallel_size
            reward_model.strategy reward_model.*.fsdp_config reward_model.param_offload
        """,
        "a checkpoint holds all that a resumed run needs, and a model folder; trainer.async_save is a key": """
            *.checkpoint trainer.del_local_ckpt_after_load trainer.esi_redundant_time
        """,
        "trainer.max_actor_ckpt_to_keep counts checkpoints of actor and critic together": "trainer.max_critic_ckpt_to_keep",
        "memory and speed alone; the result is the same": """
            *.entropy_from_logits_*
            *.entropy_checkpointing *.sum_pi_squared_checkpointing *.calculate_entropy *.calculate_sum_pi_squared
            *.use_fused_kernels *.fused_kernel_options *.use_shm *.tiled_mlp
            *.use_prefix_grouper *.use_chunked_topk *.chunked_topk_chunk_size *optim.optimizer_impl
            *.fsdp_config.use_no_sync_for_gradient_accumulation *.gradient_checkpointing_kwargs
        """,
        "it depends on a switch that is off": """
            *optim.lr_wsd_* *.qat *.mtp *.router_replay algorithm.pf_ppo
            algorithm.rollout_correction.use_policy_gradient
            actor_rollout_ref.rollout.skip_dump_dir trainer.v1 skip *.rollout.skip
            distillation.teacher_models distillation.teacher_key distillation.nnodes distillation.n_gpus_per_node
            data.datagen.name reward_model.reward_loop_class_name
            reward.reward_manager.module.name
        """,
        "distillation.task_coef is the weight of the task's rewards; 0: the teacher alone": """
            distillation.distillation_loss.use_task_rewards
        """,
        "loss_mode=k1 is an advantage in the actor's own policy loss, forward_kl_topk a loss of its own": """
            distillation.distillation_loss.use_policy_gradient distillation.distillation_loss.policy_loss_mode
            distillation.distillation_loss.clip_ratio*
        """,
        "the reference is frozen": "actor_rollout_ref.ref.optim",
        "the warm-up rises from 0": "*optim.zero_indexed_step",
        "no class is named in this section": "*._target_",
        "the native engine has no such setting, and servers take theirs on their own command line": """
            actor_rollout_ref.rollout.gpu_memory_utilization actor_rollout_ref.rollout.tensor_model_parallel_size
            actor_rollout_ref.rollout.data_parallel_size actor_rollout_ref.rollout.expert_parallel_size
            actor_rollout_ref.rollout.pipeline_model_parallel_size actor_rollout_ref.rollout.enforce_eager
            actor_rollout_ref.rollout.cudagraph_capture_sizes actor_rollout_ref.rollout.enable_chunked_prefill
            actor_rollout_ref.rollout.load_format actor_rollout_ref.rollout.layered_summon
            actor_rollout_ref.rollout.disable_log_stats actor_rollout_ref.rollout.multi_stage_wake_up
            actor_rollout_ref.rollout.scheduling_policy actor_rollout_ref.rollout.skip_tokenizer_init
            actor_rollout_ref.rollout.router_config_path actor_rollout_ref.rollout.prometheus
            actor_rollout_ref.rollout.disaggregation actor_rollout_ref.rollout.limit_images
            actor_rollout_ref.rollout.moe_load_balance_metrics_interval
        """,
        "weights go to other processes through host memory (docs/distributed.md): rollout.weight_transfer says how": """
            actor_rollout_ref.rollout.checkpoint_engine actor_rollout_ref.rollout.update_weights_bucket_megabytes
        """,
        "the engine's log-probs are always kept": "actor_rollout_ref.rollout.calculate_log_probs",
        "trainer.project_name and experiment_name name the run": "actor_rollout_ref.rollout.trace.*_name",
        "sampling and training share one token sequence, so there is one template": """
            actor_rollout_ref.rollout.multi_turn.use_inference_chat_template
        """,
        "sampled ids are never encoded again: nothing to compare (`etude chat check` tries a template)": """
            actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode
        """,
        "there is no profiler here; rollout.trace records spans": """
            *.profiler *.profile global_profiler trainer.npu_profile trainer.profile_steps trainer.*_nsight_options
        """,
        "trainer.validation_data_dir keeps every conversation": """
            trainer.log_val_generations trainer.val_generations_to_log_to_wandb
        """,
        "algorithm.kl_ctrl is the KL controller": "critic.kl_ctrl",
        "optim.name=muon is torch.optim.Muon in its own settings (docs/models.md)": """
            *optim.muon_coefficient_type *optim.muon_extra_scale_factor *optim.muon_fp32_matmul_prec
            *optim.muon_match_adamw_update_rms *optim.muon_momentum *optim.muon_nesterov *optim.muon_num_ns_steps
            *optim.muon_scalar_optimizer *optim.muon_scale_mode *optim.muon_split_qkv *optim.muon_tp_mode
        """,
        "Ray is used as trainer.backend and the section ray say": """
            trainer.ray_wait_register_center_timeout trainer.use_legacy_worker_impl trainer.use_v1
            ray_kwargs.timeline_json_file transfer_queue
        """,
        "sampled ids are never encoded again, whatever the model's family": "data.continuous_token",
        "a row keeps all its columns, its messages and its token ids": """
            data.return_raw_chat data.return_raw_input_ids data.return_full_prompt data.return_multi_modal_inputs
        """,
        "the model's own processor reads images": "data.image_patch_size",
        "figures of a validation do not depend on the order of its rows": "data.validation_shuffle",
        "the critic's mini-batches are mixed as the actor's": "critic.data_loader_seed",
        "model.lora_rank, lora_alpha and target_modules say it": "*.model.lora",
        "a reward model runs where trajectories are scored, on an engine that has no such setting": """
            reward_model.model.use_* reward_model.rollout reward_model.enable_resource_pool
            reward.reward_model reward_rollout
        """,
        "a reward model reads conversations in its own tokens and chat template": "reward_model.model.input_tokenizer",
        "scorers run in threads of the rollout's process; for others see reward_manager=prime and remote": """
            reward_model.num_workers reward.num_workers
        """,
        "rollout.mode=async scores each trajectory as it ends": "reward_model.launch_reward_fn_async",
    }.items()
    for key in keys.split()
}
"""Maps a pattern to the reason why matching keys have no effect."""

_OFF = (None, False)
_LIMIT = "max_concurrent_calls in a tool's config bounds its calls at once"
_CACHE = "cache in a tool's config keeps the answers of a tool that is pure"
_LORA = "write model.lora_rank=N, and model.lora_alpha"
_ADAPTER = "delete it: adapters start at zero, or go on from a checkpoint of the run"
_IMAGES_ONLY = "delete it: a model is shown images only (data.image_key)"
_SANDBOX = (
    "write custom_reward_function.path=etude.rewards.code, and such limits as its custom_reward_function.reward_kwargs"
)
_PLUGIN = "write plugins=[FILE.py], where @register(NAME) stands before the class, and reward_model.reward_manager=NAME"
_DTYPE = "write actor_rollout_ref.model.dtype=bfloat16 (or float16)"
_FLOAT32 = (None, "fp32", "float32")

REPLACED: dict[str, tuple[str, tuple[object, ...]]] = {
    "*.fsdp_config.model_dtype": (_DTYPE, _FLOAT32),
    "*.fsdp_config.dtype": (_DTYPE, _FLOAT32),
    "*.fsdp_config.mixed_precision": (_DTYPE, (None,)),
    "*.use_torch_compile": (
        "delete it: each micro-batch has shapes of its own; model.use_liger=true fuses operations on a GPU",
        _OFF,
    ),
    "*.qat.enable": ("delete it: weights are not quantised in training", _OFF),
    "*.mtp.enable": ("delete it: there is no multi-token prediction", _OFF),
    "*.router_replay.mode": ("write rollout.enable_rollout_routing_replay=true", (None, "disabled")),
    "*optim.optimizer": (
        "write optim.name=adamw, muon, adamw_8bit or adamw_schedule_free",
        (None, "AdamW", "adamw", "adam"),
    ),
    "*optim.lr_warmup_steps_ratio": (
        "write optim.lr_warmup_steps=N: that share of all training steps",
        (None, 0, 0.0, -1),
    ),
    "*optim.total_training_steps": (
        "write trainer.total_training_steps: a schedule ends where the run ends",
        (None, -1),
    ),
    "*optim.min_lr": ("write optim.min_lr_ratio: the final rate as a share of the peak", (None, 0, 0.0)),
    "*optim.lr_min": ("write optim.min_lr_ratio: the final rate as a share of the peak", (None, 0, 0.0)),
    "*optim.lr_start": ("delete it: the warm-up rises from 0", (None, 0, 0.0)),
    "*optim.lr_warmup_init": ("delete it: the warm-up rises from 0", (None, 0, 0.0)),
    "*optim.lr_decay_steps": (
        "write optim.lr_decay_ratio: the share of the run, at its end, over which it decays",
        (None,),
    ),
    "*optim.weight_decay_incr_style": ("delete it: the weight decay is constant", (None, "constant")),
    "*optim.eps": ("delete it: Adam's epsilon is 1e-8", (None, 1e-8)),
    "*.load_weight": ("delete it: a run starts from the model's weights", (None, True)),
    "*optim.num_cycles": ("delete it: a cosine schedule falls once", (None, 0.5)),
    "*optim.override_optimizer_config": ("write optim.betas, optim.weight_decay …", (None, {})),
    "*.override_config.moe_config.freeze_moe_router": ("delete it: all weights are trained", _OFF),
    "*.override_config": ("delete it, and write the values into config.json of the model's folder", (None, {})),
    "*.external_lib": ("write plugins=[MODULE]", (None,)),
    "*.hf_config_path": ("delete it: model.path holds configuration, weights and tokenizer", (None,)),
    "actor_rollout_ref.model.tokenizer_path": (
        "delete it: model.path holds configuration, weights and tokenizer",
        (None,),
    ),
    "critic.model.tokenizer_path": ("delete it: the critic reads the policy's tokens", (None,)),
    "*.custom_chat_template": (
        "delete it, and save the template as chat_template.jinja in the model's folder",
        (None,),
    ),
    "*.lora.rank": (_LORA, (None, 0)),
    "*.lora_adapter_path": (_ADAPTER, (None,)),
    "*.lora.adapter_path": (_ADAPTER, (None,)),
    "critic.model.trust_remote_code": ("write actor_rollout_ref.model.trust_remote_code=true", _OFF),
    "critic.enable": ("delete it: a critic is built where algorithm.adv_estimator needs values", (None,)),
    "critic.shuffle": ("delete it: the critic's mini-batches are mixed as the actor's (actor.shuffle)", (None,)),
    "critic.loss_scale_factor": ("delete it: the critic's is the response width", (None,)),
    "*.freeze_vision_tower": ("delete it: all weights are trained", _OFF),
    "actor_rollout_ref.ref.model": ("delete it: the reference is the policy as it starts", (None,)),
    "actor_rollout_ref.actor.use_token_level_loss": (
        "write actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
        (None, True),
    ),
    "actor_rollout_ref.actor.tis_imp_ratio_cap": (
        "write algorithm.rollout_correction.rollout_is=token, with this as its rollout_is_threshold",
        (None, -1),
    ),
    "actor_rollout_ref.actor.state_masking": (
        "delete it: exactly the sampled tokens are trained on, always",
        (),
    ),
    "actor_rollout_ref.rollout.over_sample_rate": (
        "delete it: every row of a batch is rolled out to its end; algorithm.filter_groups draws further ones",
        (None, 0, 0.0),
    ),
    "actor_rollout_ref.rollout.ignore_eos": ("delete it: a turn ends at its end token", _OFF),
    "actor_rollout_ref.rollout.logprobs_mode": (
        "delete it: log-probs are those of the distribution sampled from",
        (None, "processed_logprobs"),
    ),
    "actor_rollout_ref.rollout.repetition_penalty": (
        "delete it: log-probs would not be the policy's",
        (None, 1, 1.0),
    ),
    "actor_rollout_ref.rollout.full_determinism": ("write trainer.deterministic=true", _OFF),
    "actor_rollout_ref.rollout.use_fire_sampling": ("delete it: every token is sampled at rollout.temperature", _OFF),
    "actor_rollout_ref.rollout.skip_rollout": ("delete it: every step rolls out", _OFF),
    "actor_rollout_ref.rollout.quantization*": ("write rollout.engine_kwargs.vllm.quantization", (None,)),
    "actor_rollout_ref.rollout.mtp": ("delete it: there is no multi-token prediction", (None,)),
    "actor_rollout_ref.rollout.tool_response_length": (
        "write rollout.multi_turn.max_tool_response_length for a tool's answer; rollout.response_length bounds all turns "
        "and answers of a conversation together",
        (),
    ),
    "actor_rollout_ref.rollout.multi_turn.num_repeat_rollouts": ("write rollout.n=N: answers per prompt", (None,)),
    "actor_rollout_ref.rollout.multi_turn.completion_callback": (
        "write rollout.agent.agent_loop_config_path with an agent loop of yours",
        (None,),
    ),
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class": (
        "write a loop of your own as a class that a row's agent_name names (plugins, rollout.agent.agent_loop_config_path)",
        (None,),
    ),
    "actor_rollout_ref.rollout.agent.custom_async_server": (
        "write plugins=[FILE.py] with an engine of your own, and rollout.name=NAME",
        (None,),
    ),
    "data.tool_config_path": ("write actor_rollout_ref.rollout.multi_turn.tool_config_path", (None,)),
    "data.function_tool_path": ("write actor_rollout_ref.rollout.multi_turn.function_tool_path", (None,)),
    "data.truncation_side": ("delete it: a prompt is never cut", (None,)),
    "data.gen_batch_size": (
        "delete it: algorithm.filter_groups draws data.train_batch_size prompts at a time until the batch is full",
        (None,),
    ),
    "data.train_max_samples": ("delete it, and cut the file", (None, -1)),
    "data.reward_fn_key": ("delete it: the column data_source picks a row's scorer", (None, "data_source")),
    "data.tokenizer": ("delete it: the tokenizer is that of actor_rollout_ref.model.path", (None,)),
    "data.trust_remote_code": ("write actor_rollout_ref.model.trust_remote_code=true", _OFF),
    "data.datagen.path": ("delete it, and write the rows that the class makes to a file", (None,)),
    "data.mm_processor_kwargs": ("delete it: the model's own processor reads images", (None, {})),
    "data.video_key": (_IMAGES_ONLY, (None, "videos")),
    "data.audio_key": (_IMAGES_ONLY, (None, "audios")),
    "algorithm.use_pf_ppo": ("delete it: rows are not drawn by weight", _OFF),
    "algorithm.rollout_is*": ("write algorithm.rollout_correction.rollout_is and rollout_is_threshold", _OFF),
    "algorithm.rollout_correction.rollout_rs_threshold_lower": (
        "write rollout_rs_threshold=LOW_HIGH, both with a decimal point",
        (None,),
    ),
    "algorithm.rollout_correction.rollout_token_veto_threshold": (
        "write rollout_rs, such as seq_max_k2, with its bound in rollout_rs_threshold",
        (None,),
    ),
    "trainer.remove_previous_ckpt_in_save": ("write trainer.max_actor_ckpt_to_keep=1", _OFF),
    "trainer.val_only": ("run `etude eval` with the same arguments", _OFF),
    "trainer.default_hdfs_dir": ("delete it: checkpoints go to trainer.default_local_dir", (None,)),
    "trainer.checkpoint_callback_class": ("delete it: nothing is called after a checkpoint", (None,)),
    "trainer.v1.trainer_mode": ("write trainer.max_staleness=1, or more (docs/async.md)", (None, "sync")),
    "async_training.staleness_threshold": (
        "write trainer.max_staleness=N, in steps: about threshold × trigger_parameter_sync_step, rounded up",
        (),
    ),
    "async_training.trigger_parameter_sync_step": ("delete it: weights are handed over after every step", (1,)),
    "async_training.require_batches": ("delete it: a step takes data.train_batch_size prompts", (1,)),
    "async_training": ("delete it: trainer.max_staleness says how asynchronous a run is (docs/async.md)", ()),
    "actor_rollout_ref.rollout.skip.enable": ("delete it: every step rolls out", _OFF),
    "skip.*.enable": ("delete it: every step rolls out", _OFF),
    "distillation.distillation_loss.*_clamp": ("delete it: no term is cut off", (None,)),
    "distillation.enabled": ("name the teachers instead: distillation.teachers={default: …}", _OFF),
    "reward_model.model.trust_remote_code": ("write actor_rollout_ref.model.trust_remote_code=true", _OFF),
    "reward.reward_manager.source": (_PLUGIN, (None, "register")),
    "reward.reward_manager.module.path": (_PLUGIN, (None,)),
    "reward_model.reward_loop_source": (_PLUGIN, (None, "register")),
    "reward_model.reward_loop_module_path": (_PLUGIN, (None,)),
    "*sandbox_fusion.url": ("delete it, and set the environment variable ETUDE_SANDBOX_URL", (None,)),
    "*sandbox_fusion.max_concurrent": (_SANDBOX, (None, 64)),
    "*sandbox_fusion.memory_limit_mb": (_SANDBOX, (None, 1024)),
    "*.env.model_type": (
        "write multi_turn.format for the parser (auto: by the chat template), env.tool_manager for the manager",
        (),
    ),
    "*.env.mcp_mode": ("delete it: each MCP server of the tool file says how it is reached, by command or by url", ()),
    "*.env.parallel_sse_tool_call": (
        "delete it: a tool's calls run at the same time as they are; max_concurrent_calls in its config bounds them",
        (),
    ),
    "*.env.tool_name_selected": (
        "delete it: tool_selection in a row's extra_info names the tools that its model is shown",
        (),
    ),
    "*.env.enable_thinking": ("write data.apply_chat_template_kwargs.enable_thinking", ()),
    "*.env.load_custom_chat_template": (
        "delete it: the chat template is the tokenizer's; save it in the model's folder",
        (),
    ),
    "*.env.max_prompt_length": ("write data.max_prompt_length, which counts the tools' schemas, too", ()),
    "*.env.tool_timeout": ("delete it: timeout in a tool's config bounds its calls", ()),
    "*.env.enable_limiter": (f"delete it: {_LIMIT}", ()),
    "*.env.max_concurrency": (f"delete it: {_LIMIT}", ()),
    "*.env.use_storage_manager": (f"delete it: {_CACHE}", ()),
    "*.env.cache": (f"delete it: {_CACHE}", ()),
    "*.env.local_cache": (f"delete it: {_CACHE}", ()),
    "*.env.persist": ("delete it: cache.path in a tool's config names the file in which answers outlive the run", ()),
    "*.env.persist_dir": (
        "delete it: cache.path in a tool's config names the file in which answers outlive the run",
        (),
    ),
    "*.env.max_size": ("delete it: cache.max_entries in a tool's config bounds its answers", ()),
    "*.env.eviction": (
        "delete it: cache.max_entries in a tool's config bounds its answers; which of them go first is not chosen",
        (),
    ),
    "*.env.mmtool": ("delete it: tools answer with images wherever the model can see them", ()),
}
"""Maps a pattern to (what to do about matching keys, values that are accepted as inert because they hold here anyway)."""

_NEVER_CUT = "write error or drop: a prompt is never cut, since its start is the task"
_ENGINES = ("megatron", "veomni", "torchtitan", "automodel", "mindspeed")
REFUSED_VALUES: dict[str, dict[object, str]] = {
    **{
        f"{role}.strategy": dict.fromkeys(_ENGINES, "write fsdp2: no other engine of sharded training is built here")
        for role in ("actor_rollout_ref.actor", "critic")
    },
    "data.truncation": {"left": _NEVER_CUT, "right": _NEVER_CUT, "middle": _NEVER_CUT},
    "actor_rollout_ref.rollout.name": {
        "sglang_async": "write sglang",
        "vllm_async": "write vllm",
        "hf": "write native",
    },
    "distillation.distillation_loss.loss_mode": dict.fromkeys(
        ("kl", "abs", "mse", "k2", "low_var_kl", "k3"), "write k1, an advantage, or forward_kl_topk, a loss"
    ),
    "algorithm.filter_groups.max_num_gen_batches": {0: "write a bound, such as 10: 0 would be none"},
}
"""Maps one of our keys to values of other frameworks that are invalid here, each with what to do instead."""

READ_WITH = {
    "algorithm.filter_groups.max_num_gen_batches": ("algorithm.filter_groups.enable", "algorithm.zero_variance"),
    "distillation.distillation_loss.loss_mode": ("distillation.teachers", "distillation.enabled"),
}
"""Maps a key of `REFUSED_VALUES` to the keys of which one must be set for it to be read at all."""

IN_PROCESS_VLLM: dict[str, tuple[str, object]] = {
    "gpu_memory_utilization": ("gpu_memory_utilization", None),
    "tensor_model_parallel_size": ("tensor_parallel_size", 1),
    "pipeline_model_parallel_size": ("pipeline_parallel_size", 1),
    "enforce_eager": ("enforce_eager", False),
    "enable_chunked_prefill": ("enable_chunked_prefill", True),
}
"""Maps a name in verl's rollout section to (argument of in-process vLLM, its default, for which nothing needs to be set)."""
