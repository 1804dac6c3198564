#!/bin/sh
# The check of one GPU, without Ray or vLLM: verify over NCCL, training and sampling speed, memory. Under 8 minutes.
#
#   benchmarks/gpu_check.sh [WHEELS] [--json FILE]         WHEELS: a folder of *.whl that this Python lacks, e.g. pydantic's
#   benchmarks/gpu_check.sh --device cpu --tiny            the same code on a CPU, in small
#
# Nothing is downloaded and nothing is installed for good: wheels are unpacked into a folder that is removed at the end. Without WHEELS the
# packages must be there already, or on PYTHONPATH. PYTHON names another Python than python3.
# Exit codes: 0 all checks passed, 1 one failed, 2 a package is missing, 3 there is no GPU.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
python=${PYTHON:-python3}
path=$root
site=
trap 'if [ -n "$site" ]; then rm -rf "$site"; fi' EXIT
case ${1:-} in
    '' | -*) ;;
    *)
        site=$(mktemp -d)
        "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$1"/*.whl
        path=$root:$site
        shift
        ;;
esac
PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 "$python" "$here/gpu_check.py" "$@"
