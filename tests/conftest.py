"""What all rooms' tests share: a small random model, one thread, and Hypothesis without a clock."""

import gc
import os
import secrets
import signal
from pathlib import Path

import pytest
from hypothesis import settings

VOCAB = 97

# The objects of torch and Transformers are many and stay: looking at them so often was a twelfth of all tests' CPU time.
gc.set_threshold(100_000, 50, 100)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors this small only wait for a second thread

# One token for all clusters. Without these, the first cluster that a process starts sets both, and programs that inherit an
# older environment (multiprocessing's fork server) are refused by it.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a background job: children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("etude", deadline=None, max_examples=50)  # a busy machine is no failure
settings.load_profile("etude")

HEAVIEST = (
    *("trainer/test_trainer_ray", "reference/test_reference_training", "reference/test_reference_keys", "test_readme"),
    *("distributed/test_distributed_ray", "tools/test_tools_mcp", "quickstart/test_quickstart_examples"),
    *("workers/test_workers_ranks", "workers/test_workers_sharded", "distributed/test_distributed_plane"),
    *("agents/test_agents_exactness", "trainer/test_trainer_async", "limits/test_limits_ray", "viewer/test_viewer_web"),
)

SLOW = (  # whole files, since what takes long in them is what their tests share: clusters, servers, whole runs, kills
    *("trainer/test_trainer_ray", "trainer/test_trainer_resume", "trainer/test_trainer_restarts"),
    *("quickstart/test_quickstart_every_example", "quickstart/test_quickstart_stages"),
    *("quickstart/test_quickstart_nine_steps", "quickstart/test_quickstart_pretrained"),
    *("distributed/test_distributed_ray", "distributed/test_distributed_plane", "limits/test_limits_ray"),
    *("workers/test_workers_engine_link", "workers/test_workers_pretend_gpu", "workers/test_workers_ranks"),
    *("workers/test_workers_sharded", "models/test_models_gguf", "models/test_models_families"),
    *("benchmarks/test_benchmarks_drivers", "reference/test_reference_keys", "rewards/test_rewards_gold"),
    *("trainer/test_trainer_interrupts", "trainer/test_trainer_async", "trainer/test_trainer_images"),
    *("tools/test_tools_mcp", "viewer/test_viewer_web", "cli/test_cli_gateway", "sandbox/test_attacks"),
    *("inference/test_inference_server_process", "inference/test_inference_architectures"),
    *("inference/test_inference_smollm2", "models/test_models_footprint", "quickstart/test_quickstart_examples"),
    *("trainer/test_trainer_sft_keys", "trainer/test_trainer_sft_images", "trainer/test_trainer_training_engine"),
    *("trainer/test_trainer_failures", "trainer/test_trainer_distillation", "trainer/test_trainer_samplers"),
    *("trainer/test_trainer_roles", "trainer/test_trainer_precision", "trainer/test_trainer_mcp"),
    *("workers/test_workers_lora", "workers/test_workers_images", "workers/test_workers_rollout_group"),
    *("rewards/test_rewards_fuzz", "viewer/test_viewer_exports", "viewer/test_viewer_tui", "testing/test_testing_run"),
)


def pytest_collection_modifyitems(items):
    """The heaviest files first: pytest-xdist hands files out in this order, and none should be left for one process at the
    end."""
    room = Path(__file__).parent
    places = {room / f"{name}.py": place for place, name in enumerate(HEAVIEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    slow = {room / f"{name}.py" for name in SLOW}
    for item in items:
        if item.path in slow:
            item.add_marker("slow")


@pytest.fixture
def model():
    """A random Qwen3: big enough for grouped heads and two layers, small enough for milliseconds."""
    import torch  # here, so that tests without a model do not wait for these two
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.3,  # peaked distributions, so that wrong attention shows
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """What a run of a third of a second a step starts from: see `tests/house_stage.py`."""
    from house_stage import Tiny

    return Tiny.build(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def isolation():
    """For tests that run code in the sandbox as it is by default: skips them where no isolated mode works."""
    import asyncio

    from etude.sandbox import Executor, SandboxUnavailableError

    async def mode():
        async with await Executor.open(workers=1) as executor:
            return executor.isolation

    try:
        return asyncio.run(mode())
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
