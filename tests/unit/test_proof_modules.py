"""The proof's modules as Ansible calls them: parameters in, one JSON object out."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import sample_results
from ansible.module_utils.testing import patch_module_args

import bench_load
import bench_verdict
import proof_state
import truth_check
from kvfleet.core import history


def call(module, capsys, **parameters):
    with patch_module_args(parameters), pytest.raises(SystemExit):
        module.main()
    return json.loads(capsys.readouterr().out)


class Engine(BaseHTTPRequestHandler):
    """Lists a model and generates, for whoever brings the right key."""

    key = "canary-key"
    tokens = 8

    def _answer(self, status, body):
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _allowed(self):
        if self.headers.get("Authorization") == f"Bearer {self.key}":
            return True
        self._answer(401, {"error": "Unauthorized"})
        return False

    def do_GET(self):
        if self._allowed():
            self._answer(200, {"data": [{"id": "llama8b"}]})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if self._allowed():
            self._answer(200, {"choices": [{"text": "x"}], "usage": {"completion_tokens": self.tokens}})

    def log_message(self, *_):
        pass


@pytest.fixture
def engine():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


@pytest.fixture
def plan(tmp_path):
    made = sample_results.plan("cpu", "cu13-0.32.0-0.5.6")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": 1024, "torch_dtype": "bfloat16"}))
    made["instances"][0].update(model=str(model), port=1)
    made["servers"][0]["http_port"] = 1
    for name in ("etc", "state"):
        (tmp_path / name).mkdir()
    (tmp_path / "r1").mkdir()
    (tmp_path / "current").symlink_to("r1")
    made["paths"] = {name: str(tmp_path / name) for name in ("etc", "state", "current")}
    return made


def record(capsys, plan, **extra):
    return call(
        proof_state, capsys, plan=plan, record={"verdict": "pass", "profile": "smoke", "line": "h PASS", **extra}
    )


def test_proof_state_asks_records_and_stands(capsys, plan, engine):
    plan["instances"][0]["port"] = engine
    fresh = call(proof_state, capsys, plan=plan, api_key="canary-key")
    assert (fresh["proved"], fresh["changed"]) == (False, False)
    assert "never" in fresh["reason"]
    assert record(capsys, plan, time="20261129T090000Z")["changed"] is True
    stands = call(proof_state, capsys, plan=plan, api_key="canary-key")
    assert (stands["proved"], stands["changed"]) == (True, False)
    assert stands["generation"]["llama8b"]["completion_tokens"] == 8
    assert "unchanged since 20261129T090000Z" in stands["line"]
    plan["fingerprint"] = "other"
    assert "plan" in call(proof_state, capsys, plan=plan, api_key="canary-key")["reason"]


def test_an_unchanged_host_that_does_not_generate_is_to_be_proved(capsys, plan, engine, monkeypatch):
    plan["instances"][0]["port"] = engine
    record(capsys, plan)

    def why(key):
        answer = call(proof_state, capsys, plan=plan, api_key=key)
        assert (answer["proved"], answer["changed"]) == (False, False)
        assert answer["line"] == f"to prove: {answer['reason']}"
        return answer["reason"]

    assert "KVF-BENCH-002" in why("wrong")
    monkeypatch.setattr(Engine, "tokens", 0)
    assert "KVF-BENCH-004" in why("canary-key")
    plan["instances"][0]["served_model_name"] = "another"
    record(capsys, plan)
    assert "KVF-BENCH-003" in why("canary-key")


def test_check_mode_writes_no_record(capsys, plan, tmp_path):
    done = call(proof_state, capsys, plan=plan, record={"verdict": "pass"}, _ansible_check_mode=True)
    assert done["changed"] is True
    assert not (tmp_path / "state/proved.json").exists()


@pytest.fixture
def tiers(plan, tmp_path):
    """The cache partition after an upgrade: the new release's directory, and the old one beside it."""
    plan["paths"]["cache_mount"] = str(tmp_path / "cache")
    base = tmp_path / "cache/data/0/new"
    plan["servers"][0]["base_path"] = str(base)
    for folder in (base, base.parent / "old", base.parent.parent / "other/kept"):
        folder.mkdir(parents=True)
    (tmp_path / "cache/.kvfleet.json").touch()
    return base.parent


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_the_disk_tier_kept_of_another_release_goes_with_the_proof_and_not_before(
    capsys, plan, engine, tiers, tmp_path
):
    plan["instances"][0]["port"] = engine
    assert call(proof_state, capsys, plan=plan, api_key="canary-key")["dropped_tiers"] == []
    call(proof_state, capsys, plan=plan, record={"verdict": "pass"}, _ansible_check_mode=True)
    assert names(tiers) == ["new", "old"]
    assert record(capsys, plan)["dropped_tiers"] == [str(tiers / "old")]
    assert names(tiers) == ["new"]
    assert names(tmp_path / "cache/data/other") == ["kept"]
    # back on the proved release: what the failed one left
    (tiers / "failed").mkdir()
    stands = call(proof_state, capsys, plan=plan, api_key="canary-key")
    assert (stands["proved"], stands["changed"], names(tiers)) == (True, True, ["new"])


def test_nothing_is_removed_from_a_partition_that_is_not_ours(capsys, plan, engine, tiers, tmp_path):
    (tmp_path / "cache/.kvfleet.json").unlink()
    assert record(capsys, plan)["dropped_tiers"] == []
    assert names(tiers) == ["new", "old"]


@pytest.fixture
def unlocked(tmp_path, monkeypatch):
    from ansible.module_utils.kvfleet import bench_session

    lock = tmp_path / "bench.lock"
    for module in (bench_load, truth_check):
        monkeypatch.setattr(module, "only_benchmark", lambda: bench_session.only_benchmark(lock))
    return lock


def test_truth_check_returns_findings_and_never_the_key(capsys, plan, unlocked):
    done = call(truth_check, capsys, plan=plan, api_key="canary-key", check_units=False)
    assert done["ok"] is False
    assert done["changed"] is False
    assert [finding["code"] for finding in done["instances"][0]["findings"]] == ["KVF-BENCH-001"]
    assert "canary-key" not in json.dumps({key: value for key, value in done.items() if key != "invocation"})
    assert "canary-key" not in json.dumps(done["invocation"])


def test_truth_check_names_an_unreadable_model(capsys, plan, unlocked):
    plan["instances"][0]["model"] = "/nonexistent"
    done = call(truth_check, capsys, plan=plan, check_units=False)
    assert done["failed"] is True
    assert "KVF-BENCH-017" in done["msg"]


def test_load_without_a_server_or_tokenizer_is_told_apart(capsys, plan, engine, unlocked, tmp_path):
    missing = call(bench_load, capsys, plan=plan, user="root")
    assert [f["code"] for f in missing["instances"][0]["findings"]] == ["KVF-BENCH-018"]
    (tmp_path / "model/tokenizer.json").write_text("{}")
    down = call(bench_load, capsys, plan=plan, user="root")
    assert [f["code"] for f in down["instances"][0]["findings"]] == ["KVF-BENCH-001"]
    plan["instances"][0]["port"] = engine
    wrong = call(bench_load, capsys, plan=plan, user="root", api_key="wrong")
    assert [f["code"] for f in wrong["instances"][0]["findings"]] == ["KVF-BENCH-002"]


def test_two_loads_at_once_are_refused_and_the_lock_is_free_afterwards(capsys, plan, unlocked):
    from ansible.module_utils.kvfleet import bench_session

    with bench_session.only_benchmark(unlocked):
        # the truth check clears the RAM tier, so it waits for nobody either
        refused = call(truth_check, capsys, plan=plan, check_units=False)
        assert refused["failed"] is True
        assert "KVF-BENCH-024" in refused["msg"]
        second = call(bench_load, capsys, plan=plan, user="root")
        assert second["failed"] is True
        assert "KVF-BENCH-024" in second["msg"]
    assert "failed" not in call(bench_load, capsys, plan=plan, user="root")


def test_wrong_profile_is_refused_by_its_name(capsys, plan):
    done = call(bench_load, capsys, plan=plan, profile="smok")
    assert done["failed"] is True
    assert "smoke" in done["msg"]


def verdict(capsys, plan, tmp_path, **extra):
    truth = {**sample_results.truth("cpu"), "changed": False, "invocation": {"api_key": "canary-invocation"}}
    sample = sample_results.record("h", "20261129T090000Z", "cpu")
    options = {
        "host": "h",
        "plan": plan,
        "truth": truth,
        "load": sample["load"],
        "results_dir": str(tmp_path / "results"),
    }
    return call(bench_verdict, capsys, **{**options, **extra})


def test_verdict_is_kept_once_a_call(capsys, plan, tmp_path):
    first = verdict(capsys, plan, tmp_path)
    assert (first["verdict"], first["accepted"]) == ("pass", True)
    assert first["payoff"]["state"] == "unknown"
    assert first["shapes"]["llama8b"]["prefixes"] >= 4
    second = verdict(capsys, plan, tmp_path)
    assert first["path"] != second["path"]
    kept = history.load_records(tmp_path / "results")
    assert len(kept) == 2
    assert "canary" not in json.dumps(kept)


def test_a_failing_verdict_is_kept_and_not_accepted(capsys, plan, tmp_path):
    done = verdict(capsys, plan, tmp_path, ttft_p99_ms=1)
    assert (done["verdict"], done["accepted"]) == ("fail", False)
    assert done["deciding"]["limit"] == 1
    assert "KVF-BENCH-043" in done["text"]
    assert history.load_records(tmp_path / "results")[0]["verdict"] == "fail"


@pytest.mark.parametrize(("on_degrade", "accepted"), [("warn", True), ("fail", False), ("fallback", True)])
def test_on_degrade_decides_about_offload_that_costs(capsys, plan, tmp_path, on_degrade, accepted):
    for at, profile, factor in (("20261127T080000Z", "gpu", 1.0), ("20261129T090000Z", "cpu", 1.9)):
        own = {**sample_results.plan(profile, "cu13-0.32.0-0.5.6"), "paths": plan["paths"]}
        sample = sample_results.record("h", at, profile, factor=factor)
        truth = sample_results.truth(profile)
        done = verdict(capsys, own, tmp_path, load=sample["load"], truth=truth, on_degrade=on_degrade)
    assert done["verdict"] == "degrade"
    assert done["accepted"] is accepted
    assert done["better_profile"] == "gpu"


def test_verdict_in_check_mode_writes_nothing(capsys, plan, tmp_path):
    done = verdict(capsys, plan, tmp_path, _ansible_check_mode=True)
    assert done["changed"] is False
    assert not (tmp_path / "results").exists()


def test_a_host_that_died_gets_a_verdict_and_keeps_its_truth(capsys, plan, tmp_path):
    done = verdict(capsys, plan, tmp_path, load={"unreachable": True, "changed": False, "msg": "Connection reset"})
    assert (done["verdict"], done["accepted"]) == ("fail", False)
    assert "KVF-BENCH-047" in done["text"]
    kept = history.load_records(tmp_path / "results")[0]
    assert "unreachable" not in kept["load"]
    assert kept["truth"]["instances"]


def test_a_clock_that_was_set_back_is_noted_and_overwrites_nothing(capsys, plan, tmp_path):
    ahead = history.store(tmp_path / "results", sample_results.record("h", "20990101T000000Z", "cpu"))
    text = ahead.read_text()
    done = verdict(capsys, plan, tmp_path)
    assert done["verdict"] == "pass"
    assert "KVF-BENCH-050" in done["text"]
    assert "20990101T000000Z" in done["text"]
    assert ahead.read_text() == text
    assert len(history.load_records(tmp_path / "results")) == 2


def test_notes_stand_below_the_reasons(capsys, plan, tmp_path):
    truth = sample_results.truth("cpu")
    truth["instances"][0]["notes"] = ["prompt shortened to 1072 tokens"]
    assert "note: llama8b: prompt shortened to 1072 tokens" in verdict(capsys, plan, tmp_path, truth=truth)["text"]


def test_the_proved_record_feeds_the_next_plan(capsys, plan, tmp_path):
    import kv_plan

    truth = sample_results.truth("cpu")
    truth["instances"][0]["prefill_tokens_per_s"] = 700.0
    done = verdict(capsys, plan, tmp_path, truth=truth)
    speeds = done["measured"]
    assert speeds["cpu"] > 0
    call(proof_state, capsys, plan=plan, record={"verdict": "pass", "measured": speeds})
    kept = json.loads((tmp_path / "state/proved.json").read_text())
    fed = kv_plan.measured({}, kept)
    assert fed["cpu"] == speeds["cpu"]
    assert fed["prefill_tokens_per_s"] == fed["instances"]["llama8b"]["prefill_tokens_per_s"] == 700.0


def test_files_of_a_killed_benchmark_are_removed_by_the_next(capsys, plan, unlocked, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_load.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "kvfleet-bench-old/llama8b").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    call(bench_load, capsys, plan=plan, user="root")
    assert not list(tmp_path.glob("kvfleet-bench-*"))
    assert (tmp_path / "other").is_dir()


def test_a_benchmark_that_is_told_to_end_unwinds(monkeypatch):
    with pytest.raises(SystemExit) as ended:
        bench_load.end_in_order(15, None)
    assert ended.value.code == 143
