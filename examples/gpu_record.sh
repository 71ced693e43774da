#!/usr/bin/env bash
# Records the suite gpu on a machine with one GPU in at most 540 s, the most valuable first:
#     examples/gpu_record.sh DIR
# It writes below DIR: record.log, the tables, and recording.tgz, which is whole at any time. If it is
# ended, the same command goes on from there, on another machine with the same GPU, too.
# In a tree without .git, export DDLKIT_COMMIT. PYTHON is the interpreter [python3].
set -euo pipefail

if (($# != 1)); then
  sed -n '2,6p' "$0" >&2
  exit 2
fi
limit_s=540
dir=$(realpath -m -- "$1")
python=${PYTHON:-python3}
cd -- "$(dirname -- "$0")/.."
mkdir -p "$dir"
unset CUDA_LAUNCH_BLOCKING PYTHONDONTWRITEBYTECODE
export PYTHONUNBUFFERED=1
exec > >(exec tee -p -a "$dir/record.log") 2>&1

# At the limit this process is asked to end, and made to 10 s later.
(
  for ((left = limit_s; left > 0; left--)); do sleep 1 && kill -0 $$ || exit 0; done
  echo "gpu_record: STOPPED, $limit_s s are over" >> "$dir/record.log"
  kill -TERM $$ && sleep 10 && kill -KILL $$
) <&- >/dev/null 2>&1 &

# The directory of the tables has the name of the machine, under which they are recorded.
name=$("$python" -c 'from ddlkit.store import machine; print(machine.name())')
# The process that measures takes the place of this one, so that whoever ends this ends that.
exec "$python" -m workbook record gpu --budget 8m --out "$dir/$name" --pack "$dir/recording.tgz"
