"""Nothing secret leaves: names, shapes and known values; and counts of tokens stay readable."""

from __future__ import annotations

import json
import time

import pytest

from kvfleet.core.redact import HIDDEN, clean, clean_text, is_secret_name, secrets_of

CANARY = "canary-Zx81-never-to-be-seen"


@pytest.mark.parametrize(
    "name",
    [
        "smoke_benchmark_api_key",
        "VLLM_API_KEY",
        "HF_TOKEN",
        "ansible_become_password",
        "apiKey",
        "token",
        "client_secret",
        "Authorization",
        "ansible_ssh_private_key_file",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)
    assert CANARY not in json.dumps(clean({"a": [{name: CANARY}]}))


@pytest.mark.parametrize("name", ["chunk_tokens", "max_num_batched_tokens", "tokenizer", "kv_bytes_per_token", "keep",
                                  "kv_bytes_per_token_per_rank", "gpu_kv_tokens", "prefill_tokens_per_s"])  # fmt: skip
def test_counts_of_tokens_are_no_secrets(name: str) -> None:
    assert clean({name: 256, "text": f"{name}=256, {name}: 256"}) == {name: 256, "text": f"{name}=256, {name}: 256"}


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {CANARY}",
        f'Environment="VLLM_API_KEY={CANARY}"',
        f"--api-key {CANARY} --port 8000",
        f"--api-key={CANARY}",
        f"['--api-key', '{CANARY}']",
        f'{{"hf_token": "{CANARY}"}}',
        f"ansible_become_password: {CANARY}",
        f"https://user:{CANARY}@mirror.example/simple",
        f"-----BEGIN OPENSSH PRIVATE KEY-----\n{CANARY}\n-----END OPENSSH PRIVATE KEY-----",
        f"-----BEGIN RSA PRIVATE KEY-----\n{CANARY}",
        "hf_abcdefghijklmnopqrstuvwxyz",
    ],
)
def test_texts_that_look_like_secrets(text: str) -> None:
    cleaned = clean_text(text)
    assert CANARY not in cleaned
    assert "hf_abcdef" not in cleaned
    assert HIDDEN in cleaned


def test_a_known_value_disappears_wherever_it_stands() -> None:
    data = {"vllm": {"api_key": CANARY}, "n": 3}
    assert secrets_of(data) == [CANARY]
    assert clean(f"the engine said {CANARY}!", [CANARY]) == f"the engine said {HIDDEN}!"


def test_short_values_do_not_eat_the_text() -> None:
    assert clean("a plan of a host", ["a"]) == "a plan of a host"


def test_long_words_take_no_time() -> None:
    began = time.process_time()
    clean_text("x" * 500_000 + " " + "api_" * 100_000)
    assert time.process_time() - began < 5


def test_the_rest_stays_what_it_is() -> None:
    data = {"port": 8000, "on": True, "none": None, "names": ["x", "y"], "url": "http://127.0.0.1:8000/v1"}
    assert clean(data) == data
