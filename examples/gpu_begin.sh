# What gpu_check.sh and gpu_record.sh begin with. Each sets two variables and sources this file:
#     limit_s   the seconds after which the script is asked to end
#     grace_s   the seconds after that until it is made to end
# Afterwards the working directory is the root of the tree, $dir is DIR, and $python the interpreter.
# All that is printed also goes to a file in DIR, which is named check.log or record.log.

if (($# != 1)); then
  sed -n '2,6p' "$0" >&2 # how the script is called, from its own head
  exit 2
fi
script=$(basename -- "$0" .sh)
dir=$(realpath -m -- "$1")
log=$dir/${script#gpu_}.log
python=${PYTHON:-python3}
cd -- "$(dirname -- "$0")/.."
mkdir -p "$dir"
unset CUDA_LAUNCH_BLOCKING PYTHONDONTWRITEBYTECODE
export PYTHONUNBUFFERED=1
# tee ends when the last process that writes to it has ended, and not at a signal to all of them.
exec > >(exec tee -p -a "$log") 2>&1

# Each second this looks whether the script still runs, and ends with it.
(
  for ((left = limit_s; left > 0; left--)); do sleep 1 && kill -0 $$ || exit 0; done
  echo "$script: STOPPED, $limit_s s are over" >> "$log"
  kill -TERM $$ && sleep "$grace_s" && kill -KILL $$
) <&- >/dev/null 2>&1 &
