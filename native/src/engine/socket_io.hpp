// Writing and watching a socket, whatever it carries.
#pragma once

#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>

#include "ringfold/lane_sockets.hpp"

namespace ringfold {

inline constexpr std::size_t flush_bytes = 512 * 1024;  // then reading gets its turn

// Sends what `from`, a channel or the core, has for this connection. True: something was sent.
template <typename Source>
bool flush_socket(Source& from, Socket& socket, Ns now) {
  if (socket.connecting || socket.blocked) return false;
  const ConnId conn = socket.conn;
  std::size_t total = 0;
  while (total < flush_bytes) {
    iovec pieces[64];
    const std::size_t count = from.gather(conn, pieces, 64);
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
    from.sent(now, conn, static_cast<std::size_t>(n));
    total += static_cast<std::size_t>(n);
    if (static_cast<std::size_t>(n) < offered) {
      socket.blocked = true;
      return true;
    }
  }
  from.touch(conn);  // there may be more
  return true;
}

inline void watch_socket(int epoll, Socket& socket, int change = EPOLL_CTL_MOD) {
  epoll_event event{};
  socket.armed = socket.blocked;
  const bool connects = socket.connecting && !socket.offers;
  event.events = (socket.reading && !connects ? EPOLLIN : 0u) | (socket.blocked || connects ? EPOLLOUT : 0u);
  event.data.u64 = socket.conn;
  ::epoll_ctl(epoll, change, socket.fd, &event);
}

}  // namespace ringfold
