#include "cpu.hpp"

#include <atomic>
#include <cstring>
#include <initializer_list>

#include "crc32c_poly.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ringfold {

namespace {

constexpr Level generic{"generic", &kernels::generic::table, &quantize::generic::table, crc::extend_portable,
                        hash::absorb_generic};

#if defined(__x86_64__)

constexpr Level avx2{"avx2", &kernels::avx2::table, &quantize::avx2::table, crc::extend_sse42, hash::absorb_avx2};
constexpr Level avx512{"avx512", &kernels::avx512::table, &quantize::avx512::table, crc::extend_avx512,
                       hash::absorb_avx512};
constexpr Level avx512_without_folding{"avx512", &kernels::avx512::table, &quantize::avx512::table, crc::extend_sse42,
                                       hash::absorb_avx512};

// Clang before 15 has no name for it. It needs no more from the kernel than AVX2, which is asked for beside it.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

// These builtins query the operating system too: a CPU's vectors are no use when the kernel does not save them.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && has_f16c() && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

// nullptr when this CPU cannot run the level.
const Level* level_named(const char* name) {
  __builtin_cpu_init();
  if (std::strcmp(name, "generic") == 0) return &generic;
  if (std::strcmp(name, "avx2") == 0 && has_avx2()) return &avx2;
  if (std::strcmp(name, "avx512") == 0 && has_avx512())
    return __builtin_cpu_supports("vpclmulqdq") ? &avx512 : &avx512_without_folding;
  return nullptr;
}

#else

const Level* level_named(const char* name) { return std::strcmp(name, "generic") == 0 ? &generic : nullptr; }

#endif

const Level* widest_level() {
  for (const char* name : {"avx512", "avx2"})
    if (const Level* level = level_named(name)) return level;
  return &generic;
}

// Two threads that find nullptr at once detect the same level, so the order of their stores does not matter.
std::atomic<const Level*> active{nullptr};

}  // namespace

const Level& active_level() {
  const Level* level = active.load(std::memory_order_relaxed);
  if (level == nullptr) {
    level = widest_level();
    active.store(level, std::memory_order_relaxed);
  }
  return *level;
}

namespace kernels {

const char* cpu_level() { return active_level().name; }

bool set_cpu_level(const char* name) {
  const Level* level = level_named(name);
  if (level != nullptr) active.store(level, std::memory_order_relaxed);
  return level != nullptr;
}

}  // namespace kernels

}  // namespace ringfold
