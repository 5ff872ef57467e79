#!/usr/bin/env bash
# Installs the pinned dependencies and Tandem itself into a virtual environment that exists already:
#   k8s/install.sh VENV development   everything, and this checkout by reference: what `make install` does
#   k8s/install.sh VENV cpu           what serves on CPUs, without the tools that test and lint; for the image
#   k8s/install.sh VENV gpu           the same for NVIDIA GPUs
# Wheels only: nothing is compiled, so no compiler is needed. Where the package index does not carry PyTorch's CPU wheels,
# set PIP_EXTRA_INDEX_URL to PyTorch's own index of them.
set -euo pipefail

venv=$1
kind=$2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
pip() { "$venv/bin/python" -m pip "$@" --quiet --disable-pip-version-check; }

case $kind in
  development | cpu) lock=$here/requirements-cpu.lock ;;
  gpu) lock=$here/requirements-gpu.lock ;;
  *)
    echo "install.sh: the second argument must be development, cpu or gpu, not '$kind'" >&2
    exit 2
    ;;
esac

# The locks are complete; --no-deps leaves out what packages declare and do not need (docs/decisions/0001).
if [[ $kind == development ]]; then
  pip install --no-deps --only-binary :all: -r "$lock"
  pip install --no-deps --no-build-isolation -e "$here"
else
  # shellcheck disable=SC2016  # awk's variables, not the shell's
  without='NR == FNR { skip[$1]; next } !($1 in skip)'
  pip install --no-deps --only-binary :all: -r <(awk -F== "$without" "$here/k8s/development-only.txt" "$lock")
  pip install --no-deps --no-build-isolation "$here"
fi
