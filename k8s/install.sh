#!/usr/bin/env bash
# Installs Tandem and what it needs into a virtual environment that exists already:
#   k8s/install.sh VENV development   the whole lock, and this checkout by reference: what `make install` does
#   k8s/install.sh VENV cpu           what serves on CPUs, without the tools that test and lint; for the image
#   k8s/install.sh VENV gpu           the lock of the CUDA builds; for the image
#   k8s/install.sh VENV gpu-development   the same, and this checkout by reference: `make install` on a machine with a GPU
# Wheels only: nothing is compiled, so no compiler is needed. Where the package index does not carry PyTorch's CPU wheels,
# set PIP_EXTRA_INDEX_URL to PyTorch's own index of them.
set -euo pipefail

venv=$1
kind=$2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
lock=$here/requirements-cpu.lock
gpu_lock=$here/requirements-gpu.lock
pip() { PYTHONUNBUFFERED=1 "$venv/bin/python" -m pip "$@" --progress-bar off --disable-pip-version-check | progress; }

# A line for every 25 packages and for each stage. pip's own lines name package indexes.
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

# The locks are complete; --no-deps leaves out what packages declare and do not need (docs/decisions/0001).
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
