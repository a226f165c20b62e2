// What the core reports to Python, and what it counts.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ringfold/op_log.hpp"
#include "ringfold/op_spec.hpp"

namespace ringfold {

struct Event {
  enum class Kind {
    opened,
    accepted,
    message,
    closed,
    link_lost,
    mismatch,
    op_timeout,
    op_cancelled,
    silent,
    blocks,
    sample,
    wake
  };
  Kind kind = Kind::wake;
  ConnId conn = 0;
  PeerId peer = 0;
  bool outgoing = false;
  bool direct = false;      // link_lost: of direct lanes
  bool died = false;        // link_lost: so has the neighbour's process, for certain
  std::uint32_t epoch = 0;  // mismatch, op_timeout, op_cancelled: in which the op ran
  std::uint64_t tag = 0;
  std::uint32_t sequence = 0;
  std::uint64_t milliseconds = 0;
  std::uint64_t batch = 0;  // blocks: the caller's number, and the indices of those with another hash
  std::vector<std::uint32_t> bad{};
  Ns elapsed = 0;  // sample: since the first filler; `bytes` of it had come by `counted`
  Ns counted = 0;
  std::uint64_t bytes = 0;
  std::string text{};
  Bytes body{};
  Bytes other{};
};

class EventQueue {
 public:
  void push(Event event) { events_.push_back(std::move(event)); }
  bool empty() const { return events_.empty(); }
  std::optional<Event> pop() {
    if (events_.empty()) return std::nullopt;
    Event event = std::move(events_.front());
    events_.pop_front();
    return event;
  }

 private:
  std::deque<Event> events_;
};

struct Stats {
  std::uint64_t committed = 0, aborted = 0, restarted = 0;
  std::uint64_t sent_bytes = 0, received_bytes = 0;
  std::uint64_t duplicates = 0, drained = 0;
  std::uint64_t reissued = 0, lanes_lost = 0;
  std::uint64_t lane_violations = 0;  // links that were dropped because a neighbour broke the protocol
  std::uint64_t memory_bytes = 0;     // of the sent ones, those through shared memory
  // Of committed ops: bytes of the program's arrays, and nanoseconds from the start to the end, until anything of
  // another peer came, and while the transport took no payload.
  std::uint64_t op_bytes = 0, busy = 0, waited = 0, blocked = 0;
  std::array<std::uint64_t, duration_classes> durations{};

  Stats& operator+=(const Stats& other) {
    committed += other.committed;
    aborted += other.aborted;
    restarted += other.restarted;
    sent_bytes += other.sent_bytes;
    received_bytes += other.received_bytes;
    duplicates += other.duplicates;
    drained += other.drained;
    reissued += other.reissued;
    lanes_lost += other.lanes_lost;
    lane_violations += other.lane_violations;
    memory_bytes += other.memory_bytes;
    op_bytes += other.op_bytes;
    busy += other.busy;
    waited += other.waited;
    blocked += other.blocked;
    for (std::size_t i = 0; i < durations.size(); ++i) durations[i] += other.durations[i];
    return *this;
  }
};

}  // namespace ringfold
