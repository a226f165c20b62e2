#include "ringfold/worker.hpp"

#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <utility>

#include "engine/pause.hpp"
#include "ringfold/clock.hpp"
#include "ringfold/error_text.hpp"
#include "ringfold/float_environment.hpp"
#include "ringfold/planted.hpp"

namespace ringfold {
namespace {

constexpr std::uint64_t wake_key = ~std::uint64_t{0};
constexpr int pauses_before_yield = 200;
constexpr int yields_before_sleep = 200;

}  // namespace

void lock_soon(std::mutex& mutex) {
  for (int i = 0; i < pauses_before_yield; ++i) {
    if (mutex.try_lock()) return;
    pause_cpu();
  }
  for (int i = 0; i < yields_before_sleep; ++i) {
    if (mutex.try_lock()) return;
    ::sched_yield();
  }
  mutex.lock();
}

Worker::Worker(Channel& channel, Ns spin, Mailbox<Report>& reports, std::function<void(bool)> settle)
    : epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      lanes_(channel, epoll_),
      spin_(spin),
      reports_(reports),
      settle_(std::move(settle)) {
  epoll_event event{EPOLLIN, {.u64 = wake_key}};
  mutex_.lock();
  try {
    if (epoll_ < 0 || wake_ < 0 || ::epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event) != 0) {
      throw std::runtime_error("no descriptors for it: " + error_text(errno));
    }
    thread_ = std::thread([this] { work(); });
  } catch (...) {
    mutex_.unlock();
    for (const int fd : {epoll_, wake_}) {
      if (fd >= 0) ::close(fd);
    }
    throw;
  }
}

Worker::~Worker() {
  shutdown();
  if (forked_) return;
  for (const int fd : {wake_, epoll_}) ::close(fd);
}

// Whoever is awake looks at its commands before it sleeps. A sleeper is not woken for what takes a moment; the segments
// that came early are for its own thread.
void Worker::post(ChannelCommand command) {
  const bool is_begin = command.kind == ChannelCommand::Kind::begin;
  const PartPtr part = command.part;
  commands_.post(std::move(command));
  if (!mutex_.try_lock()) return;
  bool has_work = false;
  if (is_asleep_ && !is_called_) {
    is_called_ = has_work = is_begin && lanes_.channel().has_early(*part);
    if (!is_called_) {
      execute_commands();
      has_work = has_more_to_do();
    }
  }
  mutex_.unlock();
  if (has_work) wake();
}

// What it did not know of when it fell asleep: then others may have carried out commands for it.
bool Worker::has_more_to_do() const {
  const Channel& channel = lanes_.channel();
  return lanes_.has_unsent() || channel.wants_core() || channel.is_filling();
}

bool Worker::execute_commands() noexcept {
  const std::vector<ChannelCommand> commands = commands_.take();
  for (const ChannelCommand& command : commands) lanes_.channel().execute(command);
  return !commands.empty();
}

void Worker::take_lock() {
  lock_soon(mutex_);
  stops_wanted_.fetch_sub(1);
}

void Worker::wait_until_stopped() {
#ifdef RINGFOLD_PLANTED
  if (planted_in_engine.worker_goes_on) {
    goes_on_ = !mutex_.try_lock();
    stops_wanted_.fetch_sub(1);
    return;
  }
#endif
  take_lock();
}

void Worker::go_on(bool crowded) {
#ifdef RINGFOLD_PLANTED
  if (std::exchange(goes_on_, false)) return;
#endif
  is_crowded_ = crowded;
  const bool has_work = is_asleep_ && has_more_to_do();
  mutex_.unlock();
  if (has_work) wake();
}

void Worker::wake() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto n = ::write(wake_, &one, sizeof one);
}

void Worker::shutdown() {
  if (forked_) {
    if (thread_.joinable()) thread_.detach();
    return;
  }
  stop();
  take_lock();
  is_stopping_ = true;
  mutex_.unlock();
  wake();
  if (thread_.joinable()) thread_.join();
}

void Worker::forked_child() {
  forked_ = true;
  lanes_.forked_child();
  for (const int fd : {wake_, epoll_}) ::close(fd);
}

void Worker::yield_lock(std::unique_lock<std::mutex>& lock) {
  if (stops_wanted_.load() == 0) return;
  lock.unlock();
  while (stops_wanted_.load() > 0) ::sched_yield();
  lock_soon(mutex_);
  lock = std::unique_lock(mutex_, std::adopt_lock);
}

void Worker::work() {
  const FloatEnvironment arithmetic;
  std::unique_lock lock(mutex_);
  Ns idle_since = monotonic_now();
  while (!is_stopping_) {
    bool progressed = execute_commands();
    const Ns now = monotonic_now();  // what is sent now was called before
    progressed |= lanes_.poll(now, stops_wanted_);
    lanes_.look(now);
    if (lanes_.channel().wants_core()) {
      report(lock);
      progressed = true;  // who had the lock meanwhile may have left another report
    }
    if (progressed) {
      idle_since = now;
    } else if (now - idle_since >= spin_) {
      if (sleep(lock)) idle_since = monotonic_now() - spin_ / 2;
    } else if (is_crowded_ || now - idle_since >= yield_after) {  // what is waited for may need this core
      lock.unlock();
      ::sched_yield();
      lock.lock();
    } else {
      pause_cpu();
    }
    yield_lock(lock);
  }
}

// Reports go from one place to the other under the lock: a standstill finds them here or there.
void Worker::report(std::unique_lock<std::mutex>& lock) {
  const bool concerns_others = lanes_.channel().concerns_others();
  if (!concerns_others) {
    for (Report& each : lanes_.channel().take_reports()) reports_.post(std::move(each));
  }
  lock.unlock();
  settle_(concerns_others);
  lock.lock();
}

// True: something is ready.
bool Worker::sleep(std::unique_lock<std::mutex>& lock) {
  if (!lanes_.arm()) {
    lanes_.disarm();
    return true;
  }
  const int timeout = lanes_.longest_wait_ms();
  is_asleep_ = true;
  lock.unlock();
  epoll_event events[16];
  const int count = ::epoll_wait(epoll_, events, 16, commands_.has_items() ? 0 : timeout);
  lock.lock();
  is_asleep_ = is_called_ = false;
  lanes_.disarm();
  const Ns now = monotonic_now();
  for (int i = 0; i < count; ++i) {
    if (events[i].data.u64 == wake_key) {
      std::uint64_t times = 0;
      [[maybe_unused]] const auto n = ::read(wake_, &times, sizeof times);
    } else {
      lanes_.on_ready(static_cast<ConnId>(events[i].data.u64), events[i].events, now);
    }
  }
  return count > 0 || commands_.has_items();
}

}  // namespace ringfold
