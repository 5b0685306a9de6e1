#!/usr/bin/env bash
# The GPU campaign from the bundles of `make gpu-carry`, on a machine without a network:
#
#   cat bundle-* | tar -xz -C FOLDER && OUT=RESULTS bash FOLDER/bench/gpu/carried.sh [OPTION...]
#
# It takes the options of `python -m bench.gpu.campaign`. $OUT gets the results as they arrive, and at the end the logs.
# PYTHON: the interpreter, which has torch and Triton.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
: "${OUT:?a folder for the results}"
python=${PYTHON:-python3}
if [[ ! -d site ]]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target site wheels/*.whl
fi
mkdir -p "$OUT" results
touch "$OUT/results.jsonl"
ln -sf "$(realpath "$OUT")/results.jsonl" results/results.jsonl
export PYTHONPATH="$PWD/site:runtime:kernels:operator:.:tests/support${PYTHONPATH:+:$PYTHONPATH}"
TRITON_CACHE_DIR=$PWD/triton XDG_CACHE_HOME=$PWD/cache HF_HUB_OFFLINE=1 \
  "$python" -m bench.gpu.campaign --out results --model model.gguf "$@"
tar -czf "$OUT/logs.tar.gz" results
