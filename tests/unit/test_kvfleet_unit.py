"""The helper that units call: digests, tier preparation, readiness."""

import importlib.machinery
import importlib.util
import json
import os
import threading
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
