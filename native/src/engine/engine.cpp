#include "ringfold/engine.hpp"

#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <utility>

#include "engine/pause.hpp"
#include "engine/tcp.hpp"
#include "ringfold/error_text.hpp"
#include "ringfold/guardian.hpp"

namespace ringfold {
namespace {

constexpr Ns millisecond = 1'000'000;
constexpr Ns tick_every = 10 * millisecond;
constexpr Ns driver_is_late = 3 * tick_every;    // since a tick: then any thread that has the mutex does it
constexpr Ns max_yield = millisecond / 5;        // for which a driver waits until others have had their turn
constexpr Ns hint_look_every = millisecond / 2;  // where workers have to stop for it
constexpr Ns parked_for = 10 * millisecond;      // how often a parked service thread looks whether it is needed
constexpr Ns parked_after_call = 2 * millisecond;
constexpr Ns longest_spin_on_paths = 20'000;
constexpr Ns within_burst = 50'000;    // between two submissions
constexpr Ns longest_burst = 300'000;  // for which channel 0 is left alone

std::uint32_t usable_cores() {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return static_cast<std::uint32_t>(CPU_COUNT(&set));
}

}  // namespace

Engine::Engine(EngineSettings settings)
    : settings_(std::move(settings)),
      cores_(usable_cores()),
      life_(Life::create()),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      lanes_(core_.channel(0), epoll_) {
  if (epoll_ < 0 || wake_ < 0) throw std::runtime_error("no descriptors for an engine: " + error_text(errno));
  core_.set_channel_driver(this);
  epoll_event event{EPOLLIN, {.u64 = wake_key}};
  ::epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event);
  thread_ = std::thread([this] { service(); });
}

Engine::~Engine() {
  if (forked_) {
    if (thread_.joinable()) thread_.detach();
    return;
  }
  shutdown();
  for (const int fd : {wake_, epoll_}) ::close(fd);
}

// The two descriptors that are no connection stay open until the engine is destroyed: a thread that was about to wait
// in epoll_wait or to wake a thread would otherwise do it to whatever file has got the number meanwhile.
void Engine::shutdown() {
  {
    const FloatEnvironment arithmetic;  // what has been reported may commit an op
    std::unique_lock lock(mutex_);
    if (stopping_) return;
    stopping_ = true;
    const Standstill still(*this);
    route(still);
    core_.ops().fail_all(OpStatus::failed, {});
    events_ready_.notify_all();
    ops_ready_.notify_all();
    service_wanted_.notify_all();
  }
  wake();
  if (thread_.joinable()) thread_.join();
  for (const auto& worker : workers_) worker->shutdown();
  std::unique_lock lock(mutex_);
  core_.forget_blocks();
  for (auto& [conn, socket] : sockets_) ::close(socket.fd);
  sockets_.clear();
  lanes_.close_all();
  // The descriptors of workers are theirs alone, and a program may keep an engine that is shut down for long: in a
  // reference cycle, until the interpreter collects it.
  workers_.clear();
  for (const auto& [fd, until] : greeters_) ::close(fd);
  greeters_.clear();
  for (int* fd : {&listener_, &local_listener_}) {
    if (*fd >= 0) ::close(*fd);
    *fd = -1;
  }
}

void Engine::before_fork() {
  take_mutex().release();
  for_fork_.emplace(*this);
}

void Engine::forked_parent() {
  for_fork_.reset();
  mutex_.unlock();
}

void Engine::forked_child() {
  for_fork_.reset();
  mutex_.unlock();
  forked_ = true;
  for (auto& [conn, socket] : sockets_) {
    ::close(socket.fd);
    if (socket.pipe) socket.pipe->abandon();
  }
  sockets_.clear();
  lanes_.forked_child();
  for (const auto& worker : workers_) worker->forked_child();
  if (life_) life_->forked_child();
  for (const auto& [fd, until] : greeters_) ::close(fd);
  greeters_.clear();
  for (int* fd : {&listener_, &local_listener_, &wake_, &epoll_}) {
    if (*fd >= 0) ::close(*fd);
    *fd = -1;
  }
}

bool Engine::start_guardian(const std::string& program, int master, const std::string& message) {
  return life_ && !forked_ && ringfold::start_guardian(program, life_->fd(), master, message);
}

// Standing still.

// Whoever looks at the engine, or forks, carries out what the workers had to do: it may be arithmetic.
Engine::Standstill::Standstill(Engine& engine) : engine_(engine), workers_(engine.workers_.size()) {
  const FloatEnvironment arithmetic;
  for (std::size_t i = 0; i < workers_; ++i) engine_.workers_[i]->stop();
  for (std::size_t i = 0; i < workers_; ++i) engine_.workers_[i]->wait_until_stopped();
  for (std::size_t i = 0; i < workers_; ++i) engine_.workers_[i]->execute_commands();
  engine_.is_still_ = true;
}

Engine::Standstill::~Standstill() {
  engine_.is_still_ = false;
  for (std::size_t i = 0; i < workers_; ++i) engine_.workers_[i]->go_on(engine_.is_crowded());
}

// Turns: a thread with a command announces itself, and a driver lets it in between two rounds of polling.

std::unique_lock<std::mutex> Engine::take_mutex() {
  turns_wanted_.fetch_add(1);
  lock_soon(mutex_);
  turns_wanted_.fetch_sub(1);
  return {mutex_, std::adopt_lock};
}

// What workers have reported comes before the command. That a link is lost is about the lanes that it had: after a
// command that adds lanes, it would close those.
Engine::Turn::Turn(Engine& engine, During during) : engine_(engine), lock_(engine.take_mutex()) {
  if (during == During::standstill) engine_.route(still_.emplace(engine_));
  else engine_.take_reports();
}

Engine::Turn::~Turn() {
  const Ns now = monotonic_now();
  const bool is_call = !still_;
  if (still_) {
    engine_.look_at_hints(now, *still_);
    engine_.settle_sockets(*still_);
    still_.reset();
  }
  // What another command has queued leaves now: the next one may be the end of the engine.
  if (!is_call || engine_.burst_left(now) == 0) engine_.flush_dirty(now);
  engine_.settle_if_wanted();
  engine_.notify_waiters();
  engine_.wanted_ = true;
  engine_.service_wanted_.notify_one();
  const bool nudge = engine_.in_epoll_.load() > 0 && (engine_.driving_.load() || engine_.has_unsent());
  lock_.unlock();
  if (nudge) engine_.wake();  // a thread in epoll_wait does not know what was just decided or queued
}

// Workers and ops: the mutex is held.

bool Engine::post(std::uint32_t channel, ChannelCommand& command) {
  if (is_still_ || channel > workers_.size()) return false;
  workers_[channel - 1]->post(std::move(command));
  return true;
}

// What is decided here is stamped here: what was read came after this turn's time was taken.
bool Engine::take_reports() {
  const std::vector<Report> reports = reports_.take();
  if (!reports.empty()) core_.on_reports(monotonic_now(), reports);
  return !reports.empty();
}

void Engine::route(const Standstill&) {
  take_reports();
  core_.route(monotonic_now());
}

// Before a driver sleeps or ends: from now on a worker with a report takes the mutex. False: there is one already.
bool Engine::is_resting() {
  attended_.store(false);
  return !reports_.has_items();
}

// A thread that was notified of an event or of its op's end gets the mutex, too. A moment is enough, or it is busy
// elsewhere.
void Engine::yield_mutex(std::unique_lock<std::mutex>& lock) {
  const auto wanted = [this] { return turns_wanted_.load() > 0 || notified_.load(); };
  if (!wanted()) return;
  lock.unlock();
  const Ns until = monotonic_now() + max_yield;
  while (wanted() && monotonic_now() < until) ::sched_yield();
  lock.lock();
  notified_.store(false);
}

// Whether something waits that a sleeper in epoll_wait would not be woken for.
bool Engine::has_unsent() const {
  if (core_.has_dirty_messages() || lanes_.has_unsent()) return true;
  return std::any_of(sockets_.begin(), sockets_.end(),
                     [](const auto& each) { return each.second.blocked != each.second.armed; });
}

bool Engine::is_crowded() const {
  const EpochSpec& spec = core_.epoch().spec();
  return spec.peers_here * spec.channels > cores_;
}

// Between two polls while spinning. With more threads on this host than cores, the peer that is waited for needs this
// core. So it may with fewer: the kernel puts two of them on one core now and then.
void Engine::wait_a_moment(std::unique_lock<std::mutex>& lock, Ns idle) {
  if (!is_crowded() && idle < yield_after) {
    pause_cpu();
    return;
  }
  lock.unlock();
  ::sched_yield();
  lock.lock();
}

void Engine::wake() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto n = ::write(wake_, &one, sizeof one);
}

void Engine::notify_waiters() {
  if (core_.has_events() && event_waiters_ > 0) {
    events_ready_.notify_one();
    notified_.store(true);
  }
  if (core_.ops().finished_count() != reported_finished_) {
    reported_finished_ = core_.ops().finished_count();
    if (op_waiters_ > 0) {
      ops_ready_.notify_all();
      notified_.store(true);
    }
  }
}

std::optional<Event> Engine::next_event(Ns timeout) {
  std::unique_lock lock(mutex_);
  ++event_waiters_;
  events_ready_.wait_for(lock, std::chrono::nanoseconds(timeout), [&] { return core_.has_events() || stopping_; });
  --event_waiters_;
  notified_.store(false);
  return core_.next_event();
}

// The lanes alone: what a driving call does most of the time.
bool Engine::poll_hot(Ns now) {
  bool progressed = lanes_.poll(now, turns_wanted_);
  settle_if_wanted();
  if (core_.has_dirty_messages() || lanes_.channel().has_dirty()) progressed |= flush_dirty(now);
  return progressed;
}

// One look at every socket; with a timeout, the mutex is free while the kernel waits.
void Engine::poll_all(std::unique_lock<std::mutex>& lock, int timeout_ms) {
  epoll_event events[64];
  int count = 0;
  if (timeout_ms == 0) {
    count = ::epoll_wait(epoll_, events, 64, 0);
  } else {
    const bool sleeps = arm() && is_resting();
    in_epoll_.fetch_add(1);
    lock.unlock();
    count = ::epoll_wait(epoll_, events, 64, sleeps ? timeout_ms : 0);
    lock.lock();
    in_epoll_.fetch_sub(1);
    attended_.store(true);
    lanes_.disarm();
  }
  on_events(events, count, monotonic_now());
}

void Engine::on_events(const epoll_event* events, int count, Ns now) {
  for (int i = 0; i < count; ++i) on_ready(events[i], now);
  lanes_.poll_pipes(now);
  look_at_lanes(now);
  flush_dirty(now);
  settle_if_wanted();
  resume_reading();
  flush_dirty(now);
  tick(now);
  notify_waiters();
}

void Engine::follow_hints(PeerId peer, const std::string& file, std::uint32_t slot, std::uint32_t generation) {
  Turn turn(*this);
  hints_.follow(peer, file, slot, generation);
  core_.set_path_hints(&hints_);
}

void Engine::forget_hints(PeerId peer) {
  Turn turn(*this);
  hints_.forget(peer);
  if (hints_.empty()) core_.set_path_hints(nullptr);
  core_.advice_changed();
}

// Once per turn: is the agent alive, and is its advice another one?
void Engine::look_at_hints(Ns now, const Standstill&) {
  if (!hints_.empty() && hints_.look(now)) core_.advice_changed();
  last_hint_look_ = now;
}

void Engine::look_at_lanes(Ns now) {
  if (!hints_.empty() && (workers_.empty() || now - last_hint_look_ >= hint_look_every)) {
    const Standstill still(*this);
    look_at_hints(now, still);
  }
  lanes_.look(now);
}

int Engine::poll_timeout_ms() const {
  if (core_.has_dirty_messages()) return 0;
  const int lanes = lanes_.longest_wait_ms();
  return lanes < 0 ? 10 : lanes;
}

void Engine::tick(Ns now) {
  if (now - last_tick_ < tick_every) return;
  last_tick_ = now;
  if (const auto it = sockets_.find(core_.late_echo(now)); it != sockets_.end()) {
    if (const auto queued = unacknowledged(it->second.fd)) {
      core_.acknowledged(now, it->first, static_cast<std::uint64_t>(*queued));
    }
  }
  if (listener_paused_until_ != 0 && now >= listener_paused_until_) {
    listener_paused_until_ = 0;
    watch_listeners(EPOLLIN);
  }
  for (auto it = greeters_.begin(); it != greeters_.end();) {
    const auto [fd, until] = *it++;
    if (now < until) continue;
    ::close(fd);
    greeters_.erase(fd);
  }
  std::optional<Standstill> still;
  if (core_.is_tick_wide(now)) still.emplace(*this);
  core_.tick(now);
  still.reset();
  std::vector<ConnId> late;
  for (auto& [conn, socket] : sockets_) {
    if (socket.connecting && now >= socket.deadline) late.push_back(conn);
  }
  for (const ConnId conn : late) {
    if (core_.is_message(conn)) core_.lost(now, conn, "no answer to the connection attempt");
    close_socket(conn);
  }
  settle_if_wanted();
  flush_dirty(now);
}

std::uint64_t Engine::submit(OpSpec spec) {
  Turn turn(*this, During::work);
  const Ns now = monotonic_now();
  const std::uint64_t id = core_.submit(now, std::move(spec));
  if (const OpPtr op = core_.find(id); op != nullptr && op->parts.size() > 1) {
    // Channel 0 has as long as the longest burst before another one begins.
    if (now - last_of_burst_ >= within_burst && now - burst_began_ >= 2 * longest_burst) burst_began_ = now;
    last_of_burst_ = now;
  }
  return id;
}

// Ops that are cut among channels come several at a time. Whoever moves segments of channel 0 has the mutex for some
// tenths of a millisecond, and the next one would wait for it. So the service thread begins when no more come: the
// other channels work meanwhile.
Ns Engine::burst_left(Ns now) const {
  return std::max<Ns>(0, std::min(last_of_burst_ + within_burst, burst_began_ + longest_burst) - now);
}

std::uint64_t Engine::submit_to_drive(OpSpec spec) {
  const FloatEnvironment arithmetic;
  const std::unique_lock lock = take_mutex();
  const std::uint64_t id = core_.submit(monotonic_now(), std::move(spec));
  if (driving_.load() && in_epoll_.load() > 0) wake();  // another thread drives, and sleeps
  return id;
}

// A large op on several paths waits for networks, and every segment of it is a chance to sleep: spinning through all of
// them would take the core from the kernel, which has packets to move.
Ns Engine::spin_for(const Op& op) const {
  return core_.epoch().spec().multipath && !op.small ? std::min(settings_.spin, longest_spin_on_paths) : settings_.spin;
}

bool Engine::run(std::uint64_t id, Ns most) {
  const FloatEnvironment arithmetic;
  std::unique_lock lock(mutex_);
  const OpPtr op = core_.find(id);
  if (op == nullptr) return true;
  const Ns began = monotonic_now();
  if (driving_.load()) {  // another thread's call drives already
    ++op_waiters_;
    ops_ready_.wait_for(lock, std::chrono::nanoseconds(most),
                        [&] { return op->state == OpState::finished || !driving_.load() || stopping_; });
    --op_waiters_;
    notified_.store(false);
    return op->state == OpState::finished;
  }
  const Driving drives(*this);
  look_at_lanes(began);
  flush_dirty(began);
  Ns idle_since = began;
  for (int round = 0;; ++round) {
    const Ns now = monotonic_now();
    // The service thread stays parked during a loop of calls, and a short call may end before its first poll of all
    // sockets: then heartbeats and the master's messages depend on this poll alone.
    if (now - last_tick_ >= tick_every) poll_all(lock, 0);
    if (op->state == OpState::finished || stopping_ || now - began >= most) break;
    look_at_lanes(now);
    if (poll_hot(now)) {
      idle_since = now;
      if (round % 16 == 15) poll_all(lock, 0);
    } else if (now - idle_since < spin_for(*op)) {
      if (round % 32 == 31) poll_all(lock, 0);
      wait_a_moment(lock, now - idle_since);
    } else {
      poll_all(lock, poll_timeout_ms());
      idle_since = monotonic_now() - spin_for(*op) / 2;
    }
    yield_mutex(lock);
  }
  return op->state == OpState::finished;
}

Engine::Driving::~Driving() {
  engine_.driving_.store(false);
  if (!engine_.is_resting()) engine_.settle_if_wanted();
  engine_.last_drive_ = monotonic_now();
  // Of other ops: nobody else looks at once.
  engine_.flush_dirty(engine_.last_drive_);
  if (engine_.in_epoll_.load() > 0 && !engine_.lanes_.arm()) engine_.wake();  // what woke this call will not wake it
  engine_.notify_waiters();
  if (engine_.op_waiters_ > 0) engine_.ops_ready_.notify_all();
}

void Engine::service() {
  const FloatEnvironment arithmetic;
  if (life_) life_->hold();
  std::unique_lock lock(mutex_);
  Ns idle_since = 0;
  for (int round = 0; !stopping_; ++round) {
    const Ns now = monotonic_now();
    const bool just_called = now - last_drive_ < parked_after_call && !core_.ops().any_in_flight();
    const Ns burst = burst_left(now);
    if (driving_.load() || (just_called && !wanted_) || burst > 0) {
      if (!driving_.load() && !is_resting()) {
        settle_if_wanted();
        notify_waiters();
      }
      if (now - last_tick_ >= driver_is_late) poll_all(lock, 0);
      const Ns parked = driving_.load() ? parked_for : burst > 0 ? burst : parked_after_call;
      service_wanted_.wait_for(lock, std::chrono::nanoseconds(parked));
      continue;
    }
    wanted_ = false;
    // Ops that nobody's call drives: like a call, it looks for a while before it sleeps.
    if (now - idle_since < settings_.spin && core_.ops().any_in_flight() && !core_.epoch().spec().multipath) {
      attended_.store(true);
      look_at_lanes(now);
      if (poll_hot(now)) idle_since = now;
      else wait_a_moment(lock, now - idle_since);
      if (round % 32 == 31 || now - last_tick_ >= tick_every) poll_all(lock, 0);
      notify_waiters();
      yield_mutex(lock);
      continue;
    }
    epoll_event events[64];
    const int timeout = arm() && is_resting() ? poll_timeout_ms() : 0;
    in_epoll_.fetch_add(1);
    lock.unlock();
    const int count = ::epoll_wait(epoll_, events, 64, timeout);
    in_epoll_.fetch_sub(1);
    lock.lock();  // if a call took over meanwhile, it sees the same events
    if (driving_.load() || stopping_) continue;
    lanes_.disarm();
    idle_since = monotonic_now();
    if (burst_left(idle_since) > 0) continue;  // the same events come again
    on_events(events, count, idle_since);
    yield_mutex(lock);
  }
  if (life_) life_->let_go();
}

}  // namespace ringfold
