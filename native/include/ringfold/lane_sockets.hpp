// The lanes of one channel: what the thread that drives the channel reads and writes. This is the seam between lanes
// and what carries them: a TCP socket, or a pipe in shared memory beside a Unix socket. All of them are in an epoll
// set.
//
// Who may touch it: the thread that may touch the channel. A lane that the channel has lost stays here until the engine
// closes it (Channel::take_closing).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ringfold/channel.hpp"
#include "ringfold/life.hpp"
#include "ringfold/shm_pipe.hpp"

namespace ringfold {

// A connection's socket. Where it has a pipe, its lane goes through that, once it is a lane. Then the socket wakes the
// other side, with any byte, and its end is the other process's.
struct Socket {
  int fd = -1;
  ConnId conn = 0;
  bool connecting = false;
  bool reading = true;
  bool blocked = false;  // the kernel takes no more: wait for EPOLLOUT
  bool armed = false;    // EPOLLOUT is enabled
  int unsent = 0;        // how much the kernel may hold unsent, where it was limited
  Ns deadline = 0;
  std::unique_ptr<ShmPipe> pipe{};
  std::shared_ptr<const LifeView> life{};  // of the process at the other end of the pipe; nullptr: unknown
  bool offers = false;                     // the pipe: the other side has not answered yet
  bool direct = false;                     // a direct lane
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
  // In the child of a fork: the descriptors are closed, and the pipes were not inherited.
  void forked_child();

  // Moves what can be moved without waiting, of each lane in its turn, until `stops` is not 0. True: something moved.
  bool poll(Ns now, const std::atomic<int>& stops);
  // Only those in shared memory: a pipe that is not asleep is no event.
  void poll_pipes(Ns now);
  bool flush_dirty(Ns now);
  void on_ready(ConnId conn, std::uint32_t events, Ns now);

  // Before waiting in epoll: only then EPOLLOUT is enabled, and pipes are to wake this side; while driving, trying is
  // cheaper. False: there is something to do first.
  bool arm();
  void disarm();
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
  bool read(Socket& socket);
  bool read_pipe(Socket& socket);
  bool flush(Socket& socket, Ns now);
  bool flush_pipe(Socket& socket, Ns now);
  void ring(Socket& socket);
  void watch(Socket& socket) const;

  Channel& channel_;
  const int epoll_;
  std::vector<Socket> sockets_;  // they are few
  Ns last_look_ = 0, last_ack_check_ = 0;
  std::uint32_t polls_ = 0;
};

}  // namespace ringfold
