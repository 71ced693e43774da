#!/usr/bin/env bash
# Half an hour on a GPU, in calls that may be killed at any moment and then called again:
#     examples/gpu_day.sh STAGE LIMIT_S BUDGET OUT [FLAG...]
#     examples/gpu_day.sh 1 240 90s ~/day      # checks, everything once at its smallest, the GPU's tests
#     examples/gpu_day.sh 2 590 8m50s ~/day    # records, most valuable first
#     examples/gpu_day.sh 3 590 8m50s ~/day    # goes on; so does any further call
# LIMIT_S: seconds after which the call ends itself; BUDGET: after which it measures nothing new.
# OUT: what to bring home: logs, and archives, which are whole at any time. Put it back, and the next call
# goes on from there, on another machine with the same GPU, too; another GPU needs another OUT. FLAG: of python -m workbook record, such as --ignore-load.
# In a tree without .git, export DDLKIT_COMMIT. PYTHON is the interpreter [python3].
set -uo pipefail

if (($# < 4)) || [[ ! $1 =~ ^[123]$ || ! $2 =~ ^[1-9][0-9]*$ ]]; then
  sed -n '2,6p' "$0" >&2
  exit 2
fi
stage=$1 limit_s=$2 budget=$3 out=$(realpath -m -- "$4")
shift 4
python=${PYTHON:-python3}
cd -- "$(dirname -- "$0")/.." && mkdir -p "$out" || exit 1
unset CUDA_LAUNCH_BLOCKING PYTHONDONTWRITEBYTECODE
export PYTHONUNBUFFERED=1
exec > >(exec tee -p -a "$out/stage$stage.log") 2>&1

# At the limit this process is asked to end, and made to 10 s later.
(
  for ((left = limit_s; left > 0; left--)); do sleep 1 && kill -0 $$ || exit 0; done
  kill -TERM $$ && sleep 10 && kill -KILL $$
) <&- >/dev/null 2>&1 &

record=(-m workbook record gpu --budget "$budget")
if ((stage > 1)); then # the very process that may be killed: none is left behind
  exec "$python" "${record[@]}" --pack "$out/recording.tgz" "$@"
fi

step() { # run python with these arguments; it dies with this script
  local begun=$SECONDS
  "$python" -c 'import os, sys; from ddlkit.jobs import die_with_parent
die_with_parent(); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])' "$@"
  local status=$?
  echo "gpu_day: exit status $status after $((SECONDS - begun)) s: ${*:1:7}"
  ((status == 0)) || failed=1
  return $status
}
failed=0
step "${record[@]}" --preflight "$@" || (($? != 2)) || exit 2 # there is no GPU at all
step -m workbook record smoke --device cuda --budget "$budget" --pack "$out/smoke.tgz" "$@"
mapfile -t tests < <(grep -l 'pytest\.mark\.gpu' tests/test_*.py) # the others are not even imported
step -m pytest -v -m gpu "${tests[@]}"
exit $failed
