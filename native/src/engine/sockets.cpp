// The engine's sockets: listening, connecting, epoll events, and the bytes of connections that are no lanes. All under
// the mutex.
#include <netinet/in.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>

#include "engine/socket_io.hpp"
#include "engine/tcp.hpp"
#include "net.hpp"
#include "ringfold/engine.hpp"
#include "ringfold/error_text.hpp"

namespace ringfold {
namespace {

constexpr Ns listener_pause = 100'000'000;
constexpr Ns greeting_time = 5'000'000'000;
constexpr std::size_t bulk_turn_bytes = std::size_t{1} << 20;  // of one bulk connection: then the others get theirs
// In the kernel: a message should not wait behind more filler than this.
constexpr int filler_unsent_bytes = 128 * 1024;

// A measurement has well under a second. On a low-RTT path, where the acknowledgements of one direction queue behind
// the filler of the other, BBR takes them for a slow link and needs seconds to notice. So does CUBIC now and then: its
// slow start ends early when acknowledgements come in bursts, and from a few packets in flight it grows for seconds.
// Reno, which every kernel has, stays in slow start until something is lost, and so fills the link at once. On a
// high-RTT path with random loss, the host's own choice is better.
void prepare_for_filler(int fd) {
  ::setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &filler_unsent_bytes, sizeof filler_unsent_bytes);
  if (const auto rtt_us = min_rtt_us(fd); rtt_us && *rtt_us < low_rtt_us) use_congestion(fd, "reno");
}

// The bytes of a connection that is no lane. One that has ended meanwhile has none: the core would look for it among
// the lanes, which others may be driving.
struct MessageBytes {
  Core& core;

  std::size_t gather(ConnId conn, iovec* out, std::size_t most) {
    return core.is_message(conn) ? core.gather(conn, out, most) : 0;
  }
  void sent(Ns now, ConnId conn, std::size_t bytes) { core.sent(now, conn, bytes); }
  void touch(ConnId conn) {
    if (core.is_message(conn)) core.touch(conn);
  }
};

void close_all(const net::Descriptors& descriptors) {
  for (const int fd : descriptors) {
    if (fd >= 0) ::close(fd);
  }
}

}  // namespace

std::uint16_t Engine::listen(const std::string& host, std::uint16_t first_port, int tries) {
  std::string why = "no port was tried";
  for (int i = 0; i < std::max(tries, 1); ++i) {
    const int wanted = first_port == 0 ? 0 : first_port + i;
    const auto address = net::literal(host, static_cast<std::uint16_t>(wanted));
    if (!address || wanted > 65535) throw std::runtime_error("cannot listen on " + host + ": not an address");
    const int fd = ::socket(address->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) throw std::runtime_error(std::string("cannot make a socket: ") + error_text(errno));
    const int one = 1;
    ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (::bind(fd, reinterpret_cast<const sockaddr*>(&address->storage), address->bytes) == 0 &&
        ::listen(fd, 256) == 0) {
      sockaddr_storage bound{};
      socklen_t bytes = sizeof bound;
      ::getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &bytes);
      std::unique_lock lock(mutex_);
      if (stopping_) {
        ::close(fd);
        throw std::runtime_error("cannot listen on " + host + ": the engine is shut down");
      }
      listener_ = fd;
      epoll_event event{EPOLLIN, {.u64 = listener_key}};
      ::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
      return ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                               : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
    }
    why = error_text(errno);
    ::close(fd);
  }
  throw std::runtime_error("cannot listen on " + host + " from port " + std::to_string(first_port) + " on: " + why);
}

std::string Engine::listen_here() {
  std::uint64_t words[2] = {};
  if (::getrandom(words, sizeof words, 0) != static_cast<ssize_t>(sizeof words)) return {};
  char name[64];
  std::snprintf(name, sizeof name, "ringfold-%016llx%016llx", static_cast<unsigned long long>(words[0]),
                static_cast<unsigned long long>(words[1]));
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return {};
  const net::LocalAddress address(name);
  const std::unique_lock lock(mutex_);
  if (stopping_ || local_listener_ >= 0 || ::bind(fd, address.at(), address.bytes) != 0 || ::listen(fd, 64) != 0) {
    ::close(fd);
    return {};
  }
  local_listener_ = fd;
  epoll_event event{EPOLLIN, {.u64 = local_listener_key}};
  ::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
  return name;
}

// A peer of this host greets with 8 bytes, the word of the pipe that it offers, and with the descriptors of the pipe
// and of its life. The answer is one byte, 1 if the pipe will be used, with the descriptor of the other life. Otherwise
// the connection goes on without. A descriptor can be lost on its way, by a security policy: that is no error.
void Engine::accept_here() {
  while (true) {
    if (core_.unauthenticated() + greeters_.size() >= settings_.max_unauthenticated) {
      pause_listeners();
      return;
    }
    const int fd = ::accept4(local_listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
      if (errno == EMFILE || errno == ENFILE) pause_listeners();
      return;
    }
    greeters_.emplace(fd, monotonic_now() + greeting_time);
    epoll_event event{EPOLLIN, {.u64 = greeter_bit | static_cast<std::uint64_t>(fd)}};
    ::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
  }
}

void Engine::on_greeting(int fd) {
  if (!greeters_.contains(fd)) return;
  std::uint64_t word = 0;
  net::Descriptors offered;
  const bool greeted = net::receive_with_descriptors(fd, &word, sizeof word, offered);
  if (!greeted && (errno == EAGAIN || errno == EINTR)) return;  // the event was another one's, with this number before
  greeters_.erase(fd);
  std::unique_ptr<ShmPipe> pipe = offered[0] >= 0 ? ShmPipe::open(offered[0]) : nullptr;
  std::shared_ptr<const LifeView> life = offered[1] >= 0 ? LifeView::open(offered[1]) : nullptr;
  close_all(offered);
  if (pipe && pipe->word() != word) pipe.reset();
  const char answer = pipe ? 1 : 0;
  const net::Descriptors own = {pipe && life_ ? life_->fd() : -1, -1};
  if (!greeted || !net::send_with_descriptors(fd, &answer, 1, own)) {
    ::close(fd);
    return;
  }
  ::epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr);
  const ConnId conn = core_.open("this host", true);
  adopt(fd, conn, false, 0);
  sockets_[conn].pipe = std::move(pipe);
  sockets_[conn].life = std::move(life);
}

// False: it cannot be reached this way.
bool Engine::dial_here(const std::string& name, ConnId conn, Ns deadline, bool carries_little) {
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return false;
  const net::LocalAddress address(name);
  int offered = -1;
  std::unique_ptr<ShmPipe> pipe;
  if (::connect(fd, address.at(), address.bytes) == 0) {
    pipe = ShmPipe::create(offered, carries_little ? ShmPipe::small_capacity : ShmPipe::capacity);
  }
  const std::uint64_t word = pipe ? pipe->word() : 0;
  const bool greeted = pipe && net::send_with_descriptors(fd, &word, sizeof word, {offered, life_ ? life_->fd() : -1});
  if (offered >= 0) ::close(offered);
  if (!greeted) {
    ::close(fd);
    return false;
  }
  Socket& socket = sockets_[conn];
  socket.pipe = std::move(pipe);
  socket.offers = true;
  adopt(fd, conn, true, deadline);
  return true;
}

void Engine::on_answer(Socket& socket, Ns now) {
  char answer = 0;
  net::Descriptors given;
  const bool answered = net::receive_with_descriptors(socket.fd, &answer, 1, given);
  if (!answered && (errno == EAGAIN || errno == EINTR)) return;
  if (given[0] >= 0) socket.life = LifeView::open(given[0]);
  close_all(given);
  if (!answered) {
    const ConnId conn = socket.conn;
    core_.lost(now, conn, "closed by the other side");
    close_socket(conn);
    return;
  }
  if (answer != 1) socket.pipe.reset();
  socket.offers = socket.connecting = false;
  core_.opened(socket.conn);
  watch_socket(epoll_, socket);
}

ConnId Engine::dial(const std::string& host, std::uint16_t port, Ns timeout, const std::string& source,
                    const std::string& name, bool carries_little) {
  Turn turn(*this);
  const Ns now = monotonic_now();
  const ConnId conn = core_.open(host + ":" + std::to_string(port), false);
  if (stopping_) {  // nothing would close the socket
    core_.lost(now, conn, "the engine is shut down");
    return conn;
  }
  if (!name.empty() && dial_here(name, conn, now + timeout, carries_little)) return conn;
  const auto address = net::literal(host, port);
  if (!address) {
    core_.lost(now, conn, "not an address: " + host);
    return conn;
  }
  const int fd = ::socket(address->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) {
    core_.lost(now, conn, error_text(errno));
    return conn;
  }
  if (const auto from = source.empty() ? std::nullopt : net::literal(source, 0);
      from && from->storage.ss_family == address->storage.ss_family) {
    const int one = 1;
    ::setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &one, sizeof one);
    if (::bind(fd, reinterpret_cast<const sockaddr*>(&from->storage), from->bytes) != 0 && errno != EADDRNOTAVAIL) {
      core_.lost(now, conn, error_text(errno));
      ::close(fd);
      return conn;
    }
  }
  const int rc = ::connect(fd, reinterpret_cast<const sockaddr*>(&address->storage), address->bytes);
  if (rc != 0 && errno != EINPROGRESS) {
    core_.lost(now, conn, error_text(errno));
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
  watch_socket(epoll_, socket, EPOLL_CTL_ADD);
}

void Engine::close_socket(ConnId conn) {
  if (lanes_.close(conn)) return;
  const auto has_it = [conn](const auto& worker) { return worker->lanes().close(conn); };
  if (std::any_of(workers_.begin(), workers_.end(), has_it)) return;
  const auto it = sockets_.find(conn);
  if (it == sockets_.end()) return;
  ::close(it->second.fd);
  sockets_.erase(it);
}

// What a worker's channel has reported, from its thread: a turn begins with it.
void Engine::settle_channels(bool concerns_others) {
  if (!concerns_others && attended_.load()) return;
  const Turn turn(*this, concerns_others ? During::standstill : During::work);
}

void Engine::settle_if_wanted() {
  take_reports();
  if (lanes_.channel().wants_core() && !lanes_.channel().concerns_others()) core_.route_first(monotonic_now());
  if (!lanes_.channel().wants_core() && !core_.wants_settling()) return;
  Standstill still(*this);
  route(still);
  settle_sockets(still);
}

// After the core has changed: sockets that will carry filler, that have become lanes, that are to be closed, and that
// may be read again.
void Engine::settle_sockets(Standstill& still) {
  for (const ConnId conn : core_.take_filling()) {
    const auto it = sockets_.find(conn);
    if (it != sockets_.end()) prepare_for_filler(it->second.fd);
  }
  for (const LaneInfo& lane : core_.take_new_lanes()) take_lane(lane, still);
  for (const ConnId conn : core_.take_closing()) close_socket(conn);
  lanes_.resume_reading();
  for (const auto& worker : workers_) worker->lanes().resume_reading();
  resume_reading();
}

void Engine::resume_reading() {
  for (auto& [conn, socket] : sockets_) {
    if (socket.reading || socket.connecting || !core_.is_message(conn) || core_.receive_space(conn).empty()) continue;
    socket.reading = true;
    watch_socket(epoll_, socket);
  }
}

void Engine::take_lane(const LaneInfo& lane, Standstill& still) {
  const auto it = sockets_.find(lane.conn);
  if (it == sockets_.end()) return;
  try {
    LaneSockets& lanes = lane.channel == 0 ? lanes_ : worker_of(lane.channel, still).lanes();
    Socket socket = std::move(it->second);
    sockets_.erase(it);
    ::epoll_ctl(epoll_, EPOLL_CTL_DEL, socket.fd, nullptr);
    if (lane.shared) socket.pipe.reset();
    lanes.add(std::move(socket), lane, settings_.congestion, core_.dead_after());
  } catch (const std::exception& error) {
    core_.lost(monotonic_now(), lane.conn, std::string("no thread for its channel: ") + error.what());
  }
}

Worker& Engine::worker_of(std::uint32_t channel, Standstill& still) {
  while (workers_.size() < channel) {
    if (stopping_) throw std::runtime_error("the engine is shut down");
    const auto number = static_cast<std::uint32_t>(workers_.size() + 1);
    workers_.push_back(std::make_unique<Worker>(core_.channel(number), settings_.spin, reports_,
                                                [this](bool concerns_others) { settle_channels(concerns_others); }));
    still.workers_ = workers_.size();
  }
  return *workers_[channel - 1];
}

// One read; of a bulk connection a turn of many, because the head of each large block is a read of its own, so that the
// block itself is read to where it belongs.
void Engine::read_some(Socket& socket, Ns now) {
  const ConnId conn = socket.conn;
  std::optional<Standstill> still;
  if (core_.is_control(conn)) still.emplace(*this);  // it may bring evidence
  std::size_t total = 0;
  while (true) {
    const auto space = core_.is_message(conn) ? core_.receive_space(conn) : std::span<std::byte>();
    if (space.empty()) {
      socket.reading = false;
      watch_socket(epoll_, socket);
      return;
    }
    const ssize_t n = ::recv(socket.fd, space.data(), space.size(), MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) {
      core_.lost(now, conn, n == 0 ? std::string("closed by the other side") : error_text(errno));
      close_socket(conn);
      return;
    }
    // Stamped after it was read: a stamp from before would be early by as long as this thread slept.
    core_.received(monotonic_now(), conn, static_cast<std::size_t>(n));
    total += static_cast<std::size_t>(n);
    const bool was_all = static_cast<std::size_t>(n) < space.size();
    if (was_all || total >= bulk_turn_bytes || !core_.is_bulk(conn)) return;
  }
}

bool Engine::flush_messages(Socket& socket, Ns now) {
  MessageBytes messages{core_};
  return flush_socket(messages, socket, now);
}

bool Engine::flush_dirty(Ns now) {
  bool progressed = lanes_.flush_dirty(now);
  if (!core_.has_dirty_messages()) return progressed;
  for (const ConnId conn : core_.take_dirty_messages()) {
    const auto it = sockets_.find(conn);
    if (it != sockets_.end()) progressed |= flush_messages(it->second, now);
  }
  return progressed;
}

// EPOLLOUT is enabled only before blocking: while driving, trying to write is cheaper.
bool Engine::arm() {
  for (auto& [conn, socket] : sockets_) {
    if (socket.blocked != socket.armed) watch_socket(epoll_, socket);
  }
  return lanes_.arm();
}

// A connection in the backlog would make every poll of the sockets return at once.
void Engine::pause_listeners() {
  watch_listeners(0);
  listener_paused_until_ = monotonic_now() + listener_pause;
}

void Engine::watch_listeners(std::uint32_t events) {
  epoll_event event{events, {.u64 = listener_key}};
  if (listener_ >= 0) ::epoll_ctl(epoll_, EPOLL_CTL_MOD, listener_, &event);
  event.data.u64 = local_listener_key;
  if (local_listener_ >= 0) ::epoll_ctl(epoll_, EPOLL_CTL_MOD, local_listener_, &event);
}

// Python authenticates connections, and it may be busy for long. Until then unauthenticated clients must not use up the
// process's descriptors.
void Engine::accept_all() {
  while (true) {
    if (core_.unauthenticated() >= settings_.max_unauthenticated) {
      pause_listeners();
      return;
    }
    sockaddr_storage remote{};
    socklen_t bytes = sizeof remote;
    const int fd = ::accept4(listener_, reinterpret_cast<sockaddr*>(&remote), &bytes, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
      if (errno == EMFILE || errno == ENFILE) pause_listeners();
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
    core_.lost(now, conn, error_text(error));
    close_socket(conn);
    return;
  }
  socket.connecting = false;
  net::prepare(socket.fd, settings_.same_host_buffer);
  core_.opened(socket.conn);
  watch_socket(epoll_, socket);
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
  if (event.data.u64 == local_listener_key) {
    accept_here();
    return;
  }
  if ((event.data.u64 & greeter_bit) != 0) {
    on_greeting(static_cast<int>(event.data.u64 & ~greeter_bit));
    return;
  }
  const auto conn = static_cast<ConnId>(event.data.u64);
  auto it = sockets_.find(conn);
  if (it == sockets_.end()) {
    lanes_.on_ready(conn, event.events, now);
    return;
  }
  if (it->second.connecting) {
    if (it->second.offers) on_answer(it->second, now);
    else finish_connect(it->second, now);
    return;
  }
  if ((event.events & EPOLLOUT) != 0) {
    it->second.blocked = false;
    flush_messages(it->second, now);
    if (!it->second.blocked) watch_socket(epoll_, it->second);
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

}  // namespace ringfold
