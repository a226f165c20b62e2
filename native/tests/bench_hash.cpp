// GB/s of rf64 on one thread, per CPU level: from the caches, and from memory.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "ringfold/hash.hpp"
#include "ringfold/kernels.hpp"

using namespace ringfold;

int main() {
  std::vector<uint8_t> bytes(size_t{512} << 20, 1);
  for (const char* level : {"avx512", "avx2", "generic"}) {
    if (!kernels::set_cpu_level(level)) continue;
    for (const size_t size : {size_t{16} << 10, size_t{512} << 10, bytes.size()}) {
      const size_t calls = bytes.size() / size;
      std::vector<uint64_t> out(hash_block_count(size));
      double best_s = 1e9;
      for (int attempt = 0; attempt < 9; ++attempt) {
        const auto start = std::chrono::steady_clock::now();
        for (size_t i = 0; i < calls; ++i) hash_blocks(bytes.data(), size, out.data(), 1);
        const std::chrono::duration<double> took_s = std::chrono::steady_clock::now() - start;
        best_s = std::min(best_s, took_s.count());
      }
      std::printf("%-8s %7zu KiB  %5.1f GB/s\n", level, size >> 10, static_cast<double>(size * calls) / best_s / 1e9);
    }
  }
}
