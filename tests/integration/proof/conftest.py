"""One deployed host for all faults of a test run."""

import os
from pathlib import Path

import proof_host
import pytest


@pytest.fixture(scope="session")
def deployed(tmp_path_factory, request):
    """A host that was deployed and proved; removed at the end unless KVFLEET_PROOF_KEEP names a folder to reuse."""
    kept = os.environ.get("KVFLEET_PROOF_KEEP")
    host = proof_host.ProofHost("proof", Path(kept) if kept else tmp_path_factory.mktemp("proof"))
    try:
        host.up()
        status, text = host.play("site.yml", limit_s=900, smoke_benchmark_report=False)
        assert status == 0, text
        yield host
    finally:
        if not kept:
            host.down()


@pytest.fixture
def host(deployed):
    """The deployed host, whole again after the test whatever it did."""
    deployed.wait_until_serving()
    yield deployed
    deployed.wait_until_serving()
    deployed.assert_unharmed()
