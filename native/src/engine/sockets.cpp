// The engine's sockets: listening, connecting, reading, writing, and epoll events. All under the mutex.
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>

#include "net.hpp"
#include "ringfold/engine.hpp"
#include "ringfold/error_text.hpp"

namespace ringfold {
namespace {

constexpr Ns listener_pause = 100'000'000;
constexpr Ns look_every = 500'000;               // at the lanes of shared links, while they have bytes in flight
constexpr std::size_t flush_bytes = 512 * 1024;  // then reading gets its turn
constexpr std::size_t bulk_turn_bytes = std::size_t{1} << 20;  // of one bulk connection: then the others get theirs
// In the kernel: a message should not wait behind more filler than this.
constexpr int filler_unsent_bytes = 128 * 1024;
constexpr int path_unsent_bytes = 16 * 1024;  // in the kernel, of each lane of a link with several paths
// Below this RTT, losses come from the path's own full queue, and TCP soon recovers from them.
constexpr std::uint32_t low_rtt_us = 20'000;

// What the kernel reports beyond glibc's tcp_info. The minimum RTT is that of the path; the mean includes the
// handshake, in which a peer may have been slow.
struct TcpFacts {
  tcp_info info;
  std::uint64_t rates_and_bytes[4];
  std::uint32_t segments_and_unsent[3];
  std::uint32_t min_rtt_us;
};
static_assert(sizeof(tcp_info) == 104 && sizeof(TcpFacts) == 152);

std::optional<std::uint32_t> min_rtt_us(int fd) {
  TcpFacts facts{};
  socklen_t bytes = sizeof facts;
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &facts, &bytes) != 0) return std::nullopt;
  return bytes == sizeof facts ? facts.min_rtt_us : facts.info.tcpi_rtt;
}

void use_congestion(int fd, const std::string& name) {
  ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size()));
}

// A measurement has well under a second. On a low-RTT path, where the acknowledgements of one direction queue behind
// the filler of the other, BBR takes them for a slow link and needs seconds to notice. So does CUBIC now and then: its
// slow start ends early when acknowledgements come in bursts, and from a few packets in flight it grows for seconds.
// Reno, which every kernel has, stays in slow start until something is lost, and so fills the link at once. On a
// high-RTT path with random loss, the host's own choice is better.
void prepare_for_filler(int fd) {
  ::setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &filler_unsent_bytes, sizeof filler_unsent_bytes);
  if (const auto rtt_us = min_rtt_us(fd); rtt_us && *rtt_us < low_rtt_us) use_congestion(fd, "reno");
}

// Among several paths CUBIC fills a queue evenly; BBR's probing of each path by itself made the split noisier and the
// sum smaller. On a single high-RTT path with random loss, CUBIC takes each loss for a full queue: at 150 ms and a loss
// of 0.1 %, a lane gets no further than 4 Mbit/s. BBR follows the rate that it measures. It also keeps its rate over
// the pauses between ops. Where the kernel does not permit it, the host's own choice stands.
void choose_congestion(int fd, std::uint32_t paths, const std::string& wanted) {
  if (wanted == "host") return;
  if (wanted != "auto") {
    use_congestion(fd, wanted);
  } else if (paths > 1) {
    use_congestion(fd, "cubic");
  } else if (const auto rtt_us = min_rtt_us(fd); rtt_us && *rtt_us >= low_rtt_us) {
    use_congestion(fd, "bbr");
  }
}

// A lane that others can replace is not waited for: a path that carries nothing is given up, also when it is idle. But
// not before the master would have evicted the neighbour itself (its timeouts for peers are shorter than theirs for
// it). What the kernel has taken cannot be given to another lane any more: it gets little ahead.
void prepare_shared(int fd, Ns master_dead_after) {
  const int gone_ms = std::max(6'000, static_cast<int>(std::min<Ns>(master_dead_after / 5'000'000, 600'000)));
  const int idle_s = 2, every_s = gone_ms / 3'000, tries = 2, on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &gone_ms, sizeof gone_ms);
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every_s, sizeof every_s);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &tries, sizeof tries);
  ::setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &path_unsent_bytes, sizeof path_unsent_bytes);
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

ConnId Engine::dial(const std::string& host, std::uint16_t port, Ns timeout, const std::string& source) {
  Turn turn(*this);
  const Ns now = monotonic_now();
  const ConnId conn = core_.open(host + ":" + std::to_string(port), false);
  if (stopping_) {  // nothing would close the socket
    core_.lost(now, conn, "the engine is shut down");
    return conn;
  }
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

// After the core has changed: sockets that may be read again, that will carry filler, and that are to be closed.
void Engine::settle_sockets() {
  for (const ConnId conn : core_.take_filling()) {
    const auto it = sockets_.find(conn);
    if (it == sockets_.end()) continue;
    prepare_for_filler(it->second.fd);
  }
  for (const LaneInfo& lane : core_.take_new_lanes()) {
    const auto it = sockets_.find(lane.conn);
    if (it == sockets_.end()) continue;
    choose_congestion(it->second.fd, lane.paths, settings_.congestion);
    if (lane.shared) prepare_shared(it->second.fd, core_.dead_after());
  }
  for (const ConnId conn : core_.take_closing()) close_socket(conn);
  for (auto& [conn, socket] : sockets_) {
    if (socket.reading || socket.connecting || core_.receive_space(conn).empty()) continue;
    socket.reading = true;
    watch(socket);
  }
}

// One read; of a bulk connection a turn of many, because the head of each large block is a read of its own, so that the
// block itself is read to where it belongs.
bool Engine::read_some(Socket& socket, Ns now) {
  const ConnId conn = socket.conn;
  std::size_t total = 0;
  while (true) {
    const auto space = core_.receive_space(conn);
    if (space.empty()) {
      socket.reading = false;
      watch(socket);
      return total > 0;
    }
    const ssize_t n = ::recv(socket.fd, space.data(), space.size(), MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return total > 0;
    if (n <= 0) {
      core_.lost(now, conn, n == 0 ? std::string("closed by the other side") : error_text(errno));
      close_socket(conn);
      return true;
    }
    // What is measured is stamped after it was read: a stamp from before would be early by as long as this thread
    // slept.
    core_.received(core_.is_bulk(conn) ? monotonic_now() : now, conn, static_cast<std::size_t>(n));
    total += static_cast<std::size_t>(n);
    const bool was_all = static_cast<std::size_t>(n) < space.size();
    if (was_all || total >= bulk_turn_bytes || !core_.is_bulk(conn)) return true;
  }
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
      // Also when the other side has closed: its last message, such as Evicted, may be unread. Reading finds the end
      // then.
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

// What the kernel reports about lanes that share a link: bytes in flight, and the RTT.
void Engine::look_at_lanes(Ns now) {
  look_at_hints(now);
  if (!core_.has_shared() || now - last_look_ < look_every) return;
  if (!core_.ops().any_in_flight() && !core_.shared_in_flight()) return;
  last_look_ = now;
  for (const ConnId conn : hot_) {
    const auto it = sockets_.find(conn);
    int queued = 0;
    if (it == sockets_.end() || ::ioctl(it->second.fd, SIOCOUTQ, &queued) != 0) continue;
    TcpFacts facts{};
    socklen_t bytes = sizeof facts;
    if (queued > 0) ::getsockopt(it->second.fd, IPPROTO_TCP, TCP_INFO, &facts, &bytes);
    const std::uint32_t min_us = facts.min_rtt_us == ~std::uint32_t{0} ? 0 : facts.min_rtt_us;  // ~0: none yet
    core_.acknowledged(now, conn, static_cast<std::uint64_t>(queued), Ns{facts.info.tcpi_rtt} * 1'000,
                       Ns{min_us} * 1'000);
    const auto unsent = static_cast<int>(core_.unsent_wanted(conn));
    if (unsent == 0 || std::abs(unsent - it->second.unsent) <= it->second.unsent / 4) continue;
    it->second.unsent = unsent;
    ::setsockopt(it->second.fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof unsent);
  }
}

// EPOLLOUT is enabled only before blocking: while driving, trying to write is cheaper.
void Engine::arm() {
  for (auto& [conn, socket] : sockets_) {
    if (socket.blocked != socket.armed) watch(socket);
  }
}

// A connection in the backlog would make every poll of the sockets return at once.
void Engine::pause_listener() {
  epoll_event event{0, {.u64 = listener_key}};
  ::epoll_ctl(epoll_, EPOLL_CTL_MOD, listener_, &event);
  listener_paused_until_ = monotonic_now() + listener_pause;
}

// Python authenticates connections, and it may be busy for long. Until then unauthenticated clients must not use up the
// process's descriptors.
void Engine::accept_all() {
  while (true) {
    if (core_.unauthenticated() >= settings_.max_unauthenticated) {
      pause_listener();
      return;
    }
    sockaddr_storage remote{};
    socklen_t bytes = sizeof remote;
    const int fd = ::accept4(listener_, reinterpret_cast<sockaddr*>(&remote), &bytes, SOCK_CLOEXEC | SOCK_NONBLOCK);
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
    core_.lost(now, conn, error_text(error));
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

}  // namespace ringfold
