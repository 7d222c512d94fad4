#!/bin/sh
# Usage: scripts/setup.sh VENV [REQUIREMENT...]
#
# Makes the virtual environment VENV in the repository root and installs this project with its test
# tools into it, plus any further requirements. Does nothing when that has been done already for this
# folder, this pyproject.toml and these requirements. PYTHON=/path/to/python overrides the search.
set -eu
cd "$(dirname "$0")/.."
venv=$1
shift
stamp=$venv/installed
started=$(date +%s)

key=$( (pwd; echo "$*"; cat pyproject.toml) | cksum)
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$key" ]; then
  echo "set-up: 0 s ($venv is ready)"
  exit 0
fi

# A Python without venv or ensurepip (Debian splits them off) cannot make an environment.
suits() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

# Tries each argument in turn; a pattern that matches nothing is just a name that does not run.
first_suitable() {
  for candidate in "$@"; do
    if suits "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    first_suitable "$PYTHON"
    return
  fi
  home=${HOME:-}
  first_suitable python3.14 python3.13 python3.12 python3 python \
    "${PYENV_ROOT:-$home/.pyenv}"/versions/*/bin/python "$home"/.pyenv/versions/*/bin/python \
    /usr/local/bin/python3* /opt/homebrew/bin/python3* "$home"/.local/share/uv/python/*/bin/python3 \
    "${CONDA_PREFIX:-/opt/conda}/bin/python" "$home"/miniconda3/bin/python \
    "$home"/miniforge3/bin/python "$home"/anaconda3/bin/python
}

if ! suits "$venv/bin/python"; then
  python=$(find_python) || {
    echo "No Python 3.12 or newer with the venv and ensurepip modules was found:" \
      "install one (for example python3.12 and python3.12-venv) or set PYTHON=/path/to/python." >&2
    exit 1
  }
  echo "set-up: making $venv with $("$python" --version 2>&1) ($python)"
  rm -rf "$venv"
  "$python" -m venv "$venv"
fi

# Dots show that the download goes on; pip's own text is kept for the case that it fails.
log=$venv/install.log
echo "set-up: installing into $venv, one to three minutes the first time"
"$venv/bin/python" -m pip install --disable-pip-version-check -e '.[test]' "$@" >"$log" 2>&1 &
installer=$!
trap 'kill "$installer" 2>/dev/null' INT TERM
while kill -0 "$installer" 2>/dev/null; do
  printf .
  sleep 3
done
echo
if ! wait "$installer"; then
  cat "$log" >&2
  echo "set-up failed: pip could not install the packages above (full text in $log)." >&2
  exit 1
fi
echo "$key" >"$stamp"
echo "set-up: $(($(date +%s) - started)) s"
