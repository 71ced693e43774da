#!/usr/bin/env bash
# Checks a machine with one GPU in at most 210 s, before examples/gpu_record.sh records on it:
#     examples/gpu_check.sh DIR
# It writes below DIR: check.log, with a first look at the speed, what nvidia-smi says, and smoke.tgz
# with every measurement once at its smallest. The first step that fails ends it.
# In a tree without .git, export DDLKIT_COMMIT. PYTHON is the interpreter [python3].
set -euo pipefail
limit_s=210
grace_s=5
. "$(dirname -- "$0")/gpu_begin.sh"

step() { # SECONDS NAME WORD...: run python with these words; it dies with this script
  local planned_s=$1 name=$2 begun=$SECONDS status=0
  shift 2
  echo "gpu_check: $name, about $planned_s s"
  "$python" -c 'import os, sys; from ddlkit.jobs import die_with_parent
die_with_parent(); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])' "$@" || status=$?
  echo "gpu_check: $name ended with exit status $status after $((SECONDS - begun)) s"
  if ((status)); then
    echo "gpu_check: FAILED at $name: nothing further is checked"
    exit "$status"
  fi
}

look() { # FILE WORD...: keep what nvidia-smi says to these words
  nvidia-smi "${@:2}" > "$dir/$1" && return
  echo "gpu_check: FAILED at nvidia-smi ${*:2}: nothing further is checked"
  exit 1
}

look nvidia-smi.txt -q
look topology.txt topo -m
env | grep -E '^(CUDA|NCCL|TORCH|PYTORCH|NVIDIA|OMP)' || true
step 5 packages -m pip list --format freeze --disable-pip-version-check
step 40 yardstick examples/yardstick.py
step 40 preflight -m workbook record gpu --preflight
step 80 smoke -m workbook record smoke --device cuda --budget 80s --out "$dir/smoke" --pack "$dir/smoke.tgz"
# The tests of kernels beside the stand-in come last: they are the ones that may hang.
mapfile -t tests < <(grep -l 'pytest\.mark\.gpu' tests/test_*.py | grep -v contention)
step 40 tests -m pytest -v -m gpu --timeout 40 "${tests[@]}" tests/test_contention.py
echo "gpu_check: all is well after $SECONDS s"
