#!/bin/sh
# Inside the dry-run root: make it look like a GPU host whose image holds torch, then take the whole path. $1: profiles.
set -eu
install -m 755 /out/extra/nvidia-smi /usr/local/bin/nvidia-smi
mkdir -p /usr/local/cuda/bin
for name in /usr/local/cuda/bin/nvcc /usr/local/bin/gcc; do
  printf '#!/bin/sh\necho stub\n' > "$name"
  chmod 755 "$name"
done
/repo/scripts/gpu-proof unpack --parts /parts --memory-gib 1
if [ ! -x /opt/base/bin/python ]; then
  home=/var/lib/kvfleet-gpu-proof
  "$home/uv" venv --quiet --python /usr/bin/python3 /opt/base
  "$home/uv" pip install --quiet --offline --no-index --no-deps --python /opt/base/bin/python /out/extra/*.whl
fi
/repo/scripts/gpu-proof unpack --parts /parts --python /opt/base/bin/python
/repo/scripts/gpu-proof run --profiles "$1" --budget "${2:-900}" --disk-gib 3 --output /out/collected \
  --set kvfleet_buffer_gib_per_gpu=1 --set kvfleet_quota_gib=0.8 --set kvfleet_ram_reserve_gib=0.5
/repo/scripts/gpu-proof try --name other-chunk --lmcache '{"chunk_size": 128}' --environment KVFLEET_TRIED=1 --concurrency 4,8 \
  --budget 300 --output /out/collected
