#include "ringfold/lane_sockets.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "engine/socket_io.hpp"
#include "engine/tcp.hpp"
#include "ringfold/clock.hpp"
#include "ringfold/error_text.hpp"

namespace ringfold {
namespace {

constexpr Ns look_every = 500'000;  // at the lanes of shared links, while they have bytes in flight
constexpr Ns ack_check_every = 100'000'000;
constexpr std::size_t read_bytes = 256 * 1024;  // then who waits for the channel gets a turn: about 50 us
// In the kernel, of each lane of a link with several lanes: what it has taken cannot be given to another one any more.
constexpr int path_unsent_bytes = 16 * 1024;

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

// A lane that others can replace, or the ring, is not waited for: a path that carries nothing is given up, also when it
// is idle. But not before the master would have evicted the neighbour itself (its timeouts for peers are shorter than
// theirs for it).
void prepare_replaceable(int fd, Ns master_dead_after) {
  const int gone_ms = std::max(6'000, static_cast<int>(std::min<Ns>(master_dead_after / 5'000'000, 600'000)));
  const int idle_s = 2, every_s = gone_ms / 3'000, tries = 2, on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &gone_ms, sizeof gone_ms);
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every_s, sizeof every_s);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &tries, sizeof tries);
}

}  // namespace

void LaneSockets::add(Socket socket, const LaneInfo& lane, const std::string& congestion, Ns dead_after) {
  if (socket.pipe) {
    if (channel_.has(socket.conn))
      channel_.set_in_memory(socket.conn);  // what came with its handshake may have ended it
  } else {
    choose_congestion(socket.fd, lane.paths, congestion);
    if (lane.shared || lane.direct) prepare_replaceable(socket.fd, dead_after);
    if (lane.shared)
      ::setsockopt(socket.fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &path_unsent_bytes, sizeof path_unsent_bytes);
  }
  socket.direct = lane.direct;
  sockets_.push_back(std::move(socket));
  watch_socket(epoll_, sockets_.back(), EPOLL_CTL_ADD);
}

Socket* LaneSockets::find(ConnId conn) {
  const auto it = std::find_if(sockets_.begin(), sockets_.end(), [&](const Socket& each) { return each.conn == conn; });
  return it == sockets_.end() ? nullptr : &*it;
}

bool LaneSockets::close(ConnId conn) {
  const Socket* found = find(conn);
  if (found == nullptr) return false;
  ::close(found->fd);
  sockets_.erase(sockets_.begin() + (found - sockets_.data()));
  return true;
}

void LaneSockets::forked_child() {
  for (Socket& socket : sockets_) {
    if (socket.pipe) socket.pipe->abandon();
  }
  close_all();
}

void LaneSockets::close_all() {
  for (const Socket& socket : sockets_) ::close(socket.fd);
  sockets_.clear();
}

bool LaneSockets::read(Socket& socket) {
  if (socket.pipe) return read_pipe(socket);
  const auto space = channel_.receive_space(socket.conn);
  if (space.empty()) {
    socket.reading = false;
    watch_socket(epoll_, socket);
    return false;
  }
  const ssize_t n = ::recv(socket.fd, space.data(), std::min(space.size(), read_bytes), MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  // Stamped after it was read: `now` is from before this thread may have slept, and no payload comes before it leaves.
  if (n > 0) channel_.received(monotonic_now(), socket.conn, static_cast<std::size_t>(n));
  else channel_.lost(socket.conn, n == 0 ? std::string("closed by the other side") : error_text(errno));
  return true;
}

bool LaneSockets::read_pipe(Socket& socket) {
  if (channel_.receive_space(socket.conn).empty()) {  // it is held
    socket.reading = false;
    return false;
  }
  const auto bytes = socket.pipe->readable();
  if (socket.pipe->is_broken()) {
    channel_.lost(socket.conn, "a position of its pipe cannot be");
    return true;
  }
  // A frame that is no longer than half a FIFO can be reduced out of it, while the next one is written to it.
  const std::size_t used =
      bytes.empty() ? 0 : channel_.take(monotonic_now(), socket.conn, bytes, socket.pipe->fifo_bytes() / 2);
  if (!channel_.has(socket.conn)) return true;
  socket.reading = !channel_.receive_space(socket.conn).empty();
  if (used == 0 && socket.life && socket.life->has_died()) {
    channel_.lost(socket.conn, "its process has died", true);
    return true;
  }
  if (used == 0) return false;
  socket.pipe->consume(used);
  ring(socket);
  return true;
}

bool LaneSockets::flush(Socket& socket, Ns now) {
  return socket.pipe ? flush_pipe(socket, now) : flush_socket(channel_, socket, now);
}

bool LaneSockets::flush_pipe(Socket& socket, Ns now) {
  if (socket.blocked) return false;
  std::size_t total = 0;
  while (total < flush_bytes) {
    iovec pieces[64];
    const std::size_t count = channel_.gather(socket.conn, pieces, 64);
    if (count == 0) return total > 0;
    std::size_t offered = 0;
    for (std::size_t i = 0; i < count; ++i) offered += pieces[i].iov_len;
    const std::size_t written = socket.pipe->write(pieces, count);
    if (written > 0) {
      channel_.sent(now, socket.conn, written);
      ring(socket);
    }
    total += written;
    if (written < offered) {
      socket.blocked = true;
      return total > 0;
    }
  }
  channel_.touch(socket.conn);  // there may be more
  return true;
}

// Wakes the other side, if it sleeps. A byte that the socket has no room for is not needed: others are unread.
void LaneSockets::ring(Socket& socket) {
  if (!socket.pipe->take_wake()) return;
  const char any = 0;
  [[maybe_unused]] const auto n = ::send(socket.fd, &any, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
}

bool LaneSockets::poll(Ns now, const std::atomic<int>& stops) {
  bool progressed = channel_.look_at_blocks();
  const bool all = ++polls_ % 8 == 0;  // now and then also where little comes
  for (Socket& socket : sockets_) {
    if (stops.load(std::memory_order_relaxed) > 0) return true;
    if (!channel_.has(socket.conn)) continue;
    const bool is_near = socket.pipe && !socket.direct;  // it costs nothing to look
    if (socket.reading && (is_near || all || channel_.expects(socket.conn))) progressed |= read(socket);
    if (!socket.blocked || !channel_.has(socket.conn)) continue;
    if (stops.load(std::memory_order_relaxed) > 0) return true;
    socket.blocked = false;
    progressed |= flush(socket, now);
  }
  if (stops.load(std::memory_order_relaxed) > 0) return true;
  return flush_dirty(now) || progressed;
}

void LaneSockets::poll_pipes(Ns now) {
  channel_.look_at_blocks();
  for (Socket& socket : sockets_) {
    if (!socket.pipe || !channel_.has(socket.conn)) continue;
    if (socket.reading) read_pipe(socket);
    if (!socket.blocked || !channel_.has(socket.conn)) continue;
    socket.blocked = false;
    flush_pipe(socket, now);
  }
}

bool LaneSockets::flush_dirty(Ns now) {
  if (!channel_.has_dirty()) return false;
  bool progressed = false;
  for (const ConnId conn : channel_.take_dirty()) {
    Socket* socket = channel_.has(conn) ? find(conn) : nullptr;
    if (socket != nullptr) progressed |= flush(*socket, now);
  }
  return progressed;
}

void LaneSockets::on_ready(ConnId conn, std::uint32_t events, Ns now) {
  Socket* socket = find(conn);
  if (socket == nullptr || !channel_.has(conn)) return;
  if (socket->pipe) {
    char bytes[256];
    const ssize_t n = ::recv(socket->fd, bytes, sizeof bytes, MSG_DONTWAIT);
    const int error = errno;
    if (socket->reading) read_pipe(*socket);
    if (channel_.has(conn) && std::exchange(socket->blocked, false)) flush_pipe(*socket, now);
    if (!channel_.has(conn) || n > 0 || (n < 0 && (error == EAGAIN || error == EINTR))) return;
    // What it wrote before its end has been read, unless the lane is held.
    channel_.lost(conn, n == 0 ? std::string("closed by the other side") : error_text(error));
    return;
  }
  if ((events & EPOLLOUT) != 0) {
    socket->blocked = false;
    flush_socket(channel_, *socket, now);
    if (!channel_.has(conn)) return;
    if (!socket->blocked) watch_socket(epoll_, *socket);
  }
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) == 0) return;
  if (socket->reading) read(*socket);
  else if ((events & (EPOLLHUP | EPOLLERR)) != 0) channel_.lost(conn, "closed by the other side");
}

bool LaneSockets::arm() {
  bool may_sleep = true;
  for (Socket& socket : sockets_) {
    if (!socket.pipe && socket.blocked != socket.armed) watch_socket(epoll_, socket);
    if (socket.pipe && channel_.has(socket.conn)) {
      may_sleep &= socket.pipe->prepare_sleep(socket.reading, socket.blocked);
    }
  }
  return may_sleep;
}

void LaneSockets::disarm() {
  for (Socket& socket : sockets_) {
    if (socket.pipe) socket.pipe->end_sleep();
  }
}

bool LaneSockets::has_unsent() const {
  return channel_.has_dirty() || std::any_of(sockets_.begin(), sockets_.end(), [](const Socket& each) {
           return each.pipe ? !each.pipe->is_prepared(each.blocked) : each.blocked != each.armed;
         });
}

int LaneSockets::longest_wait_ms() const {
  if (channel_.has_dirty()) return 0;
  if (channel_.is_filling() || (channel_.has_shared() && channel_.shared_in_flight())) return 1;
  return channel_.has_parts() ? 10 : -1;
}

void LaneSockets::resume_reading() {
  for (Socket& socket : sockets_) {
    if (socket.reading || !channel_.has(socket.conn) || channel_.receive_space(socket.conn).empty()) continue;
    socket.reading = true;
    if (socket.pipe) socket.pipe->end_sleep();  // what is there has not been looked at
    else watch_socket(epoll_, socket);
  }
}

// Of a single lane only what is acknowledged, and that seldom; of lanes that share a link the RTT, too.
void LaneSockets::look(Ns now) {
  const bool shares = channel_.has_shared();
  if (now - (shares ? last_look_ : last_ack_check_) < (shares ? look_every : ack_check_every)) return;
  if (!channel_.has_parts() && !(shares && channel_.shared_in_flight())) return;
  last_look_ = last_ack_check_ = now;
  for (Socket& socket : sockets_) {
    const auto queued = socket.pipe ? static_cast<int>(socket.pipe->unread()) : unacknowledged(socket.fd);
    if (!queued || !channel_.has(socket.conn)) continue;
    TcpFacts facts{};
    socklen_t bytes = sizeof facts;
    if (shares && *queued > 0) ::getsockopt(socket.fd, IPPROTO_TCP, TCP_INFO, &facts, &bytes);
    const std::uint32_t min_us = facts.min_rtt_us == ~std::uint32_t{0} ? 0 : facts.min_rtt_us;  // ~0: none yet
    channel_.acknowledged(now, socket.conn, static_cast<std::uint64_t>(*queued), Ns{facts.info.tcpi_rtt} * 1'000,
                          Ns{min_us} * 1'000);
    const auto unsent = static_cast<int>(channel_.unsent_wanted(socket.conn));
    if (unsent == 0 || std::abs(unsent - socket.unsent) <= socket.unsent / 4) continue;
    socket.unsent = unsent;
    ::setsockopt(socket.fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof unsent);
  }
}

}  // namespace ringfold
