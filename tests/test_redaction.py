"""Secrets are replaced wherever they are written, and nothing that a run needs again is."""

import pytest

from etude.options import SFTOptions, TrainOptions, declarations
from etude.run_folder import REDACTED, redact, redact_arguments


def test_texts_named_like_secrets_are_replaced_and_nothing_else():
    given = {
        "reward_kwargs": {"api_key": "sk-1", "judge": {"Authorization": "Bearer x", "model": "m"}, "hf_token": "t"},
        "server_api_key_env": "NAME",
        "max_num_batched_tokens": 8,
        "rollout_is": "token",
        "prompt_key": "prompt",
        "keys": [{"password": "p"}, "https://user:pw@host/x"],
        "runtime_env": {"env_vars": {"ANYTHING": "v", "deeper": {"x": "w"}}},
        "secret": "",
    }
    assert redact(given) == {
        "reward_kwargs": {
            "api_key": REDACTED,
            "judge": {"Authorization": REDACTED, "model": "m"},
            "hf_token": REDACTED,
        },
        "server_api_key_env": "NAME",
        "max_num_batched_tokens": 8,
        "rollout_is": "token",
        "prompt_key": "prompt",
        "keys": [{"password": REDACTED}, f"https://{REDACTED}@host/x"],
        "runtime_env": {"env_vars": {"ANYTHING": REDACTED, "deeper": {"x": REDACTED}}},
        "secret": "",
    }
    arguments = ["train", "trainer.seed=1", "+r.api_key=sk-1", "r={a: 1, api_key: sk-1}", "ray.init.env_vars.X=v"]
    assert redact_arguments(arguments) == [
        "train",
        "trainer.seed=1",
        f"+r.api_key={REDACTED}",
        f"r={REDACTED}",
        f"ray.init.env_vars.X={REDACTED}",
    ]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("https://host/search?q=cats&api_key=sk-1&n=3", f"https://host/search?q=cats&api_key={REDACTED}&n=3"),
        ("http://h/?X-Amz-Signature=abc#part", f"http://h/?X-Amz-Signature={REDACTED}#part"),
        ("https://user:p@ss@host/x?mail=a@b", f"https://{REDACTED}@host/x?mail=a@b"),
        ("Bearer eyJhbGciOi", f"Bearer {REDACTED}"),
        ("npx server --api-key sk-1 --port 3", f"npx server --api-key {REDACTED} --port 3"),
        ("the bearer of a low-key token of love", "the bearer of a low-key token of love"),
    ],
)
def test_secrets_inside_a_text_are_replaced(given, kept):
    assert redact({"url": given}) == {"url": kept}


def test_keys_that_end_like_a_secret_hide_their_texts_alone():
    names = ("openai_key", "authtoken", "db_password", "signing-key", "apikey", "api-key", "X-Api-Key", "secretKey")
    kept = {"n_key": 3, "key": "data.train_files", "monkey": "e", "keys": "f"}
    assert redact(dict.fromkeys(names, "a") | kept) == dict.fromkeys(names, REDACTED) | kept


def test_the_value_of_an_option_is_replaced_also_where_it_stands_apart():
    given = ["etude", "gateway", "--token", "abc", "--port", "8000", "--judge-api-key=k", "x.url=http://h/?token=t"]
    kept = ["etude", "gateway", "--token", REDACTED, "--port", "8000", f"--judge-api-key={REDACTED}"]
    assert redact_arguments(given) == [*kept, f"x.url=http://h/?token={REDACTED}"]
    assert redact({"args": ["--password", "abc", "--verbose"]}) == {"args": ["--password", REDACTED, "--verbose"]}


@pytest.mark.parametrize("tree", [TrainOptions, SFTOptions])
def test_no_declared_key_is_taken_for_a_secret(tree):
    for key in declarations(tree):
        name = key.rpartition(".")[2]
        assert redact({name: "text"}) == {name: "text"}, key
