#!/usr/bin/env bash
# Records the suite gpu on a machine with one GPU in at most 540 s, the most valuable first:
#     examples/gpu_record.sh DIR
# It writes below DIR: record.log, the tables, and recording.tgz, which is whole at any time. If it is
# ended, the same command goes on from there, on another machine with the same GPU, too.
# In a tree without .git, export DDLKIT_COMMIT. PYTHON is the interpreter [python3].
set -euo pipefail
limit_s=540
grace_s=10
. "$(dirname -- "$0")/gpu_begin.sh"

# The directory of the tables has the name of the machine, under which they are recorded.
name=$("$python" -c 'from ddlkit.store import machine; print(machine.name())')
# The process that measures takes the place of this one, so that whoever ends this ends that.
exec "$python" -m workbook record gpu --budget 8m --out "$dir/$name" --pack "$dir/recording.tgz"
