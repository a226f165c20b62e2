// What the kernel knows about a TCP connection, and how it is told what the connection is for.
#pragma once

#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>

namespace ringfold {

// Below this RTT, losses come from the path's own full queue, and TCP soon recovers from them.
inline constexpr std::uint32_t low_rtt_us = 20'000;

// What the kernel reports beyond glibc's tcp_info. The minimum RTT is that of the path; the mean includes the
// handshake, in which a peer may have been slow.
struct TcpFacts {
  tcp_info info;
  std::uint64_t rates_and_bytes[4];
  std::uint32_t segments_and_unsent[3];
  std::uint32_t min_rtt_us;
};
static_assert(sizeof(tcp_info) == 104 && sizeof(TcpFacts) == 152);

inline std::optional<std::uint32_t> min_rtt_us(int fd) {
  TcpFacts facts{};
  socklen_t bytes = sizeof facts;
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &facts, &bytes) != 0) return std::nullopt;
  return bytes == sizeof facts ? facts.min_rtt_us : facts.info.tcpi_rtt;
}

inline void use_congestion(int fd, const std::string& name) {
  ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size()));
}

// Bytes that the other side's kernel has not acknowledged, sent or not.
inline std::optional<int> unacknowledged(int fd) {
  int queued = 0;
  if (::ioctl(fd, SIOCOUTQ, &queued) != 0) return std::nullopt;
  return queued;
}

}  // namespace ringfold
