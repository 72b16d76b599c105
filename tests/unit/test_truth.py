"""The passes of the truth check against a model of engine and cache, with each fault that it must catch."""

import random

import pytest
from fake_stack import CHUNK, FakeCache, FakeEngine, FakeStack

from kvfleet.core import truth
from kvfleet.core.findings import KvfleetError
from kvfleet.core.http import HttpFailure


def answer(tokens, alternatives):
    return truth.Completion(tuple(tokens), tuple(alternatives), 1.0, 2.0, 10)


LOOSE = truth.Tolerance(logprob=0.25, tie=0.1)


def test_same_tokens_and_close_logprobs_are_the_same_answer():
    cold = answer([1, 2], [{1: -1.0, 9: -2.0}, {2: -1.0, 9: -3.0}])
    warm = answer([1, 2], [{1: -1.1, 9: -2.0}, {2: -1.0, 9: -2.9}])
    found = truth.compare(cold, warm, LOOSE)
    assert found.same
    assert found.identical
    assert found.max_logprob_difference == pytest.approx(0.1)


def test_a_near_tie_may_part_and_ends_the_comparison():
    cold = answer([1, 2, 5], [{1: -1.0, 9: -2.0}, {2: -1.00, 3: -1.05}, {5: -0.1, 6: -9.0}])
    warm = answer([1, 3, 7], [{1: -1.0, 9: -2.0}, {2: -1.05, 3: -1.00}, {7: -0.1, 8: -9.0}])
    found = truth.compare(cold, warm, LOOSE)
    assert found.same
    assert found.near_tie
    assert not found.identical
    assert found.first_difference == 1


def test_a_clear_choice_that_flips_is_another_answer():
    cold = answer([1, 2], [{1: -1.0, 9: -2.0}, {2: -1.0, 3: -1.2}])
    warm = answer([1, 3], [{1: -1.0, 9: -2.0}, {2: -1.2, 3: -1.0}])
    found = truth.compare(cold, warm, LOOSE)
    assert not found.same
    assert "no near-tie" in found.reason


def test_same_tokens_with_shifted_logprobs_are_another_answer():
    cold = answer([1], [{1: -1.0, 2: -2.0}])
    warm = answer([1], [{1: -1.0, 2: -2.4}])
    assert not truth.compare(cold, warm, LOOSE).same


def test_an_alternative_that_one_side_lacks_counts_with_its_least_difference():
    # 4 is at -1.2 here; there it must be below the last listed, -3.0: at least 1.8 apart
    cold = answer([1], [{1: -1.0, 4: -1.2}])
    warm = answer([1], [{1: -1.0, 5: -3.0}])
    assert truth.compare(cold, warm, LOOSE).max_logprob_difference == pytest.approx(1.8)


def test_a_shorter_answer_is_another_answer():
    assert not truth.compare(answer([1, 2], [{1: -1.0}, {2: -1.0}]), answer([1], [{1: -1.0}]), LOOSE).same


@pytest.mark.parametrize(
    ("max_model_len", "pool", "chunk", "expected"),
    [
        (32768, 1_000_000, 256, 6144),
        (7680, 8192, 256, 6144),
        # 4096 - 24 - 48 = 4024 tokens: 15 chunks of 256
        (4096, 8192, 256, 3840),
        # 2048 - 2 blocks of 128 - 72 = 1720: 6 chunks
        (4096, 2048, 256, 1536),
    ],
)
def test_long_prompt_is_whole_chunks_and_a_tail(max_model_len, pool, chunk, expected):
    size = truth.prompt_size(max_model_len, pool, chunk, 128)
    assert size.cached == expected
    assert size.tokens == expected + truth.TAIL_TOKENS


def test_a_model_that_holds_no_chunk_is_refused():
    with pytest.raises(KvfleetError, match="KVF-BENCH-012"):
        truth.prompt_size(300, 8192, 256, 128)


@pytest.mark.parametrize("pool", [1000, 8192, 8064, 900_000])
def test_a_flood_holds_a_whole_pool_of_full_blocks(pool):
    flood = truth.flood_size(pool, 4096, 128, 16)
    assert flood.tokens % 128 == 0
    assert flood.count * flood.tokens >= pool
    assert flood.concurrency * flood.tokens <= pool
    assert flood.tokens < 4096


def test_random_prompts_avoid_both_ends_of_the_vocabulary():
    ids = truth.random_prompt(random.Random(1), 5000, 128256)  # noqa: S311
    assert min(ids) >= 6412
    assert max(ids) < 96192


def proof(stack, may_clear=True, limits=None):
    surroundings = truth.Surroundings(
        tier_files=stack.tier_files,
        sleep=stack.sleep,
        clock=stack.clock,
        rng=random.Random(7),  # noqa: S311
    )
    return truth.InstanceProof(
        stack.instance(),
        stack.server(),
        FakeEngine(stack),
        FakeCache(stack) if stack.profile != "gpu" else None,
        1024,
        LOOSE,
        may_clear,
        surroundings,
        limits or truth.Limits(settle_s=5),
    )


def codes(result):
    return [finding["code"] for finding in result["findings"]]


def test_disk_profile_is_proved_tier_by_tier():
    stack = FakeStack()
    result = proof(stack).run()
    assert codes(result) == []
    # pool of 24 blocks: min(512, 384 - 32) - 72 = 280 tokens, 4 chunks of 64
    assert result["prompt_tokens"] == 4 * CHUNK + 48
    assert result["hit_tokens"] == {"engine_cache": None, "ram": 4 * CHUNK, "disk": 4 * CHUNK}
    assert result["bytes"]["disk"] == 4 * CHUNK * 1024
    assert result["identical"] is True
    assert result["ttft_ms"]["cold"] > 5 * result["ttft_ms"]["ram"]
    assert result["ttft_ms"]["cold"] > 5 * result["ttft_ms"]["disk"]


def test_two_runs_on_one_deployment_are_both_cold():
    stack = FakeStack()
    first, second = proof(stack).run(), proof(stack)
    second.salt = "kvfleet-proof-second"
    again = second.run()
    assert codes(again) == []
    assert again["ttft_ms"]["cold"] == pytest.approx(first["ttft_ms"]["cold"], rel=0.05)


def test_cpu_profile_needs_no_disk():
    result = proof(FakeStack(profile="cpu")).run()
    assert codes(result) == []
    assert result["hit_tokens"]["ram"] == 4 * CHUNK
    assert result["hit_tokens"]["disk"] is None


def test_gpu_profile_shows_the_engines_own_cache():
    result = proof(FakeStack(profile="gpu")).run()
    assert codes(result) == []
    assert result["hit_tokens"]["engine_cache"] >= 4 * CHUNK
    assert result["ttft_ms"]["ram"] is None


def test_an_engine_whose_cache_the_inventory_switched_off_need_not_hit_it():
    stack = FakeStack(profile="gpu", pool_blocks=24)
    stack.prefix_caching = False
    assert codes(proof(stack).run()) == ["KVF-BENCH-011"], "nobody said that it should be off"
    checked = proof(stack)
    checked.instance = {**checked.instance, "engine_flags": {"enable-prefix-caching": False}}
    result = checked.run()
    assert codes(result) == []
    assert result["hit_tokens"]["engine_cache"] is None
    assert "prefix caching is off" in result["notes"][0]


def test_a_host_with_traffic_keeps_its_ram_tier():
    stack = FakeStack()
    result = proof(stack, may_clear=False).run()
    assert codes(result) == []
    assert result["hit_tokens"]["disk"] is None
    assert any("takes traffic" in note for note in result["notes"])
    assert stack.ram


def test_a_host_that_others_use_keeps_its_ram_tier_too():
    stack = FakeStack()
    stack.tier_hits["user-7"] = {"requested": 640, "l1": 0, "l2": 0}
    result = proof(stack).run()
    assert codes(result) == []
    assert result["hit_tokens"]["disk"] is None
    assert any("others looked up 640 tokens" in note for note in result["notes"])
    assert stack.ram


def test_a_server_that_does_not_count_by_tier_is_proved_by_order():
    stack = FakeStack()
    page = stack.cache_page
    stack.cache_page = lambda: "\n".join(
        line for line in page().splitlines() if "_l1_tokens" not in line and "_l2_tokens" not in line
    )
    result = proof(stack).run()
    assert codes(result) == []
    assert result["hit_tokens"]["disk"] == 4 * CHUNK
    assert any("does not count by tier" in note for note in result["notes"])


def test_every_request_carries_this_runs_own_salt():
    stack = FakeStack()
    result = proof(stack).run()
    assert all(body["cache_salt"].startswith(result["salt"]) for body in stack.requests)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("disk_off", "KVF-BENCH-010"),
        ("ram_off", "KVF-BENCH-010"),
        ("corrupt_disk", "KVF-BENCH-008"),
        ("failed_loads", "KVF-BENCH-013"),
        ("skip_loads_of_whole_prompts", "KVF-BENCH-008"),
        ("forget_whole_prompts", "KVF-BENCH-006"),
    ],
)
def test_a_fault_in_a_tier_is_found(fault, expected):
    stack = FakeStack()
    setattr(stack, fault, True)
    assert expected in codes(proof(stack).run())


def test_a_disk_tier_that_forgets_is_found():
    stack = FakeStack()
    checked = proof(stack)
    clear = checked.cache.post_json

    def clear_both(*arguments):
        stack.disk.clear()
        return clear(*arguments)

    checked.cache.post_json = clear_both
    assert codes(checked.run()) == ["KVF-BENCH-007"]


def test_an_engine_that_keeps_more_than_it_says_is_found():
    stack = FakeStack()
    stack.secret_pool_blocks = 1000
    assert "KVF-BENCH-011" in codes(proof(stack).run())


def test_hits_of_a_prompt_never_sent_are_found():
    stack = FakeStack()
    checked = proof(stack)
    serve = stack.serve

    def stale(body):
        # a cache from an earlier run that answers for everything
        for end in range(0, len(body["prompt"]) - CHUNK + 1, CHUNK):
            stack.disk[body["cache_salt"], tuple(body["prompt"][: end + CHUNK])] = True
        return serve(body)

    stack.serve = stale
    assert "KVF-BENCH-005" in codes(checked.run())


@pytest.mark.parametrize(("status", "expected"), [(503, "001"), (401, "002"), (404, "004"), (500, "004")])
def test_http_errors_are_told_apart(status, expected):
    stack = FakeStack()
    stack.status = status
    assert codes(proof(stack).run()) == [f"KVF-BENCH-{expected}"]


def test_a_server_that_does_not_listen_is_not_up():
    assert truth.request_finding("a", HttpFailure("refused", "nobody listens")).code == "KVF-BENCH-001"


def test_another_model_on_the_port_is_named():
    stack = FakeStack()
    stack.model = "somebody-elses"
    result = proof(stack).run()
    assert codes(result) == ["KVF-BENCH-003"]
    assert "somebody-elses" in result["findings"][0]["message"]


def test_zero_tokens_are_no_answer():
    stack = FakeStack()
    stack.no_tokens = True
    assert codes(proof(stack).run()) == ["KVF-BENCH-004"]


def test_ttft_ends_at_the_first_token_not_at_an_empty_event():
    # field report H4: a role-only chunk at 10 ms, first text at 900 ms
    class Engine:
        base_url = "http://stub"

        def stream(self, _path, _body, _timeout_s):
            listed = {"tokens": ["token_id:5"], "top_logprobs": [{"token_id:5": -0.5}]}
            yield 0.010, {"choices": [{"text": ""}]}
            yield 0.900, {"choices": [{"text": "x", "logprobs": listed}]}

    found = truth.completion(Engine(), "tiny", [1, 2], "salt")
    assert found.ttft_ms == pytest.approx(900)


def test_a_flood_beyond_its_limit_ends_the_proof():
    stack = FakeStack()
    result = proof(stack, limits=truth.Limits(flood_s=-1)).run()
    assert codes(result) == ["KVF-BENCH-014"]


def test_a_slow_host_gets_a_shorter_prompt_and_a_note():
    # the model computes a token in a millisecond; the long prompt of 304 tokens would be planned with 0.46 s
    result = proof(FakeStack(), limits=truth.Limits(settle_s=5, cold_s=0.2)).run()
    assert codes(result) == []
    assert result["prompt_tokens"] == 2 * CHUNK + 48
    assert any("shortened" in note for note in result["notes"])


def test_logprobs_that_are_no_numbers_are_another_answer():
    # what vLLM 0.32 sends for a prompt whose cached KV was overwritten with noise: null
    events = [
        (
            1.0,
            {
                "choices": [
                    {"text": "x", "logprobs": {"tokens": ["token_id:0"], "top_logprobs": [{"token_id:0": None}]}}
                ]
            },
        )
    ]
    engine = type("Engine", (), {"base_url": "http://stub", "stream": lambda *_: events})()
    damaged = truth.completion(engine, "tiny", [1, 2], "salt")
    found = truth.compare(answer([0], [{0: -1.0}]), damaged, LOOSE)
    assert not found.same
    assert "not numbers" in found.reason


@pytest.mark.parametrize("event", [[], {"choices": [3]}, {"choices": [{"logprobs": {"tokens": ["x"]}}]}])
def test_odd_events_are_a_broken_answer(event):
    engine = type("Engine", (), {"base_url": "http://stub", "stream": lambda *_: [(1.0, event)]})()
    with pytest.raises(HttpFailure, match="odd event"):
        truth.completion(engine, "tiny", [1, 2], "salt")
