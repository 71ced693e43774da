#!/usr/bin/env bash
# Records the suite gpu on a machine with one GPU in at most 540 s, the most valuable first:
#     examples/gpu_record.sh DIR
# It writes into DIR: record.log, and recording.tgz with all tables, which is whole at any time. If it
# is ended, it prints STOPPED and ends with exit status 143, and the same command goes on from there, on
# another machine with the same GPU, too.
# In a tree without .git, export DDLKIT_COMMIT. PYTHON is the interpreter [python3].
set -euo pipefail
limit_s=529
grace_s=10
. "$(dirname -- "$0")/gpu_begin.sh"

# The directory of the tables has the name of the machine, under which they are recorded. It is not in
# DIR: one file can be brought home more easily than a hundred.
tables=$scratch/$machine
archive=$dir/recording.tgz

pack_rest() { # packs what was measured after the last pack, if the process that measures was killed
  local unpacked=(-name '*.csv*')
  [[ ! -e $archive ]] || unpacked+=(-newer "$archive")
  if [[ -d $tables && $(find "$tables" "${unpacked[@]}") ]]; then
    run "$grace_s" -c '
import sys
from pathlib import Path
from ddlkit.measure.session.engine import pack_into

pack_into(Path(sys.argv[1]), Path(sys.argv[2]))
' "$tables" "$archive" || return
    echo "gpu_record: packed what was measured last"
  fi
}
# If they cannot be packed, the tables stay where they are.
trap 'if pack_rest; then rm -rf -- "$scratch"; else echo "gpu_record: NOT PACKED, but kept: $tables"; fi' EXIT

run "$limit_s" -m workbook record gpu --budget 490s --out "$tables" --pack "$archive"
