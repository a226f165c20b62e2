#include "net.hpp"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

namespace ringfold::net {

std::optional<Address> literal(const std::string& host, std::uint16_t port) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return std::nullopt;
  Address out;
  std::memcpy(&out.storage, found->ai_addr, found->ai_addrlen);
  out.bytes = found->ai_addrlen;
  ::freeaddrinfo(found);
  return out;
}

std::string readable(const sockaddr_storage& storage, socklen_t bytes) {
  char host[NI_MAXHOST] = "?", port[NI_MAXSERV] = "?";
  ::getnameinfo(reinterpret_cast<const sockaddr*>(&storage), bytes, host, sizeof host, port, sizeof port,
                NI_NUMERICHOST | NI_NUMERICSERV);
  const bool v6 = storage.ss_family == AF_INET6;
  std::string out = v6 ? "[" : "";
  out.append(host).append(v6 ? "]:" : ":").append(port);
  return out;
}

LocalAddress::LocalAddress(const std::string& name) {
  storage.sun_family = AF_UNIX;
  const std::size_t used = std::min(name.size(), sizeof storage.sun_path - 1);
  std::memcpy(storage.sun_path + 1, name.data(), used);  // after a zero: no file
  bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + used);
}

bool send_with_descriptors(int fd, const void* data, std::size_t bytes, const Descriptors& descriptors) {
  iovec piece{const_cast<void*>(data), bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(Descriptors))] = {};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  int given[2] = {};
  std::size_t count = 0;
  for (const int each : descriptors) {
    if (each >= 0) given[count++] = each;
  }
  if (count > 0) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(count * sizeof(int));
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(count * sizeof(int));
    std::memcpy(CMSG_DATA(head), given, count * sizeof(int));
  }
  return ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(bytes);
}

bool receive_with_descriptors(int fd, void* data, std::size_t bytes, Descriptors& descriptors) {
  iovec piece{data, bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(Descriptors))] = {};  // the kernel closes what does not fit
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t n = ::recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  const int error = errno;
  descriptors.fill(-1);
  std::size_t count = 0;
  for (cmsghdr* head = n < 0 ? nullptr : CMSG_FIRSTHDR(&message); head != nullptr; head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t at = 0; at + sizeof(int) <= head->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
      int each = -1;
      std::memcpy(&each, CMSG_DATA(head) + at, sizeof each);
      if (count < descriptors.size()) descriptors[count++] = each;
      else ::close(each);
    }
  }
  errno = n == 0 ? ECONNRESET : error;
  return n == static_cast<ssize_t>(bytes);
}

namespace {

bool same_host(int fd) {
  sockaddr_storage here{}, there{};
  socklen_t here_bytes = sizeof here, there_bytes = sizeof there;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&here), &here_bytes) != 0) return false;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&there), &there_bytes) != 0) return false;
  if (here.ss_family != there.ss_family) return false;
  if (here.ss_family == AF_INET) {
    return reinterpret_cast<sockaddr_in&>(here).sin_addr.s_addr ==
           reinterpret_cast<sockaddr_in&>(there).sin_addr.s_addr;
  }
  return std::memcmp(&reinterpret_cast<sockaddr_in6&>(here).sin6_addr,
                     &reinterpret_cast<sockaddr_in6&>(there).sin6_addr, sizeof(in6_addr)) == 0;
}

}  // namespace

// Between machines the kernel sizes the buffers best. On one host there is no distance to fill: what is in flight
// should stay in the cache, so the buffers are small and fixed.
void prepare(int fd, int same_host_buffer) {
  const int one = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  if (same_host_buffer <= 0 || !same_host(fd)) return;
  ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &same_host_buffer, sizeof same_host_buffer);
  ::setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &same_host_buffer, sizeof same_host_buffer);
}

}  // namespace ringfold::net
