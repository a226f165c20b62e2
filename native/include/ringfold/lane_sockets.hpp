// The lanes of one channel, as sockets in an epoll set: what the thread that drives the channel reads and writes.
//
// Who may touch it: the thread that may touch the channel. A lane that the channel has lost stays here until the engine
// closes it (Channel::take_closing).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ringfold/channel.hpp"

namespace ringfold {

struct Socket {
  int fd = -1;
  ConnId conn = 0;
  bool connecting = false;
  bool reading = true;
  bool blocked = false;  // the kernel takes no more: wait for EPOLLOUT
  bool armed = false;    // EPOLLOUT is enabled
  int unsent = 0;        // how much the kernel may hold unsent, where it was limited
  Ns deadline = 0;
};

class LaneSockets {
 public:
  LaneSockets(Channel& channel, int epoll) : channel_(channel), epoll_(epoll) {}
  LaneSockets(const LaneSockets&) = delete;
  LaneSockets& operator=(const LaneSockets&) = delete;
  ~LaneSockets() { close_all(); }

  Channel& channel() const { return channel_; }

  // A socket that has become a lane. `congestion` as in EngineSettings. A lane that others can replace is given up when
  // it carries nothing, but not before the master, which is given `dead_after`, would have evicted the neighbour.
  void add(Socket socket, const LaneInfo& lane, const std::string& congestion, Ns dead_after);
  // False: it is none of these.
  bool close(ConnId conn);
  void close_all();

  // Moves what can be moved without waiting, of each lane in its turn, until `stops` is not 0. True: something moved.
  bool poll(Ns now, const std::atomic<int>& stops);
  bool flush_dirty(Ns now);
  void on_ready(ConnId conn, std::uint32_t events, Ns now);

  // Before waiting in epoll: EPOLLOUT is enabled only then; while driving, trying to write is cheaper.
  void arm();
  // Whether something waits that a sleeper in epoll_wait would not be woken for.
  bool has_unsent() const;
  // How long to wait in epoll at most, in milliseconds; -1: for ever. No event marks the tail of a slow lane: while
  // something is in flight, the lanes are polled.
  int longest_wait_ms() const;
  // Lanes that were held may be read again.
  void resume_reading();
  // What the kernel reports about the lanes: now and then.
  void look(Ns now);

 private:
  Socket* find(ConnId conn);
  bool read(Socket& socket, Ns now);
  void watch(Socket& socket) const;

  Channel& channel_;
  const int epoll_;
  std::vector<Socket> sockets_;  // they are few
  Ns last_look_ = 0, last_ack_check_ = 0;
};

}  // namespace ringfold
