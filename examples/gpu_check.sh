#!/usr/bin/env bash
# Checks a machine with one GPU in at most 210 s, before examples/gpu_record.sh records on it:
#     examples/gpu_check.sh DIR
# It writes into DIR: check.log, with a first look at the speed, what nvidia-smi says, and smoke.tgz
# with every measurement once at its smallest. The first step that fails, or takes twice its time, ends
# it. If it has to be ended, it prints STOPPED and ends with exit status 143.
# In a tree without .git, export DDLKIT_COMMIT. PYTHON is the interpreter [python3].
set -euo pipefail
limit_s=204
grace_s=5
. "$(dirname -- "$0")/gpu_begin.sh"

step() { # SECONDS NAME WORD...: runs python with these words, for at most twice the planned seconds
  local planned_s=$1 name=$2 begun=$SECONDS status=0
  echo "gpu_check: $name, about $planned_s s"
  run $((2 * planned_s)) "${@:3}" || status=$?
  if ((status == alarm_status)); then
    echo "gpu_check: $name was ended, because it took more than $((2 * planned_s)) s"
  fi
  echo "gpu_check: $name ended with exit status $status after $((SECONDS - begun)) s"
  ((status == 0)) || fail "$status" "at $name: nothing further is checked"
}

look() { # FILE WORD...: keeps what nvidia-smi says to these words; it may hang on a broken driver
  timeout 20 nvidia-smi "${@:2}" > "$dir/$1"
}

look nvidia-smi.txt -q || fail 1 "at nvidia-smi -q: nothing further is checked"
look topology.txt topo -m ||
  echo "gpu_check: WARNING: nvidia-smi topo -m fails, and topology.txt says nothing: going on"
env | grep -E '^(CUDA|NCCL|TORCH|PYTORCH|NVIDIA|OMP)' || true
step 3 packages -c '
from importlib.metadata import distributions

for package in distributions():
    print(f"{package.name}=={package.version}")
'
step 40 yardstick examples/yardstick.py
step 40 preflight -m workbook record gpu --preflight
step 80 smoke -m workbook record smoke --device cuda --budget 80s --out "$scratch/smoke" --pack "$dir/smoke.tgz"
lacking=$(absent pytest hypothesis)
if [[ $lacking ]]; then
  echo "gpu_check: SKIPPED the tests that need a GPU, because these packages are not installed: $lacking"
else
  # The tests of kernels that run next to the stand-in come last: they are the ones that may hang. The plugin for
  # timeouts is not needed, and its alarm would replace that of the step.
  mapfile -t tests < <(grep -l 'pytest\.mark\.gpu' tests/test_*.py | grep -v contention)
  step 35 tests -m pytest -v -m gpu -p no:timeout -o faulthandler_timeout=30 \
    -o cache_dir="$scratch/pytest-cache" "${tests[@]}" tests/test_contention.py
fi
echo "gpu_check: all is well after $SECONDS s"
