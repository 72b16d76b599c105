"""The whole path of scripts/gpu-proof with a stub release: parts, check, unpack, three profiles, results, page."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
DRY_RUN = ROOT / "scripts" / "gpu-proof.d" / "dry-run"


def sh(*argv: str | Path, timeout_s: float = 900) -> str:
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"{argv}: {done.stdout[-4000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which the proof has run on a host without systemd, udev, network and GPU."""
    sh(ROOT / "scripts" / "testhost", "image", timeout_s=600)
    # overlay's upper layer needs a real file system
    folder = Path("/var/tmp") / f"kvfleet-gpu-proof-{tmp_path_factory.getbasetemp().name}"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "debs").mkdir(parents=True)
    try:
        sh("env", "-C", folder / "debs", "apt-get", "download", "-qq", "gdisk", "libpopt0")
        sh(sys.executable, HERE / "make_pack.py", folder / "pack", folder / "debs")
        (folder / "dry" / "out").mkdir(parents=True)
        shutil.copytree(folder / "pack" / "extra", folder / "dry" / "out" / "extra")
        inside = Path("/repo") / HERE.relative_to(ROOT) / "inside.sh"
        text = sh(DRY_RUN, folder / "dry", folder / "pack" / "parts", inside, "gpu,cpu,disk")
        (folder / "log").write_text(text)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.root
def test_every_profile_was_deployed_proved_and_measured(proof: Path) -> None:
    collected = proof / "dry" / "out" / "collected"
    summary = json.loads((collected / "summary.json").read_text())
    assert {name: outcome["ran"] for name, outcome in summary["profiles"].items()} == {
        "gpu": True, "cpu": True, "disk": True, "article": False,
        "gpu-whole": False, "cpu-whole": False, "gpu-tp2": False, "cpu-tp2": False,
    }  # fmt: skip
    for profile in ("gpu", "cpu", "disk"):
        record = json.loads((collected / f"results-{profile}.json").read_text())
        assert record["verdict"] in ("pass", "degrade"), record["reasons"]
        runs = record["load"]["instances"][0]["runs"]
        assert [run["run"]["concurrency"] for run in runs] == [32, 8, 32]
        assert all(run["figures"]["completed"] == 200 for run in runs)
        assert record["outcome"]["engine"]["kv_tokens"] == record["plan"]["instances"][0]["gpu_kv_tokens"] == 32768
        # the tiers served what the engine's pool could not hold
        served = sum(run["tokens"]["external"] for run in runs)
        assert (served > 0) == (profile != "gpu")


@pytest.mark.root
def test_the_units_ran_as_rendered_and_the_results_say_what_was_not_enforced(proof: Path) -> None:
    collected = proof / "dry" / "out" / "collected"
    summary = json.loads((collected / "summary.json").read_text())
    assert summary["services"]["kind"] == "docker-systemctl-replacement"
    assert any("Restart=" in line for line in summary["services"]["not_enforced"])
    runs = proof / "dry" / "upper" / "var" / "lib" / "kvfleet-gpu-proof" / "runs" / "disk" / "host"
    journal = (runs / "kvfleet-vllm@default.service.journal").read_text()
    assert "sampler 0" in journal
    assert "'local_disk': 'file:///var/cache/kvfleet/data/default/'" in journal
    assert "ERROR:systemctl" not in journal
    assert "AssertPathIsMountPoint=/var/cache/kvfleet" in (runs / "kvfleet-vllm@default.service").read_text()


@pytest.mark.root
def test_a_trial_changes_the_unit_for_one_start_and_puts_it_back(proof: Path) -> None:
    record = json.loads((proof / "dry" / "out" / "collected" / "results-try-other-chunk.json").read_text())
    assert record["base"] == "disk"
    assert record["ready"]
    runs = record["load"]["instances"][0]["runs"]
    assert [(run["run"]["concurrency"], run["figures"]["completed"]) for run in runs] == [
        (32, 200), (8, 200), (32, 25), (4, 25),
    ]  # fmt: skip
    home = proof / "dry" / "upper" / "var" / "lib" / "kvfleet-gpu-proof"
    tried = home / "runs" / "try-other-chunk" / "host"
    assert "'chunk_size': 128" in (tried / "kvfleet-vllm@default.service.journal").read_text()
    assert "KVFLEET_TRIED=1" in (tried / "kvfleet-vllm@default.service").read_text()
    now = proof / "dry" / "upper" / "etc"
    assert "KVFLEET_TRIED" not in (now / "systemd" / "system" / "kvfleet-vllm@default.service").read_text()
    assert json.loads((now / "kvfleet" / "kvfleet-vllm@default.lmcache.yaml").read_text())["chunk_size"] == 256


@pytest.mark.root
def test_the_page_is_made_of_the_collected_files(proof: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Benchmarks\n")
    sh(
        *(ROOT / "scripts" / "gpu-proof", "report", "--collected", proof / "dry" / "out" / "collected"),
        *("--results", tmp_path / "results", "--document", page),
    )
    text = page.read_text()
    assert "| disk | warm | 32 |" in text
    assert "| article | | | | not run: not asked for |" in text
    assert "| other-chunk | disk | `KVFLEET_TRIED=1 chunk_size: 128` | warm | 8 |" in text
    assert len(list((tmp_path / "results").glob("*.json"))) == 5
