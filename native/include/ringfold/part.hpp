// The part of an op that one channel carries: the same slice of every chunk, and its progress through the plan.
//
// In place, `source` and `target` are the same memory, and every byte is saved to the op's backup when it is first
// overwritten, so that an abort can put it back at any time until the commit.
//
// A quantised op has the same plan and the same offsets, but its segments travel encoded and are therefore shorter. A
// segment's encoding is that of its pieces, one after the other: blocks never reach into another array. Encoded
// segments belong to what is queued for sending, not to the caller's memory.
//
// A value has a count of contributors, which travels with each segment; the owner of the final value divides by it. A
// value without contributors has no bytes and travels as an empty segment; where it is final it is written as zeros.
// What is reduced with it is passed on unchanged, so the bits are those of a reduction by the contributors alone.
//
// Where the op has blocks (`blocks.hpp`), a segment is sent, reduced or overwritten only when its range is filled. What
// comes before that is copied, and waits.
//
// A part belongs to its channel: only the thread that drives the channel touches it, or one that has stopped the
// channel. Of its op it reads what does not change while the op runs: what was asked, its name, and where the backup
// is. Parts of one op never share a byte of memory that they write.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ringfold/op_spec.hpp"

namespace ringfold {

class Op;

inline constexpr std::size_t max_paths = 16;

// A segment that may be sent now.
struct Sendable {
  std::uint16_t stage = 0;
  bool own = false;          // the caller's bytes, not a value that was received
  std::uint32_t length = 0;  // of a value as it travels
  std::uint64_t offset = 0;
  std::uint32_t crc = 0;
  bool crc_known = false;
  Payload encoded{};               // quantised ops: the segment as it travels; own ones are encoded when they are taken
  bool again = false;              // it has been sent before, on a lane that is lost
  std::uint32_t contributors = 1;  // 0: there is no value, and nothing travels but the header

  std::uint32_t travelling_bytes() const { return contributors > 0 ? length : 0; }
};

// A contiguous piece of memory inside a segment.
struct Piece {
  const std::byte* at;
  std::size_t bytes;
};

// First in, first out. Unlike a std::deque it has no memory until something is in it: most ops are small.
template <typename T>
class Fifo {
 public:
  bool empty() const { return first_ == items_.size(); }
  std::size_t size() const { return items_.size() - first_; }
  const T& front() const { return items_[first_]; }
  void push(T item) { items_.push_back(std::move(item)); }
  T pop() {
    T item = std::move(items_[first_++]);
    if (first_ >= items_.size() / 2 && (first_ == items_.size() || first_ >= 64)) {
      items_.erase(items_.begin(), items_.begin() + static_cast<std::ptrdiff_t>(first_));
      first_ = 0;
    }
    return item;
  }

 private:
  std::vector<T> items_;
  std::size_t first_ = 0;
};

class OpPart {
 public:
  // A small op travels inside Done: its part has an empty plan.
  OpPart(const Op& op, std::uint32_t channel, Plan plan);
  OpPart(const OpPart&) = delete;
  OpPart& operator=(const OpPart&) = delete;

  const Op& op;
  const std::uint32_t channel;
  // What goes to, and comes from, the member at one side.
  struct SideState {
    bool peer_ready = false;  // it has called the op: no eager limit any more
    bool ready_sent = false;  // and has received Ready of this peer
    std::size_t eager_sent = 0;
    std::size_t early_sent = 0;                       // of these, before it was known to have called the op
    std::size_t early_received = 0;                   // payload that came before Ready was sent to it
    Ns arriving = 0;                                  // how long its segments took, each from first to last byte
    std::array<std::uint64_t, max_paths> assigned{};  // bytes by path
    Fifo<Sendable> own{}, forwards{}, again{};
  };
  std::vector<SideState> sides;  // as many as the plan uses, the ring's two at least
  std::uint64_t sent_bytes = 0, received_bytes = 0;
  // When payload was first and last handed to the transport, and came; for how long some of it waited for the
  // transport, in all; and for how long segments were arriving from the member with which that took longest. Kept by
  // the channel, for people: nothing is decided by it.
  struct Times {
    Ns out_first = 0, out_last = 0, in_first = 0, in_last = 0, blocked = 0, arriving = 0;
    PeerId arriving_from = 0;
  } times;
  // Whether what is passed on will need its CRC. Where it was not computed and is needed after all, sending computes
  // it.
  bool checksums = true;

  const Plan& plan() const { return plan_; }
  // Every segment is in. It stays so, and is reported to the op once (see Channel).
  bool is_finished() const { return received_ == plan_.receive_segments; }
  // How many ranks contributed to the final value, once a segment of it is here.
  std::optional<std::uint32_t> final_count() const { return final_count_; }

  bool has_sendable(Side to) const {
    if (to >= sides.size()) return false;
    const SideState& side = sides[to];
    return !side.again.empty() || !side.forwards.empty() || (!side.own.empty() && is_here(side.own.front()));
  }
  const Sendable& next_sendable(Side to) const {
    const SideState& side = sides[to];
    if (!side.again.empty()) return side.again.front();
    return side.forwards.empty() ? side.own.front() : side.forwards.front();
  }
  Sendable take_sendable(Side to);
  // About how many bytes may be sent now.
  std::size_t sendable_bytes(Side to) const {
    const SideState& side = sides[to];
    return (side.again.size() + side.forwards.size() + side.own.size()) * plan_.segment_bytes;
  }
  void resend(Side to, Sendable item);
  // Whether the segment's memory holds a later value by now. That value came around the ring, so the neighbour had the
  // segment, whether or not it has reported that.
  bool superseded(const Sendable& item) const;
  // The memory behind a sendable segment, in order.
  void pieces(const Sendable& item, std::vector<Piece>& out) const;
  std::uint32_t crc_of(const Sendable& item) const;

  enum class Applied { yes, duplicate, invalid };
  // Applies one received segment, with its CRC if it is known: reduces or overwrites, saves what was there, and queues
  // it for the next hop.
  Applied apply(Side from, std::uint16_t stage, std::uint64_t offset, const std::byte* payload, std::uint32_t length,
                std::optional<std::uint32_t> crc, std::uint32_t contributors, bool ignore_bitmap = false);

  // Whether blocks are still to be filled, as far as it has looked.
  bool is_filling() const { return is_filling_; }
  // Looks again, and applies what has waited for a block. False: nothing has changed.
  bool look_at_blocks();

  // Puts back every byte that was overwritten in place.
  void restore();

 private:
  // A segment that came before the one it is to be reduced into, or before the memory for it is filled.
  struct Early {
    std::uint16_t stage;
    std::uint64_t offset;
    std::optional<std::uint32_t> crc;
    std::uint32_t contributors;
    Bytes payload;
  };

  // What a received segment brings, and how many ranks its value is of with what is here.
  struct Incoming {
    std::uint64_t offset;
    const std::byte* payload;
    std::uint32_t length;              // of a value
    std::optional<std::uint32_t> crc;  // it came without one over a lane in shared memory
    std::uint32_t contributors;
    std::uint32_t here;  // contributors of the value that it is reduced into

    std::uint32_t together() const { return contributors + here; }
  };

  void queue_own();
  void pass_on(const Receive& receive, const Incoming& in, std::optional<std::uint32_t> crc, const Payload& encoded,
               std::uint32_t contributors);
  void write(const Receive& receive, const Incoming& in);
  std::uint32_t write_span(const Receive& receive, const Incoming& in, const Span& span, std::size_t inside,
                           std::size_t at, std::size_t count);
  void write_quantised(const Receive& receive, const Incoming& in);
  bool count(const Receive& receive, std::uint16_t stage, const Incoming& in);
  std::uint32_t divisor(const Receive& receive, std::uint32_t contributors) const;
  bool quantised() const { return op_spec().scheme != quantize::Scheme::none; }
  // The part of the virtual range that the segment at `offset` of a chunk covers, and its length as it travels.
  std::size_t segment_end(std::int32_t chunk, std::size_t offset) const;
  std::uint32_t wire_bytes(std::size_t from, std::size_t to) const;
  void count_wire_bytes();
  Bytes encoded(std::size_t from, std::size_t to) const;
  void apply_early(std::uint16_t after, std::uint64_t offset);
  bool apply_next_filled();
  void apply_again(std::size_t early);
  bool must_wait(const Receive& receive, std::uint64_t offset) const;
  bool is_filled(std::size_t from, std::size_t to) const;
  bool is_here(const Sendable& own) const;
  void note_final(const Receive& receive, const Incoming& in);
  std::byte* work(std::size_t at) const;
  std::size_t bit_of(std::uint16_t stage, std::uint64_t offset) const;
  bool received(std::uint16_t stage, std::uint64_t offset) const;
  const OpSpec& op_spec() const;

  Plan plan_;
  std::vector<std::uint64_t> bitmap_;
  std::uint32_t received_ = 0;
  std::optional<std::uint32_t> final_count_;
  // By stage: contributors of the value here, as long as a later stage is reduced into it.
  std::vector<std::uint32_t> stage_counts_;
  std::vector<Early> early_;
  std::size_t filled_ = 0;  // blocks
  bool is_filling_ = false;
};

using PartPtr = std::shared_ptr<OpPart>;

}  // namespace ringfold
