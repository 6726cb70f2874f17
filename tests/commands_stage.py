"""verl's own example commands as data, and what one does to them once the message is read.

Keys and values are those of verl's scripts; paths and names of models are this file's own.
"""

import shlex

ACTOR, MODEL, REF = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"

QUICKSTART = f"""
data.train_files=gsm8k/train.parquet data.val_files=gsm8k/test.parquet data.train_batch_size=256
data.max_prompt_length=512 data.max_response_length=512
{MODEL}.path=a {ACTOR}.optim.lr=1e-6 {ACTOR}.ppo_mini_batch_size=64 {ACTOR}.ppo_micro_batch_size_per_gpu=4
{ROLLOUT}.name=vllm {ROLLOUT}.log_prob_micro_batch_size_per_gpu=8 {ROLLOUT}.tensor_model_parallel_size=1
{ROLLOUT}.gpu_memory_utilization=0.4 {REF}.log_prob_micro_batch_size_per_gpu=4
critic.optim.lr=1e-5 critic.model.path=a critic.ppo_micro_batch_size_per_gpu=4
algorithm.kl_ctrl.kl_coef=0.001
trainer.logger=console trainer.val_before_train=False trainer.n_gpus_per_node=1 trainer.nnodes=1
trainer.save_freq=10 trainer.test_freq=10 trainer.total_epochs=15
"""

_MULTI_TURN = f"""
algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False
data.filter_overlong_prompts=True data.truncation=error data.return_raw_chat=True
{MODEL}.path=a {MODEL}.use_remove_padding=True {MODEL}.enable_gradient_checkpointing=True
{ACTOR}.optim.lr=1e-6 {ACTOR}.ppo_mini_batch_size=256 {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0.001
{ACTOR}.kl_loss_type=low_var_kl {ACTOR}.entropy_coeff=0
{ACTOR}.fsdp_config.param_offload=False {ACTOR}.fsdp_config.optimizer_offload=False {REF}.fsdp_config.param_offload=True
{ROLLOUT}.tensor_model_parallel_size=1 {ROLLOUT}.name=sglang {ROLLOUT}.multi_turn.tool_config_path=tools.yaml
trainer.critic_warmup=0 trainer.logger='["console","wandb"]' trainer.project_name=p trainer.experiment_name=e
trainer.n_gpus_per_node=8 trainer.nnodes=1
"""

GSM8K_MULTITURN = f"""{_MULTI_TURN}
data.train_batch_size=256 data.max_prompt_length=1024 data.max_response_length=1024
data.train_files=gsm8k/train.parquet data.val_files=gsm8k/test.parquet
{ACTOR}.ppo_micro_batch_size_per_gpu=32 {REF}.log_prob_micro_batch_size_per_gpu=32
global_profiler.tool=torch_memory global_profiler.save_path=./mem_snapshots
global_profiler.global_tool_config.torch_memory.trace_alloc_max_entries=100000
global_profiler.global_tool_config.torch_memory.stack_depth=32
{ROLLOUT}.log_prob_micro_batch_size_per_gpu=32 {ROLLOUT}.gpu_memory_utilization=0.85
{ROLLOUT}.multi_stage_wake_up=True {ROLLOUT}.n=16 {ROLLOUT}.over_sample_rate=0.1
trainer.save_freq=-1 trainer.test_freq=20 trainer.val_before_train=True trainer.total_epochs=15
"""

SEARCH_R1 = f"""{_MULTI_TURN}
data.train_batch_size=512 data.val_batch_size=256 data.max_prompt_length=4096 data.max_response_length=3000
data.train_files=search/train.parquet data.val_files=search/test.parquet
{ACTOR}.optim.lr_warmup_steps_ratio=0.285
{ACTOR}.ppo_micro_batch_size_per_gpu=8 {REF}.log_prob_micro_batch_size_per_gpu=8
{ROLLOUT}.max_model_len=15000 {ROLLOUT}.log_prob_micro_batch_size_per_gpu=8 {ROLLOUT}.gpu_memory_utilization=0.5
{ROLLOUT}.n=5 {ROLLOUT}.mode=async {ROLLOUT}.agent.default_agent_loop=tool_agent
{ROLLOUT}.multi_turn.max_tool_response_length=1024 {ROLLOUT}.multi_turn.max_assistant_turns=4
{ROLLOUT}.multi_turn.max_user_turns=4
trainer.save_freq=100 trainer.test_freq=50 trainer.val_before_train=False trainer.total_epochs=1
"""

DAPO = f"""
data.train_files=dapo-math-17k.parquet data.val_files=aime-2024.parquet data.prompt_key=prompt data.truncation=left
data.max_prompt_length=2048 data.max_response_length=20480 data.gen_batch_size=1536 data.train_batch_size=512
{ROLLOUT}.n=16 algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.0
{ACTOR}.use_kl_loss=False {ACTOR}.kl_loss_coef=0.0 {ACTOR}.clip_ratio_low=0.2 {ACTOR}.clip_ratio_high=0.28
{ACTOR}.clip_ratio_c=10.0 algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=10
algorithm.filter_groups.metric=acc {MODEL}.use_remove_padding=True {ACTOR}.use_dynamic_bsz=True
{REF}.log_prob_use_dynamic_bsz=True {ROLLOUT}.log_prob_use_dynamic_bsz=True {ACTOR}.ppo_max_token_len_per_gpu=22528
{REF}.log_prob_max_token_len_per_gpu=22528 {ROLLOUT}.log_prob_max_token_len_per_gpu=22528 {MODEL}.path=a
{MODEL}.enable_gradient_checkpointing=True {ACTOR}.optim.lr=1e-6 {ACTOR}.optim.lr_warmup_steps=10
{ACTOR}.optim.weight_decay=0.1 {ACTOR}.ppo_mini_batch_size=32 {ACTOR}.fsdp_config.param_offload=True
{ACTOR}.fsdp_config.optimizer_offload=True {ACTOR}.entropy_coeff=0 {ACTOR}.grad_clip=1.0
{ACTOR}.loss_agg_mode=token-mean {ACTOR}.ulysses_sequence_parallel_size=8 {ROLLOUT}.gpu_memory_utilization=0.80
{ROLLOUT}.tensor_model_parallel_size=4 {ROLLOUT}.enable_chunked_prefill=True {ROLLOUT}.max_num_batched_tokens=22528
{ROLLOUT}.temperature=1.0 {ROLLOUT}.top_p=1.0 {ROLLOUT}.top_k=-1 {ROLLOUT}.val_kwargs.temperature=1.0
{ROLLOUT}.val_kwargs.top_p=0.7 {ROLLOUT}.val_kwargs.top_k=-1 {ROLLOUT}.val_kwargs.do_sample=True
{ROLLOUT}.val_kwargs.n=1 {REF}.fsdp_config.param_offload=True {REF}.ulysses_sequence_parallel_size=8
{ACTOR}.fsdp_config.fsdp_size=-1 reward_model.reward_manager=dapo
+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True +reward_model.reward_kwargs.overlong_buffer_cfg.len=4096
+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0
+reward_model.reward_kwargs.max_resp_len=20480
trainer.logger='["console","wandb"]' trainer.project_name=p trainer.experiment_name=e trainer.n_gpus_per_node=8
trainer.nnodes=16 trainer.val_before_train=True trainer.test_freq=5 trainer.save_freq=5 trainer.total_epochs=1
trainer.default_local_dir=ckpts trainer.resume_mode=auto
"""

GSM8K_YAML = """
hydra:
  searchpath: [file://verl/trainer/config]
defaults: [ppo_trainer, _self_]
data: {max_prompt_length: 1024, max_response_length: 1024, train_batch_size: 256, return_raw_chat: true}
actor_rollout_ref:
  hybrid_engine: true
  rollout: {name: sglang, multi_turn: {enable: true, max_assistant_turns: 5}}
"""
SEARCH_YAML = """
hydra:
  searchpath: [file://verl/trainer/config]
defaults: [ppo_trainer, _self_]
data: {max_prompt_length: 1024, max_response_length: 1024, train_batch_size: 256, return_raw_chat: true, shuffle: false}
actor_rollout_ref:
  hybrid_engine: true
  rollout: {name: sglang, multi_turn: {enable: true, max_assistant_turns: 4, format: hermes}}
"""
COMMANDS = {
    "quickstart": (
        None,
        QUICKSTART,
        {f"{ROLLOUT}.gpu_memory_utilization": f"{ROLLOUT}.engine_kwargs.vllm.gpu_memory_utilization=0.4"},
    ),
    "gsm8k_multiturn": (GSM8K_YAML, GSM8K_MULTITURN, {f"{ROLLOUT}.over_sample_rate": None}),
    "search_r1": (
        SEARCH_YAML,
        SEARCH_R1,
        {f"{ACTOR}.optim.lr_warmup_steps_ratio": f"{ACTOR}.optim.lr_warmup_steps=80"},
    ),
    "dapo": (
        None,
        DAPO,
        {
            "data.truncation": "data.truncation=drop",
            "data.gen_batch_size": None,
        },
    ),
}
"""Name → (the YAML that the command names, its arguments, key that must change → what stands in its place)."""


def arguments_of(name, folder):
    """(arguments of `compose`, key=value arguments) of a command, its YAML written to `folder`."""
    written, text, _ = COMMANDS[name]
    if written:
        (folder / f"{name}.yaml").write_text(written)
    return {"config_name": name if written else None, "config_path": folder if written else None}, shlex.split(text)


def corrected(name, arguments):
    """`arguments` after one has done what the message says."""
    changes = COMMANDS[name][2]
    kept = [each for each in arguments if each.partition("=")[0].lstrip("+") not in changes]
    return [*kept, *(change for change in changes.values() if change)]
