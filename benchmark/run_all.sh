#!/usr/bin/env bash
# Every CSV and plot under benchmark/results/ that the documents quote, in some two minutes on an H200. Then, anywhere:
# python benchmark/figures.py
#
#   benchmark/run_all.sh [DIRECTORY] [FlashMLA's library]     default: benchmark/results, .peer/_flashmla_C.abi3.so
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
out=${1:-benchmark/results}
peer=${2:-.peer/_flashmla_C.abi3.so}
interface=.cache/vllm-0.33.0/vllm/third_party/flashmla/flash_mla_interface.py   # make test has fetched it

few=1,2,4,8,16,32,64,128
failed=0
run() { "$PYTHON" "benchmark/$1.py" "${@:2}" || failed=1; }
bench() { run bench_sparse_decode --peer "$peer" --out "$out" "$@"; }

bench --targets                                                     # V4, 8 and 16 heads
bench --pad-to 64 --tokens $few --targets
bench --heads 64 128 --tokens $few,256 --topk 0 512 1024 --targets
bench --record v32 --targets
bench --record v32 --pad-to 64 --tokens 1,2,4,8,16 --targets
bench --record v32 --heads 64 128 --tokens $few,256 --targets
bench --record v32 --heads 64 128 --tokens 128,256 --s-q 2 --targets
run step_benchmark --peer "$peer" --interface "$interface" --out "$out/step.csv"
run search_plan --budget-s 120 --out "$out/plan_search.csv"
# Status 1 is no failure here: for 64 heads the plan weighs padded calls as well.
"$PYTHON" benchmark/search_plan.py --budget-s 60 --heads 64,128 --tokens $few --out "$out/plan_search_h64_128.csv"
exit $failed
