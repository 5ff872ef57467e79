#!/usr/bin/env bash
# Installs Tandem and its packages into an existing virtual environment: k8s/install.sh VENV KIND
#   development      the whole lock, and this checkout by reference; for `make install`
#   cpu              the packages that serve on CPUs, without test and lint tools; for the image
#   gpu              the lock of the CUDA builds; for the image
#   checkout         this checkout alone; for the image, after its packages
#   gpu-development  the same lock, and this checkout by reference; for `make install` with a GPU
# Installs wheels only, so no compiler is needed. For the CPU builds it first chooses PyTorch's
# wheel (`choose_torch`). TORCH_CPU_INDEX replaces PyTorch's own index; empty: do not ask it.
set -euo pipefail

venv=$1
kind=$2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
lock=$here/requirements-cpu.lock
gpu_lock=$here/requirements-gpu.lock
torch_index=${TORCH_CPU_INDEX-https://download.pytorch.org/whl/cpu}
pip() { PYTHONUNBUFFERED=1 "$venv/bin/python" -m pip "$@" --progress-bar off --disable-pip-version-check | progress; }
fail() { echo "install.sh: $1" >&2; exit "${2:-1}"; }

# Prints a line for every 25 packages and for each stage. pip's own lines name package indexes.
progress() {
  local line count=0
  while IFS= read -r line; do
    case $line in
      "Collecting "* | "Processing "*)
        count=$((count + 1))
        if ((count % 25 == 0)); then echo "tandem: $count packages fetched  ${SECONDS} s"; fi
        ;;
      "Installing collected packages"*) echo "tandem: $count packages fetched, unpacking them  ${SECONDS} s" ;;
      "Successfully installed"*) echo "tandem: installed  ${SECONDS} s" ;;
    esac
  done
}

# Copy the lines of a lock whose packages a file names, or does not name.
only() { awk -F== 'NR == FNR { named[$1]; next } $1 in named' "$1" -; }
without() { awk -F== 'NR == FNR { named[$1]; next } !($1 in named)' "$1" -; }

# Returns whether an index has this release of torch for this interpreter; fetches no package.
# Leaves in `reason` why pages of the index could not be read.
has_torch() {
  local release=$1 answer
  shift
  answer=$("$venv/bin/python" -m pip index versions torch -vv --only-binary :all: "$@" 2>&1) || true
  reason=$(sed -n '/^ *Could not fetch URL /{s///; s/ - skipping$//; p; q}' <<<"$answer")
  [[ ", $(sed -n 's/^ *Available versions: //p' <<<"$answer")," == *", $release,"* ]]
}

# Sets `packages`, the lines to install. Installs torch alone if only PyTorch's index has its CPU
# wheel. If no index has it, takes the configured index's own build, which contains CUDA, runs
# without a GPU as well, and loads the libraries that torch-from-pypi.txt names.
choose_torch() {
  local cpu_release release installed
  packages=$(<"$lock")
  cpu_release=$(sed -n 's/^torch==//p' "$lock")
  release=${cpu_release%+cpu}
  installed=$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null) || true
  if [[ $installed == "$cpu_release" ]]; then
    echo "tandem: torch $cpu_release is installed"
  elif has_torch "$cpu_release"; then
    echo "tandem: torch $cpu_release (0.2 GB) comes from the configured package index"
  elif [[ -n $torch_index ]] && has_torch "$cpu_release" --index-url "$torch_index" --retries 0 --timeout 5; then
    echo "tandem: torch $cpu_release (0.2 GB) comes from $torch_index; the configured package index does not have it"
    pip install --no-deps --only-binary :all: --index-url "$torch_index" "torch==$cpu_release"
  else
    if [[ -n $torch_index && -n $reason ]]; then echo "tandem: PyTorch's package index does not answer: $reason"; fi
    has_torch "$release" || fail "no package index has torch $release for $python${reason:+: $reason}"
    echo "tandem: torch $release with CUDA (2.4 GB; 3 GB more on disk than the CPU wheel) comes from the configured" \
      "package index; no index has torch $cpu_release for $python"
    packages=$(sed "s/^torch==.*/torch==$release/" "$lock"; only "$here/k8s/torch-from-pypi.txt" <"$gpu_lock")
  fi
}

case $kind in
  development | cpu | gpu | gpu-development | checkout) ;;
  *) fail "the second argument must be development, cpu, gpu, gpu-development or checkout, not '$kind'" 2 ;;
esac
[[ $(uname -sm) == "Linux x86_64" ]] || fail "the locked packages are for Linux on x86-64, not for $(uname -sm)"
python=$("$venv/bin/python" -c 'import sys; print("Python %d.%d" % sys.version_info[:2])')
case $python in
  "Python 3.11" | "Python 3.12" | "Python 3.13") ;;
  *) fail "$venv has $python; remove it, then choose 3.11, 3.12 or 3.13: make install PYTHON=python3.12" ;;
esac

case $kind in
  checkout) packages= ;;
  # For pip, 2.13.0+cpu satisfies ==2.13.0 and is newer.
  gpu*) packages=$(sed -E 's/^(torch[a-z]*)==(.*)/&,!=\2+cpu/' "$gpu_lock") ;;
  *) choose_torch ;;
esac
if [[ $kind == cpu ]]; then packages=$(without "$here/k8s/development-only.txt" <<<"$packages"); fi
# The locks are complete. --no-deps leaves out packages that others declare without need
# (docs/decisions/0001).
if [[ -n $packages ]]; then pip install --no-deps --only-binary :all: -r <(echo "$packages"); fi
case $kind in
  *development) pip install --no-deps --no-build-isolation -e "$here" ;;
  checkout) pip install --no-deps --no-build-isolation "$here" ;;
esac
