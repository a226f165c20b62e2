// The control connection to the master, as far as time is concerned: heartbeats, their echoes, and silence.
//
// Both sides number their heartbeats and repeat the last number that they have received. So the master's silence shows,
// and also that this peer is not heard any more. Behind a large message heartbeats and echoes wait: the progress of its
// bytes counts instead.
//
// It belongs to the core: see there who may touch it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "ringfold/frame.hpp"

namespace ringfold {

class ControlChannel {
 public:
  bool is_open() const { return conn_ != 0; }
  ConnId conn() const { return conn_; }
  Ns dead_after() const { return dead_after_; }
  void open(Ns now, ConnId conn, Ns heartbeat, Ns dead_after);
  void close() { conn_ = 0; }

  void frame_came(Ns now) { last_received_ = now; }
  // Bytes of a large message of the master's, or of our own, have come or gone.
  void is_receiving(Ns now) { last_received_ = last_echoed_ = now; }
  void is_sending(Ns now) { last_echoed_ = now; }
  // What the kernel reports about our bytes.
  void acknowledged(Ns now, std::uint64_t sent_total, std::uint64_t unacknowledged);
  // False: not a heartbeat.
  bool on_heartbeat(Ns now, const std::byte* body, std::size_t bytes);
  // This process slept for so long: nothing is overdue because of it.
  void shift(Ns gap);

  bool is_due(Ns now) const { return is_open() && now >= next_; }
  Ns next_deadline() const { return is_open() ? next_ : 0; }
  // The number of the next heartbeat, and what it repeats.
  std::pair<std::uint64_t, std::uint64_t> beat(Ns now);
  // For how long the master has been silent, once when it is too long.
  std::optional<Ns> new_silence(Ns now);
  // The last echo is overdue: are the bytes acknowledged, at least?
  bool is_echo_late(Ns now) const { return is_open() && now - last_echoed_ > 2 * heartbeat_; }

 private:
  ConnId conn_ = 0;
  Ns heartbeat_ = 0, dead_after_ = 0, next_ = 0, last_received_ = 0, last_echoed_ = 0;
  std::uint64_t number_ = 0, received_number_ = 0, echoed_number_ = 0, acknowledged_total_ = 0;
  bool silence_reported_ = false;
};

}  // namespace ringfold
