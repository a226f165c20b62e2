// The bytes on a lane, on a control connection and on a bulk connection. All little-endian; Linux on x86-64 and aarch64
// both are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ringfold/crc32c.hpp"

namespace ringfold {

using Ns = std::int64_t;
using ConnId = std::uint32_t;
using PeerId = std::uint64_t;

inline constexpr std::uint32_t lane_magic = 0x444c4652;  // "RFLD"
inline constexpr std::uint8_t lane_version = 1;

enum class LaneFrame : std::uint8_t {
  mark = 1,     // every later frame of this lane belongs to `epoch`
  open = 2,     // payload: the descriptor of an op the sender has called
  data = 3,     // payload: one segment, at `stage` and `offset`
  done = 4,     // the local part at rank `origin` is finished; a small op's payload travels inside
  ready = 5,    // the receiver has called the op: more than the eager bytes may come
  applied = 6,  // on shared links: `offset` frames of this lane have been dealt with; not counted itself
  absent = 7,   // rank `origin` contributes nothing to the op; a small op's Done says so itself
};

// A frame is this header and `length` bytes of payload.
struct FrameHeader {
  std::uint32_t magic = lane_magic;
  std::uint8_t version = lane_version;
  LaneFrame kind = LaneFrame::mark;
  std::uint16_t stage = 0;
  std::uint32_t epoch = 0;
  std::uint32_t sequence = 0;
  std::uint64_t tag = 0;
  std::uint64_t offset = 0;
  std::uint32_t length = 0;
  std::uint32_t payload_crc = 0;
  std::uint32_t fingerprint = 0;
  std::uint32_t origin = 0;
  std::uint64_t registrations = 0;
  // data: how many ranks have contributed to the value, 0 without a payload; done: 1 if `origin` contributes.
  std::uint32_t contributors = 0;
  std::uint32_t header_crc = 0;

  std::uint32_t crc() const { return crc32c(this, offsetof(FrameHeader, header_crc)); }
};
static_assert(sizeof(FrameHeader) == 64 && std::is_trivially_copyable_v<FrameHeader>);

// Sequences count the ops of a tag and wrap around: whether `a` comes before `b`, of two that are near each other.
inline bool is_before(std::uint32_t a, std::uint32_t b) { return static_cast<std::int32_t>(a - b) < 0; }

inline constexpr std::uint64_t no_step = ~std::uint64_t{0};  // of a call outside of any step

// What two peers must agree on before they reduce with each other. Its CRC is the op's fingerprint.
struct Descriptor {
  std::uint8_t kind = 0;
  std::uint8_t dtype = 0;  // 255: several
  std::uint8_t reduce_op = 0;
  std::uint8_t quantisation = 0;
  std::uint8_t retry = 0;
  std::uint8_t padding = 0;
  std::uint16_t root = 0;
  std::uint32_t arrays = 0;
  std::uint32_t layout = 0;  // CRC over every array's dtype and size
  std::uint64_t count = 0;
  std::uint64_t bytes = 0;
  std::uint64_t step = no_step;  // and `call`: which call on its tag this is, as every member counts
  std::uint32_t call = 0;
  std::uint32_t padding_2 = 0;

  std::uint32_t fingerprint() const { return crc32c(this, sizeof *this); }
};
static_assert(sizeof(Descriptor) == 48 && std::is_trivially_copyable_v<Descriptor>);

// Control and bulk connections: u32 length (of kind and body), u8 kind, body. See ringfold/wire/frames.py. Blocks and
// filler have their place on bulk connections only, heartbeats, Done and evidence on control connections only.
enum class ControlFrame : std::uint8_t { message = 0, heartbeat = 1, done = 2, evidence = 3, block = 4, filler = 5 };
inline constexpr std::size_t control_head_bytes = 5;
inline constexpr std::size_t max_handshake_bytes = 16 * 1024;
inline constexpr std::size_t max_control_bytes = 64 * 1024 * 1024;
inline constexpr std::size_t max_bulk_bytes = 16 * 1024 * 1024;  // a message or a block of a bulk connection
inline constexpr std::size_t max_filler_bytes = 1024 * 1024;

// Appends plain values to a byte buffer, and reads them back with a bound.
template <typename Bytes, typename T>
void put(Bytes& out, T value) {
  static_assert(std::is_trivially_copyable_v<T>);
  const std::size_t at = out.size();
  out.resize(at + sizeof value);
  std::memcpy(out.data() + at, &value, sizeof value);
}

class Reader {
 public:
  Reader(const std::byte* at, std::size_t bytes) : at_(at), left_(bytes) {}
  template <typename T>
  bool get(T& value) {
    if (left_ < sizeof value) return false;
    std::memcpy(&value, at_, sizeof value);
    at_ += sizeof value;
    left_ -= sizeof value;
    return true;
  }
  bool skip(std::size_t bytes) {
    if (left_ < bytes) return false;
    at_ += bytes;
    left_ -= bytes;
    return true;
  }
  const std::byte* at() const { return at_; }
  std::size_t left() const { return left_; }

 private:
  const std::byte* at_;
  std::size_t left_;
};

}  // namespace ringfold
