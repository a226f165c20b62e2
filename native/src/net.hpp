// Addresses and socket options, as the engine needs them.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cstddef>
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
// The name of a Unix socket that is no file: it belongs to the network namespace and ends with its listener.
struct LocalAddress {
  explicit LocalAddress(const std::string& name);
  const sockaddr* at() const { return reinterpret_cast<const sockaddr*>(&storage); }

  sockaddr_un storage{};
  socklen_t bytes = 0;
};

// A few bytes with up to two descriptors (-1: none), over a Unix socket without waiting. False: not all bytes.
// Descriptors that do not arrive are -1; the receiver closes those that do.
using Descriptors = std::array<int, 2>;
bool send_with_descriptors(int fd, const void* data, std::size_t bytes, const Descriptors& descriptors);
bool receive_with_descriptors(int fd, void* data, std::size_t bytes, Descriptors& descriptors);

// Options of a connected socket: no delay, and small fixed buffers where both ends are on one host.
void prepare(int fd, int same_host_buffer);

}  // namespace ringfold::net
