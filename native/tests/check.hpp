// A small test framework: TEST(name) registers a test, CHECK reports what did not hold and goes on.
//
// Every test program links main.cpp, which runs all of its tests, or those that are named on the command line. With
// --list it prints their names: the build reads them, so that each test is a case of ctest.
#pragma once

#include <cstdio>

namespace check {

// A test registers itself: all of a program are in a list, in the order of the file.
struct Test {
  Test(const char* test_name, void (*function)()) noexcept;
  const char* const name;
  void (*const run)();
  const Test* next = nullptr;
};

inline const Test* first_test = nullptr;
inline const Test** end_of_tests = &first_test;

inline Test::Test(const char* test_name, void (*function)()) noexcept : name(test_name), run(function) {
  *end_of_tests = this;
  end_of_tests = &next;
}

inline int failures = 0;

inline void report(const char* file, int line, const char* what) {
  // One broken kernel fails thousands of checks; the first few are enough to see why.
  if (++failures <= 20) std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, what);
}

}  // namespace check

#define TEST(name)                                   \
  static void name();                                \
  static const check::Test test_##name(#name, name); \
  static void name()

#define CHECK(condition)                                             \
  do {                                                               \
    if (!(condition)) check::report(__FILE__, __LINE__, #condition); \
  } while (false)

// Like CHECK, with a printf-style message about what was tried.
#define CHECK_MESSAGE(condition, ...)                  \
  do {                                                 \
    if (!(condition)) {                                \
      char what_[256];                                 \
      std::snprintf(what_, sizeof what_, __VA_ARGS__); \
      check::report(__FILE__, __LINE__, what_);        \
    }                                                  \
  } while (false)
