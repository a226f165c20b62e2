// Lines with a made-up clock, and the relay between pairs of sockets.
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <ctime>
#include <stdexcept>
#include <string>

#include "check.hpp"
#include "relay.hpp"

using namespace ringfold::relay;

namespace {

constexpr Ns ms = 1'000'000;

std::span<const std::uint8_t> bytes_of(const std::string& text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

// What a line hands over at an instant.
std::string taken(Line& line, Ns now) {
  std::string out;
  while (const auto packet = line.front(now)) {
    out.append(packet->begin(), packet->end());
    line.pop(now, true);
  }
  return out;
}

TEST(a_packet_takes_its_time) {
  Line line(1);
  line.set(10 * ms, 0);
  CHECK(!line.due());
  line.push(0, bytes_of("a"));
  line.push(3 * ms, bytes_of("b"));
  CHECK(line.due() == 10 * ms);
  CHECK(taken(line, 10 * ms - 1).empty());
  CHECK(taken(line, 10 * ms) == "a");
  CHECK(line.due() == 13 * ms);
  CHECK(taken(line, 14 * ms) == "b");
  CHECK(line.stats().latest == 1 * ms);
  CHECK(line.stats().in_flight == 0);
}

TEST(a_shorter_delay_overtakes_nothing) {
  Line line(1);
  line.set(10 * ms, 0);
  line.push(0, bytes_of("a"));
  line.set(1 * ms, 0);
  line.push(1 * ms, bytes_of("b"));
  CHECK(taken(line, 9 * ms).empty());
  CHECK(taken(line, 10 * ms) == "ab");
  line.push(20 * ms, bytes_of("c"));
  CHECK(line.due() == 21 * ms);
}

TEST(the_configured_share_is_lost_and_a_seed_decides_which) {
  std::array<std::string, 3> seen;
  const std::array<std::uint64_t, 3> seeds{7, 7, 8};
  for (std::size_t i = 0; i < seeds.size(); ++i) {
    Line line(seeds[i]);
    line.set(0, 0.1);
    for (int n = 0; n < 20'000; ++n) line.push(n, bytes_of(n % 2 ? "x" : "y"));
    seen[i] = taken(line, 20'000);
    CHECK_MESSAGE(line.stats().lost > 1'800 && line.stats().lost < 2'200, "%lu lost", line.stats().lost);
    CHECK(seen[i].size() + line.stats().lost == 20'000);
  }
  CHECK(seen[0] == seen[1]);
  CHECK(seen[0] != seen[2]);
  Line all(1), none(1);
  all.set(0, 1.0);
  for (int n = 0; n < 100; ++n) {
    all.push(n, bytes_of("x"));
    none.push(n, bytes_of("x"));
  }
  CHECK(all.stats().lost == 100);
  CHECK(none.stats().lost == 0);
}

TEST(a_full_line_drops_what_comes) {
  Line line(1, 10);
  line.set(1 * ms, 0);
  for (int n = 0; n < 5; ++n) line.push(0, bytes_of("abc"));
  CHECK(line.stats().overflowed == 2);
  CHECK(taken(line, 1 * ms) == "abcabcabc");
  line.push(2 * ms, bytes_of("d"));
  CHECK(taken(line, 3 * ms) == "d");
}

struct Pair {
  std::array<int, 2> ends{};
  Pair() { CHECK(::socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, ends.data()) == 0); }
  ~Pair() {
    ::close(ends[0]);
    ::close(ends[1]);
  }
};

std::string received(int descriptor) {
  std::array<char, 64> buffer;
  const auto got = ::read(descriptor, buffer.data(), buffer.size());
  return got < 0 ? "" : std::string(buffer.data(), static_cast<std::size_t>(got));
}

Ns now() {
  timespec at{};
  ::clock_gettime(CLOCK_MONOTONIC, &at);
  return Ns{at.tv_sec} * 1'000 * ms + at.tv_nsec;
}

TEST(the_relay_carries_packets_in_both_directions_and_not_before_their_time) {
  Pair host, other;
  Relay relay;
  const auto cable = relay.add(host.ends[1], other.ends[1], 5 * ms, 0, 1);
  const Ns start = now();
  CHECK(::write(host.ends[0], "there", 5) == 5);
  CHECK(received(other.ends[0]) == "there");
  CHECK(::write(other.ends[0], "back", 4) == 4);
  CHECK(received(host.ends[0]) == "back");
  CHECK(now() - start >= 10 * ms);
  const auto [there, back] = relay.stats(cable);
  CHECK(there.packets == 1 && there.bytes == 5 && back.packets == 1);
  relay.set(cable, 0, 1.0);
  CHECK(::write(host.ends[0], "lost", 4) == 4);
  CHECK(::write(other.ends[0], "kept", 4) == 4);
  CHECK(received(host.ends[0]) == "kept");
  relay.close();
  relay.close();
}

// More packets than a turn hands over, all due at one instant: none may wait for the next arrival.
TEST(a_crowd_of_packets_all_arrives) {
  Pair host, other;
  const int room = 1 << 20;
  for (const int end : {host.ends[0], other.ends[1]}) ::setsockopt(end, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
  const timeval test_timeout{5, 0};
  ::setsockopt(other.ends[0], SOL_SOCKET, SO_RCVTIMEO, &test_timeout, sizeof test_timeout);
  Relay relay;
  relay.add(host.ends[1], other.ends[1], 20 * ms, 0, 1);
  int sent = 0, got = 0;
  for (; sent < 500 && ::send(host.ends[0], "x", 1, MSG_DONTWAIT) == 1; ++sent) {
    if (sent % 5 == 0) ::usleep(100);  // a socket pair holds few
  }
  while (got < sent && received(other.ends[0]) == "x") ++got;
  CHECK_MESSAGE(sent > 5 && got == sent, "%d of %d", got, sent);
}

TEST(an_unknown_cable_is_refused) {
  Relay relay;
  bool refused = false;
  try {
    relay.set(0, 0, 0);
  } catch (const std::out_of_range&) {
    refused = true;
  }
  CHECK(refused);
  try {
    relay.add(-1, -1, 0, 0, 1);
    CHECK(false);
  } catch (const std::runtime_error&) {
  }
}

}  // namespace
