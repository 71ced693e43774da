# What gpu_check.sh and gpu_record.sh begin with. Each sets two variables and sources this file:
#     limit_s   the seconds after which the script is asked to end
#     grace_s   the seconds after that until it is made to end
# Afterwards the working directory is the root of the tree, and these variables are set:
#     dir       DIR as an absolute path
#     scratch   a directory of temporary files, which is removed when the script ends
#     python    the interpreter
#     machine   the name of this machine
# All that is printed also goes to a file in DIR, which is named check.log or record.log.

if [[ ${1-} == -h || ${1-} == --help ]]; then
  sed -n '2,7p' "$0" # how the script is called, from its own head
  exit 0
fi
if (($# != 1)) || [[ $1 == -* ]]; then
  sed -n '2,7p' "$0" >&2
  exit 2
fi
script=$(basename -- "$0" .sh)
dir=$(realpath -m -- "$1")
python=${PYTHON:-python3}
cd -- "$(dirname -- "$0")/.."
mkdir -p "$dir"
# tee ends when the last process that writes to it has ended, and not at a signal to all of them.
exec > >(trap '' TERM INT HUP && exec tee -p -a "$dir/${script#gpu_}.log") 2>&1

# What Python, CUDA and the tests write besides results is temporary.
scratch=$(mktemp -d -t "$script.XXXXXX")
export TMPDIR=$scratch CUDA_CACHE_PATH=$scratch/cuda HYPOTHESIS_STORAGE_DIRECTORY=$scratch/hypothesis
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
unset CUDA_LAUNCH_BLOCKING
trap 'rm -rf -- "$scratch"' EXIT

child= # the process id of the python that runs, if one does

stop() { # ends the script, because its time is up or because somebody else ends it
  trap '' TERM INT HUP PIPE
  echo "$script: STOPPED after $SECONDS s of $limit_s s" || true
  if [[ $child ]]; then
    kill -TERM "$child" || true
    wait "$child" || true
  fi
  exit 143
}
trap stop TERM INT HUP

# This process asks the script to end when its time is up, and ends it if it does not.
(
  while_script_runs() { # SECONDS: returns then, and exits if the script has ended before
    while ((SECONDS < $1)); do sleep 1 && kill -0 $$ || exit 0; done
  }
  while_script_runs "$limit_s"
  kill -TERM $$
  while_script_runs $((limit_s + grace_s))
  kill -KILL $$
) <&- >/dev/null 2>&1 &

# This program becomes another one, which the kernel ends when the script ends, and by SIGALRM when so
# many seconds have passed.
guard='
import os, signal, sys
from ddlkit.jobs import die_with_parent

script, seconds, *command = sys.argv[1:]
die_with_parent(int(script))
signal.alarm(int(seconds))
os.execvp(command[0], command)
'
alarm_status=142 # the exit status after SIGALRM

run() { # SECONDS WORD...: runs python with these words for at most so many seconds
  local status=0
  # In the background, because bash calls `stop` only when what runs in the foreground has ended.
  "$python" -c "$guard" $$ "$1" "$python" "${@:2}" &
  child=$!
  wait "$child" || status=$?
  child=
  return "$status"
}

absent() { # PACKAGE...: prints those of the packages that are not installed
  "$python" -c '
import sys
from importlib.util import find_spec

print(*(package for package in sys.argv[1:] if find_spec(package) is None))
' "$@"
}

fail() { # STATUS WORD...: says why the script ends, and ends it
  echo "$script: FAILED ${*:2}"
  exit "$1"
}

lacking=$(absent torch torchvision numpy pandas scipy psutil) || fail 2 "at the start of $python"
[[ -z $lacking ]] || fail 2 "because these packages are not installed: $lacking: install requirements.txt for $python, or name another interpreter with PYTHON"
described=$("$python" -c '
from ddlkit.store import machine

print(machine.commit(), machine.name())
') || fail 2 "at the commit of the code and the name of the machine"
read -r commit machine <<< "$described"
[[ $commit != unknown ]] || fail 2 "because every stamp would say that the commit is unknown: export DDLKIT_COMMIT, set to the hash of the commit"
echo "$script: commit $commit on $machine"
