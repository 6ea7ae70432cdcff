#!/usr/bin/env bash
# Every CSV and plot under benchmark/results/ that the documents quote, in some two minutes on an H200. Then, anywhere:
# python benchmark/figures.py
#
#   benchmark/run_all.sh [DIRECTORY]     default: benchmark/results
#
# FlashMLA's library and vLLM's interface file are those that `make test` has fetched into .cache/.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
out=${1:-benchmark/results}
vllm=$(echo .cache/vllm-*/vllm)

few=1,2,4,8,16,32,64,128
failed=0
run() { "$PYTHON" "benchmark/$1.py" "${@:2}" || failed=1; }
bench() { run bench_sparse_decode --peer "$vllm/_flashmla_C.abi3.so" --out "$out" "$@"; }

bench --targets                                                     # V4, 8 and 16 heads
bench --pad-to 64 --tokens $few --targets
bench --heads 64 128 --tokens $few,256 --topk 0 64 512 1024 --targets
bench --record v32 --targets
bench --record v32 --pad-to 64 --tokens 1,2,4,8,16 --targets
bench --record v32 --heads 64 128 --tokens $few,256 --targets
bench --record v32 --heads 64 128 --tokens 128,256 --s-q 2 --targets
run step_benchmark --peer "$vllm/_flashmla_C.abi3.so" --interface "$vllm/third_party/flashmla/flash_mla_interface.py" --out "$out/step.csv"
run search_plan --budget-s 120 --out "$out/plan_search.csv"
# Status 1 is no failure here: for 64 heads the plan weighs padded calls as well.
"$PYTHON" benchmark/search_plan.py --budget-s 60 --heads 64,128 --tokens $few --out "$out/plan_search_h64_128.csv"
exit $failed
