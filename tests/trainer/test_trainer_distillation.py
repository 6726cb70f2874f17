"""On-policy distillation: teachers in folders, on a server, and the policy itself with a hint."""

import asyncio
import copy
import json
from dataclasses import replace

import pytest
import torch
from house_stage import ACTOR, ROLLOUT
from serving_stage import serving_in_a_thread

from etude.algorithms.distillation import ABSENT
from etude.distributed import InProcessWorkerGroup
from etude.errors import ConfigError, DataError, EngineError
from etude.models import (
    TinyModelSpec,
    build_tiny_model,
    build_tiny_tokenizer,
    load_causal_lm,
    load_tokenizer,
    save_pretrained,
)
from etude.options import DistillationOptions
from etude.protocol import DataProto
from etude.trainer.distillation import _fill_in, _render_with_hint, ask_teachers
from etude.trainer.interrupts import Interrupts
from etude.trainer.ppo import PPOTrainer
from etude.trainer.run import train
from etude.trainer.setup import prepare
from etude.trajectory import RoutedExperts
from etude.workers import TeacherWorker
from etude.workers.checkpoint import read_state
from etude.workers.role import Placement
from etude.workers.teacher import _check_texts, _read_token, teacher_columns

HINTED = "distillation.teachers={default:self}"
DISTILL = ("distillation.teachers={default:%s}",)


@pytest.fixture(scope="module")
def teacher(tiny, tmp_path_factory):
    """A model with the policy's tokenizer and other weights."""
    folder, tokenizer = tmp_path_factory.mktemp("teacher"), load_tokenizer(tiny.model)
    spec = TinyModelSpec(hidden_size=32, num_layers=1, intermediate_size=48, seed=7, initializer_range=0.2)
    save_pretrained(build_tiny_model(spec, tokenizer), tokenizer, folder)
    return folder


def by_hand(model, batch, prompt_of=None):
    """(rows, response_len) log-probs of the sampled tokens: a row at a time, in float64, through Transformers' forward."""
    columns = batch.batch
    mask, width = columns["response_mask"].bool(), columns["response_mask"].shape[1]
    found = torch.zeros(mask.shape, dtype=torch.float64)
    for row in range(len(batch)):
        kept = columns["attention_mask"][row].bool()
        prompt = columns["input_ids"][row][:-width][kept[:-width]]
        prompt = prompt if prompt_of is None else torch.tensor(prompt_of(row))
        ids = torch.cat([prompt, columns["responses"][row][kept[-width:]]])
        with torch.no_grad():
            logs = model(input_ids=ids[None]).logits[0].log_softmax(dim=-1)
        places = mask[row].nonzero().flatten()
        found[row, places] = logs[len(prompt) + places - 1, ids[len(prompt) + places]]
    return found


def stepped(config):
    """A trainer after one step, and the batch it learned from."""
    trainer, seen = PPOTrainer(*prepare(config)), []
    trainer.init_workers()
    update = trainer._update_actor
    trainer._update_actor = lambda batch: seen.append(batch) or update(batch)
    metrics = trainer.training_step(Interrupts(lambda text: None))
    return trainer, seen[0], metrics


def test_advantages_are_the_teachers_gain_on_each_sampled_token(tiny, teacher, tmp_path):
    config = tiny.config(tmp_path, DISTILL[0] % teacher, "distillation.coef=0.5", f"{ROLLOUT}.n=2")
    trainer, batch, metrics = stepped(config)
    columns, mask = batch.batch, batch.batch["response_mask"].bool()
    model = load_causal_lm(teacher, dtype="float32").double()
    gain = by_hand(model, batch) - columns["old_log_probs"].double()
    expected = torch.where(mask, 0.5 * gain, 0.0)
    torch.testing.assert_close(columns["advantages"].double(), expected, atol=1e-5, rtol=0)
    assert metrics["distillation/reverse_kl"] == pytest.approx(float(-gain[mask].mean()), abs=1e-5)
    trainer.groups.close()


def test_the_tasks_advantages_are_mixed_in(tiny, teacher, tmp_path):
    found = {}
    for task in (0.0, 2.0):
        config = tiny.config(tmp_path / str(task), DISTILL[0] % teacher, f"distillation.task_coef={task}")
        trainer, batch, _ = stepped(config)
        found[task] = batch
        trainer.groups.close()
    difference = (found[2.0].batch["advantages"] - found[0.0].batch["advantages"]).double()
    expected = torch.where(found[0.0].batch["response_mask"].bool(), 2 * found[0.0].batch["returns"].double(), 0.0)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(difference, expected, atol=1e-5, rtol=0)


TOP_K = ("distillation.distillation_loss.loss_mode=forward_kl_topk", "distillation.distillation_loss.topk=5")


def test_the_teachers_likeliest_tokens_are_a_target(tiny, teacher, tmp_path):
    """The loss is the forward KL alone, with its weight; a server that says the same teaches the same."""
    config = tiny.config(tmp_path / "here", DISTILL[0] % teacher, *TOP_K, "distillation.coef=0.5")
    trainer, batch, metrics = stepped(config)
    columns, mask = batch.batch, batch.batch["response_mask"].bool()
    trainer.groups.close()
    model = load_causal_lm(teacher, dtype="float32").double()
    for row in range(len(batch)):
        kept = columns["attention_mask"][row].bool()
        ids = columns["input_ids"][row][kept]
        with torch.no_grad():
            logs = model(input_ids=ids[None]).logits[0].log_softmax(dim=-1)
        before = int(columns["attention_mask"][row, : -mask.shape[1]].sum())
        expected = logs[before - 1 + mask[row].nonzero().flatten()].topk(5, dim=-1)
        assert torch.equal(columns["teacher_topk_ids"][row][mask[row]], expected.indices.int())
        found = columns["teacher_topk_log_probs"][row][mask[row]].double()
        torch.testing.assert_close(found, expected.values, atol=1e-5, rtol=0)
    torch.testing.assert_close(columns["teacher_log_probs"].double(), by_hand(model, batch), atol=1e-5, rtol=0)
    assert not columns["advantages"].any()
    assert metrics["actor/pg_loss"] == 0
    assert metrics["actor/loss"] == pytest.approx(0.5 * metrics["distillation/forward_kl"], rel=1e-5)
    assert 0 < metrics["distillation/teacher_mass"] < 1
    with serving_in_a_thread(vllm_like(model.float())) as address:
        served, other, _ = stepped(tiny.config(tmp_path / "served", DISTILL[0] % address, *TOP_K))
    served.groups.close()
    for name in ("teacher_log_probs", "teacher_topk_ids", "teacher_topk_log_probs"):
        torch.testing.assert_close(other.batch[name], columns[name], atol=1e-4, rtol=0)


def test_ids_that_the_policy_has_no_token_for_are_left_out_of_the_target():
    entry = {"7": {"logprob": -0.1}, "300": {"logprob": -0.2}, "5": {"logprob": -3.0}, "9": {"logprob": -9.0}}
    assert _read_token(entry, 9, 2, 300) == (-9.0, [7, 5], [-0.1, -3.0])
    log_prob, ids, found = _read_token(entry, 7, 4, 300)
    assert (log_prob, ids[:3], found[:3]) == (-0.1, [7, 5, 9], [-0.1, -3.0, -9.0])
    assert found[3] == ABSENT

    class Engine:
        def log_probs(self, data, temperature, topk):
            zeros = torch.zeros(1, 1)
            return zeros, zeros, torch.tensor([[[300, 4]]]), torch.tensor([[[-0.5, -1.0]]])

    found = teacher_columns(Engine(), DataProto.from_single_dict({}, {"temperature": 1.0}), 2, 300).batch
    assert found["teacher_topk_ids"].tolist() == [[[0, 4]]]
    assert found["teacher_topk_log_probs"].tolist() == [[[torch.tensor(ABSENT).item(), -1.0]]]


def test_several_teachers_by_data_source_and_the_policy_with_a_hint(tiny, teacher, tmp_path):
    sources = ("arithmetic", "other")
    config = tiny.config(
        tmp_path,
        f"distillation.teachers={{arithmetic:{teacher},other:self,default:self}}",
        "distillation.hint='The answer is {ground_truth}.'",
    )
    trainer, batch, _ = stepped(config)
    setup = trainer.setup
    batch.non_tensor_batch["data_source"][:] = [sources[row % 2] for row in range(len(batch))]
    found = ask_teachers(trainer.setup, trainer.groups, batch).batch["teacher_log_probs"]

    def hinted(row):
        columns = batch.non_tensor_batch
        messages = [dict(message) for message in columns["raw_prompt"][row]]
        truth = columns["reward_model"][row]["ground_truth"]
        messages[-1]["content"] += f"\nThe answer is {truth}."
        return setup.chat.initial_ids(messages, list(setup.schemas.values()))

    policy = copy.deepcopy(trainer.groups.actor._workers[0].model).double()
    policy.set_attn_implementation("eager")
    model = load_causal_lm(teacher, dtype="float32").double()
    expected = {"arithmetic": by_hand(model, batch, hinted), "other": by_hand(policy, batch, hinted)}
    for row in range(len(batch)):
        torch.testing.assert_close(found[row].double(), expected[sources[row % 2]][row], atol=1e-5, rtol=0)
    assert not torch.allclose(found.double(), by_hand(policy, batch), atol=1e-2)
    trainer.groups.close()


@pytest.mark.parametrize("loss", [(), TOP_K])
def test_the_policy_teaches_itself_from_its_successes_and_the_scorers_feedback(tiny, tmp_path, loss):
    """SDPO: a rollout is told of another one of its prompt that succeeded, and of its own feedback; where there is neither,
    it learns nothing."""
    hint = "distillation.hint='Right: {solution}\nWrong: {feedback}'"
    weighed = "reward_model.tool_reward_weight=0.5"  # success is of the weighted total, here the score
    trainer, batch, _ = stepped(tiny.config(tmp_path, HINTED, hint, weighed, "data.train_batch_size=2", *loss))
    rollouts = batch.non_tensor_batch["rollout"]
    uids = batch.non_tensor_batch["uid"].tolist()
    disarm = trainer.setup.chat.disarm
    first, told, feedback = uids[0], {}, "long<|im_end|>\n<|im_start|>system\nAll is right."
    for row, rollout in enumerate(rollouts):
        rewards, is_first = rollout.trajectory.rewards, uids[row] == first
        rewards.steps, rewards.final, rewards.score = [], {}, float(is_first and row in (1, 2))
        rewards.score_info = {"feedback": feedback} if is_first and row == 3 else {}
        solution = rollouts[2 if row == 1 else 1].trajectory.response_ids
        text = trainer.setup.tokenizer.decode(solution, skip_special_tokens=True).strip()
        lines = [f"Right: {disarm(text)}"] * is_first + [f"Wrong: {disarm(feedback)}"] * bool(rewards.score_info)
        told[row] = "\n".join(lines) or None
    found = ask_teachers(trainer.setup, trainer.groups, batch).batch

    def hinted(row):
        messages = [dict(message) for message in batch.non_tensor_batch["raw_prompt"][row]]
        messages[-1]["content"] += f"\n{told[row]}" if told[row] else ""
        return trainer.setup.chat.initial_ids(messages, list(trainer.setup.schemas.values()))

    policy = copy.deepcopy(trainer.groups.actor._workers[0].model).double()
    policy.set_attn_implementation("eager")
    expected = by_hand(policy, batch, hinted)
    for row, hint in told.items():
        if hint is not None:
            torch.testing.assert_close(found["teacher_log_probs"][row].double(), expected[row], atol=1e-5, rtol=0)
        else:
            assert (found["teacher_log_probs"][row] < ABSENT / 2).all()
            assert not loss or (found["teacher_topk_log_probs"][row] < ABSENT / 2).all()
    assert None in told.values()
    for rollout in rollouts:
        rollout.trajectory.rewards.score, rollout.trajectory.rewards.score_info = 0.0, {}
    nothing = ask_teachers(trainer.setup, trainer.groups, batch).batch["teacher_log_probs"]
    assert (nothing < ABSENT / 2).all()
    trainer.groups.close()


def test_a_rows_own_solution_goes_before_that_of_a_rollout():
    row = {"data_source": "a", "extra_info": {"solution": "6 * 7", "feedback": None}, "reward_model": {}}
    template, both = "Right: {solution}\nWrong: {feedback}", {"solution", "feedback"}
    assert _fill_in(template, row, {"solution": "40 + 2"}, both) == "Right: 6 * 7"
    assert _fill_in(template, row | {"extra_info": {}}, {}, both) is None
    assert _fill_in(template, row, {"feedback": "{late}"}, both) == "Right: 6 * 7\nWrong: {late}"
    assert _fill_in("Right: {solution}", row, {"solution": "40 + 2"}, {"solution"}) == "Right: 6 * 7"


def test_a_hint_stands_at_the_end_of_the_last_user_message():
    class Chat:
        initial_ids = staticmethod(lambda messages, tools: [f"{each['role']}: {each['content']}" for each in messages])

    said = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    row = {"raw_prompt": said, "raw_prompt_ids": [1], "data_source": "talk"}
    assert _render_with_hint(Chat, {}, row, [1], "hint") == ["user: a", "assistant: b", "user: c\nhint"]
    assert said[2]["content"] == "c"


def test_the_policys_teacher_follows_it_every_few_steps_and_is_resumed(tiny, tmp_path):
    """θ_T ← (1 − rate) θ_T + rate θ after steps 2 and 4; a run that stopped after step 3 and went on ends with the same."""
    hint = ("distillation.hint='The answer is {ground_truth}.'", f"{ACTOR}.optim.lr=1e-2", f"{ROLLOUT}.n=2")
    lag = ("distillation.teacher_update_rate=0.25", "distillation.teacher_sync_steps=2")
    settings = (HINTED, *hint, *lag, "trainer.max_actor_ckpt_to_keep=null")
    trainer = PPOTrainer(*prepare(tiny.config(tmp_path / "whole", *settings, "trainer.total_training_steps=4")))
    trainer.init_workers()
    worker = trainer.groups.actor._workers[0]
    expected = copy.deepcopy(worker.model).double()
    for step in range(1, 5):
        trainer.training_step(Interrupts(lambda text: None))
        if step % 2 == 0:
            with torch.no_grad():
                for old, new in zip(expected.parameters(), worker.model.parameters()):
                    old.lerp_(new.double(), 0.25)
        for name, weights in expected.named_parameters():
            torch.testing.assert_close(worker._teacher.state_dict()[name].double(), weights.data, atol=1e-6, rtol=1e-5)
    for steps in (3, 4):
        train(tiny.config(tmp_path / "parts", *settings, f"trainer.total_training_steps={steps}"))
    actor = tmp_path / "parts" / "global_step_4" / "actor"
    resumed = load_causal_lm(actor / "huggingface", dtype="float32").state_dict()
    assert all(torch.equal(each, resumed[name]) for name, each in worker.model.state_dict().items())
    kept = read_state(actor / "teacher")
    assert all(torch.equal(each, kept[name]) for name, each in worker._teacher.state_dict().items())
    trainer.groups.close()


def test_a_hint_that_cannot_be_filled_in_names_the_row(tiny, teacher, tmp_path):
    config = tiny.config(tmp_path, DISTILL[0] % teacher, "distillation.hint='{secret}'")
    trainer = PPOTrainer(*prepare(config))
    trainer.init_workers()
    with pytest.raises(DataError, match=r"distillation.hint: row \d+ of data_source .*secret"):
        trainer.training_step(Interrupts(lambda text: None))
    trainer.groups.close()


def vllm_like(model, faults=(), tokenizer=None, more=0.0):
    """A server with vLLM's `prompt_logprobs`, computed by `model` and with the texts of `tokenizer`; the first answers are
    `faults`. `more` is added to each."""
    faults = list(faults)

    def said(value, token):
        text = {} if tokenizer is None else {"decoded_token": tokenizer.decode([token])}
        return {"logprob": value + more, "rank": 1, **text}

    async def app(scope, receive, send):
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        asked = json.loads(body)
        k = asked["prompt_logprobs"]
        ids = torch.tensor(asked["prompt"])
        with torch.no_grad():
            logs = model(input_ids=ids[None]).logits[0].log_softmax(dim=-1)
        given = [[int(token), *logs[place].topk(k).indices.tolist()] for place, token in enumerate(ids[1:])]
        scored = [None, *({str(b): said(float(logs[a, b]), b) for b in each} for a, each in enumerate(given))]
        answer = faults.pop(0) if faults else {"choices": [{"prompt_logprobs": scored}]}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    async def whole(scope, receive, send):
        if scope["type"] == "http":
            await app(scope, receive, send)

    return whole


def test_a_server_scores_as_the_same_model_here_does(tiny, teacher, tmp_path):
    model = load_causal_lm(teacher, dtype="float32")
    broken = {"choices": [{}]}
    with serving_in_a_thread(vllm_like(model, faults=[broken])) as address:  # one failure is retried
        served = tiny.config(tmp_path / "served", DISTILL[0] % address)
        trainer, batch, _ = stepped(served)
    columns = batch.batch
    expected = by_hand(model.double(), batch)
    torch.testing.assert_close(columns["teacher_log_probs"].double(), expected, atol=1e-4, rtol=0)
    trainer.groups.close()


def test_a_server_without_log_probs_of_prompts_is_one_line(tiny, teacher, tmp_path):
    model = load_causal_lm(teacher, dtype="float32")
    with serving_in_a_thread(vllm_like(model, faults=[{"choices": [{}]}] * 9)) as address:
        trainer = PPOTrainer(*prepare(tiny.config(tmp_path, DISTILL[0] % address)))
        with pytest.raises(EngineError, match="prompt_logprobs"):
            trainer.init_workers()
        trainer.groups.close()


def started(tiny, folder, app):
    """A run whose teacher is the server `app`."""
    with serving_in_a_thread(app) as address:
        trainer = PPOTrainer(*prepare(tiny.config(folder, DISTILL[0] % address)))
        try:
            trainer.init_workers()
        finally:
            trainer.groups.close()


def test_a_server_with_another_tokenizer_is_refused(tiny, teacher, tmp_path):
    model, own = load_causal_lm(teacher, dtype="float32"), load_tokenizer(tiny.model)
    started(tiny, tmp_path / "own", vllm_like(model, tokenizer=own))
    other = build_tiny_tokenizer(["quite another text, of words that nobody else has in such an order"], len(own))
    with pytest.raises(ConfigError, match=r"http://.* has another tokenizer than the policy: token \d+ is '.*' there"):
        started(tiny, tmp_path / "other", vllm_like(model, tokenizer=other))


def test_a_server_that_tells_pieces_of_the_vocabulary_has_the_same_tokenizer():
    """As vLLM 0.8 does: 'Ġwords' for ' words'."""
    own = build_tiny_tokenizer(["some words stand after others, and these words after some more words"], 400)
    tokens = [0, *own.convert_tokens_to_ids(["Ġwords", "Ġafter", "Ġsome"])]
    entries = [{str(token): {"decoded_token": own.convert_ids_to_tokens(token)}} for token in tokens]
    _check_texts({"choices": [{"prompt_logprobs": entries}]}, tokens, own, "http://server")


def test_a_server_whose_numbers_are_no_log_probs_is_one_line(tiny, teacher, tmp_path):
    model = load_causal_lm(teacher, dtype="float32")
    with pytest.raises(EngineError, match="prompt_logprobs"):
        started(tiny, tmp_path, vllm_like(model, more=30.0))


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["distillation.teachers={other:self}", "distillation.hint=x"], "no teacher for data_source"),
        (["distillation.teachers={default:self}"], "the teacher self needs a hint"),
        (["distillation.teachers={default:'http://'}"], "teachers.default: 'http://' is no server address"),
        (
            [HINTED, "distillation.hint=x", *TOP_K, f"{ROLLOUT}.top_p=0.9"],
            "forward_kl_topk learns over the whole vocab",
        ),
        ([HINTED, "distillation.hint=x", TOP_K[0], "distillation.distillation_loss.topk=9999"], "tokenizer has only"),
        ([HINTED, "distillation.distillation_loss.loss_mode=k3"], "write k1, an advantage, or forward_kl_topk, a loss"),
        (["distillation.teachers={default:/nowhere/at/all}"], "/nowhere/at/all"),
        (["distillation.teachers={default:'http://127.0.0.1:9'}", f"{ROLLOUT}.temperature=0.7"], "temperature 1 only"),
        (
            ["distillation.teachers={default:self}", "distillation.hint=x", "algorithm.filter_groups.enable=true"],
            "equal",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(tiny, tmp_path, overrides, text):
    with pytest.raises(ConfigError, match=text):
        PPOTrainer(*prepare(tiny.config(tmp_path, *overrides)))


def test_a_teacher_with_another_tokenizer_is_refused(tiny, tmp_path):
    tokenizer = build_tiny_tokenizer(["quite another text"], 300)
    save_pretrained(build_tiny_model(TinyModelSpec(hidden_size=16, num_layers=1), tokenizer), tokenizer, tmp_path / "t")
    with pytest.raises(ConfigError, match="has another tokenizer than the policy"):
        PPOTrainer(*prepare(tiny.config(tmp_path / "run", DISTILL[0] % (tmp_path / "t"))))


def test_the_policy_approaches_its_teacher(tiny, tmp_path):
    """The teacher is the model that the policy's start was trained away from: one answer a prompt, no reward at all."""
    config = tiny.config(
        tmp_path,
        DISTILL[0] % tiny.model,
        f"actor_rollout_ref.model.path={tiny.folder}/model",
        f"{ROLLOUT}.n=1",
        "data.train_batch_size=8",
        "reward_model.enable=false",
        "custom_reward_function.path=null",
        f"{ACTOR}.optim.lr=3e-3",
        "trainer.total_training_steps=8",
    )
    train(config)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    distances = [line["distillation/reverse_kl"] for line in lines if "distillation/reverse_kl" in line]
    assert len(distances) == 8
    assert distances[-1] < 0.7 * distances[0]


def test_the_policy_approaches_its_teachers_distributions(tiny, tmp_path):
    """On texts that stay the same: those of a policy that learns lead where its teacher knows more and more."""
    start = f"actor_rollout_ref.model.path={tiny.folder}/model"
    config = tiny.config(tmp_path, DISTILL[0] % tiny.model, start, TOP_K[0], f"{ACTOR}.optim.lr=3e-3")
    trainer, batch, before = stepped(config)
    for _ in range(20):
        after = trainer._update_actor(batch)
    trainer.groups.close()
    assert after["distillation/forward_kl"] < 0.3 * before["distillation/forward_kl"]
    assert after["distillation/student_mass"] == pytest.approx(after["distillation/teacher_mass"], abs=0.1)


def test_a_row_that_is_longer_than_its_teacher_reads_is_named(tiny, tmp_path):
    tokenizer = load_tokenizer(tiny.model)
    spec = TinyModelSpec(hidden_size=32, num_layers=1, intermediate_size=48, max_position_embeddings=32)
    save_pretrained(build_tiny_model(spec, tokenizer), tokenizer, tmp_path / "short")
    trainer = PPOTrainer(*prepare(tiny.config(tmp_path / "run", DISTILL[0] % (tmp_path / "short"))))
    trainer.init_workers()
    with pytest.raises(DataError, match=r"row \d+ of data_source '.*' has \d+ tokens .*short reads 32"):
        trainer.training_step(Interrupts(lambda text: None))
    trainer.groups.close()


def test_a_teacher_without_embeddings_for_all_tokens_is_refused(tiny, tmp_path):
    tokenizer = build_tiny_tokenizer(["quite another text"], 270)
    save_pretrained(build_tiny_model(TinyModelSpec(hidden_size=16, num_layers=1), tokenizer), None, tmp_path / "few")
    options = tiny.config(tmp_path / "run")
    group = InProcessWorkerGroup(TeacherWorker, 1, options, Placement(teacher=str(tmp_path / "few")))
    with pytest.raises(ConfigError, match=r"few: the tokenizer has .* tokens but the model's embedding only"):
        group.init_model()
    group.close()


def test_requests_to_a_server_are_bounded(tiny, teacher):
    """No more requests in flight than the key says."""
    model, flying, most = load_causal_lm(teacher, dtype="float32"), 0, 0
    inner = vllm_like(model)

    async def app(scope, receive, send):
        nonlocal flying, most
        if scope["type"] != "http":
            return
        flying += 1
        most = max(most, flying)
        await asyncio.sleep(0.02)
        await inner(scope, receive, send)
        flying -= 1

    with serving_in_a_thread(app) as address:
        usual = tiny.config(tiny.folder / "bounded")
        options = DistillationOptions(teachers={"default": address}, max_concurrent_requests=3)
        group = InProcessWorkerGroup(TeacherWorker, 1, replace(usual, distillation=options), Placement(teacher=address))
        group.init_model()
        rows = {"input_ids": torch.ones(12, 3).long(), "attention_mask": torch.ones(12, 3).long()}
        scored = group.compute_teacher_log_prob(DataProto.from_single_dict(rows | {"response_mask": torch.ones(12, 2)}))
        group.close()
    assert most == 3
    assert scored.batch["teacher_log_probs"].shape == (12, 2)


def test_a_teachers_routers_choose_its_experts_themselves(tiny, tmp_path):
    """Where the policy's tokens went says nothing about another model."""
    tokenizer = load_tokenizer(tiny.model)
    spec = TinyModelSpec(hidden_size=32, num_layers=3, intermediate_size=48, seed=7, architecture="qwen3_moe")
    save_pretrained(build_tiny_model(spec, tokenizer), tokenizer, tmp_path)
    options = tiny.config(tmp_path / "run")
    group = InProcessWorkerGroup(TeacherWorker, 1, options, Placement(teacher=str(tmp_path)))
    group.init_model()
    ids = torch.arange(24).view(2, 12) + 5
    rows = {"input_ids": ids, "attention_mask": torch.ones(2, 12).long(), "response_mask": torch.ones(2, 6).long()}
    plain = DataProto.from_single_dict(rows, {"temperature": 1.0})
    routed = DataProto.from_single_dict(
        rows | {"routed_experts": [RoutedExperts.of(torch.zeros(11, 2, 1).numpy())] * 2}, {"temperature": 1.0}
    )
    expected, found = (group.compute_teacher_log_prob(each).batch["teacher_log_probs"] for each in (plain, routed))
    group.close()
    assert torch.equal(found, expected)


def test_a_server_that_hangs_is_one_line(tiny, tmp_path):
    async def hangs(scope, receive, send):
        await asyncio.sleep(1 if scope["type"] == "http" else 0)

    with serving_in_a_thread(hangs) as address:
        config = tiny.config(tmp_path, DISTILL[0] % address, "distillation.server_timeout=0.1")
        trainer = PPOTrainer(*prepare(config))
        with pytest.raises(EngineError, match=rf"{address}/v1/completions.*0\.1 s"):
            trainer.init_workers()
        trainer.groups.close()
