// Large scratch memory that is kept between ops, so that a training loop does not fault in its backup at every step.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

namespace ringfold {

class BackupPool {
 public:
  class Buffer {
   public:
    Buffer() = default;
    explicit Buffer(std::size_t bytes) : bytes_(bytes) {
      void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
      if (bytes >= (std::size_t{4} << 20)) ::madvise(memory, bytes, MADV_HUGEPAGE);
#endif
      at_ = static_cast<std::byte*>(memory);
    }
    Buffer(Buffer&& other) noexcept : at_(std::exchange(other.at_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    Buffer& operator=(Buffer&& other) noexcept {
      std::swap(at_, other.at_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Buffer() {
      if (at_ != nullptr) ::munmap(at_, bytes_);
    }
    std::byte* at() const { return at_; }
    std::size_t bytes() const { return bytes_; }

   private:
    std::byte* at_ = nullptr;
    std::size_t bytes_ = 0;
  };

  Buffer take(std::size_t bytes) {
    if (bytes == 0) return {};
    const std::size_t rounded = (bytes + 4095) / 4096 * 4096;
    ++taken_;
    std::erase_if(free_, [&](const Free& each) { return taken_ - each.since > idle_takes; });
    auto best = free_.end();
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      const std::size_t size = it->buffer.bytes();
      const bool fits = size >= rounded && size <= 2 * rounded + (std::size_t{1} << 20);
      if (fits && (best == free_.end() || size < best->buffer.bytes())) best = it;
    }
    if (best == free_.end()) return Buffer(rounded);
    Buffer found = std::move(best->buffer);
    free_.erase(best);
    return found;
  }

  void give_back(Buffer buffer) {
    if (buffer.at() != nullptr && free_.size() < 64) free_.push_back({std::move(buffer), taken_});
  }

 private:
  static constexpr std::uint64_t idle_takes = 64;  // what so many ops had no use for is not hoarded

  struct Free {
    Buffer buffer;
    std::uint64_t since;
  };
  std::vector<Free> free_;
  std::uint64_t taken_ = 0;
};

}  // namespace ringfold
