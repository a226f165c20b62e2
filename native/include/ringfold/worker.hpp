// The worker of a channel: a thread that sends, receives, checks and reduces what the channel carries.
//
// Its lock is for driving the channel, or changing it. The worker holds it while it works, and lets go of it between
// two lanes when another thread wants it (`stop`). So a channel stands still within the time that one read and its
// segments take.
//
// What the core has decided for the channel is posted as a command. The worker carries it out before it moves anything
// else; if the worker is asleep, the thread that posts does it.
//
// A worker never waits for the engine's mutex while it holds its lock: what its channel reports it delivers without it.
// Nothing to move: it looks for a while, then sleeps until a socket is ready or `go_on` has something for it.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>

#include "ringfold/channels.hpp"
#include "ringfold/lane_sockets.hpp"
#include "ringfold/mailbox.hpp"

namespace ringfold {

// Lock a mutex that its holder is asked to give up: it comes free sooner than a sleeper would be woken.
void lock_soon(std::mutex& mutex);

class Worker {
 public:
  // It stands still until go_on(). What the channel reports about ops is left in `reports`, under the worker's lock.
  // After that, and when the channel wants the core for something that concerns other channels, `settle` is called from
  // the worker's thread, without its lock. Throws std::runtime_error, or std::system_error, where there is no
  // descriptor or no thread left.
  Worker(Channel& channel, Ns spin, Mailbox<Report>& reports, std::function<void(bool concerns_others)> settle);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // The lanes, and the channel: for who has stopped the worker.
  LaneSockets& lanes() { return lanes_; }

  // A command for the channel. By one thread at a time, which has not stopped the worker.
  void post(ChannelCommand command);
  // Carries out what was posted: for who has stopped the worker. False: nothing was. Where there is no memory for it,
  // the process ends, as it does when that happens to the worker.
  bool execute_commands() noexcept;

  // Two steps, so that several workers come to a stop at the same time. After wait_until_stopped() it stands still
  // until go_on().
  void stop() { stops_wanted_.fetch_add(1); }
  void wait_until_stopped();
  // `crowded`: there are more threads like this one than cores.
  void go_on(bool crowded);

  // Ends the thread. The sockets stay open.
  void shutdown();
  // In the child of a fork there is no such thread.
  void forked_child();

 private:
  void work();
  void report(std::unique_lock<std::mutex>& lock);
  void take_lock();
  void yield_lock(std::unique_lock<std::mutex>& lock);
  bool sleep(std::unique_lock<std::mutex>& lock);
  bool has_more_to_do() const;
  void wake();

  const int epoll_, wake_;
  LaneSockets lanes_;
  const Ns spin_;
  Mailbox<Report>& reports_;
  const std::function<void(bool concerns_others)> settle_;
  Mailbox<ChannelCommand> commands_;
  std::mutex mutex_;
  std::atomic<int> stops_wanted_{0};
  bool is_asleep_ = false, is_called_ = false, is_crowded_ = false, is_stopping_ = false, forked_ = false;
#ifdef RINGFOLD_PLANTED
  bool goes_on_ = false;  // a planted bug: it was to stop, and was not waited for
#endif
  std::thread thread_;
};

}  // namespace ringfold
