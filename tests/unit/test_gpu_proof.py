"""The pure parts of scripts/gpu-proof, and what the library gained for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import engine_stubs
import pytest
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "gpu-proof.d"))

from gpuproof import disk, host, model, report, requires, settings  # noqa: E402

from kvfleet.core import engine, services  # noqa: E402
from kvfleet.core.bench import Capacity, custom_runs  # noqa: E402
from kvfleet.core.command import CommandResult, run_command  # noqa: E402
from kvfleet.core.findings import KvfleetError  # noqa: E402
from kvfleet.core.host_access import tier_paths  # noqa: E402
from kvfleet.core.lockfile import parse_lock, reduce_lock, render_lock  # noqa: E402
from kvfleet.core.settings import parse_settings  # noqa: E402

RELEASE = "cu13-0.25.1-0.5.3"
LOCK = (ROOT / "locks" / f"{RELEASE}-cp312-x86_64.txt").read_text()


# -- requirements --------------------------------------------------------------------------------------------------


def entry(version: str, *needs: str) -> dict[str, Any]:
    return {"version": version, "requires": list(needs)}


def test_a_requirement_is_met_by_what_is_carried_before_what_the_image_holds() -> None:
    carried = {"vllm": entry("0.26.0", "numpy", "torch==2.11.0"), "numpy": entry("2.2.6")}
    image = {"numpy": entry("2.5.2"), "torch": entry("2.11.0+cu130")}
    found = requires.check(["vllm"], carried, image)
    assert found["unmet"] == []
    # numpy of the image is not used, torch is
    assert found["used"] == {"torch": "2.11.0+cu130"}


def test_a_wrong_version_deep_in_the_image_stops_the_run_and_names_both() -> None:
    carried = {"vllm": entry("0.26.0", "transformers>=5.5.3"), "filelock": entry("4.3.1")}
    image = {"transformers": entry("5.17.0", "filelock<4"), "filelock": entry("3.9")}
    found = requires.check(["vllm"], carried, image)
    assert found["unmet"] == ["transformers 5.17.0 needs filelock<4, carried has 4.3.1"]


def test_what_is_left_out_is_known_and_its_own_needs_are_not_asked_for() -> None:
    carried = {"lmcache": entry("0.5.3", "redis", "cupy-cuda13x", "numpy<=2.2.6")}
    image = {"cupy-cuda13x": entry("14.2.0", "fastrlock"), "numpy": entry("2.5.2")}
    found = requires.check(["lmcache"], carried, image, left_out=["redis", "cupy-cuda13x"], accepted=["numpy"])
    assert found["unmet"] == []
    assert found["known"] == [
        "lmcache 0.5.3 needs numpy<=2.2.6, the image has 2.5.2",
        "lmcache 0.5.3 needs redis, which is nowhere",
    ]


def test_extras_and_markers_are_followed() -> None:
    carried = {"a": entry("1", "b[fast]", "old; python_version < '3'"), "b": entry("2", "c>=3; extra == 'fast'")}
    assert requires.check(["a"], carried, {})["unmet"] == ["b 2 needs c>=3, which is nowhere"]
    assert requires.check(["b"], carried, {})["unmet"] == []


# -- the reduced lock ----------------------------------------------------------------------------------------------


def test_every_package_that_is_provided_or_left_out_is_in_the_lock() -> None:
    lock = parse_lock(LOCK, "lock")
    reduced = reduce_lock(lock, settings.PROVIDED[RELEASE], settings.LEFT_OUT[RELEASE])
    names = {pin.name for pin in reduced.pins}
    assert "torch" not in names
    assert {"vllm", "lmcache", "numpy"} <= names
    # what is carried fits eight parts of 56 MiB
    assert reduced.size_bytes < 8 * 56 * 2**20
    assert not set(settings.PROVIDED[RELEASE]) & set(settings.LEFT_OUT[RELEASE])


def test_a_reduced_lock_says_what_is_provided_and_is_another_lock() -> None:
    lock = parse_lock(LOCK, "lock")
    reduced = reduce_lock(lock, {"torch": "2.11.0", "triton": None})
    again = parse_lock(render_lock(reduced, "a test"), "reduced")
    assert again.provided == (("torch", "2.11.0"), ("triton", None))
    assert again.digest == reduced.digest != lock.digest
    assert reduce_lock(lock, {"torch": None, "triton": None}).digest != reduced.digest
    with pytest.raises(KvfleetError, match="has no nosuch"):
        reduce_lock(lock, {"nosuch": None})


def test_a_lock_may_leave_torch_to_the_host_but_not_another_torch() -> None:
    row = {**engine_stubs.ROW, "id": RELEASE, "distribution": "vllm", "vllm": "0.25.1", "lmcache": "0.5.3"}
    lock = parse_lock(LOCK, "lock")
    engine.check_lock({**row, "torch": "2.11.0+cu130"}, reduce_lock(lock, {"torch": "2.11.0"}))
    with pytest.raises(KvfleetError, match=r"torch 2\.10\.0 instead of 2\.11\.0"):
        engine.check_lock({**row, "torch": "2.11.0+cu130"}, reduce_lock(lock, {"torch": "2.10.0"}))
    with pytest.raises(KvfleetError, match="torch missing"):
        engine.check_lock({**row, "torch": "2.11.0+cu130"}, reduce_lock(lock, {"torch": None}))


def test_a_lock_that_leaves_packages_to_the_host_needs_the_environment_that_holds_them(tmp_path: Path) -> None:
    wheels = engine_stubs.make_release(tmp_path / "wheels")
    lock = engine_stubs.lock_of(wheels, "stub-1")
    reduced = reduce_lock(lock, {"torch": "7.8.9+cpu"})
    with pytest.raises(KvfleetError, match="KVF-ENG-009"):
        engine.install(engine.Layout(tmp_path / "opt"), engine_stubs.ROW, reduced, "", run_command)


# -- the base environment ------------------------------------------------------------------------------------------


def test_an_environment_is_asked_for_its_packages_and_refused_when_its_python_is_another() -> None:
    found = engine.base_environment(sys.executable, engine_stubs.PYTHON, run_command)
    assert any(path.endswith("site-packages") for path in found.site_packages)
    assert Path(found.python).name == f"python{engine_stubs.PYTHON}"
    with pytest.raises(KvfleetError, match=r"is no environment of Python 3\.7"):
        engine.base_environment(sys.executable, "3.7", run_command)
    with pytest.raises(KvfleetError, match="KVF-ENG-009"):
        engine.base_environment("/nonexistent/python", engine_stubs.PYTHON, run_command)


def test_a_release_sees_the_packages_of_the_base_environment_after_its_own(tmp_path: Path) -> None:
    base, own = tmp_path / "base", tmp_path / "own"
    for folder, word in ((base, "base"), (own, "own")):
        folder.mkdir()
        (folder / "both.py").write_text(f"word = {word!r}\n")
    (base / "only.py").write_text("word = 'base'\n")
    engine.BaseEnvironment(sys.executable, (str(base),)).attach(own)
    script = f"import site; site.addsitedir({str(own)!r}); import both, only; print(both.word, only.word)"
    assert run_command([sys.executable, "-I", "-c", script]).stdout.split() == ["own", "base"]


@pytest.mark.parametrize(
    ("have", "ok", "words"),
    [
        ({"torch": "2.11.0+cu130", "triton": "3.6.0"}, True, "torch 2.11.0+cu130"),
        ({"torch": "2.10.0", "triton": "3.6.0"}, False, "torch 2.10.0 instead of 2.11.0"),
        ({"torch": "2.11.0", "triton": None}, False, "triton missing"),
    ],
)
def test_the_gate_names_what_the_base_environment_lacks(
    tmp_path: Path, have: dict[str, str | None], ok: bool, words: str
) -> None:
    lock = reduce_lock(parse_lock(LOCK, "lock"), {"torch": "2.11.0", "triton": None})
    gate = engine.provided_gate(tmp_path, lock, lambda argv, **_: CommandResult(0, json.dumps(have), ""))
    assert gate.ok is ok
    assert words in gate.detail


# -- settings and services -----------------------------------------------------------------------------------------


def test_random_weights_are_asked_for_by_name_and_warned_about() -> None:
    parsed = parse_settings({"kvfleet_load_format": "dummy", "kvfleet_model": "/m"})
    assert parsed.instances[0].get("load_format") == "dummy"
    with pytest.raises(KvfleetError, match="no way to load weights"):
        parse_settings({"kvfleet_load_format": "random"})


def test_a_disk_tier_inside_the_engine_has_its_own_directory() -> None:
    inside = {"lmcache_config": {"local_disk": "file:///var/cache/kvfleet/data/default/"}}
    assert tier_paths(None, inside) == ["/var/cache/kvfleet/data/default/"]
    assert tier_paths({"base_path": "/var/cache/kvfleet/data/0/ab"}, {}) == ["/var/cache/kvfleet/data/0/ab"]
    assert tier_paths(None, {"lmcache_config": None}) == []


@pytest.mark.parametrize("profile", settings.PROFILES)
def test_the_inventory_of_every_profile_holds_known_names_only(profile: str) -> None:
    values = {**settings.host_values(RELEASE, "cuda", "/m"), **settings.profile_values(profile)}
    planner = {key: value for key, value in values.items() if key.startswith(("kvfleet_", "cache_disk_"))}
    parsed = parse_settings(planner)
    assert parsed.profile == ("cpu" if profile == "article" else profile.partition("-")[0])
    pool = parsed.instances[0].get("kv_pool_gib")
    assert pool == {"whole": None, "tp2": 2.0}.get(profile.partition("-")[2], 4.0)


def test_every_point_of_the_load_is_warm_only_after_its_own_cold_pass() -> None:
    runs = settings.runs(7, concurrencies=(1, 4, 8, 16, 32))
    assert [(run["phase"], run["concurrency"]) for run in runs] == [
        ("populate", 32), ("warm", 8), ("warm", 16), ("warm", 32), ("populate", 32), ("warm", 4), ("warm", 1),
    ]  # fmt: skip
    # the same prompts come back only with the same number of them and the same seed
    assert {(run["load"], run["requests"], run["seed"]) for run in runs} == {("rag", 200, 7), ("rag-few", 25, 8)}
    assert [run["load"] for run in settings.runs(7, concurrencies=(1,))] == ["rag-few", "rag-few"]


UNIT = """[Unit]
Description=x

[Service]
User=kvfleet
ExecStart=/opt/python -m vllm serve /m \\
  --port 8000 \\
  --max-num-seqs 32
ExecStartPost=/ready
"""


def test_a_trial_adds_its_words_to_the_engine_and_to_nothing_else() -> None:
    text = host.Change(("--name", "a 100%"), ("A=1",)).unit(UNIT)
    assert '[Service]\nEnvironment="A=1"\nUser=kvfleet\n' in text
    assert '  --max-num-seqs 32 \\\n  "--name" "a 100%%"\nExecStartPost=/ready\n' in text
    assert host.Change().unit(UNIT) == UNIT
    with pytest.raises(host.ProofError, match="no ExecStart"):
        host.Change(("--name",)).unit("[Service]\n")
    # the server's words are the server's alone
    change = host.Change(server_flags=("--chunk-size", "64"))
    assert change.unit(UNIT) == UNIT
    assert '  --max-num-seqs 32 \\\n  "--chunk-size" "64"\nExecStartPost=/ready\n' in change.server_unit(UNIT)


def test_units_learn_what_the_host_says_about_traffic_between_gpus() -> None:
    said = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "HOME": "/"}
    assert host.host_environment(said) == {
        "NCCL_NVLS_ENABLE": "0",
        "NVSHMEM_DISABLE_NVLS": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    }
    assert host.host_environment({"HOME": "/"}) == {}


def test_the_load_is_one_that_the_instance_can_take() -> None:
    room = Capacity(32768, 0, 0, 256, 8192, 32)
    plan = custom_runs(settings.runs(7), room, 1)
    assert [(run.phase, run.concurrency) for run in plan.runs] == [("populate", 32), ("warm", 8), ("warm", 32)]
    # 12.8 GiB of KV at 128 KiB a token do not fit the pool of 4 GiB
    assert plan.runs[0].working_set_tokens == 100000
    assert len({run.seed for run in plan.runs}) == 1


def test_services_print_the_load_format_only_when_it_is_not_the_engines_own() -> None:
    from test_services import plan

    usual, dummy = plan(), plan()
    dummy["instances"][0]["load_format"] = "dummy"
    for one in (usual, dummy):
        services.attach_commands(one)
    assert "--load-format" not in usual["instances"][0]["command"]
    command = dummy["instances"][0]["command"]
    assert command[command.index("--load-format") + 1] == "dummy"


# -- the host ------------------------------------------------------------------------------------------------------


def test_the_tokenizer_gives_the_ids_back_that_its_text_was_made_of(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(model.tokenizer(300)))
    tokenizer = Tokenizer.from_file(str(path))
    ids = [4, 299, 17, 17, 120]
    assert tokenizer.encode(tokenizer.decode(ids)).ids == ids
    assert tokenizer.encode("never seen").ids == [3, 3]


def test_what_the_engine_logs_about_itself_is_found() -> None:
    lines = [
        "INFO [kv_cache_utils.py:2177] GPU KV cache size: 32,768 tokens",
        "[req_id=a] Retrieved 2048 out of 2048 required tokens (from 2048 total tokens). size: 0.2500 gb, cost 4.2000 "
        "ms, throughput: 59.5238 GB/s;",
        "[req_id=b] Retrieved 256 out of 2048 required tokens (from 2048 total tokens). size: 0.0312 gb, cost 9.0000 "
        "ms, throughput: 3.4722 GB/s;",
        "INFO Available KV cache memory: 111.85 GiB",
    ]
    found = host.engine_facts([lines])
    assert found["kv_tokens"] == 32768
    assert found["kv_gib"] == 111.85
    # a hit of one chunk says nothing about the tier's speed
    assert found["loads"] == 1
    assert found["load_gb_per_s"]["max"] == pytest.approx(59.5238)


def test_seconds_of_a_run_are_told_apart_by_who_took_them() -> None:
    # headings and times of a run that was watched: the engine took from 18.9 to 126.8
    tasks = [
        {"name": "host_plan : Compute the plan", "at": 3.0},
        {"name": "engine : Build and prove the release", "at": 53.0},
        {"name": "vllm_instance : Take the host out of traffic before a restart", "at": 53.5},
        {"name": "vllm_instance : Bring servers and instances to the rendered state", "at": 133.5},
        {"name": "smoke_benchmark : Check that every tier serves the same answer as computing", "at": 142.5},
        # another playbook
        {"name": "Put the load on the host", "at": 70.0},
        {"name": "host_plan : Keep the plan on the host", "at": 70.5},
    ]
    assert host.own_seconds(tasks) == {"engine": 80.0, "proof": 9.0, "load": 70.0, "install": 50.0, "own": 4.0}


def test_a_buffer_shrinks_only_where_memory_has_not_grown() -> None:
    values = {"kvfleet_buffer_gib_per_gpu": 20}
    assert host.fit_buffer(values, {"total_gib": 64, "available_gib": 60}) == {}
    # the planner's own sum: 20 + 17 + an eighth of 44 do not fit 40, without most of the reserve they do
    assert host.fit_buffer(values, {"total_gib": 44, "available_gib": 40}) == {
        "kvfleet_ram_reserve_gib": 1,
        "kvfleet_buffer_gib_per_gpu": 20,
    }
    assert host.fit_buffer(values, {"total_gib": 31, "available_gib": 29})["kvfleet_buffer_gib_per_gpu"] == 11
    assert host.fit_buffer({}, {"total_gib": 31, "available_gib": 2}) == {}


def test_nodes_are_made_for_partitions_that_lack_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = tmp_path / "block" / "loop7" / "loop7p1"
    part.mkdir(parents=True)
    (part / "dev").write_text("259:3\n")
    (tmp_path / "dev").mkdir()
    made = []
    monkeypatch.setattr(disk.os, "mknod", lambda path, mode, device: made.append((Path(path).name, device)))
    disk.nodes("loop7", tmp_path / "dev", tmp_path / "block")
    assert made == [("loop7p1", disk.os.makedev(259, 3))]


# -- the report ----------------------------------------------------------------------------------------------------


def run(phase: str, concurrency: int, rate: float, ttft: float) -> dict[str, Any]:
    word = "cold" if phase == "populate" else "warm"
    shape = {
        "name": f"rag-{word}-c{concurrency}", "phase": phase, "concurrency": concurrency, "requests": 200,
        "prefixes": 50, "prefix_tokens": 2000, "suffix_tokens": 48, "output_tokens": 128,
    }  # fmt: skip
    series = {"mean": ttft, "p99": 2 * ttft}
    return {"run": shape, "figures": {"requests_per_s": rate, "ttft": series, "tpot": {"mean": 6.0}, "failed": 0}}


def record(profile: str, *runs: dict[str, Any], pays: Any = None) -> dict[str, Any]:
    tiers = {"cpu": {"pays": pays}, "disk": {"pays": pays}}
    return {
        "proof_profile": profile,
        "time": "20261130T010203Z",
        "plan": {"instances": [{"gpu_kv_tokens": 32768, "max_num_seqs": 32, "tiers": tiers}], "host": {"ram": {}}},
        "load": {"instances": [{"runs": list(runs)}]},
        "outcome": {"engine": {"kv_tokens": 32768}, "own": {"own": 21.0}, "time": "x"},
    }


#: the figures of the trial by hand (reference: one H200, vLLM 0.26 + LMCache 0.5.3 in process)
TRIAL = {
    "gpu": record("gpu", run("populate", 32, 12.0, 1375.7), run("warm", 8, 8.0, 235.4), run("warm", 32, 12.0, 1375.7)),
    "cpu": record(
        "cpu", run("populate", 32, 12.13, 1340.9), run("warm", 8, 10.74, 30.5), run("warm", 32, 18.81, 733.5), pays=True
    ),
}
SUMMARY = {
    "proof": {"release": RELEASE, "commit": "abc", "python": "3.12", "reduced": False},
    "profiles": {"disk": {"ran": False, "reason": "only 90 s were left of the budget"}, "article": {"ran": False}},
}


def test_goals_are_judged_by_the_trials_own_numbers() -> None:
    lines = {line[0]: line[2:] for line in report.goals(TRIAL, SUMMARY)}
    # +56.7 % and 7.7x of the trial: both short of the goals
    assert lines["requests/s at 32, warm, profile cpu against gpu"] == ("1.567x", "missed")
    assert lines["mean TTFT at 8, profile gpu against cpu, warm"] == ("7.718x", "missed")
    assert lines["requests/s at 32, cold, profile cpu against gpu"] == ("1.011x", "met")
    assert lines["GPU KV tokens, profile gpu"] == ("32768 planned, 32768 logged (0.0%)", "met")
    article = lines["the same against the article's hand settings (chunk 32, buffer 20)"]
    assert article == ("-", "not run (article: not asked for)")


def test_the_plans_word_is_held_against_every_concurrency() -> None:
    assert report.pays(TRIAL) == [
        ("cpu", 8, "True", "1.34x", "agrees"),
        ("cpu", 32, "True", "1.57x", "agrees"),
    ]
    slow = {**TRIAL, "disk": record("disk", run("warm", 32, 7.38, 2374.0), pays=True)}
    assert ("disk", 32, "True", "0.61x", "DISAGREES") in report.pays(slow)


def test_the_page_keeps_what_is_outside_of_the_marks_and_names_what_was_not_run() -> None:
    section = report.render(TRIAL, SUMMARY)
    assert "| disk | | | | not run: only 90 s were left of the budget" in section
    assert "| cpu | warm | 32 | 200 | 18.81 | 1.57x | 733.5 | 1467.0 | 6.00 | 0 |" in section
    page = report.replace_section("# Benchmarks\n\ntext\n", section)
    again = report.replace_section(page + "\nmore\n", "new\n")
    assert again.startswith("# Benchmarks\n\ntext\n")
    assert again.rstrip().endswith("more")
    assert section not in again


def test_a_trial_stands_beside_the_profile_that_it_changed() -> None:
    tried = {
        **record("try-native", run("warm", 32, 15.0, 900.0)), "base": "gpu",
        "change": {"flags": ["--kv-offloading-size", "20"], "environment": [], "lmcache": {}},
    }  # fmt: skip
    server = {**tried, "proof_profile": "try-small", "base": "cpu"}
    server["change"] = {"flags": [], "environment": [], "lmcache": {}, "server_flags": ["--chunk-size", "64"]}
    assert "| small | cpu | `server: --chunk-size 64` | warm |" in report.render(TRIAL, SUMMARY, [server])
    failed = {**tried, "proof_profile": "try-no", "load": None, "errors": ["ERROR no such thing"]}
    section = report.render(TRIAL, SUMMARY, [tried, failed])
    assert "| native | gpu | `--kv-offloading-size 20` | warm | 32 | 15.00 | 1.25x | 1.25x | 900.0 | 6.00 |" in section
    assert "| no | gpu | `--kv-offloading-size 20` | | | not run: ERROR no such thing | | | | |" in section


def test_warm_passes_are_drawn_against_concurrency() -> None:
    other = {"proof_profile": "try-native", "base": "gpu", "load": TRIAL["cpu"]["load"]}
    ours = {"proof_profile": "try-chunk", "base": "cpu", "load": TRIAL["cpu"]["load"]}
    requests, ttft = report.charts(RELEASE, TRIAL, [other, ours])
    assert [line.label for line in requests.lines] == ["gpu", "cpu", "try-native"]
    # the cold pass at 32 is no point of the line
    assert requests.lines[0].points == [(8.0, 8.0), (32.0, 12.0)]
    assert ttft.lines[1].points == [(8.0, 30.5), (32.0, 733.5)]
    assert f"](measured/gpu/{requests.name}.svg)" in report.render(TRIAL, SUMMARY)


def test_what_was_planned_stands_beside_what_was_measured() -> None:
    measured = record("cpu", run("warm", 8, 1.0, 1.0))
    measured["plan"]["instances"][0].update(
        kv_bytes_per_token_stored=131072,
        kv_bytes_per_token_per_rank=65536,
        tiers={"cpu": {"pays": "yes", "needed_bytes_per_s": 131072 * 30000}},
    )
    measured["truth"] = {"instances": [{"prefill_tokens_per_s": 25000.0}]}
    section = report.render({"cpu": measured}, SUMMARY)
    assert "| cpu | prefill tokens/s (the break-even is made of it) | 30,000 | 25,000 | +20.0% |" in section


def test_results_of_several_commands_are_merged_and_never_overwritten(tmp_path: Path) -> None:
    collected, results = tmp_path / "out", tmp_path / "results"
    collected.mkdir()
    outcomes = {
        "gpu": {"ran": True, "time": "20261130T010203Z", "tasks": [{"name": "x", "at": 1.0}]},
        "cpu": {"ran": False, "reason": "r"},
    }
    (collected / "summary.json").write_text(json.dumps({"proof": SUMMARY["proof"], "profiles": outcomes}))
    (collected / "results-gpu.json").write_text(json.dumps(TRIAL["gpu"]))
    names = sorted(path.name for path in report.store(collected, results))
    assert names == [f"20261130T010203Z-{RELEASE}-gpu.json", f"20261130T010203Z-{RELEASE}-summary.json"]
    kept = (results / names[0]).read_text()
    (collected / "results-gpu.json").write_text("{}")
    report.store(collected, results)
    assert (results / names[0]).read_text() == kept
    outcomes["cpu"] = {"ran": True, "time": "20261130T020000Z"}
    outcomes["gpu"] = {"ran": False, "reason": "not asked for"}
    (collected / "results-gpu.json").unlink()
    (collected / "summary.json").write_text(json.dumps({"proof": SUMMARY["proof"], "profiles": outcomes}))
    (collected / "results-cpu.json").write_text(json.dumps(TRIAL["cpu"]))
    report.store(collected, results)
    records, summary = report.newest(results, RELEASE)
    assert set(records) == {"gpu", "cpu"}
    assert summary["profiles"]["gpu"]["ran"] is True
    assert summary["profiles"]["cpu"]["ran"] is True


def test_releases_are_never_compared_with_each_other(tmp_path: Path) -> None:
    for day, release, rate in (("20261130", RELEASE, 12.0), ("20261201", "cu13-9-9", 30.0)):
        own = record("cpu", run("warm", 32, rate, 1.0))
        (tmp_path / f"{day}T000000Z-{release}-cpu.json").write_text(json.dumps(own))
        profiles = {"cpu": {"ran": True, "result": "x"}}
        about = {"proof": {**SUMMARY["proof"], "release": release}, "profiles": profiles}
        (tmp_path / f"{day}T000000Z-{release}-summary.json").write_text(json.dumps(about))
    (tmp_path / f"20261130T000000Z-{RELEASE}-gpu.json").write_text(json.dumps(TRIAL["gpu"]))
    old, new = report.section(tmp_path).split("### cu13-9-9")
    assert "| cpu | warm | 32 | 200 | 12.00 | 1.00x |" in old
    assert "| cpu | warm | 32 | 200 | 30.00 | - |" in new
    assert "| gpu | | | | not run: not asked for" in new
