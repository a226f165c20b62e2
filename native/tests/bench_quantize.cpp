// GB/s of f32 through quantise and dequantise, per scheme and CPU level, in cache and from memory.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>
#include <vector>

#include "ringfold/quantize.hpp"

using namespace ringfold;
using kernels::DType;
using quantize::Scheme;

namespace {

template <class Work>
double seconds(Work work) {
  double best_s = 1e9;
  for (int attempt = 0; attempt < 7; ++attempt) {
    const auto start = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    best_s = std::min(best_s, took.count());
  }
  return best_s;
}

void measure(size_t count, size_t calls) {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  std::vector<float> values(count), back(count);
  for (float& v : values) v = normal(rng);
  std::vector<uint8_t> encoded(count * 4), forward(count * 4);
  const char* names[] = {"minmax8", "minmax4", "zeroscale8", "zeroscale4"};
  const double gigabytes = static_cast<double>(count) * 4 * static_cast<double>(calls) / 1e9;
  for (int s = 1; s <= 4; ++s) {
    const auto scheme = static_cast<Scheme>(s);
    const double out = seconds([&] {
      for (size_t i = 0; i < calls; ++i) quantize::encode(scheme, DType::f32, encoded.data(), values.data(), count);
    });
    const double in = seconds([&] {
      for (size_t i = 0; i < calls; ++i) quantize::decode(scheme, DType::f32, back.data(), encoded.data(), count);
    });
    const double both = seconds([&] {
      for (size_t i = 0; i < calls; ++i)
        quantize::reduce(scheme, DType::f32, kernels::ReduceOp::sum, forward.data(), encoded.data(), values.data(),
                         count);
    });
    std::printf("    %-10s quantise %6.1f  dequantise %6.1f  one after the other %6.1f  reduce step %6.1f\n",
                names[s - 1], gigabytes / out, gigabytes / in, gigabytes / (out + in), gigabytes / both);
  }
}

}  // namespace

int main() {
  for (const char* level : {"avx512", "avx2", "generic"}) {
    if (!kernels::set_cpu_level(level)) continue;
    std::printf("%s, 64 KiB in cache (GB/s of f32)\n", level);
    measure(16 << 10, 1000);
    std::printf("%s, 64 MiB\n", level);
    measure(16 << 20, 1);
  }
}
