// GB/s of target bytes, per kernel and CPU level. "memory" means that the buffers are larger than every cache.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <vector>

#include "ringfold/crc32c.hpp"
#include "ringfold/kernels.hpp"

using namespace ringfold;
using kernels::DType;
using kernels::ReduceOp;

namespace {

volatile uint32_t sink;

// The best of several tries: the machine is shared, and noise only ever slows down.
template <class Work>
double gb_per_s(size_t bytes_per_call, size_t calls, Work work) {
  double best_s = 1e9;
  for (int attempt = 0; attempt < 7; ++attempt) {
    const auto start = std::chrono::steady_clock::now();
    for (size_t i = 0; i < calls; ++i) work(i);
    const std::chrono::duration<double> took_s = std::chrono::steady_clock::now() - start;
    best_s = std::min(best_s, took_s.count());
  }
  return static_cast<double>(bytes_per_call) * static_cast<double>(calls) / best_s / 1e9;
}

void in_cache(size_t bytes) {
  struct Kernel {
    const char* name;
    DType dtype;
    ReduceOp op;
  };
  const Kernel all[] = {
      {"f32 sum", DType::f32, ReduceOp::sum},   {"f32 prod", DType::f32, ReduceOp::prod},
      {"f32 min", DType::f32, ReduceOp::min},   {"f64 sum", DType::f64, ReduceOp::sum},
      {"f64 max", DType::f64, ReduceOp::max},   {"f16 sum", DType::f16, ReduceOp::sum},
      {"f16 max", DType::f16, ReduceOp::max},   {"bf16 sum", DType::bf16, ReduceOp::sum},
      {"bf16 max", DType::bf16, ReduceOp::max}, {"u8 sum", DType::u8, ReduceOp::sum},
      {"i8 prod", DType::i8, ReduceOp::prod},   {"i16 prod", DType::i16, ReduceOp::prod},
      {"i32 sum", DType::i32, ReduceOp::sum},   {"i32 max", DType::i32, ReduceOp::max},
      {"i64 sum", DType::i64, ReduceOp::sum},   {"i64 prod", DType::i64, ReduceOp::prod},
      {"u64 min", DType::u64, ReduceOp::min},
  };
  const size_t calls = (64u << 20) / bytes;
  std::vector<uint8_t> a(bytes), b(bytes);
  for (const Kernel& k : all) {
    std::fill(a.begin(), a.end(), uint8_t{0x11});
    std::fill(b.begin(), b.end(), uint8_t{0x12});
    const size_t count = bytes / kernels::item_bytes(k.dtype);
    const double rate =
        gb_per_s(bytes, calls, [&](size_t) { kernels::reduce(k.dtype, k.op, a.data(), a.data(), b.data(), count); });
    std::printf("    reduce %-9s %7.1f\n", k.name, rate);
  }
  const char* names[] = {"u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "f16", "bf16", "f32", "f64"};
  for (size_t d = 0; d < kernels::dtype_count; ++d) {
    const auto dtype = static_cast<DType>(d);
    const size_t count = bytes / kernels::item_bytes(dtype);
    std::fill(a.begin(), a.end(), uint8_t{0x3c});
    const double rate = gb_per_s(bytes, calls / 8 + 1, [&](size_t) { kernels::divide(dtype, a.data(), 3, count); });
    std::printf("    divide %-9s %7.1f\n", names[d], rate);
  }
  const double crc = gb_per_s(bytes, calls, [&](size_t) { sink = crc32c(a.data(), bytes); });
  std::printf("    crc32c           %7.1f\n", crc);
}

void from_memory() {
  constexpr size_t segment = 256 << 10, total = 128 << 20, segments = total / segment;
  std::vector<float> target(total / 4, 1.0f), other(total / 4, 1.0f), backup(total / 4), b(segment / 4, 1e-20f);
  auto* t = reinterpret_cast<uint8_t*>(target.data());
  auto* o = reinterpret_cast<uint8_t*>(other.data());
  auto* saved = reinterpret_cast<uint8_t*>(backup.data());
  const size_t count = segment / 4;
  const auto step = [&](bool save, bool crc, uint32_t divisor) {
    return gb_per_s(segment, segments, [&](size_t i) {
      uint8_t* p = t + i * segment;
      sink = kernels::reduce_step(DType::f32, ReduceOp::sum, p, p, b.data(), count,
                                  kernels::Backup{save ? saved + i * segment : nullptr, true}, divisor, crc);
    });
  };
  std::printf("    memcpy, memory to memory            %6.1f\n", gb_per_s(segment, segments, [&](size_t i) {
                std::memcpy(saved + i * segment, t + i * segment, segment);
              }));
  std::printf("    f32 add in place, b in cache        %6.1f\n", gb_per_s(segment, segments, [&](size_t i) {
                float* p = target.data() + i * count;
                kernels::reduce(DType::f32, ReduceOp::sum, p, p, b.data(), count);
              }));
  std::printf("    reduce_step f32                     %6.1f\n", step(false, false, 0));
  std::printf("    reduce_step f32 crc                 %6.1f\n", step(false, true, 0));
  std::printf("    reduce_step f32 backup              %6.1f\n", step(true, false, 0));
  std::printf("    reduce_step f32 backup crc          %6.1f\n", step(true, true, 0));
  std::printf("    reduce_step f32 backup crc divide   %6.1f\n", step(true, true, 2));
  std::printf("    reduce_step f32 out of place, crc   %6.1f\n", gb_per_s(segment, segments, [&](size_t i) {
                sink = kernels::reduce_step(DType::f32, ReduceOp::sum, o + i * segment, t + i * segment, b.data(),
                                            count, {}, 0, true);
              }));
  std::printf("    overwrite                           %6.1f\n", gb_per_s(segment, segments, [&](size_t i) {
                kernels::overwrite(t + i * segment, b.data(), segment, {});
              }));
  std::printf("    overwrite backup                    %6.1f\n", gb_per_s(segment, segments, [&](size_t i) {
                kernels::overwrite(t + i * segment, b.data(), segment, {saved + i * segment, true});
              }));
}

}  // namespace

int main() {
  for (const char* level : {"avx512", "avx2", "generic"}) {
    if (!kernels::set_cpu_level(level)) continue;
    for (const size_t bytes : {size_t{8} << 10, size_t{256} << 10}) {
      std::printf("%s, %zu KiB in cache (GB/s of target)\n", level, bytes >> 10);
      in_cache(bytes);
    }
    std::printf("%s, 256 KiB segments, target and backup in memory\n", level);
    from_memory();
  }
}
