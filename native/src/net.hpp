// Addresses and socket options, as the engine needs them.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>

namespace ringfold::net {

struct Address {
  sockaddr_storage storage{};
  socklen_t bytes = 0;
};

// A literal IPv4 or IPv6 address; no name is ever looked up.
std::optional<Address> literal(const std::string& host, std::uint16_t port);
std::string readable(const sockaddr_storage& storage, socklen_t bytes);
// Options of a connected socket: no delay, and small fixed buffers where both ends are on one host.
void prepare(int fd, int same_host_buffer);

}  // namespace ringfold::net
