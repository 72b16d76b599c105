"""GPUs: reading ``nvidia-smi``, choosing by index or UUID, peak speeds of known cards."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .findings import refuse

#: What :func:`parse_query` expects; ``compute_cap`` and ``memory.reserved`` exist since driver 510.
QUERY_FIELDS = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "memory.used",
    "pci.bus_id",
    "pcie.link.gen.max",
    "pcie.link.width.max",
    "driver_version",
    "mig.mode.current",
    "compute_cap",
    "memory.reserved",
)
#: The same for drivers that do not know the newest fields.
BASIC_FIELDS = QUERY_FIELDS[:-3]

#: Dense 16-bit tensor peak in TFLOP/s (NVIDIA's data sheets, without sparsity) by words in the card's name.
_DENSE_TFLOPS = (
    (r"\bG?B300\b", 2500.0),
    (r"\bG?B200\b", 2250.0),
    (r"\bH200\b|\bH100\b.*(SXM|HBM3)|\bGH200\b|\bH800\b(?!.*PCIe)", 989.0),
    (r"\bH100\b.*NVL", 835.0),
    (r"\bH100\b|\bH800\b", 756.0),
    (r"\bH20\b", 148.0),
    (r"\bA100\b|\bA800\b", 312.0),
    (r"\bL40S\b", 362.0),
    (r"\bL40\b", 181.0),
    (r"\bL4\b", 121.0),
    (r"\bA40\b", 149.7),
    (r"\bA30\b", 165.0),
    (r"\bA10G?\b", 125.0),
    (r"RTX PRO 6000", 503.0),
    (r"RTX 6000 Ada", 364.0),
    (r"RTX 5090", 209.5),
    (r"RTX 4090", 165.2),
    (r"RTX 4080", 97.5),
    (r"RTX 3090", 71.0),
    (r"RTX A6000", 154.8),
    (r"\bV100\b", 125.0),
    (r"\bT4\b", 65.0),
)
#: How the driver speaks of a GPU that does not answer any more.
_LOST = ("GPU is lost", "fallen off the bus", "Unable to determine the device handle")


def parse_query(text: str, fields: Sequence[str] = QUERY_FIELDS) -> list[dict[str, Any]]:
    """Read ``nvidia-smi --query-gpu=<fields> --format=csv,noheader,nounits`` into one mapping a GPU.

    Values that the driver answers with ``[N/A]`` or an error become ``None``; lines that are no GPU (warnings) are
    left out.
    """
    gpus = []
    for row in csv.reader(io.StringIO(text)):
        cells = [cell.strip() for cell in row]
        if len(cells) != len(fields) or not cells[0].isdigit():
            continue
        values = dict(zip(fields, cells))
        gpus.append(
            {
                "index": int(values["index"]),
                "uuid": values["uuid"],
                "name": values["name"],
                "memory_mib": _number(values["memory.total"]),
                "memory_used_mib": _number(values["memory.used"]),
                "memory_reserved_mib": _number(values.get("memory.reserved") or ""),
                "pci_bus_id": sysfs_address(values["pci.bus_id"]),
                "numa_node": None,
                "compute_capability": _text(values.get("compute_cap")),
                "pcie_gen": _number(values["pcie.link.gen.max"]),
                "pcie_width": _number(values["pcie.link.width.max"]),
                "driver_version": _text(values["driver_version"]),
                "mig": _text(values.get("mig.mode.current")) == "Enabled",
            }
        )
    return gpus


def parse_list(text: str) -> dict[str, list[dict[str, str]]]:
    """Read ``nvidia-smi -L``: for every GPU's UUID the MIG devices on it, as ``{"uuid", "name"}``."""
    found: dict[str, list[dict[str, str]]] = {}
    current: str | None = None
    for line in text.splitlines():
        gpu = re.match(r"GPU \d+: .*\(UUID: (GPU-[0-9a-fA-F-]+)\)", line)
        if gpu:
            current = gpu.group(1)
            found[current] = []
            continue
        mig = re.match(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)", line)
        if mig and current is not None:
            found[current].append({"uuid": mig.group(2), "name": mig.group(1)})
    return found


def sysfs_address(bus_id: str) -> str:
    """``nvidia-smi``'s bus id as sysfs writes it: ``00000000:3B:00.0`` becomes ``0000:3b:00.0``."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:].zfill(4)}:{rest}" if rest else bus_id.lower()


def explain_failure(returncode: int, output: str) -> str:
    """One sentence on why ``nvidia-smi`` gave no GPUs, from its exit status and its output."""
    text = " ".join(output.split())
    if returncode == 127:
        return "nvidia-smi is not installed"
    if "Driver/library version mismatch" in text:
        return (
            "the loaded kernel module and the driver libraries have different versions "
            "(nvidia-smi: Driver/library version mismatch); reboot the host"
        )
    if "couldn't communicate with the NVIDIA driver" in text or "NVIDIA driver is not loaded" in text:
        return "nvidia-smi cannot reach the driver (is the kernel module loaded?)"
    if "No devices were found" in text:
        return "nvidia-smi found no devices"
    if any(word in text for word in _LOST):
        line = next(line for line in output.splitlines() if any(word in line for word in _LOST))
        return f"a GPU has fallen off the bus ({line.strip()})"
    if returncode == 124:
        return "nvidia-smi did not answer in time (a GPU or the driver hangs)"
    return f"nvidia-smi failed with status {returncode}: {_first_line(output) or 'no output'}"


def select_gpus(host_gpus: Sequence[Mapping[str, Any]], wanted: Any, instance: str) -> list[dict[str, Any]]:
    """The GPUs that ``wanted`` names: ``"all"``, or a list of indices and UUIDs (whole, or an unambiguous beginning).

    Raises ``KvfleetError``: KVF-GPU-001 (no such GPU), -002 (named twice), -003 (MIG device or GPU in MIG mode).
    """
    known = sorted(host_gpus, key=lambda gpu: int(gpu["index"]))
    present = ", ".join(f"{gpu['index']} ({gpu['uuid']})" for gpu in known) or "none"
    if wanted == "all" or wanted is None:
        chosen = list(known)
    else:
        items = wanted if isinstance(wanted, (list, tuple)) else [part.strip() for part in str(wanted).split(",")]
        chosen = []
        for item in items:
            text = str(item)
            if text.upper().startswith("MIG-"):
                raise refuse(
                    "KVF-GPU-003",
                    f"Instance {instance}: {text} is a MIG device; kvfleet sizes whole GPUs only.",
                    "Switch MIG off on that GPU (nvidia-smi -mig 0) and name the GPU in gpus.",
                )
            if text.isdigit():
                matches = [gpu for gpu in known if int(gpu["index"]) == int(text)]
            else:
                matches = [gpu for gpu in known if str(gpu["uuid"]).lower().startswith(text.lower())]
            if len(matches) != 1:
                how = "is not on this host" if not matches else "fits several GPUs"
                raise refuse(
                    "KVF-GPU-001",
                    f"Instance {instance}: GPU {text} {how}; it has {len(known)}: {present}.",
                    "Set gpus of that instance to indices or UUIDs of GPUs that nvidia-smi lists.",
                )
            chosen.append(matches[0])
    seen: set[str] = set()
    for gpu in chosen:
        if gpu["uuid"] in seen:
            raise refuse(
                "KVF-GPU-002",
                f"Instance {instance} names GPU {gpu['index']} twice.",
                "Name every GPU once in gpus.",
            )
        seen.add(str(gpu["uuid"]))
        if gpu.get("mig"):
            raise refuse(
                "KVF-GPU-003",
                f"Instance {instance}: GPU {gpu['index']} ({gpu['uuid']}) is in MIG mode; kvfleet sizes whole GPUs "
                "only.",
                "Switch MIG off on that GPU (nvidia-smi -mig 0), or leave it out of gpus.",
            )
    return [dict(gpu) for gpu in chosen]


def dense_tflops(name: str) -> float | None:
    """Dense 16-bit tensor peak of a card in TFLOP/s, ``None`` for cards that are not in the table."""
    for pattern, value in _DENSE_TFLOPS:
        if re.search(pattern, name, re.IGNORECASE):
            return value
    return None


def _number(text: str) -> int | None:
    match = re.match(r"^(\d+)", text)
    return int(match.group(1)) if match else None


def _text(text: str | None) -> str | None:
    return None if text is None or text.startswith("[") or not text else text


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
