#!/usr/bin/env bash
# Installs Tandem and its packages into an existing virtual environment: k8s/install.sh VENV KIND
#   development      the whole lock, and this checkout by reference; for `make install`
#   cpu              the packages that serve on CPUs, without test and lint tools; for the image
#   gpu              the lock of the CUDA builds; for the image
#   gpu-development  the same lock, and this checkout by reference; for `make install` with a GPU
# Installs wheels only, so no compiler is needed. If the package index does not have PyTorch's CPU
# wheels, set PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index.
set -euo pipefail

venv=$1
kind=$2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
lock=$here/requirements-cpu.lock
gpu_lock=$here/requirements-gpu.lock
pip() { PYTHONUNBUFFERED=1 "$venv/bin/python" -m pip "$@" --progress-bar off --disable-pip-version-check | progress; }

# Prints a line for every 25 packages and for each stage. pip's own lines name package indexes.
progress() {
  local line count=0
  while IFS= read -r line; do
    case $line in
      "Collecting "*)
        count=$((count + 1))
        if ((count % 25 == 0)); then echo "tandem: $count packages fetched  ${SECONDS} s"; fi
        ;;
      "Installing collected packages"*) echo "tandem: $count packages fetched, unpacking them  ${SECONDS} s" ;;
      "Successfully installed"*) echo "tandem: installed  ${SECONDS} s" ;;
    esac
  done
}

# The locks are complete. --no-deps leaves out packages that others declare without need
# (docs/decisions/0001).
case $kind in
  development)
    pip install --no-deps --only-binary :all: -r "$lock"
    pip install --no-deps --no-build-isolation -e "$here"
    ;;
  cpu)
    # shellcheck disable=SC2016  # awk's variables, not the shell's
    without='NR == FNR { skip[$1]; next } !($1 in skip)'
    pip install --no-deps --only-binary :all: -r <(awk -F== "$without" "$here/k8s/development-only.txt" "$lock")
    pip install --no-deps --no-build-isolation "$here"
    ;;
  gpu)
    pip install --no-deps --only-binary :all: -r "$gpu_lock"
    pip install --no-deps --no-build-isolation "$here"
    ;;
  gpu-development)
    pip install --no-deps --only-binary :all: -r "$gpu_lock"
    pip install --no-deps --no-build-isolation -e "$here"
    ;;
  *)
    echo "install.sh: the second argument must be development, cpu, gpu or gpu-development, not '$kind'" >&2
    exit 2
    ;;
esac
