// The shell around a Core: sockets and threads.
//
// Channel 0, all connections that are no lanes, and the ops belong to the engine's mutex: who has it drives them. Every
// other channel has a worker with a lock of its own (worker.hpp). Ops begin and end while the workers go on: the core's
// commands for a channel are posted to its worker, and what a channel reports about ops is left in a mailbox, which
// the driving thread looks at between two rounds. Whatever else concerns more than one channel is done while all
// workers stand still, under the mutex and all their locks, with nothing left in any mailbox (Standstill): epochs,
// lanes, heartbeats. Such a stop is short, so the core is written as if there was one thread. The order of locks: the
// mutex, then those of the workers by channel.
//
// Driving: a synchronous call drives from the calling thread (no hand-off, no wake-up). Otherwise the service thread
// drives. While a synchronous call drives, and for a moment after it, the service thread stays parked, so that a loop
// of calls never pays for waking it. So every call, however short, must keep the clock ticking: the driver polls all
// sockets and ticks at least every `tick_every`. A driver that gets no core, or not the mutex, is late with that; then
// the parked thread does it. Python is never entered from here, and the GIL is never taken under the mutex.
//
// The driving thread computes, and so does one that makes workers stand still. All peers must compute the same bits:
// every thread does so under a FloatEnvironment, whatever the program or another library has set in it.
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ringfold/clock.hpp"
#include "ringfold/core.hpp"
#include "ringfold/float_environment.hpp"
#include "ringfold/lane_sockets.hpp"
#include "ringfold/life.hpp"
#include "ringfold/path_hints.hpp"
#include "ringfold/worker.hpp"

namespace ringfold {

struct EngineSettings {
  Ns spin = 300'000;
  int same_host_buffer = 1 << 20;         // bytes; 0: the kernel's own tuning on one host too
  std::size_t max_unauthenticated = 256;  // accepted connections without a role; more wait in the kernel's backlog
  std::string congestion = "auto";        // control of the lanes: "auto", "host", or one that the kernel knows
};

class Engine : private ChannelDriver {
 public:
  explicit Engine(EngineSettings settings);
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Binds the data port: the first free one of `tries` ports from `first_port` on (0: any). Returns it; throws
  // std::runtime_error.
  std::uint16_t listen(const std::string& host, std::uint16_t first_port, int tries);
  // Listens for peers of this host, too, which can then share memory with this one. Returns the name to dial (it is
  // known in this network namespace, and cannot be guessed); empty: that is not possible here.
  std::string listen_here();
  // Begins to connect to a literal address; "opened" or "closed" follows. `source` is the address to connect from,
  // where it is one of this machine's (behind NAT the advertised one is not). A peer with a name, as of listen_here(),
  // is tried there first, for a lane in shared memory; where it is not to be found, the address counts. One that will
  // carry little gets little memory.
  ConnId dial(const std::string& host, std::uint16_t port, Ns timeout, const std::string& source = {},
              const std::string& name = {}, bool carries_little = false);

  // Runs `command(core, now)` while all stands still, then sends what it queued and wakes the threads that wait for it.
  template <typename Command>
  auto with_core(Command command) {
    Turn turn(*this);
    return command(core_, monotonic_now());
  }

  // The same without the consequences: for looking.
  template <typename Look>
  auto look(Look look) {
    const std::unique_lock lock = take_mutex();
    const Standstill still(*this);
    return look(core_);
  }

  // The ops while channels go on: for looking at them, and for forgetting them.
  template <typename Look>
  auto look_at_ops(Look look) {
    const std::unique_lock lock = take_mutex();
    return look(core_.ops());
  }

  // Advice of the host's agent about the paths to a peer: where it is. It is in force until forget_hints, while the
  // agent is alive and the place is still this flow's.
  void follow_hints(PeerId peer, const std::string& file, std::uint32_t slot, std::uint32_t generation);
  void forget_hints(PeerId peer);

  // Starts a guardian of this process (guardian.hpp), with a connection to the master and what it is to send there.
  bool start_guardian(const std::string& program, int master, const std::string& message);

  std::optional<Event> next_event(Ns timeout);
  void wake();

  // An op that the service thread will drive, and one that the caller is about to run().
  std::uint64_t submit(OpSpec spec);
  std::uint64_t submit_to_drive(OpSpec spec);
  // Drives until the op is finished or `most` has passed; true when it is finished.
  bool run(std::uint64_t op, Ns most);

  void shutdown();
  // Around a fork, so that the child's copy is consistent. The parent goes on; the child closes every descriptor, so
  // that it does not keep a dead parent's connections open.
  void before_fork();
  void forked_parent();
  void forked_child();

 private:
  // What epoll calls the two descriptors that are no connection.
  static constexpr std::uint64_t listener_key = ~std::uint64_t{0};
  static constexpr std::uint64_t wake_key = ~std::uint64_t{1};
  static constexpr std::uint64_t local_listener_key = ~std::uint64_t{2};
  static constexpr std::uint64_t greeter_bit = std::uint64_t{1} << 62;  // and the descriptor

  // While this lives, no worker drives a channel, and no command is outstanding. The mutex is held.
  class Standstill {
   public:
    explicit Standstill(Engine& engine);
    ~Standstill();
    Standstill(const Standstill&) = delete;
    Standstill& operator=(const Standstill&) = delete;

   private:
    friend class Engine;

    Engine& engine_;
    std::size_t workers_;  // that stand still, those that are made meanwhile included
  };

  // The mutex, fair against a driver that holds it most of the time.
  std::unique_lock<std::mutex> take_mutex();

  // A command's turn with the core: while all stands still, or while workers go on.
  enum class During { standstill, work };
  class Turn {
   public:
    explicit Turn(Engine& engine, During during = During::standstill);
    ~Turn();

   private:
    const FloatEnvironment arithmetic_;  // a command may commit an op, which computes
    Engine& engine_;
    std::unique_lock<std::mutex> lock_;
    std::optional<Standstill> still_;
  };

  // A call drives while this lives, however it ends. The mutex is held at both ends.
  class Driving {
   public:
    explicit Driving(Engine& engine) : engine_(engine) {
      engine_.driving_.store(true);
      engine_.attended_.store(true);
    }
    ~Driving();

   private:
    Engine& engine_;
  };

  // engine.cpp: driving
  void service();
  bool poll_hot(Ns now);
  void poll_all(std::unique_lock<std::mutex>& lock, int timeout_ms);
  void on_ready(const epoll_event& event, Ns now);
  void on_events(const epoll_event* events, int count, Ns now);
  void read_some(Socket& socket, Ns now);
  bool flush_messages(Socket& socket, Ns now);
  bool flush_dirty(Ns now);
  bool arm();
  bool post(std::uint32_t channel, ChannelCommand& command) override;
  void settle_channels(bool concerns_others);
  void route(const Standstill& still);
  bool take_reports();
  bool is_resting();
  void settle_if_wanted();
  void settle_sockets(Standstill& still);
  void resume_reading();
  void take_lane(const LaneInfo& lane, Standstill& still);
  Worker& worker_of(std::uint32_t channel, Standstill& still);
  void close_socket(ConnId conn);
  void accept_all();
  void accept_here();
  void on_greeting(int fd);
  bool dial_here(const std::string& name, ConnId conn, Ns deadline, bool carries_little);
  void on_answer(Socket& socket, Ns now);
  void pause_listeners();
  void watch_listeners(std::uint32_t events);
  void finish_connect(Socket& socket, Ns now);
  void adopt(int fd, ConnId conn, bool connecting, Ns deadline);
  void tick(Ns now);
  void look_at_lanes(Ns now);
  void look_at_hints(Ns now, const Standstill& still);
  int poll_timeout_ms() const;
  Ns spin_for(const Op& op) const;
  Ns burst_left(Ns now) const;
  void notify_waiters();
  void yield_mutex(std::unique_lock<std::mutex>& lock);
  bool has_unsent() const;
  bool is_crowded() const;
  void wait_a_moment(std::unique_lock<std::mutex>& lock, Ns idle);

  const EngineSettings settings_;
  const std::uint32_t cores_;
  std::mutex mutex_;
  std::condition_variable events_ready_, ops_ready_, service_wanted_;
  const std::unique_ptr<Life> life_;  // nullptr: not possible here; held by the service thread
  FollowedHints hints_;
  Core core_;
  int epoll_, wake_, listener_ = -1, local_listener_ = -1;
  std::map<int, Ns> greeters_;  // descriptors of accepted peers of this host that have sent nothing yet, and until when
  std::map<ConnId, Socket> sockets_;              // of connections that are no lanes
  LaneSockets lanes_;                             // of channel 0: tried directly while a call drives
  std::vector<std::unique_ptr<Worker>> workers_;  // of the other channels, in their order
  Mailbox<Report> reports_;                       // of workers, about ops
  std::atomic<int> turns_wanted_{0};
  std::atomic<bool> driving_{false};
  std::atomic<bool> attended_{false};  // somebody looks at reports_ again before it sleeps
  std::atomic<int> in_epoll_{0};
  std::atomic<bool> notified_{false};  // a waiter was woken and has not had the mutex yet
  bool is_still_ = false, wanted_ = false, stopping_ = false, forked_ = false;
  int op_waiters_ = 0, event_waiters_ = 0;
  std::uint64_t reported_finished_ = 0;
  Ns last_drive_ = 0, last_tick_ = 0, last_hint_look_ = 0, listener_paused_until_ = 0;
  Ns burst_began_ = 0, last_of_burst_ = 0;  // submissions of ops that are cut among channels
  std::optional<Standstill> for_fork_;
  std::thread thread_;
};

}  // namespace ringfold
