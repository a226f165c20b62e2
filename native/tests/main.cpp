// The main function of every native test program: `test_core` runs all tests, `test_core PATTERN...` those whose name
// matches one of the shell patterns, `test_core --list` prints the names.
#include <fnmatch.h>

#include <algorithm>
#include <cstring>
#include <span>

#include "check.hpp"

namespace {

bool is_selected(const check::Test& test, std::span<char*> patterns) {
  return patterns.empty() || std::any_of(patterns.begin(), patterns.end(),
                                         [&](const char* pattern) { return fnmatch(pattern, test.name, 0) == 0; });
}

}  // namespace

int main(int count, char** arguments) {
  const std::span<char*> patterns(arguments + 1, static_cast<std::size_t>(count - 1));
  const bool lists = patterns.size() == 1 && std::strcmp(patterns[0], "--list") == 0;
  int run = 0;
  for (const check::Test* each = check::first_test; each != nullptr; each = each->next) {
    const check::Test& test = *each;
    if (lists) {
      std::puts(test.name);
    } else if (is_selected(test, patterns)) {
      const int before = check::failures;
      test.run();
      std::printf("%s: %s\n", test.name, check::failures == before ? "ok" : "failed");
      std::fflush(stdout);
      ++run;
    }
  }
  if (lists) return 0;
  if (run == 0) std::fprintf(stderr, "no test matches; --list prints them\n");
  if (check::failures > 0) std::fprintf(stderr, "%d checks failed\n", check::failures);
  return run > 0 && check::failures == 0 ? 0 : 1;
}
