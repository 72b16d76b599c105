"""Runs on the host: damages each cache file of a proof as soon as it is complete, until it is ended."""

import os
import re
import sys
import time
from pathlib import Path

action, base = sys.argv[1], sys.argv[2]
done = set()
while True:
    for directory, _, names in os.walk(base):
        for name in names:
            # the long prompt's own files, not those of the prompts that displace it
            if name in done or not re.search(r"@kvfleet-proof-[0-9a-f]{16}\.data$", name):
                continue
            path = Path(directory) / name
            size = path.stat().st_size
            if action == "truncate":
                os.truncate(path, size // 2)
            else:
                with path.open("r+b") as file:
                    for offset in range(0, size, 997):
                        file.seek(offset)
                        byte = file.read(1)
                        file.seek(offset)
                        file.write(bytes([byte[0] ^ 0x5A]))
            done.add(name)
    time.sleep(0.2)
