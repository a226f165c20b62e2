// The shell around a probe core: one UDP socket, one thread, and the kernel's stamps.
//
// The thread wakes at the core's instants, reads all that came (packets, and from the error queue the stamps of what
// was sent), looks at the clocks once, and sends all that is due. While there is nothing to do it sleeps until
// something comes. The mutex guards the core and is never held in a system call, so that a rotation does not wait for
// one.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ringfold/probe.hpp"

namespace ringfold::probe {

struct Settings {
  Node node = 0;
  std::string host;        // a literal address of this host
  std::uint16_t port = 0;  // 0: any
  Ns anchor = 0, offset = 0;
  std::int64_t drift_ppb = 0;
  bool user_stamps = false;  // do without the kernel's
};

struct Neighbour {
  Node node = 0;
  std::string host;
  std::uint16_t port = 0;
};

struct Stats {
  CoreStats core;
  std::uint64_t sent = 0, send_errors = 0, would_block = 0, wakes = 0, icmp_errors = 0, resyncs = 0, clock_bends = 0;
  Ns cpu = 0;
  double clock_noise = 0;
  bool user_stamps = false;
};

Ns raw_now();

class Prober {
 public:
  // Binds the socket and starts the thread; throws std::runtime_error with the reason.
  explicit Prober(Settings settings);
  ~Prober();
  Prober(const Prober&) = delete;
  Prober& operator=(const Prober&) = delete;

  std::uint16_t port() const { return port_; }
  // Throws std::invalid_argument for what cannot be a neighbour; then everything is as before.
  void configure(const Key& key, const std::vector<Neighbour>& out, const std::vector<Neighbour>& into);
  void resume(Ns gap, Ns pause);
  void pause();
  std::vector<Window> rotate();
  std::vector<Window> so_far();
  std::vector<Window> peek(std::size_t most);
  void rename(Node node);
  Stats stats();
  Ns to_node(Ns raw) const { return virtual_clock(raw, settings_.anchor, settings_.offset, settings_.drift_ppb); }
  // CLOCK_REALTIME minus the node's clock.
  Ns utc() const;
  // As if the host's time of day had been set forward by so much.
  void pretend_step(Ns step) { pretended_.fetch_add(step); }

  void shutdown();
  // Around a fork, so that the child's copy is consistent. The child closes the socket.
  void before_fork() { mutex_.lock(); }
  void forked_parent() { mutex_.unlock(); }
  void forked_child();

 private:
  struct Io;  // what only the thread touches

  Endpoint endpoint(const Neighbour& neighbour) const;
  std::vector<Link> links(const std::vector<Neighbour>& neighbours) const;
  void open_socket();
  void run();
  void wait(std::optional<Ns> due);
  void drain_packets();
  void drain_stamps();
  void look_at_clocks();
  void judge_stamps();
  void send_all();
  void publish();
  void wake();

  Settings settings_;
  std::uint16_t port_ = 0;
  int family_ = 0, socket_ = -1, wake_ = -1;
  std::mutex mutex_;
  Core core_;
  Stats counts_;  // under the mutex; the core's own part is filled in when asked
  std::atomic<Ns> pretended_{0};
  bool stopping_ = false, forked_ = false;
  std::unique_ptr<Io> io_;
  std::thread thread_;
};

}  // namespace ringfold::probe
