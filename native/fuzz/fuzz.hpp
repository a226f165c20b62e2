// What the fuzz programs share: values taken from the input, checks that end the program, and a count of memory held.
//
// A program is one function of the input, without clock, thread or randomness: the same input does the same again. The
// input is a script. Each byte chooses an action or one of its parameters, and where it ends everything is 0, so that
// every input means something and a small change of it is a small change of what happens. Frames are built from it with
// the right magic and checksums, because a fuzzer does not guess a CRC; a part of them is left broken.
//
// Include this file once per program: it replaces operator new, to count.
#pragma once

#include <malloc.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "ringfold/core.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

#define REQUIRE(condition, ...)                                                           \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      std::fprintf(stderr, "%s:%d: does not hold: %s: ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                                                  \
      std::fprintf(stderr, "\n");                                                         \
      std::abort();                                                                       \
    }                                                                                     \
  } while (false)

namespace fuzz {

using ringfold::Bytes;

class Input {
 public:
  Input(const std::uint8_t* at, std::size_t left) : at_(at), left_(left) {}

  bool is_used_up() const { return left_ == 0; }
  std::uint8_t byte() {
    if (left_ == 0) return 0;
    --left_;
    return *at_++;
  }
  template <typename T>
  T value() {
    T out{};
    copy_to(&out, sizeof out);
    return out;
  }
  std::size_t below(std::size_t limit) {
    return limit <= 1 ? 0 : (limit <= 256 ? byte() : value<std::uint32_t>()) % limit;
  }
  bool chance(unsigned of_256) { return byte() >= 256 - of_256; }  // an input that has ended does nothing unusual
  Bytes bytes(std::size_t count) {
    Bytes out(count);
    copy_to(out.data(), count);
    return out;
  }
  // Mostly one of the values that mean something, sometimes any.
  template <typename T>
  T number(std::initializer_list<T> usual) {
    if (chance(32)) return value<T>();
    return usual.begin()[below(usual.size())];
  }

 private:
  void copy_to(void* target, std::size_t most) {
    const std::size_t bytes = std::min(most, left_);
    if (bytes == 0) return;
    std::memcpy(target, at_, bytes);
    at_ += bytes;
    left_ -= bytes;
  }

  const std::uint8_t* at_;
  std::size_t left_;
};

inline std::size_t bytes_held = 0;

// Feeds bytes as a shell does: only while there is space to read into. How many were taken.
inline std::size_t feed(ringfold::Core& core, ringfold::ConnId conn, const Bytes& bytes, ringfold::Ns now,
                        std::size_t max_at_once = ~std::size_t{0}) {
  std::size_t at = 0;
  while (at < bytes.size()) {
    const auto space = core.receive_space(conn);
    if (space.empty()) break;
    const std::size_t step = std::min({space.size(), bytes.size() - at, std::max<std::size_t>(max_at_once, 1)});
    std::memcpy(space.data(), bytes.data() + at, step);
    core.received(now, conn, step);
    at += step;
  }
  return at;
}

// Takes up to `most` bytes of what a core wants to send.
inline Bytes take(ringfold::Core& core, ringfold::ConnId conn, ringfold::Ns now, std::size_t most) {
  iovec pieces[16];
  const std::size_t count = core.gather(conn, pieces, 16);
  Bytes out;
  for (std::size_t i = 0; i < count && out.size() < most; ++i) {
    const auto* from = static_cast<const std::byte*>(pieces[i].iov_base);
    out.insert(out.end(), from, from + std::min(pieces[i].iov_len, most - out.size()));
  }
  if (!out.empty()) core.sent(now, conn, out.size());
  return out;
}

inline Bytes control_frame(std::uint32_t length, std::uint8_t kind, const Bytes& body) {
  Bytes out;
  ringfold::put(out, length);
  ringfold::put(out, kind);
  out.insert(out.end(), body.begin(), body.end());
  return out;
}

inline Bytes lane_frame(ringfold::FrameHeader header, const Bytes& payload) {
  Bytes out;
  ringfold::put(out, header);
  out.insert(out.end(), payload.begin(), payload.end());
  return out;
}

inline void seal(ringfold::FrameHeader& header, const Bytes& payload) {
  header.payload_crc = ringfold::crc32c(payload.data(), payload.size());
  header.header_crc = header.crc();
}

}  // namespace fuzz

// Not inlined: GCC would take the pairs apart, and warn about what it sees of them.
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  void* const memory = std::malloc(std::max<std::size_t>(bytes, 1));
  if (memory != nullptr) fuzz::bytes_held += malloc_usable_size(memory);
  return memory;
}

[[gnu::noinline]] void* operator new(std::size_t bytes) {
  void* const memory = operator new(bytes, std::nothrow);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

[[gnu::noinline]] void operator delete(void* memory) noexcept {
  if (memory != nullptr) fuzz::bytes_held -= malloc_usable_size(memory);
  std::free(memory);
}

[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { operator delete(memory); }
[[gnu::noinline]] void operator delete(void* memory, const std::nothrow_t&) noexcept { operator delete(memory); }
