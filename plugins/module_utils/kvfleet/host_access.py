"""What the proof reads on the host besides HTTP: the model's configuration, a tier's files, the page cache."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .findings import refuse

#: names that model configurations use, by the name of the tolerance
_DTYPES = {
    "float32": "float32", "float": "float32", "bfloat16": "bfloat16", "float16": "float16", "half": "float16",
}  # fmt: skip


def base_url(instance: Mapping[str, Any]) -> str:
    """Where the instance answers on this host; a wildcard address is reached over loopback."""
    host = str(instance.get("host") or "127.0.0.1")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://{f'[{host}]' if ':' in host else host}:{instance['port']}"


def server_of(plan: Mapping[str, Any], instance: Mapping[str, Any]) -> dict[str, Any] | None:
    """The LMCache server of an instance; ``None`` for profile ``gpu`` and for in-process releases."""
    return next((dict(server) for server in plan["servers"] if server["name"] == instance.get("server")), None)


def tier_paths(server: Mapping[str, Any] | None, instance: Mapping[str, Any]) -> list[str]:
    """Directories of the instance's disk tier: its server's, or its own where LMCache runs inside vLLM; else none."""
    own = str((instance.get("lmcache_config") or {}).get("local_disk") or "").partition("://")[2]
    found = [str((server or {}).get("base_path") or ""), own]
    return [path for path in found if path]


def server_url(server: Mapping[str, Any]) -> str:
    """The LMCache server's HTTP address; it knows no authentication and listens on loopback only."""
    return f"http://127.0.0.1:{server['http_port']}"


def model_config(instance: Mapping[str, Any]) -> dict[str, Any]:
    """The model's ``config.json``. Raises KVF-BENCH-017 when it cannot be read."""
    path = Path(str(instance["model"])) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise refuse(
            "KVF-BENCH-017",
            f"{path} cannot be read: {error}.",
            f"Check the model of instance {instance['name']} in kvfleet_instances.",
        ) from error
    return config if isinstance(config, dict) else {}


def vocabulary_size(instance: Mapping[str, Any]) -> int:
    """Token ids that the model knows; multimodal models keep it in ``text_config``."""
    config = model_config(instance)
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    if not isinstance(size, int) or size < 16:
        raise refuse(
            "KVF-BENCH-017",
            f"The configuration of model {instance['model']} names no vocab_size.",
            "Complete the model's config.json.",
        )
    return size


def engine_dtype(instance: Mapping[str, Any]) -> str:
    """Precision of the KV cache: the instance's dtype, else the model's; a quantised KV cache counts as bfloat16."""
    if str(instance.get("kv_cache_dtype") or "auto") not in ("auto", "float32", "float16", "bfloat16"):
        return "bfloat16"
    dtype = str(instance.get("dtype") or "auto")
    if dtype == "auto":
        config = model_config(instance)
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        # vLLM's auto runs float32 checkpoints in half precision on GPUs
        if dtype == "float32" and instance.get("gpus"):
            dtype = "float16"
    return _DTYPES.get(dtype, "bfloat16")


def require_tokenizer(instance: Mapping[str, Any]) -> str:
    """The directory of the instance's tokenizer. Raises KVF-BENCH-018 when no tokenizer file lies there."""
    directory = Path(str(instance.get("tokenizer") or instance["model"]))
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "tokenizer_config.json")
    if not any((directory / name).is_file() for name in names):
        raise refuse(
            "KVF-BENCH-018",
            f"{directory} holds no tokenizer, so the load could not make its prompts; the service itself may be well.",
            "Put the model's tokenizer files beside its config.json.",
        )
    return str(directory)


def files_of_salt(base_path: str, salt: str) -> Iterator[Path]:
    """Cache files of one ``cache_salt``: LMCache 0.5.x ends their names with ``@<salt>.data``."""
    for directory, _, names in os.walk(base_path):
        for name in names:
            if name.endswith(f"@{salt}.data"):
                yield Path(directory) / name


def tier_files(base_path: str, salt: str) -> tuple[int, int]:
    """Bytes on the device and number of the files of ``salt`` below ``base_path``."""
    size = count = 0
    for path in files_of_salt(base_path, salt):
        try:
            size += path.stat().st_blocks * 512
        except FileNotFoundError:
            # evicted while we looked
            continue
        count += 1
    return size, count


def drop_page_cache(base_path: str, salt: str) -> None:
    """Write out the files of ``salt`` and forget their pages, so that a buffered read comes from the device."""
    for path in files_of_salt(base_path, salt):
        try:
            handle = os.open(str(path), os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
