/* A consumer of hints that knows the header and nothing else.
 *
 *   read_hints                              checks what the header promises about words
 *   read_hints FILE SLOT:GENERATION...      one line per slot: the file's state, then
 *                                           `local`, `busy`, or `PATHS BACKPRESSURE SHARE...` */
#include "ringfold_hints.h"

#include <stdio.h>
#include <stdlib.h>

static int failures = 0;

static void check(int holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "read_hints: failed: %s\n", what);
  ++failures;
}

static int check_words(void) {
  const uint64_t two = UINT64_C(7) << 44 | RINGFOLD_WORD_VALID | UINT64_C(2) << 40 | 43690;
  const uint64_t four = UINT64_C(9) << 44 | RINGFOLD_WORD_VALID | UINT64_C(4) << 40 | UINT64_C(5) << 36 | 4095;
  const uint64_t broken = UINT64_C(9) << 44 | RINGFOLD_WORD_VALID | UINT64_C(3) << 40 | UINT64_C(0xffffff);
  check(ringfold_share_of_sup_bw(0) == 0, "sup_bw 0 is nothing");
  check(ringfold_share_of_sup_bw(1) == 32768, "sup_bw 1 is a half");
  check(ringfold_share_of_sup_bw(2) == 43690, "sup_bw 2 is two thirds");
  check(ringfold_share_of_sup_bw(UINT32_MAX) == 65535, "no multiplier overflows");
  check(ringfold_word_is_for(two, 7) && !ringfold_word_is_for(two, 8), "a word is for one generation");
  check(!ringfold_word_is_for(two & ~RINGFOLD_WORD_VALID, 7), "an invalid word is for nobody");
  check(ringfold_word_share(two, RINGFOLD_PATH_SUP) == 43690, "the share of SUP");
  check(ringfold_word_share(two, RINGFOLD_PATH_SOUT) == 21845, "the rest is SOUT's");
  check(ringfold_word_share(two, 2) == 0, "a path that is not there");
  check(ringfold_word_share(four, 1) == 65535 && ringfold_word_share(four, 0) == 0, "4095 is everything");
  check(ringfold_word_backpressure(four) == 5, "backpressure of paths 0 and 2");
  check(ringfold_word_share(broken, 1) == 65535 && ringfold_word_share(broken, 2) == 0,
        "shares never exceed the whole");
  if (failures == 0) puts("read_hints: ok");
  return failures != 0;
}

static void print_slot(const struct ringfold_hints_map* map, enum ringfold_hints_state state, const char* argument) {
  struct ringfold_hint hint = {{0}, 0, 0};
  unsigned slot = 0, generation = 0, path;
  if (sscanf(argument, "%u:%u", &slot, &generation) != 2) {
    puts("not SLOT:GENERATION");
    return;
  }
  printf("%d ", (int)state);
  switch (state == RINGFOLD_HINTS_OK ? ringfold_hint_read(map->base, slot, generation, &hint) : RINGFOLD_HINT_LOCAL) {
    case RINGFOLD_HINT_LOCAL:
      puts("local");
      return;
    case RINGFOLD_HINT_BUSY:
      puts("busy");
      return;
    case RINGFOLD_HINT_READ:
      break;
  }
  printf("%u %u", (unsigned)hint.paths, (unsigned)hint.backpressure);
  for (path = 0; path < hint.paths; ++path) printf(" %u", (unsigned)hint.shares[path]);
  puts("");
}

int main(int count, char** arguments) {
  struct ringfold_hints_map map;
  enum ringfold_hints_state state;
  int each;
  if (count < 2) return check_words();
  state = ringfold_hints_open(arguments[1], &map);
  for (each = 2; each < count; ++each) print_slot(&map, state, arguments[each]);
  ringfold_hints_close(&map);
  return 0;
}
