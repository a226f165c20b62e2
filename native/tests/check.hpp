// A test is a program: it checks, prints what did not hold with its place, and fails at the end.
#pragma once

#include <cstdio>

namespace check {

inline int failures = 0;

inline void report(const char* file, int line, const char* what) {
  // One broken kernel fails thousands of checks; the first few say enough.
  if (++failures <= 20) std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, what);
}

// What main() returns.
inline int verdict(const char* name) {
  if (failures == 0) std::printf("%s: ok\n", name);
  else std::fprintf(stderr, "%s: %d checks failed\n", name, failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace check

#define CHECK(condition)                                             \
  do {                                                               \
    if (!(condition)) check::report(__FILE__, __LINE__, #condition); \
  } while (false)

// Like CHECK, with printf-style words on what was being tried.
#define CHECK_SAYING(condition, ...)                   \
  do {                                                 \
    if (!(condition)) {                                \
      char what_[256];                                 \
      std::snprintf(what_, sizeof what_, __VA_ARGS__); \
      check::report(__FILE__, __LINE__, what_);        \
    }                                                  \
  } while (false)
