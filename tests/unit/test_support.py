"""The support bundle: complete enough to be useful, and without the secrets that a host holds."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

from kvfleet.core.command import CommandResult
from kvfleet.core.support import LIMIT_BYTES, collect, pack

CANARY = "canary-Zx81-never-to-be-seen"


def test_a_bundle_holds_no_secret(tmp_path: Path) -> None:
    units = tmp_path / "units"
    units.mkdir()
    for name in ("etc", "state"):
        (tmp_path / name).mkdir()
    (units / "kvfleet-vllm@a.service").write_text(f'[Service]\nEnvironment="VLLM_API_KEY={CANARY}"\n')
    (tmp_path / "etc" / "kvfleet-vllm@a.lmcache.yaml").write_text(f"api_key: {CANARY}\nchunk_size: 256\n")
    plan: dict[str, Any] = {
        "servers": [],
        "instances": [{"name": "a", "environment": {"VLLM_API_KEY": CANARY}, "max_num_seqs": 4}],
        "paths": {"etc": str(tmp_path / "etc"), "state": str(tmp_path / "state")},
    }

    def run(argv: Any, **_: Any) -> CommandResult:
        if argv[0] == "journalctl" and "-u" in argv:
            return CommandResult(0, f"ERROR it broke with key {CANARY}\n" + "x" * (LIMIT_BYTES + 5), "")
        if argv[0] == "nvidia-smi":
            return CommandResult(127, "", "not found")
        return CommandResult(0, "fine\n", "")

    texts = collect(plan, "it failed", run, units)
    archive = pack(texts, "support-h")
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        names = opened.getnames()
        everything = b"".join(opened.extractfile(name).read() for name in names).decode()  # type: ignore[union-attr]
    assert CANARY not in everything
    assert "it failed" in everything
    assert "chunk_size: 256" in everything
    assert '"max_num_seqs": 4' in everything
    assert "support-h/journal/kvfleet-vllm@a.service.txt" in names
    assert len(texts["journal/kvfleet-vllm@a.service.txt"]) <= LIMIT_BYTES
    assert "not found" in texts["nvidia-smi.txt"]
