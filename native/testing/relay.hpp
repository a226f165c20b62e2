// Cables with latency and loss: packets that arrive late, and packets that never arrive.
//
// A *cable* joins two descriptors that give and take one packet per call (TAP devices, in the lab: one in a host's
// network namespace, one in the switch's). It has a *line* for each direction. A line holds every packet back for its
// delay, never lets one overtake another, and loses each with a probability, decided by a generator with a seed: the
// same packets meet the same fate. It has no rate; the shapers of the devices in front of it have.
//
// The line knows neither clock nor descriptor. The relay around it is one thread for all cables of a process.
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

namespace ringfold::relay {

using Ns = std::int64_t;

struct LineStats {
  std::uint64_t packets = 0, bytes = 0;  // taken in, the lost ones included
  std::uint64_t lost = 0;                // as configured
  std::uint64_t overflowed = 0;          // more in flight than the line holds
  std::uint64_t refused = 0;             // the far end did not take them (its interface is down)
  std::uint64_t in_flight = 0;           // bytes, now
  Ns latest = 0;                         // the most that a packet was handed over after its time
};

class Line {
 public:
  explicit Line(std::uint64_t seed, std::size_t capacity = std::size_t{64} << 20) : state_(seed), capacity_(capacity) {}

  // For packets from now on. Those in flight keep their time, and the order stays.
  void set(Ns delay, double loss) {
    delay_ = delay;
    loss_ = loss;
  }
  void push(Ns now, std::span<const std::uint8_t> packet);
  // When the next packet is to be handed over; nothing if none is in flight.
  std::optional<Ns> due() const;
  // The next packet, if its time has come. It stays until it is popped.
  std::optional<std::span<const std::uint8_t>> front(Ns now) const;
  void pop(Ns now, bool taken);
  const LineStats& stats() const { return stats_; }

 private:
  struct Packet {
    Ns due = 0;
    std::vector<std::uint8_t> bytes;
  };

  bool is_lost();

  std::uint64_t state_;
  std::size_t capacity_;
  Ns delay_ = 0, last_due_ = 0;
  double loss_ = 0;
  std::deque<Packet> packets_;
  std::vector<std::vector<std::uint8_t>> spare_;
  LineStats stats_;
};

class Relay {
 public:
  // Starts the thread; throws std::runtime_error with the reason.
  Relay();
  ~Relay() { close(); }
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // Joins two descriptors, which the relay duplicates. `loss` applies from `near` to `far`; nothing is lost in the
  // other direction. The number of the cable.
  std::size_t add(int near, int far, Ns delay, double loss, std::uint64_t seed);
  // Throws std::out_of_range for a number that is no cable.
  void set(std::size_t cable, Ns delay, double loss);
  // There, and back.
  std::pair<LineStats, LineStats> stats(std::size_t cable);
  // Ends the thread and closes the descriptors; what is in flight is lost. Safe to call twice, and in a child.
  void close();

 private:
  struct Direction {
    int from, to;
    Line line;
    bool is_gone = false;
  };
  struct Cable {
    int near, far;
    Direction there, back;
  };

  void run();
  void turn(std::vector<std::uint8_t>& buffer);
  void mark_gone(const std::vector<pollfd>& polled);
  void wake();

  std::mutex mutex_;  // held for a whole turn of the thread, not while it waits
  std::vector<std::unique_ptr<Cable>> cables_;
  bool stopping_ = false;
  int wake_ = -1, alarm_ = -1;
  pid_t owner_ = 0;
  std::thread thread_;
};

}  // namespace ringfold::relay
