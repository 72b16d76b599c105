"""The helper that units call: digests, tier preparation, readiness, clean-up, health."""

import errno
import importlib.machinery
import importlib.util
import json
import mmap
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

HELPER = Path(__file__).parents[2] / "roles/service_user/files/kvfleet-unit"


@pytest.fixture
def helper(tmp_path, monkeypatch):
    loader = importlib.machinery.SourceFileLoader("kvfleet_unit", str(HELPER))
    spec = importlib.util.spec_from_loader("kvfleet_unit", loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    for name, folder in (("UNIT_DIRECTORY", "units"), ("SETTINGS_DIRECTORY", "etc"), ("RUN_DIRECTORY", "run")):
        (tmp_path / folder).mkdir()
        monkeypatch.setattr(module, name, tmp_path / folder)
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path / "shm")
    # of this machine's processes the tests' own is enough
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / str(os.getpid())).symlink_to("/proc/self")
    monkeypatch.setattr(module, "PROC", tmp_path / "proc")
    monkeypatch.setattr(module, "CREDENTIALS_DIRECTORY", tmp_path / "etc/credentials")
    (tmp_path / "r1").mkdir()
    (tmp_path / "current").symlink_to("r1")
    monkeypatch.setattr(module, "CURRENT_RELEASE", tmp_path / "current")
    monkeypatch.setenv("MAINPID", str(os.getpid()))
    return module


def test_digest_follows_unit_dropin_settings_and_release(helper, tmp_path):
    unit = "kvfleet-vllm@a.service"
    (tmp_path / "units" / unit).write_text("[Service]")
    digests = [helper.unit_digest(unit)]
    (tmp_path / "units" / f"{unit}.d").mkdir()
    (tmp_path / "units" / f"{unit}.d" / "x.conf").write_text("[Service]")
    digests.append(helper.unit_digest(unit))
    (tmp_path / "etc" / "kvfleet-vllm@a.lmcache.yaml").write_text("{}")
    digests.append(helper.unit_digest(unit))
    (tmp_path / "r2").mkdir()
    (tmp_path / "current").unlink()
    (tmp_path / "current").symlink_to("r2")
    digests.append(helper.unit_digest(unit))
    assert len(set(digests)) == 4
    (tmp_path / "etc" / "kvfleet-vllm@b.lmcache.yaml").write_text("another instance's")
    assert helper.unit_digest(unit) == digests[-1]


def test_start_is_recorded(helper, tmp_path):
    helper.record_start("u.service")
    assert (tmp_path / "run/u.service.digest").read_text().strip() == helper.unit_digest("u.service")


def mounted(monkeypatch, path):
    monkeypatch.setattr(Path, "is_mount", lambda self: self == path)


def test_tier_on_an_unmounted_directory_is_refused(helper, tmp_path):
    (tmp_path / ".kvfleet.json").touch()
    victim = tmp_path / "data/0/old/file"
    victim.parent.mkdir(parents=True)
    victim.touch()
    with pytest.raises(SystemExit, match="is not mounted"):
        helper.prepare_tier(tmp_path / "data/0/new", tmp_path, keep=False)
    assert victim.exists()


def test_tier_on_a_foreign_partition_is_refused(helper, tmp_path, monkeypatch):
    mounted(monkeypatch, tmp_path)
    victim = tmp_path / "data/0/old/file"
    victim.parent.mkdir(parents=True)
    victim.touch()
    with pytest.raises(SystemExit, match=r"holds no \.kvfleet\.json"):
        helper.prepare_tier(tmp_path / "data/0/new", tmp_path, keep=False)
    assert victim.exists()


def test_tier_outside_the_mount_is_refused(helper, tmp_path, monkeypatch):
    mount = tmp_path / "mount"
    mount.mkdir()
    mounted(monkeypatch, mount)
    (mount / ".kvfleet.json").touch()
    victim = tmp_path / "elsewhere/0/file"
    victim.parent.mkdir(parents=True)
    victim.touch()
    with pytest.raises(SystemExit, match="does not lie below"):
        helper.prepare_tier(tmp_path / "elsewhere/0/new", mount, keep=False)
    assert victim.exists()


@pytest.fixture
def tier(tmp_path, monkeypatch):
    """A server's folder on a cache partition: files of now, files of another release, and a link out of it."""
    mounted(monkeypatch, tmp_path)
    (tmp_path / ".kvfleet.json").touch()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/precious").touch()
    tier = tmp_path / "data/0"
    for name in ("old", "now"):
        (tier / name).mkdir(parents=True)
        for number in range(3):
            path = tier / name / f"chunk{number}"
            path.touch()
            os.utime(path, (number, number))
    (tier / "link").symlink_to(tmp_path / "outside")
    return tier


@pytest.mark.parametrize("keep", [False, True])
def test_tier_is_emptied_without_following_links(helper, tmp_path, tier, keep):
    helper.prepare_tier(tier / "now", tmp_path, keep=keep)
    assert (tmp_path / "outside/precious").exists()
    assert not (tier / "link").exists()
    assert (tier / "now/chunk0").exists() is keep
    # what a failed upgrade returns to; it goes after the proof
    assert (tier / "old/chunk0").exists()


def test_a_cache_inside_the_process_begins_empty(helper, tmp_path, tier):
    """LMCache inside vLLM writes beside the directory that the unit names, not into it."""
    mine, others = tmp_path / "data/llama8b", tmp_path / "data/other/chunk.pt"
    for path in (mine / "model@1@0@abc.pt", mine / "in-process/x", others):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    helper.prepare_tier(mine / "in-process", tmp_path, keep=False)
    assert [path.name for path in mine.rglob("*")] == ["in-process"]
    assert others.exists()


@pytest.mark.parametrize(
    ("free", "old", "kept"),
    [
        (0, False, []),
        (2, False, ["chunk2"]),
        (4, False, ["chunk0", "chunk1", "chunk2"]),
        (5, True, ["chunk0", "chunk1", "chunk2"]),
    ],
)
def test_tier_makes_room_for_quota_and_floor_first_from_other_releases(
    helper, tmp_path, tier, monkeypatch, free, old, kept
):
    """Five are needed; the other release's folder frees one, and so does each of the oldest files of now."""

    def usage(_path):
        gone = 3 - len(list((tier / "now").iterdir())) + (not (tier / "old").exists())
        return SimpleNamespace(free=free + gone)

    monkeypatch.setattr(helper.shutil, "disk_usage", usage)
    helper.prepare_tier(tier / "now", tmp_path, keep=True, room_bytes=5)
    assert (tier / "old").exists() is old
    assert sorted(path.name for path in (tier / "now").iterdir()) == kept


class Answers(BaseHTTPRequestHandler):
    completion = (200, {"choices": [{"text": "x"}], "usage": {"completion_tokens": 1}})

    def do_GET(self):
        self._send(200, {})

    def do_POST(self):
        self._send(*self.completion)

    def _send(self, status, body):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    class Handler(Answers):
        pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield http
        http.shutdown()


def test_ready_means_a_token(helper, server):
    assert helper.instance_probe("127.0.0.1", server.server_port, "m") == ""


def test_health_without_a_token_is_not_ready(helper, server):
    server.RequestHandlerClass.completion = (200, {"choices": [], "usage": {"completion_tokens": 0}})
    assert helper.instance_probe("127.0.0.1", server.server_port, "m") == "no token came back"


def test_wrong_model_name_ends_the_wait_at_once(helper, server):
    server.RequestHandlerClass.completion = (404, {"error": "The model `m` does not exist."})
    with pytest.raises(SystemExit, match="refuses a completion for m: 404"):
        helper.wait_until("x", lambda: helper.instance_probe("127.0.0.1", server.server_port, "m"), 60)


def test_dead_process_ends_the_wait_at_once(helper, monkeypatch):
    monkeypatch.setenv("MAINPID", "4194305")  # above the kernel's largest pid
    with pytest.raises(SystemExit, match="the process ended before x was ready"):
        helper.wait_until("x", lambda: "not yet", 60)


def test_deadline_says_the_last_reason(helper):
    with pytest.raises(SystemExit, match=r"not ready within 0\.1 s: not yet"):
        helper.wait_until("x", lambda: "not yet", 0.1)


def test_digest_follows_the_key_only_where_the_unit_loads_it(helper, tmp_path):
    unit, other = "kvfleet-vllm@a.service", "kvfleet-lmcache@0.service"
    (tmp_path / "units" / unit).write_text("[Service]\nLoadCredential=api_key:/x")
    (tmp_path / "units" / other).write_text("[Service]")
    (tmp_path / "etc/credentials").mkdir()
    key = tmp_path / "etc/credentials/api_key"
    key.write_text("one")
    before = [helper.unit_digest(unit), helper.unit_digest(other)]
    key.write_text("another")
    assert helper.unit_digest(unit) != before[0]
    assert helper.unit_digest(other) == before[1]


def test_digest_of_a_timer_follows_its_service_and_settings(helper, tmp_path):
    (tmp_path / "units/kvfleet-watch.timer").write_text("[Timer]")
    digests = [helper.unit_digest("kvfleet-watch.timer")]
    (tmp_path / "units/kvfleet-watch.service").write_text("[Service]")
    digests.append(helper.unit_digest("kvfleet-watch.timer"))
    (tmp_path / "etc/kvfleet-watch.json").write_text("{}")
    digests.append(helper.unit_digest("kvfleet-watch.timer"))
    assert len(set(digests)) == 3


def test_clean_removes_own_and_unmapped_segments_only(helper, tmp_path):
    shm = tmp_path / "shm"
    for name in ("kvfleet_l1_0", "kvfleet_l1_1", "psm_left", "psm_mapped", "psm_open", "postgres", "psm_young"):
        (shm / name).write_bytes(b"x" * mmap.PAGESIZE)
        os.utime(shm / name, (0, 0))
    with (shm / "psm_mapped").open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    young = time.time()
    with (shm / "psm_open").open("rb"):
        # as seen a minute later; one that was made just then must stay
        os.utime(shm / "psm_young", (young + 60, young + 60))
        removed = helper.clean(["kvfleet_l1_0"], now=young + 60)
    mapped.close()
    assert removed == ["kvfleet_l1_0", "psm_left"]
    assert sorted(path.name for path in shm.iterdir()) == [
        "kvfleet_l1_1", "postgres", "psm_mapped", "psm_open", "psm_young",
    ]  # fmt: skip


def test_clean_leaves_other_users_segments(helper, tmp_path, monkeypatch):
    (tmp_path / "shm/psm_other").write_text("x")
    monkeypatch.setattr(helper.os, "geteuid", lambda: os.getuid() + 1)
    assert helper.clean(["psm_other"], now=time.time() + 60) == []


def test_clean_does_nothing_when_a_process_cannot_be_read(helper, tmp_path, monkeypatch):
    (tmp_path / "shm/psm_left").write_text("x")
    process = tmp_path / "proc/1"
    process.mkdir()
    (process / "maps").mkdir()  # reading it is an error other than "gone"
    assert helper.clean([], now=time.time() + 60) == []
    assert (tmp_path / "shm/psm_left").exists()


def test_a_reserved_segment_has_all_its_pages(helper, monkeypatch):
    folder = Path(tempfile.mkdtemp(prefix="kvfleet-test-", dir="/dev/shm"))
    monkeypatch.setattr(helper, "SHARED_MEMORY", folder)
    try:
        with (folder / "pool").open("wb") as segment:
            segment.truncate(4 * 1024**2)
        assert (folder / "pool").stat().st_blocks == 0
        helper.reserve("pool")
        assert (folder / "pool").stat().st_blocks * 512 == 4 * 1024**2
        with (folder / "pool").open("wb") as segment:
            segment.truncate(1024**5)
        with pytest.raises(SystemExit, match=r"MiB free of \d+ MiB, but the buffer of 1073741824 MiB does not fit"):
            helper.reserve("pool")
    finally:
        shutil.rmtree(folder)


def test_a_port_that_somebody_has_is_named_before_the_start(helper):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit, match=rf"127.0.0.1:{port}: Address already in use; .*sport = :{port}"):
            helper.check_ports_free("127.0.0.1", [port])
    helper.check_ports_free("127.0.0.1", [port])


def test_a_server_without_that_segment_starts(helper, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(helper, "SHARED_MEMORY", tmp_path)
    helper.reserve("lmcache_l1_pool_x")
    assert "nothing is set aside" in capsys.readouterr().out


def test_forget_removes_the_tier_and_settings_of_that_unit_only(helper, tmp_path, monkeypatch):
    mounted(monkeypatch, tmp_path)
    (tmp_path / ".kvfleet.json").touch()
    for name in ("0", "1"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "chunk").touch()
    (tmp_path / "etc/kvfleet-lmcache@0.yaml").touch()
    (tmp_path / "etc/kvfleet-lmcache@1.yaml").touch()
    helper.forget("kvfleet-lmcache@0.service", tmp_path / "data", tmp_path)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["1"]
    assert [path.name for path in (tmp_path / "etc").glob("kvfleet*")] == ["kvfleet-lmcache@1.yaml"]
    with pytest.raises(SystemExit, match="is no unit"):
        helper.forget("kvfleet-lmcache@...service", tmp_path / "data", tmp_path)


def test_forget_leaves_a_tier_of_the_same_name_that_is_used(helper, tmp_path, monkeypatch):
    mounted(monkeypatch, tmp_path)
    (tmp_path / ".kvfleet.json").touch()
    (tmp_path / "data/a").mkdir(parents=True)
    (tmp_path / "units/kvfleet-lmcache@a.service").touch()
    helper.forget("kvfleet-vllm@a.service", tmp_path / "data", tmp_path)
    assert (tmp_path / "data/a").is_dir()


def test_waits_for_gpu_memory(helper, monkeypatch):
    answers = iter([["GPU-a, 81559, 2000", "GPU-b, 81559, 100"], ["GPU-a, 81559, 80000", "GPU-b, 81559, 100"]])
    monkeypatch.setattr(helper, "_nvidia_smi", lambda query: next(answers))
    waited = []
    helper.wait_for_gpus(0.9, ["GPU-a"], 60, waited.append)
    assert waited == [2]


def test_says_who_holds_gpu_memory(helper, monkeypatch):
    def smi(query):
        return ["GPU-a, 81559, 2000"] if "query-gpu" in query else ["GPU-a, 4711, 70000", "GPU-b, 1, 1"]

    monkeypatch.setattr(helper, "_nvidia_smi", smi)
    with pytest.raises(SystemExit, match=r"GPU-a has 2000 of 73403 MiB free; held by: GPU-a, 4711, 70000$"):
        helper.wait_for_gpus(0.9, ["GPU-a"], 0)


def test_key_goes_into_the_environment_not_the_arguments(helper, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(helper.os, "execve", lambda *words: seen.append(words))
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    (tmp_path / "api_key").write_text("secret\n")
    helper.run_with_key(["/x/vllm", "serve"])
    program, argv, environment = seen[0]
    assert (program, argv, environment["VLLM_API_KEY"]) == ("/x/vllm", ["/x/vllm", "serve"], "secret")
    (tmp_path / "api_key").write_text("\n")
    with pytest.raises(SystemExit, match="is empty"):
        helper.run_with_key(["/x/vllm"])


def test_key_of_the_readiness_check_comes_from_the_main_process_where_systemd_hides_the_credential(
    helper, tmp_path, monkeypatch
):
    process = tmp_path / "proc/77"
    process.mkdir()
    (process / "environ").write_bytes(b"HOME=/x\0VLLM_API_KEY=secret\0VLLM_PORT=1\0")
    monkeypatch.setenv("MAINPID", "77")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "hidden"))
    assert helper.api_key() == "secret"
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden/api_key").write_text("credential\n")
    assert helper.api_key() == "credential"
    monkeypatch.delenv("CREDENTIALS_DIRECTORY")
    (process / "environ").write_bytes(b"HOME=/x\0")
    assert helper.api_key() == ""


def instance_entry(server):
    return {"unit": "u", "address": "127.0.0.1", "port": server.server_port, "model": "m"}


def test_health_of_a_generating_instance(helper, server):
    assert helper.health_of_instance(instance_entry(server), 5) == ("ok", "")


@pytest.mark.parametrize(("step", "state"), [(1, "busy"), (0, "hung")])
def test_no_token_in_time_is_a_hang_only_without_a_step(helper, server, step, state):
    """The same silence of the API: a queue while the counters move, a hang while they stand."""
    counter = {"value": 5}

    def get(handler):
        counter["value"] += step
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(f'vllm:generation_tokens_total{{a="b"}} {counter["value"]}.0\n'.encode())

    server.RequestHandlerClass.do_GET = get
    server.RequestHandlerClass.completion = (503, {"error": "queue"})
    found, reason = helper.health_of_instance(instance_entry(server), 5)
    assert found == state
    assert "within 5 s" in reason


def test_server_without_engine_is_dead(helper, server):
    server.RequestHandlerClass.completion = (500, {"error": "EngineDeadError"})
    server.RequestHandlerClass.do_GET = lambda handler: handler._send(503, {})
    found, reason = helper.health_of_instance(instance_entry(server), 5)
    assert found == "dead"
    assert "EngineDeadError" in reason


def test_wrong_key_is_no_reason_to_restart(helper, server):
    server.RequestHandlerClass.completion = (401, {"error": "Unauthorized"})
    assert helper.health_of_instance(instance_entry(server), 5)[0] == "refuses"


def test_nobody_listening_is_dead(helper, server):
    server.server_close()
    assert helper.health_of_instance(instance_entry(server), 5)[0] == "dead"


SETTINGS = {"deadline_s": 1, "server_patience_s": 45}
ENTRY = {"unit": "u", "address": "127.0.0.1", "port": 1, "model": "m"}


def look(helper, states, health, before=None, entry=ENTRY):
    """One look with systemd's answers and the instance's health given; returns the result and the acts."""
    acts = []
    answers = iter(states)
    helper.health_of_instance = helper.health_of_server = lambda *_: health
    result = helper.look_at(
        entry, SETTINGS, before or {}, time.time(), lambda unit: next(answers), lambda *words: acts.append(words)
    )
    return result, acts


def test_a_hung_instance_is_killed_and_restarted(helper):
    active = {"ActiveState": "active", "InvocationID": "1"}
    result, acts = look(helper, [active, active], ("hung", "no token"))
    assert acts == [("kill", "--kill-who=all", "--signal=SIGKILL", "u"), ("restart", "--no-block", "u")]
    assert result["restarts"] == 1


@pytest.mark.parametrize("again", [{"ActiveState": "deactivating"}, {"ActiveState": "active", "InvocationID": "2"}])
def test_what_somebody_else_stops_or_restarts_is_left_alone(helper, again):
    _, acts = look(helper, [{"ActiveState": "active", "InvocationID": "1"}, again], ("hung", "no token"))
    assert acts == []


@pytest.mark.parametrize("state", ["activating", "deactivating", "inactive", "failed"])
def test_only_active_units_are_asked(helper, state):
    result, acts = look(helper, [{"ActiveState": state, "Result": "start-limit-hit"}], ("hung", ""))
    assert result["state"] == state
    assert acts == []


@pytest.mark.parametrize(("since", "restarts"), [(10, 0), (46, 1)])
def test_a_slow_cache_server_gets_patience(helper, since, restarts):
    active = {"ActiveState": "active", "InvocationID": "1"}
    # the wall clock was set a day ahead meanwhile
    before = {"state": "hung", "since": time.time() - 86400}
    before["since_uptime"] = time.clock_gettime(time.CLOCK_BOOTTIME) - since
    result, acts = look(helper, [active, active], ("hung", "x"), before, {"unit": "s", "http_port": 1})
    assert result["restarts"] == restarts
    assert bool(acts) is bool(restarts)


MOUNT = "var-cache-kvfleet.mount"


@pytest.mark.parametrize(
    ("unit", "changed", "state"),
    [
        ("kvfleet-lmcache@0.service", {}, "inactive"),
        ("kvfleet-lmcache@0.service", {MOUNT: {"ActiveState": "inactive"}}, "blocked"),
        ("kvfleet-lmcache@0.service", {MOUNT: {"ActiveState": "failed"}}, "blocked"),
        (
            "kvfleet-lmcache@0.service",
            {"kvfleet-lmcache@0.service": {"AssertResult": "no", "AssertTimestampMonotonic": "7"}},
            "blocked",
        ),
        # as systemd 252 shows a unit that never started
        (
            "kvfleet-lmcache@0.service",
            {"kvfleet-lmcache@0.service": {"AssertResult": "no", "AssertTimestampMonotonic": "0"}},
            "inactive",
        ),
        # still waiting for the disk at boot
        (
            "kvfleet-lmcache@0.service",
            {MOUNT: {"ActiveState": "inactive"}, "kvfleet-lmcache@0.service": {"Job": "77"}},
            "inactive",
        ),
        ("kvfleet-vllm@a.service", {MOUNT: {"ActiveState": "inactive"}}, "blocked"),
        # somebody stopped the server: that is no alert
        ("kvfleet-vllm@a.service", {}, "inactive"),
    ],
)
def test_a_unit_that_waits_for_its_partition_for_ever_is_blocked(helper, unit, changed, state):
    units = {
        MOUNT: {"ActiveState": "active"},
        "kvfleet-lmcache@0.service": {"ActiveState": "inactive", "Job": "0", "Requires": f"system.slice {MOUNT}"},
        "kvfleet-vllm@a.service": {
            "ActiveState": "inactive", "Job": "0", "Requires": "sysinit.target kvfleet-lmcache@0.service",
        },
        "system.slice": {"ActiveState": "inactive"},
    }  # fmt: skip
    for name, values in changed.items():
        units[name].update(values)
    result = helper.look_at({"unit": unit, "http_port": 1}, SETTINGS, {}, 1.0, units.__getitem__, None)
    assert result["state"] == state
    assert (MOUNT in result["reason"] or "not mounted" in result["reason"]) is (state == "blocked")


@pytest.mark.parametrize(("number", "told"), [(None, False), (errno.EIO, True), (errno.EINVAL, False)])
def test_a_disk_that_cannot_be_read_is_told(helper, monkeypatch, tmp_path, number, told):
    tier = tmp_path / "tier"
    (tier / "a").mkdir(parents=True)
    assert helper.read_error(tier) == ""
    (tier / "a" / "x.data").write_bytes(b"x" * 8192)
    if number is not None:

        def fails(*_):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(helper.os, "preadv", fails)
    found = helper.read_error(tier)
    assert found == (f"{tier}/a/x.data: Input/output error" if told else "")


@pytest.mark.parametrize("unit", ["kvfleet-lmcache@0.service", "kvfleet-vllm@a.service"])
@pytest.mark.parametrize(
    ("mount", "before", "started"),
    [("active", "blocked", True), ("inactive", "blocked", False), ("active", "inactive", False)],
)
def test_what_was_blocked_is_started_when_its_partition_is_back(helper, unit, mount, before, started):
    """What somebody stopped stays down."""
    units = {
        MOUNT: {"ActiveState": mount},
        "kvfleet-lmcache@0.service": {"ActiveState": "inactive", "Job": "0", "Requires": MOUNT},
        "kvfleet-vllm@a.service": {"ActiveState": "inactive", "Job": "0", "Requires": "kvfleet-lmcache@0.service"},
    }
    acts = []
    helper.look_at(
        {"unit": unit}, SETTINGS, {"state": before}, 1.0, units.__getitem__, lambda *words: acts.append(words)
    )
    assert acts == ([("start", "--no-block", unit)] if started else [])


#: an API server: ends at SIGTERM, or waits for ever; an engine below it ends by itself
API_SERVER = """
import signal, subprocess, sys, time
engine = subprocess.Popen([sys.executable, "-c", "open('/proc/self/comm', 'w').write('VLLM::EngineCor');"
                           " import time; print('up', flush=True); time.sleep(float(ENGINE_S))"])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0) if POLITE else None)
# as systemd starts a service; a run of the tests under nohup ignores it
signal.signal(signal.SIGHUP, signal.SIG_DFL)
while True:
    time.sleep(0.1)
    engine.poll()
"""


@pytest.mark.parametrize(("polite", "engine_s", "status"), [(True, 9, 0), (False, 1.5, -signal.SIGHUP)])
def test_an_api_server_that_waits_for_an_engine_that_is_gone_is_ended(helper, monkeypatch, polite, engine_s, status):
    monkeypatch.setattr(helper, "PROC", Path("/proc"))
    text = API_SERVER.replace("ENGINE_S", str(engine_s)).replace("POLITE", str(polite))
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout.readline() == "up\n"
            monkeypatch.setenv("MAINPID", str(server.pid))
            assert helper.engine_runs(server.pid)
            began = time.monotonic()
            helper.stop_instance(patience_s=0.5)
            took = time.monotonic() - began
            assert server.wait(5) == status
        finally:
            server.kill()
    # never while the engine still drains
    assert polite or took >= 1


@pytest.mark.parametrize("state", ["blocked", "failed", "degraded", "refuses"])
def test_every_lasting_trouble_has_an_alert(helper, tmp_path, state):
    run_watch(helper, tmp_path, state)
    assert (tmp_path / "alerts/u.json").exists()


def run_watch(helper, tmp_path, state, reason="r"):
    settings = tmp_path / "watch.json"
    settings.write_text(json.dumps({**SETTINGS, "units": [ENTRY]}))
    helper.look_at = lambda entry, *_: {"unit": entry["unit"], "state": state, "reason": reason, "since": 1}
    helper.last_error = lambda unit: "ValueError: why"
    helper.watch(settings, tmp_path / "run", tmp_path / "alerts")
    return json.loads((tmp_path / "run/health.json").read_text())["units"][0]["state"]


def test_a_failed_unit_raises_an_alert_until_it_is_well(helper, tmp_path):
    assert run_watch(helper, tmp_path, "failed") == "failed"
    alert = tmp_path / "alerts/u.json"
    assert json.loads(alert.read_text())["cause"] == "ValueError: why"
    assert alert.stat().st_mode & 0o007 == 0
    run_watch(helper, tmp_path, "activating")
    assert alert.exists()
    run_watch(helper, tmp_path, "ok")
    assert not alert.exists()


def test_disk_tier_that_is_gone_is_said(helper, monkeypatch, tmp_path):
    monkeypatch.setattr(helper, "server_probe", lambda port: "")
    (tmp_path / "proc/self").mkdir()
    mountinfo = tmp_path / "proc/self/mountinfo"
    # as in a sandbox: the mount is read-only, its file system is not
    line = f"36 35 98:0 / {tmp_path} ro,noatime master:1 - ext4 /dev/loop0"
    mountinfo.write_text(f"{line} rw,errors=continue\n")
    user = pwd.getpwuid(os.getuid()).pw_name
    entry = {"unit": "s", "http_port": 1, "mount_point": str(tmp_path), "base_path": str(tmp_path / "t"), "user": user}
    assert "is not mounted" in helper.health_of_server(entry)[1]
    mounted(monkeypatch, tmp_path)
    assert "is gone" in helper.health_of_server(entry)[1]
    (tmp_path / "t").mkdir()
    assert helper.health_of_server(entry) == ("ok", "")
    for found in ("ro,errors=continue", "rw,emergency_ro"):
        mountinfo.write_text(f"{line} {found}\n")
        assert "is read-only" in helper.health_of_server(entry)[1]
    mountinfo.write_text(f"{line} rw\n")
    assert "is not nobody's" in helper.health_of_server({**entry, "user": "nobody"})[1]
