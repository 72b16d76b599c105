"""Recorded host descriptions: whatever is in the file, the answer is a plan or one sentence that names the field."""

import copy
import json

import pytest
from planner_hosts import LLAMA_8B, host

from kvfleet.core.findings import KvfleetError
from kvfleet.core.hostcheck import check_recorded
from kvfleet.core.plan_text import summary_lines
from kvfleet.core.planning import make_plan
from kvfleet.matrix import load_matrix

LINK = "/dev/disk/by-id/nvme-x"
DISK = {"by_id": LINK, "by_ids": [LINK], "serial": "x", "size_bytes": 1920383410176, "name": "nvme1n1"}
MORE = {
    "disks": [DISK],
    "machine": "x86_64",
    "listeners": [{"port": 9999, "pid": 1, "process": "x", "unit": None}],
    "kvfleet": {"units": [], "memory_bytes": 0},
    "unavailable": [{"field": "glibc", "reason": "x"}],
}
BAD = [None, "x", "8", -1, 0, 10**30, 1.5, [], {}, True, [None], [1], {"a": 1}, float("inf")]


def places(value, path=()):
    """The path of every value in a nested document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed(document, path, value):
    result = copy.deepcopy(document)
    inner = result
    for key in path[:-1]:
        inner = inner[key]
    if value is KeyError:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return result


@pytest.mark.parametrize("gpus", [1, 0])
def test_no_description_ends_in_a_traceback(gpus):
    where = host(gpus, ram_gib=64, **MORE)
    matrix = load_matrix()
    values = {"kvfleet_model": "/m", "cache_disk_device": LINK, "cache_disk_serial": "x"}
    refused = 0
    for path in places(where):
        for value in (KeyError, *BAD):
            try:
                recorded = check_recorded(changed(where, path, value))
            except KvfleetError as error:
                named = error.findings[0].code == "KVF-HOST-003" and str(path[0]) in str(error)
                refused += named
                if not named:
                    raise
                continue
            made = make_plan(
                values, matrix, recorded, read_text=lambda _: None, list_sizes=lambda _: None, model_config=LLAMA_8B
            )
            json.dumps(made, allow_nan=False)
            assert summary_lines(made)
    assert refused > 100


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("gpus",), "none", "gpus is 'none', not a list"),
        (("gpus", 0), "GPU-1", "gpus[0] is 'GPU-1', not an object"),
        (("gpus", 1, "memory_mib"), "81920", "gpus[1].memory_mib is '81920', not a whole number"),
        (("gpus", 0, "memory_mib"), 81920 * 1024**2, "gpus[0].memory_mib is 85899345920, above 4194304"),
        (("gpus", 0, "compute_capability"), 8.0, "gpus[0].compute_capability is 8.0, not a version in quotes"),
        (("gpus", 1, "index"), 0, "gpus has the index 0 more than once"),
        (("gpus", 0, "uuid"), KeyError, "gpus[0].uuid is missing"),
        (("memory", "available_bytes"), None, "memory.available_bytes is missing"),
        (("memory", "total_bytes"), 512, "memory.total_bytes is 512, below 268435456"),
        (("gpus", 0, "memory_reserved_mib"), 90000, "gpus[0].memory_reserved_mib is not below memory_mib"),
        (("memory",), 512, "memory is 512, not an object"),
        (("numa", 1, "node"), 0, "numa has the node 0 more than once"),
        (("python",), 3.11, "python is 3.11, not a version in quotes"),
        (("disks", 0, "serial"), 5, "disks[0].serial is 5, not text"),
    ],
)
def test_message_names_the_field_and_what_is_wrong(path, value, words):
    with pytest.raises(KvfleetError) as refused:
        check_recorded(changed(host(2, nodes=2, **MORE), path, value))
    assert words in str(refused.value)


def test_all_problems_are_said_at_once_but_not_endlessly():
    where = host(8)
    for card in where["gpus"]:
        card["memory_mib"] = "?"
    with pytest.raises(KvfleetError) as refused:
        check_recorded(where)
    assert "gpus[4].memory_mib" in str(refused.value)
    assert "and 3 more" in str(refused.value)


@pytest.mark.parametrize("data", [None, [], "x", 5])
def test_a_description_that_is_no_object(data):
    with pytest.raises(KvfleetError, match="not an object"):
        check_recorded(data)
