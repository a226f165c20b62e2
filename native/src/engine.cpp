#include "ringfold/engine.hpp"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <stdexcept>

#include "net.hpp"

namespace ringfold {
namespace {

constexpr Ns millisecond = 1'000'000;
constexpr Ns tick_every = 10 * millisecond;
constexpr Ns longest_way = millisecond / 5;      // for which a driver waits until others have had their turn
constexpr Ns listener_pause = 100 * millisecond;
constexpr Ns ack_check_every = 100 * millisecond;
constexpr Ns parked_for = 10 * millisecond;      // how often a parked service thread looks whether it is needed
constexpr Ns parked_after_call = 2 * millisecond;
constexpr std::size_t flush_bytes = 512 * 1024;  // then reading gets its turn
constexpr std::uint64_t listener_key = ~std::uint64_t{0};
constexpr std::uint64_t wake_key = ~std::uint64_t{1};

std::uint32_t usable_cores() {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return static_cast<std::uint32_t>(CPU_COUNT(&set));
}

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Ns monotonic_now() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return Ns{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

Engine::Engine(EngineSettings settings) : settings_(settings), cores_(usable_cores()) {
  epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
  wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (epoll_ < 0 || wake_ < 0) throw std::runtime_error("no descriptors for an engine: " + std::string(strerror(errno)));
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
}

void Engine::shutdown() {
  {
    std::unique_lock lock(mutex_);
    if (stopping_) return;
    stopping_ = true;
    core_.fail_all(OpStatus::failed, {});
    events_ready_.notify_all();
    ops_ready_.notify_all();
    service_wanted_.notify_all();
  }
  wake();
  if (thread_.joinable()) thread_.join();
  std::unique_lock lock(mutex_);
  for (auto& [conn, socket] : sockets_) ::close(socket.fd);
  sockets_.clear();
  for (int* fd : {&listener_, &wake_, &epoll_}) {
    if (*fd >= 0) ::close(*fd);
    *fd = -1;
  }
}

void Engine::before_fork() {
  turns_wanted_.fetch_add(1);
  mutex_.lock();
  turns_wanted_.fetch_sub(1);
}

void Engine::forked_child() {
  mutex_.unlock();
  forked_ = true;
  for (auto& [conn, socket] : sockets_) ::close(socket.fd);
  sockets_.clear();
  for (int* fd : {&listener_, &wake_, &epoll_}) {
    if (*fd >= 0) ::close(*fd);
    *fd = -1;
  }
}

std::uint16_t Engine::listen(const std::string& host, std::uint16_t first_port, int tries) {
  std::string why = "no port was tried";
  for (int i = 0; i < std::max(tries, 1); ++i) {
    const int wanted = first_port == 0 ? 0 : first_port + i;
    const auto address = net::literal(host, static_cast<std::uint16_t>(wanted));
    if (!address || wanted > 65535) throw std::runtime_error("cannot listen on " + host + ": not an address");
    const int fd = ::socket(address->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) throw std::runtime_error(std::string("cannot make a socket: ") + strerror(errno));
    const int one = 1;
    ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (::bind(fd, reinterpret_cast<const sockaddr*>(&address->storage), address->bytes) == 0 &&
        ::listen(fd, 256) == 0) {
      sockaddr_storage bound{};
      socklen_t bytes = sizeof bound;
      ::getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &bytes);
      std::unique_lock lock(mutex_);
      listener_ = fd;
      epoll_event event{EPOLLIN, {.u64 = listener_key}};
      ::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
      return ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                               : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
    }
    why = strerror(errno);
    ::close(fd);
  }
  throw std::runtime_error("cannot listen on " + host + " from port " + std::to_string(first_port) + " on: " + why);
}

ConnId Engine::dial(const std::string& host, std::uint16_t port, Ns timeout) {
  Turn turn(*this);
  const Ns now = monotonic_now();
  const ConnId conn = core_.open(host + ":" + std::to_string(port), false);
  const auto address = net::literal(host, port);
  if (!address) {
    core_.lost(now, conn, "not an address: " + host);
    return conn;
  }
  const int fd = ::socket(address->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) {
    core_.lost(now, conn, strerror(errno));
    return conn;
  }
  const int rc = ::connect(fd, reinterpret_cast<const sockaddr*>(&address->storage), address->bytes);
  if (rc != 0 && errno != EINPROGRESS) {
    core_.lost(now, conn, strerror(errno));
    ::close(fd);
    return conn;
  }
  adopt(fd, conn, true, now + timeout);
  return conn;
}

void Engine::adopt(int fd, ConnId conn, bool connecting, Ns deadline) {
  Socket& socket = sockets_[conn];
  socket.fd = fd;
  socket.conn = conn;
  socket.connecting = connecting;
  socket.deadline = deadline;
  epoll_event event{};
  event.events = connecting ? EPOLLOUT : EPOLLIN;
  event.data.u64 = conn;
  ::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
}

void Engine::watch(Socket& socket) {
  epoll_event event{};
  socket.armed = socket.blocked;
  event.events = (socket.reading ? EPOLLIN : 0u) | (socket.blocked || socket.connecting ? EPOLLOUT : 0u);
  event.data.u64 = socket.conn;
  ::epoll_ctl(epoll_, EPOLL_CTL_MOD, socket.fd, &event);
}

void Engine::close_socket(ConnId conn) {
  const auto it = sockets_.find(conn);
  if (it == sockets_.end()) return;
  ::close(it->second.fd);
  sockets_.erase(it);
  refresh_hot();
}

void Engine::refresh_hot() {
  hot_.clear();
  for (const LaneInfo& lane : core_.lanes()) hot_.push_back(lane.conn);
}

// Turns: whoever has a command announces itself, and a driver lets it in between two rounds of polling.

Engine::Turn::Turn(Engine& engine) : engine_(engine) {
  engine_.turns_wanted_.fetch_add(1);
  engine_.mutex_.lock();
  engine_.turns_wanted_.fetch_sub(1);
}

Engine::Turn::~Turn() {
  const Ns now = monotonic_now();
  engine_.settle_sockets();
  engine_.flush_dirty(now);
  engine_.settle_sockets();
  engine_.refresh_hot();
  engine_.tell();
  engine_.wanted_ = true;
  engine_.service_wanted_.notify_one();
  const bool nudge = engine_.in_epoll_.load() > 0 && (engine_.driving_.load() || engine_.has_unsent());
  engine_.mutex_.unlock();
  if (nudge) engine_.wake();  // somebody sleeps in the kernel and does not know what was just decided or queued
}

// Whoever was told of an event or of its op's end gets the mutex, too; a moment is enough, or it is busy elsewhere.
void Engine::give_way(std::unique_lock<std::mutex>& lock) {
  const auto wanted = [this] { return turns_wanted_.load() > 0 || told_.load(); };
  if (!wanted()) return;
  lock.unlock();
  const Ns until = monotonic_now() + longest_way;
  while (wanted() && monotonic_now() < until) ::sched_yield();
  lock.lock();
  told_.store(false);
}

// Whether something waits that a sleeper in epoll_wait would not be woken for.
bool Engine::has_unsent() const {
  if (core_.has_dirty()) return true;
  return std::any_of(sockets_.begin(), sockets_.end(), [](const auto& each) { return each.second.blocked != each.second.armed; });
}

// Between two looks while spinning. With more peers here than cores, the one that is waited for needs this core. Otherwise
// the core is kept: two peers that yield to each other on one core look busy enough for the kernel to leave them there.
void Engine::wait_a_moment(std::unique_lock<std::mutex>& lock) {
  if (core_.peers_here() <= cores_) {
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

// After the core has changed: sockets that may be read again, and sockets that are to be closed.
void Engine::settle_sockets() {
  for (const ConnId conn : core_.take_closing()) close_socket(conn);
  for (auto& [conn, socket] : sockets_) {
    if (socket.reading || socket.connecting || core_.receive_space(conn).empty()) continue;
    socket.reading = true;
    watch(socket);
  }
}

void Engine::tell() {
  if (core_.has_events() && event_waiters_ > 0) {
    events_ready_.notify_one();
    told_.store(true);
  }
  if (core_.finished_count() != told_finished_) {
    told_finished_ = core_.finished_count();
    if (op_waiters_ > 0) {
      ops_ready_.notify_all();
      told_.store(true);
    }
  }
}

std::optional<Event> Engine::next_event(Ns timeout) {
  std::unique_lock lock(mutex_);
  ++event_waiters_;
  events_ready_.wait_for(lock, std::chrono::nanoseconds(timeout), [&] { return core_.has_events() || stopping_; });
  --event_waiters_;
  told_.store(false);
  return core_.next_event();
}

bool Engine::read_some(Socket& socket, Ns now) {
  const ConnId conn = socket.conn;
  const auto space = core_.receive_space(conn);
  if (space.empty()) {
    socket.reading = false;
    watch(socket);
    return false;
  }
  const ssize_t n = ::recv(socket.fd, space.data(), space.size(), MSG_DONTWAIT);
  if (n > 0) {
    core_.received(now, conn, static_cast<std::size_t>(n));
    return true;
  }
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  core_.lost(now, conn, n == 0 ? "closed by the other side" : strerror(errno));
  close_socket(conn);
  return true;
}

bool Engine::flush(Socket& socket, Ns now) {
  if (socket.connecting || socket.blocked) return false;
  const ConnId conn = socket.conn;
  std::size_t total = 0;
  while (total < flush_bytes) {
    iovec pieces[64];
    const std::size_t count = core_.gather(conn, pieces, 64);
    if (count == 0) return total > 0;
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = count;
    std::size_t offered = 0;
    for (std::size_t i = 0; i < count; ++i) offered += pieces[i].iov_len;
    const ssize_t n = ::sendmsg(socket.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0) {
      if (errno == EINTR) continue;
      // Also when the other side is gone: its last words, such as Evicted, may be unread. Reading finds the end then.
      socket.blocked = true;
      return total > 0;
    }
    core_.sent(now, conn, static_cast<std::size_t>(n));
    total += static_cast<std::size_t>(n);
    if (static_cast<std::size_t>(n) < offered) {
      socket.blocked = true;
      return true;
    }
  }
  core_.touch(conn);  // there may be more
  return true;
}

bool Engine::flush_dirty(Ns now) {
  bool progressed = false;
  for (const ConnId conn : core_.take_dirty()) {
    const auto it = sockets_.find(conn);
    if (it != sockets_.end()) progressed |= flush(it->second, now);
  }
  return progressed;
}

// Only before blocking is the kernel asked to tell when a full socket drains: while driving, trying is cheaper.
void Engine::arm() {
  for (auto& [conn, socket] : sockets_) {
    if (socket.blocked != socket.armed) watch(socket);
  }
}

// Out of descriptors: whoever waits in the backlog would make every look at the sockets return at once.
void Engine::pause_listener() {
  epoll_event event{0, {.u64 = listener_key}};
  ::epoll_ctl(epoll_, EPOLL_CTL_MOD, listener_, &event);
  listener_paused_until_ = monotonic_now() + listener_pause;
}

void Engine::accept_all() {
  while (true) {
    sockaddr_storage remote{};
    socklen_t bytes = sizeof remote;
    const int fd =
        ::accept4(listener_, reinterpret_cast<sockaddr*>(&remote), &bytes, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
      if (errno == EMFILE || errno == ENFILE) pause_listener();
      return;
    }
    net::prepare(fd, settings_.same_host_buffer);
    adopt(fd, core_.open(net::readable(remote, bytes), true), false, 0);
  }
}

void Engine::finish_connect(Socket& socket, Ns now) {
  int error = 0;
  socklen_t bytes = sizeof error;
  ::getsockopt(socket.fd, SOL_SOCKET, SO_ERROR, &error, &bytes);
  if (error != 0) {
    const ConnId conn = socket.conn;
    core_.lost(now, conn, strerror(error));
    close_socket(conn);
    return;
  }
  socket.connecting = false;
  net::prepare(socket.fd, settings_.same_host_buffer);
  core_.opened(socket.conn);
  watch(socket);
}

void Engine::on_ready(const epoll_event& event, Ns now) {
  if (event.data.u64 == wake_key) {
    std::uint64_t count = 0;
    [[maybe_unused]] const auto n = ::read(wake_, &count, sizeof count);
    return;
  }
  if (event.data.u64 == listener_key) {
    accept_all();
    return;
  }
  const auto conn = static_cast<ConnId>(event.data.u64);
  auto it = sockets_.find(conn);
  if (it == sockets_.end()) return;
  if (it->second.connecting) {
    finish_connect(it->second, now);
    return;
  }
  if ((event.events & EPOLLOUT) != 0) {
    it->second.blocked = false;
    flush(it->second, now);
    it = sockets_.find(conn);
    if (it == sockets_.end()) return;
    if (!it->second.blocked) watch(it->second);
  }
  if ((event.events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) {
    if (it->second.reading) {
      read_some(it->second, now);
    } else if ((event.events & (EPOLLHUP | EPOLLERR)) != 0) {
      core_.lost(now, conn, "closed by the other side");
      close_socket(conn);
    }
  }
}

// The lanes alone: what a driving call does most of the time.
bool Engine::poll_hot(Ns now) {
  bool progressed = false;
  for (std::size_t i = 0; i < hot_.size(); ++i) {
    auto it = sockets_.find(hot_[i]);
    if (it != sockets_.end() && it->second.reading && core_.expects(hot_[i])) progressed |= read_some(it->second, now);
    it = i < hot_.size() ? sockets_.find(hot_[i]) : sockets_.end();  // reading may have closed it
    if (it == sockets_.end() || !it->second.blocked) continue;
    it->second.blocked = false;
    progressed |= flush(it->second, now);
  }
  progressed |= flush_dirty(now);
  if (progressed) settle_sockets();
  return progressed;
}

// One look at every socket; with a timeout, the mutex is free while the kernel waits.
void Engine::poll_all(std::unique_lock<std::mutex>& lock, int timeout_ms) {
  epoll_event events[64];
  int count = 0;
  if (timeout_ms != 0) arm();
  if (timeout_ms == 0) {
    count = ::epoll_wait(epoll_, events, 64, 0);
  } else {
    in_epoll_.fetch_add(1);
    const int fd = epoll_;
    lock.unlock();
    count = ::epoll_wait(fd, events, 64, timeout_ms);
    lock.lock();
    in_epoll_.fetch_sub(1);
  }
  const Ns now = monotonic_now();
  for (int i = 0; i < count; ++i) on_ready(events[i], now);
  flush_dirty(now);
  settle_sockets();
  flush_dirty(now);
  tick(now);
  tell();
}

void Engine::tick(Ns now) {
  if (now - last_tick_ < tick_every) return;
  last_tick_ = now;
  if (now - last_ack_check_ >= ack_check_every && core_.any_in_flight()) {
    last_ack_check_ = now;
    for (const LaneInfo& lane : core_.lanes()) {
      const auto it = sockets_.find(lane.conn);
      int queued = 0;
      if (it == sockets_.end() || !lane.outgoing || ::ioctl(it->second.fd, SIOCOUTQ, &queued) != 0) continue;
      core_.acknowledged(now, lane.conn, static_cast<std::uint64_t>(queued));
    }
  }
  if (listener_paused_until_ != 0 && now >= listener_paused_until_) {
    listener_paused_until_ = 0;
    epoll_event event{EPOLLIN, {.u64 = listener_key}};
    ::epoll_ctl(epoll_, EPOLL_CTL_MOD, listener_, &event);
  }
  core_.tick(now);
  std::vector<ConnId> late;
  for (auto& [conn, socket] : sockets_) {
    if (socket.connecting && now >= socket.deadline) late.push_back(conn);
  }
  for (const ConnId conn : late) {
    core_.lost(now, conn, "no answer to the connection attempt");
    close_socket(conn);
  }
  settle_sockets();
  flush_dirty(now);
}

std::uint64_t Engine::submit(OpSpec spec) {
  Turn turn(*this);
  return core_.submit(monotonic_now(), std::move(spec));
}

std::uint64_t Engine::submit_to_drive(OpSpec spec) {
  turns_wanted_.fetch_add(1);
  std::unique_lock lock(mutex_);
  turns_wanted_.fetch_sub(1);
  const std::uint64_t id = core_.submit(monotonic_now(), std::move(spec));
  if (driving_.load() && in_epoll_.load() > 0) wake();  // another thread drives, and sleeps
  return id;
}

bool Engine::run(std::uint64_t id, Ns most) {
  std::unique_lock lock(mutex_);
  const OpPtr op = core_.find(id);
  if (op == nullptr) return true;
  const Ns began = monotonic_now();
  if (driving_.load()) {  // another thread's call drives already
    ++op_waiters_;
    ops_ready_.wait_for(lock, std::chrono::nanoseconds(most),
                        [&] { return op->state == OpState::finished || !driving_.load() || stopping_; });
    --op_waiters_;
  told_.store(false);
    return op->state == OpState::finished;
  }
  const Driving drives(*this);
  flush_dirty(began);
  Ns idle_since = began;
  for (int round = 0; op->state != OpState::finished && !stopping_; ++round) {
    const Ns now = monotonic_now();
    if (now - began >= most) break;
    if (poll_hot(now)) {
      idle_since = now;
      if (round % 16 == 15) poll_all(lock, 0);
    } else if (now - idle_since < settings_.spin) {
      if (round % 4 == 3) poll_all(lock, 0);
      wait_a_moment(lock);
    } else {
      poll_all(lock, core_.has_dirty() ? 0 : 10);
      idle_since = monotonic_now() - settings_.spin / 2;
    }
    give_way(lock);
  }
  return op->state == OpState::finished;
}

Engine::Driving::~Driving() {
  engine_.driving_.store(false);
  engine_.last_drive_ = monotonic_now();
  engine_.tell();
  if (engine_.op_waiters_ > 0) engine_.ops_ready_.notify_all();
}

bool Engine::wait(std::uint64_t id, Ns most) {
  std::unique_lock lock(mutex_);
  const OpPtr op = core_.find(id);
  if (op == nullptr) return true;
  ++op_waiters_;
  ops_ready_.wait_for(lock, std::chrono::nanoseconds(most),
                      [&] { return op->state == OpState::finished || stopping_; });
  --op_waiters_;
  told_.store(false);
  return op->state == OpState::finished;
}

void Engine::service() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const Ns now = monotonic_now();
    const bool just_called = now - last_drive_ < parked_after_call && !core_.any_in_flight();
    if (driving_.load() || (just_called && !wanted_)) {
      service_wanted_.wait_for(lock, std::chrono::nanoseconds(driving_.load() ? parked_for : parked_after_call));
      continue;
    }
    wanted_ = false;
    epoll_event events[64];
    arm();
    const int fd = epoll_;
    const int timeout = core_.has_dirty() ? 0 : 10;
    in_epoll_.fetch_add(1);
    lock.unlock();
    const int count = ::epoll_wait(fd, events, 64, timeout);
    in_epoll_.fetch_sub(1);
    lock.lock();  // if a call took over meanwhile, it sees the same events
    if (driving_.load() || stopping_) continue;
    const Ns then = monotonic_now();
    for (int i = 0; i < count; ++i) on_ready(events[i], then);
    flush_dirty(then);
    settle_sockets();
    flush_dirty(then);
    tick(then);
    tell();
    give_way(lock);
  }
}

}  // namespace ringfold
