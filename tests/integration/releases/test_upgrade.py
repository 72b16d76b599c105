"""An upgrade and a rollback between two real releases, under load, the rollback after a reboot."""

from fleet import NEW, OLD, TESTHOST, run, ssh


def test_an_upgrade_loses_no_request_outside_its_drain_window(fleet):
    before, since = fleet.state(), fleet.now()
    status, text = fleet.kvfleet("upgrade", "--release", NEW)
    assert (status, "proved" in text) == (0, True)
    after = fleet.state()
    assert (after["current"], after["proved"]) == (NEW, NEW)
    assert {OLD, NEW} <= set(after["releases"])
    seen = fleet.traffic(since)
    assert seen.failed_outside == []
    assert len(seen.windows) == 1
    begin, end = seen.windows[0]
    print(f"drain window {end - begin:.0f} s, {len(seen.requests) - len(seen.good)} requests refused in it")
    # requests before, during the proof, and after
    assert min(one["start"] for one in seen.good) < begin
    assert len([one for one in seen.good if one["start"] > end]) > 5
    # what both releases hold is on the disk once
    inodes = ssh(f"stat -c %i /opt/kvfleet/releases/{{{OLD},{NEW}}}/lib/python3.11/site-packages/torch/__init__.py")
    assert len(set(inodes.split())) == 1
    # KV of the old release is useless to the new one, and was there for a return until the proof
    (old_tier,) = before["tiers"]
    (new_tier,) = after["tiers"]
    assert old_tier != new_tier
    gone = [one for one in seen.looks if old_tier not in one["tiers"]]
    assert all(one["proved"] == NEW for one in gone)
    assert gone


def test_the_same_deploy_again_changes_nothing(fleet):
    said = fleet.site(NEW)
    assert "changed=0" in said, said
    assert "failed=0" in said


def test_rollback_is_one_command_also_after_a_reboot(fleet):
    (tier,) = fleet.state()["tiers"]
    run(TESTHOST, "reboot", "releases")
    fleet.cut_network()
    # the services come back by themselves, on the new release
    ssh("systemctl start kvfleet-vllm@tiny.service")  # joins the start that the boot began
    assert fleet.state()["current"] == NEW
    since = fleet.now()
    status, _ = fleet.kvfleet("rollback")
    assert status == 0
    state = fleet.state()
    assert (state["current"], state["proved"]) == (OLD, OLD)
    assert {OLD, NEW} <= set(state["releases"])
    assert state["tiers"] != [tier]
    seen = fleet.traffic(since)
    assert seen.failed_outside == []
    assert len(seen.windows) == 1
    begin, end = seen.windows[0]
    print(f"drain window {end - begin:.0f} s, {len(seen.requests) - len(seen.good)} requests refused in it")
    assert len([one for one in seen.good if one["start"] > end]) > 1
