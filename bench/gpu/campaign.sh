#!/usr/bin/env bash
# The GPU campaign on a machine without a network that gets its files in bundles: README.md.
#
#   bash bench/gpu/campaign.sh prepare WHEELS GGUF   here: writes build/gpu (wheels, the model in two parts)
#   bash bench/gpu/campaign.sh 1 [OPTION...]         there, with build/gpu/whl and build/gpu/model.a
#   bash bench/gpu/campaign.sh 2 [OPTION...]         there, with build/gpu/model.b
#
# Options are those of `python -m bench.gpu.campaign`. $OUT gets the results and, at the end, the logs.
# BUNDLE_MIB, PART_MIB: limit of a bundle, and the size of the model's first part. BUNDLES, STATE: folders of the bundles
# and of the campaign. PYTHON: the interpreter.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
python=${PYTHON:-python3}
bundles=${BUNDLES:-build/gpu}
state=${STATE:-/tmp/gpu-campaign}
model=$state/model.gguf

size_of() { # bytes of the files and folders
  du -cb "$@" | tail -n 1 | cut -f 1
}

prepare() {
  local wheels=$1 gguf=$2 limit=$((${BUNDLE_MIB:-64} << 20)) part=$((${PART_MIB:-36} << 20))
  mkdir -p "$bundles/whl"
  cp "$wheels"/*.whl "$bundles/whl/"
  "$python" - "$gguf" "$bundles" "$part" <<'PYTHON'
import lzma, pathlib, sys
source, bundles, part = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
data = lzma.compress(source.read_bytes(), preset=9 | lzma.PRESET_EXTREME)  # minutes, for 8 % less
(bundles / "model.a").write_bytes(data[:part])
(bundles / "model.b").write_bytes(data[part:])
PYTHON
  local tree first second
  # du reports a deleted file that git still lists as an error.
  tree=$(git ls-files -z --cached --others --exclude-standard | { du -cb --files0-from=- 2>/dev/null || true; } | tail -n 1 | cut -f 1)
  first=$((tree + $(size_of "$bundles/whl" "$bundles/model.a")))
  second=$((tree + $(size_of "$bundles/model.b")))
  echo "bundle 1: $((first >> 20)) MiB, bundle 2: $((second >> 20)) MiB, limit $((limit >> 20)) MiB"
  if ((first > limit || second > limit)); then
    echo "a bundle is too large: change PART_MIB=$((part >> 20)), or remove wheels" >&2
    return 1
  fi
}

run() { # name, options of the campaign
  local folder=$state/$1
  shift
  : "${OUT:?a folder for the results}"
  mkdir -p "$folder" "$OUT"
  ln -sf "$OUT/results.jsonl" "$folder/results.jsonl"
  touch "$OUT/results.jsonl"
  export PYTHONPATH="$state/site:runtime:kernels:operator:.:tests/support${PYTHONPATH:+:$PYTHONPATH}"
  TRITON_CACHE_DIR=$state/triton XDG_CACHE_HOME=$state/cache HF_HUB_OFFLINE=1 \
    "$python" -m bench.gpu.campaign --out "$folder" "$@"
  tar -czf "$OUT/logs-$(basename "$folder").tar.gz" -C "$state" --exclude='*.gguf' "$(basename "$folder")"
}

case ${1:-} in
prepare)
  prepare "${2:?folder of wheels}" "${3:?GGUF file}"
  ;;
1)
  shift
  mkdir -p "$state"
  cp "$bundles/model.a" "$state/"
  if [[ ! -d $state/site ]]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$state/site" "$bundles"/whl/*.whl
  fi
  run phase-1 --seconds 345 --steps facts,engine,race,profile,products,sampling,memory,tests "$@"
  ;;
2)
  shift
  if [[ ! -d $state/site || ! -f $state/model.a ]]; then
    echo "the machine is a new one: run call 1 first" >&2
    exit 3
  fi
  "$python" - "$state/model.a" "$bundles/model.b" "$model" <<'PYTHON'
import lzma, pathlib, sys
first, second, model = map(pathlib.Path, sys.argv[1:])
model.write_bytes(lzma.decompress(first.read_bytes() + second.read_bytes()))
PYTHON
  run phase-2 --seconds 255 --steps server,bench_serve,moe --model "$model" "$@"
  ;;
*)
  sed -n '2,12p' "${BASH_SOURCE[0]}" >&2
  exit 2
  ;;
esac
