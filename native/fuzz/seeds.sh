#!/usr/bin/env bash
# Makes the seeds of the fuzz programs again, from what earlier runs of `make fuzz-native` have learned (build/fuzz/corpus).
#
#   native/fuzz/seeds.sh [TARGET...]
#
# Of all inputs those are kept that reach the most between them, smallest first, up to two dozen for each program. Inputs with
# another name than seed-* once broke something and stay as they are.
set -euo pipefail
cd "$(dirname "$0")/../.."
max_seeds=24

targets=("$@")
if [ "${#targets[@]}" = 0 ]; then
  for source in native/fuzz/fuzz_*.cpp; do
    target=${source##*/fuzz_}
    targets+=("${target%.cpp}")
  done
fi

for target in "${targets[@]}"; do
  kept=tests/fuzz/corpus/$target learned=build/fuzz/corpus/$target cover=build/fuzz/cover/$target
  rm -rf "$cover"
  mkdir -p "$kept" "$learned" "$cover"
  build/fuzz/native/fuzz_"$target" -set_cover_merge=1 -max_len=2048 "$cover" "$learned" "$kept" > build/fuzz/"$target".merge.log 2>&1
  rm -f "$kept"/seed-*
  number=0
  # The cover is written with the inputs that add the most first.
  while read -r file; do
    [ "$number" -lt "$max_seeds" ] || break
    cp "$file" "$(printf '%s/seed-%02d' "$kept" "$number")"
    number=$((number + 1))
  done < <(ls -tr -d "$cover"/*)
  echo "$target: $number seeds of $(ls "$learned" | wc -l) inputs"
done
