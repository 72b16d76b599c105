"""A disk that became slow: offload costs, so the proof deploys the better profile and proves that."""

import json

import proof_host
import pytest
import yaml
from proof_host import result_codes
from test_truth_faults import slow_reads

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A host that was proved as profile gpu, then deployed and proved with its tiers."""
    host = proof_host.ProofHost("fallback", tmp_path_factory.mktemp("fallback"))
    try:
        host.up()
        alone = host.folder / "gpu.yml"
        alone.write_text(yaml.safe_dump({"all": {"hosts": {host.name: {"kvfleet_profile": "gpu"}}}}))
        for inventory in (("-i", str(alone)), ()):
            status, text = host.play("site.yml", *inventory, limit_s=900, smoke_benchmark_report=False)
            assert status == 0, text
        yield host
    finally:
        host.down()


def test_tiers_are_compared_with_the_gpu_alone(measured):
    """What the same load did on the same host without tiers is known, so the proof says whether they pay."""
    gpu, disk = measured.records()
    assert (gpu["plan_profile"], disk["plan_profile"]) == ("gpu", "disk")
    assert gpu["payoff"]["state"] == "unknown"
    assert disk["payoff"]["state"] in ("pays", "costs")
    assert disk["payoff"]["ratio"] > 0


def test_offload_that_costs_is_left_for_the_better_profile(measured):
    """The truth check's own limit on speed is lowered, so that only the comparison can find the slow disk."""
    with slow_reads(measured, 1_000_000):
        status, text = measured.prove(
            smoke_benchmark_on_degrade="fallback", smoke_benchmark_min_warm_speedup_disk=0.001
        )
    assert status == 0, text
    slow, proof = measured.records()[-2:]
    assert (slow["plan_profile"], slow["verdict"]) == ("disk", "degrade")
    assert "KVF-BENCH-045" in result_codes(slow)
    assert slow["payoff"]["ratio"] < 1
    # degrade: a neighbour may slow it down against the first proof, it is proved all the same
    assert proof["plan_profile"] == "gpu"
    assert proof["verdict"] in ("pass", "degrade")
    # Ansible breaks long lines
    assert "Set kvfleet_profile: gpu, or the next run deploys disk again" in " ".join(text.split())


def test_the_host_runs_and_is_proved_as_what_it_fell_back_to(measured):
    assert json.loads(measured.ssh("cat /var/lib/kvfleet/proved.json"))["plan_profile"] == "gpu"
    assert measured.ssh("systemctl is-active kvfleet-vllm@tiny").strip() == "active"
    assert measured.ssh("systemctl is-active kvfleet-lmcache@0", check=False).strip() == "inactive"
    measured.assert_unharmed()
