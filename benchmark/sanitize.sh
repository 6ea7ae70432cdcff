#!/usr/bin/env bash
# Runs tests/sanitize.py under compute-sanitizer's memcheck and racecheck; needs an SM90 GPU.
#
#   benchmark/sanitize.sh [FILE]     default: benchmark/results/sanitizer.txt
#
# Writes date, machine and the tools' summary lines to FILE. Fails if a tool finds anything, or does
# not get to its summary.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
SANITIZER=${SANITIZER:-compute-sanitizer}
results=${1:-benchmark/results/sanitizer.txt}

export PYTHONPATH=.:tests${PYTHONPATH:+:$PYTHONPATH}
export PYTORCH_NO_CUDA_MEMORY_CACHING=1   # one allocation per tensor, so that its bounds are known

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

mkdir -p "$(dirname "$results")"
{
    echo "date         $(date -u +%Y-%m-%dT%H:%M:%SZ)"
    "$PYTHON" - <<'PY'
import torch
from gpu_results import csrc_sha256
print(f"gpu          {torch.cuda.get_device_name()}")
print(f"torch        {torch.__version__}, CUDA {torch.version.cuda}")
print(f"csrc_sha256  {csrc_sha256()}")
PY
    echo "sanitizer    $("$SANITIZER" --version | grep -i version | tail -n 1)"
    echo "program      tests/sanitize.py"
} >"$results"

options_of() {
    echo --tool "$1" --target-processes all --error-exitcode 1
    [ "$1" = memcheck ] && echo --padding 256   # unused bytes between allocations
    return 0
}

# Side by side: most of the time is the CPU's.
for tool in memcheck racecheck; do
    (
        status=0
        "$SANITIZER" $(options_of $tool) "$PYTHON" tests/sanitize.py >"$logs/$tool" 2>&1 || status=$?
        echo $status >"$logs/$tool.status"
        echo "$tool has ended with status $status" >&2
    ) &
done
wait

failed=0
for tool in memcheck racecheck; do
    log=$logs/$tool status=$(cat "$logs/$tool.status")
    {
        echo
        echo "compute-sanitizer" $(options_of $tool)
        echo "exit status $status"
        grep -E 'SUMMARY|agree with the reference' "$log" || echo "no summary"
        # Which kernels were reported, and how often.
        grep -E '(Error|Warning): ' "$log" | grep -oE '[a-z0-9]+::[a-z_]+_kernel<.*>' | sort | uniq -c || true
    } >>"$results"
    if [ "$status" -ne 0 ] || ! grep -q 'SUMMARY: 0 ' "$log" || ! grep -q 'agree with the reference' "$log"; then
        tail -n 40 "$log"
        failed=1
    fi
done
cat "$results"
exit "$failed"
