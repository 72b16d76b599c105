"""Deploy the demo host, or an inventory, and print the verdicts: .venv/bin/python examples/deploy.py [INVENTORY]"""

import sys

from kvfleet import fleet
from kvfleet.checkout import ROOT

inventory = sys.argv[1] if len(sys.argv) > 1 else ROOT / "inventories" / "local"
done = fleet.deploy(inventory, on_event=lambda event: print(event.kind, event.host, event.task))
for name, host in done.hosts.items():
    print(name, host.verdict, host.release, host.figure, *host.reasons, sep="\n  ")
sys.exit(done.exit)
