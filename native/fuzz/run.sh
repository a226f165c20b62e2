#!/usr/bin/env bash
# Runs the fuzz programs that were built in build/fuzz, two at a time, each for so many seconds.
#
#   native/fuzz/run.sh SECONDS TARGET...
#
# A program starts from tests/fuzz/corpus/TARGET, and keeps what it learns in build/fuzz/corpus/TARGET for the next run. An
# input that breaks something is kept in tests/fuzz/corpus/TARGET, where the tests run it from then on.
set -euo pipefail
cd "$(dirname "$0")/../.."
seconds=$1
shift
export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1:allocator_may_return_null=0
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1

fuzz() {
  local target=$1 seconds=$2
  local kept=tests/fuzz/corpus/$target learned=build/fuzz/corpus/$target log=build/fuzz/$target.log
  mkdir -p "$kept" "$learned"
  local status=0
  build/fuzz/native/fuzz_"$target" -max_total_time="$seconds" -max_len=2048 -len_control=0 -entropic=0 -timeout=20 \
    -report_slow_units=60 -rss_limit_mb=2048 -print_final_stats=1 -artifact_prefix="$kept/" "$learned" "$kept" \
    > "$log" 2>&1 || status=$?
  local runs speed edges
  runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  speed=$(sed -n 's/^stat::average_exec_per_sec: *//p' "$log")
  edges=$(grep -oE 'cov: [0-9]+' "$log" | tail -n 1)
  echo "$target: ${runs:-?} inputs, ${speed:-?} a second, ${edges:-cov: ?} edges"
  if [ "$status" != 0 ]; then
    grep -E 'ERROR|does not hold|runtime error|SUMMARY|Test unit written' "$log" >&2 || tail -n 20 "$log" >&2
    echo "error: fuzz_$target failed; all of it is in $log" >&2
  fi
  return "$status"
}
export -f fuzz

printf '%s\n' "$@" | xargs -P 2 -I TARGET bash -c 'fuzz "$@"' fuzz TARGET "$seconds"
