#!/usr/bin/env bash
# From a fresh clone to the report, or to the tests. Runs on Linux and macOS (bash 3.2 and newer).
set -euo pipefail
unset CDPATH
self=${BASH_SOURCE[0]}
while [[ -L $self ]]; do # the folder is that of the script itself, not of a link to it
  cd -- "$(dirname -- "$self")"
  self=$(readlink -- "$(basename -- "$self")")
done
cd -- "$(dirname -- "$self")"

usage() {
  cat <<'TEXT'
usage: ./reproduce.sh [--recorded | --full] [--only NN,NN]
       ./reproduce.sh test [--long]

Sets up what is needed, measures this machine, runs all notebooks and builds the site and the reports.
An interrupted run goes on where it stopped. Logs of the stages are in build/logs.

  test          set up if needed, then run the tests (pytest, with ruff and mypy among them)
  test --long   run also the tests that take minutes, such as whole measurements on small models
  --recorded    measure nothing, and take every number from data/recorded
  --full        measure larger networks, with more repeats, into build/measured-full
  --only NN,NN  run only the notebooks with these numbers
  --help        print this

Python: the active virtual or conda environment when it satisfies requirements.txt,
else .venv, which is made on the first run. To measure afresh, delete build/measured (or build/measured-full).
TEXT
}

# ---------------------------------------------------------------- what is printed

die() {  # STATUS MESSAGE: leave with one line
  if [[ -t 1 ]]; then printf '\r\033[K'; fi
  printf 'reproduce.sh: %s\n' "$2" >&2
  exit "$1"
}

duration() {  # SECONDS, for reading
  if (($1 < 60)); then printf '%d s' "$1"; else printf '%d min %02d s' $(($1 / 60)) $(($1 % 60)); fi
}

last_line() {  # LOG: its last line with a word in it, without colours and progress bars' returns
  tail -c 4000 "$1" | LC_ALL=C awk -F '\r' '{
    for (i = 1; i <= NF; i++) {
      gsub(/\033\[[0-9;]*[A-Za-z]/, "", $i)
      if ($i ~ /[A-Za-z0-9]/) last = $i
    }
  } END { print last }'
}

# ---------------------------------------------------------------- stages

child="" # leader of the running stage's process group

guard() {  # leaders of stages, one a line, until we have ended: then the last one's must not go on
  trap "" INT TERM HUP
  local leader
  while read -r leader; do child=$leader; done
  stop_stage
}

has_room() {  # whether something can still be written to build
  { head -c 4096 /dev/zero >build/.room; } 2>/dev/null
  local status=$?
  rm -f build/.room
  return "$status"
}

stop_stage() {  # what Ctrl-C does, and harder for what stays once the stage itself has cleaned up
  [[ -n $child ]] || return 0
  local signal
  for signal in INT TERM KILL; do
    kill -"$signal" -- "-$child" 2>/dev/null || break
    for _ in {1..80}; do
      sleep 0.1
      kill -0 "$child" 2>/dev/null || break
    done
  done
  child=""
}

stage_line() {  # NAME BEGUN LOG
  printf '%-10s %12s  %s' "$1" "$(duration $((SECONDS - $2)))" "$(last_line "$3")"
}

stage() {  # NN-NAME COMMAND...: run one stage, its output in a log, its progress on a terminal
  local name=$1 log=build/logs/$1.log begun=$SECONDS status=0
  shift
  # Not on a terminal, nothing else is printed until the stage has ended.
  if [[ ! -t 1 ]]; then printf '%-10s %12s  [log: %s]\n' "$name" begins "$log"; fi
  set -m # a process group of its own, so that stop_stage reaches every process in it
  "$@" >"$log" 2>&1 </dev/null 8>&- &
  child=$!
  set +m
  echo "$child" >&8
  if [[ -t 1 ]]; then
    while kill -0 "$child" 2>/dev/null; do
      printf '\r\033[K%.79s' "$(stage_line "$name" "$begun" "$log")"
      sleep 1 # seldom enough not to disturb what is being measured
    done
    printf '\r\033[K'
  fi
  wait "$child" 2>/dev/null || status=$?
  stop_stage
  echo >&8
  if ((status)) && ! has_room; then
    die "$status" "stage $name failed: $PWD/build is full: make room there; the same command goes on"
  fi
  if ((status)); then
    die "$status" "stage $name failed (exit status $status): $(last_line "$log") [log: $log]"
  fi
  printf '%s\n' "$(stage_line "$name" "$begun" "$log")"
}

# ---------------------------------------------------------------- Python and its packages

find_python() {  # the first Python that the pins can be installed for
  local candidate
  for candidate in python3.11 python3 python3.12 python3.13 python3.14; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      command -v "$candidate"
      return
    fi
  done
  die 1 "Python 3.11 or newer is needed and neither python3.11 nor python3 is one; install it first"
}

unmet_pins() {  # PYTHON: the pins of requirements.txt that its environment does not meet
  "$1" - <<'CODE'
from importlib.metadata import PackageNotFoundError, version

for line in open("requirements.txt", encoding="utf-8"):
    pin = line.split("#")[0].strip()
    name, _, wanted = pin.partition("==")
    try:
        # A local version such as 2.13.0+cpu names a build of the same release.
        met = not pin or version(name).split("+")[0] == wanted
    except PackageNotFoundError:
        met = False
    if not met:
        print(pin)
CODE
}

has_ddlkit() {  # BIN: whether the environment there runs the ddlkit of this very folder
  [[ -x $1/ddlkit ]] &&
    [[ $(cd / && "$1/python" -c 'import ddlkit; print(*ddlkit.__path__)' 2>/dev/null) -ef ddlkit ]]
}

is_whole() {  # BIN: whether what was sealed is still there: a package may have been lost since, or our link
  local unmet
  unmet=$(unmet_pins "$1/python" 2>/dev/null) && [[ -z $unmet ]] && has_ddlkit "$1"
}

own_temporary() {  # of a set-up that is ended, pip leaves files: here, where the next one removes them
  rm -rf build/tmp
  mkdir build/tmp
  export TMPDIR=$PWD/build/tmp
}

install_ddlkit() {  # BIN
  own_temporary
  "$1/python" -m pip install --no-deps --no-build-isolation --editable .
}

make_venv() {  # BASE KEY: .venv from nothing, sealed with KEY once it is whole
  own_temporary
  rm -f .venv/ready
  "$1" -m venv --clear .venv
  # The one that came with Python takes 20 s longer; where this cannot be had, it does.
  .venv/bin/python -m pip install pip==26.3 || echo "pip stays what it is"
  # Compiling every module now takes as long as the rest; Python compiles those it imports anyway.
  .venv/bin/python -m pip install --no-compile --requirement requirements.txt
  install_ddlkit .venv/bin
  printf '%s\n' "$2" >.venv/ready
}

seal() {  # BASE: what .venv was made of: the pins, the Python and the place
  "$1" - "$PWD" <<'CODE'
import hashlib, sys

with open("requirements.txt", "rb") as pins:
    print(hashlib.sha256(pins.read()).hexdigest(), sys.version.split()[0], sys.argv[1])
CODE
}

set_up() {  # BASE: choose the environment, make it if needed, put it first on the PATH
  local active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}} bin=$PWD/.venv/bin unmet key version
  if [[ -n $active && ! $active -ef .venv ]]; then
    unmet=$(unmet_pins "$active/bin/python" 2>/dev/null) || unmet="a working Python"
    if [[ -z $unmet ]]; then
      bin=$active/bin
      echo "environment: $active (active, and satisfies the pins)"
    else
      echo "environment: .venv, because the active one lacks ${unmet//$'\n'/, }" | cut -c 1-100
    fi
  fi
  if [[ $bin == "$PWD/.venv/bin" ]]; then
    key=$(seal "$1")
    if [[ ! -f .venv/ready || $(<.venv/ready) != "$key" ]] || ! is_whole "$bin"; then
      if ! "$1" -c 'import ensurepip, venv' 2>/dev/null; then
        version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        die 1 "$1 lacks venv or ensurepip: install them (python$version-venv on Debian and Ubuntu)"
      fi
      stage 01-set-up make_venv "$1" "$key"
    fi
  elif ! has_ddlkit "$bin"; then
    stage 01-set-up install_ddlkit "$bin"
  fi
  export PATH="$bin:$PATH"
}

measuring_tests() {  # one after the other, with nothing beside them; status 5: there are none
  local files
  files=$(grep -ls "mark\.alone" tests/test_*.py) || true
  # shellcheck disable=SC2086 # names without spaces
  python -m pytest -m alone $files || (($? == 5))
}

# ---------------------------------------------------------------- one run

keep_bytecode() {  # dozens of processes import torch: compiling takes longer than the import itself
  [[ -n ${PYTHONDONTWRITEBYTECODE-} ]] || return 0
  unset PYTHONDONTWRITEBYTECODE
  export PYTHONPYCACHEPREFIX=${PYTHONPYCACHEPREFIX:-$PWD/build/bytecode} # none beside the sources
}

take_lock() {  # PYTHON: one run at a time; the kernel frees the lock however the run ends
  exec 9>>build/.lock
  local holder
  until "$1" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null; do
    holder=$(<build/.lock)
    if kill -0 "$holder" 2>/dev/null || ((SECONDS > 30)); then
      die 1 "another run is at work in this folder (pid $holder): wait for it or stop it"
    fi
    sleep 0.2 # it was killed, and its guard is stopping its stage
  done
  echo $$ 2>/dev/null >build/.lock || die 1 "$PWD/build is full: make room there"
  exec 8> >(
    exec 9>&-
    set -m # out of reach of what ends us
    guard <&0 >/dev/null 2>&1 &
  )
}

main() {
  local command=report suite=quick data=build/measured book=(build) base long=()
  local recorded="" full="" only="" number
  while (($#)); do
    case $1 in
      test) command=test ;;
      --recorded) recorded=yes ;;
      --long) long=(--long) ;;
      --full) full=yes suite=full data=build/measured-full ;;
      --only)
        only=${2-}
        [[ $only =~ ^[0-9]{2}(,[0-9]{2})*$ ]] ||
          die 2 "--only needs the two-digit numbers of notebooks, as in --only 02,04"
        for number in ${only//,/ }; do
          compgen -G "notebooks/${number}_*.ipynb" >/dev/null ||
            die 2 "--only $number: there is no such notebook in notebooks/"
        done
        shift
        ;;
      -h | --help) usage && exit 0 ;;
      *) die 2 "unknown argument '$1'; see ./reproduce.sh --help" ;;
    esac
    shift
  done
  if [[ -n $recorded && -n $full ]]; then die 2 "--recorded and --full exclude each other: leave one of them out"; fi
  if [[ $command == test && -n $recorded$full$only ]]; then die 2 "test takes no option but --long: leave the other options out"; fi
  if [[ $command != test && ${#long[@]} -gt 0 ]]; then die 2 "--long has an effect on the tests only: run ./reproduce.sh test --long"; fi

  trap 'die 130 "interrupted; the same command goes on from here"' INT
  trap 'die 143 "terminated; the same command goes on from here"' TERM HUP
  trap 'trap "" INT TERM HUP; stop_stage' EXIT
  mkdir -p build/logs 2>/dev/null || die 1 "cannot write to $PWD/build"
  base=$(find_python)
  take_lock "$base"
  export PYTHONUNBUFFERED=1 PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
  keep_bytecode
  set_up "$base"
  if [[ $command == test ]]; then
    # Three at a time on two cores: a fifth of the time is waiting, and four take as long as three.
    stage 04-test python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not alone" ${long[@]+"${long[@]}"}
    stage 05-alone measuring_tests
  else
    if [[ -n $recorded ]]; then
      book+=(--recorded)
    else
      stage 02-measure python -m workbook record all --suite "$suite" --out "$data"
      book+=(--data "$data" --reports build/reports)
    fi
    if [[ -n $only ]]; then book+=(--only "$only"); fi
    stage 03-book python -m workbook "${book[@]}"
  fi
  printf '%-10s %12s\n' total "$(duration "$SECONDS")"
}

main "$@"
