#include "ringfold/probe_socket.hpp"

#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/timex.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <utility>

#include "net.hpp"
#include "probe_messages.hpp"
#include "ringfold/error_text.hpp"

namespace ringfold::probe {
namespace {

constexpr Ns second = 1'000'000'000;
constexpr Ns longest_sleep = second;     // so that a step of the clock is seen while it can be distinguished from drift
constexpr Ns after_garbage = 1'000'000;  // sleep at least this long when what woke us was worth nothing
constexpr int batches_a_wake = 32;       // then sending gets its turn
constexpr std::size_t max_expected = 4'096;  // transmit stamps that are waited for
constexpr std::uint64_t stampless_sent = 200, stampless_received = 100;

Ns read_clock(clockid_t clock) {
  timespec now{};
  ::clock_gettime(clock, &now);
  return Ns{now.tv_sec} * second + now.tv_nsec;
}

struct Sandwich {
  Ns before = 0, real = 0, after = 0;
};

// CLOCK_REALTIME between two readings of CLOCK_MONOTONIC_RAW, the tightest of a few.
Sandwich sandwich() {
  Sandwich best;
  for (int i = 0; i < 5; ++i) {
    Sandwich next;
    next.before = raw_now();
    next.real = read_clock(CLOCK_REALTIME);
    next.after = raw_now();
    if (i == 0 || next.after - next.before < best.after - best.before) best = next;
  }
  return best;
}

// How the kernel steers CLOCK_REALTIME now.
double steering() {
  timex now{};
  if (::adjtimex(&now) < 0) return 0;
  return static_cast<double>(now.freq) / 65'536e6 + static_cast<double>(now.tick - 10'000) / 10'000;
}

// Asks the scheduler for short and prompt turns instead of long ones, where it can (Linux 6.12 on); it needs no right.
void request_short_time_slices() {
#if defined(SYS_sched_setattr)
  struct {
    std::uint32_t size = 48, policy = SCHED_OTHER;
    std::uint64_t flags = 0;
    std::int32_t nice = 0;
    std::uint32_t priority = 0;
    std::uint64_t runtime = 100'000, deadline = 0, period = 0;
  } wish;
  wish.nice = ::getpriority(PRIO_PROCESS, 0);
  ::syscall(SYS_sched_setattr, 0, &wish, 0u);
#endif
}

struct Arrived {
  std::array<std::uint8_t, 64> bytes;
  std::size_t length;
  Endpoint from;
  Ns real;
};

struct Expected {
  Owner owner;
  Ns sent_real;
};

struct Stamped {
  Owner owner;
  Ns real;
};

}  // namespace

Ns raw_now() { return read_clock(CLOCK_MONOTONIC_RAW); }

struct Prober::Io {
  Messages messages;
  std::vector<Arrived> arrived;
  std::vector<Stamped> stamped;
  std::vector<Outgoing> out;
  std::deque<Expected> expected;  // the stamp with id first_id + i is for expected[i]
  std::uint32_t first_id = 0;
  std::uint64_t wanted = 0;
  Key key{};
  ClockMap clocks{steering()};
  Ns pretended = 0;
  bool kernel_tx = true, kernel_rx = true, worthless = false;
  std::uint64_t sent = 0, send_errors = 0, would_block = 0, icmp_errors = 0, resyncs = 0;
  std::uint64_t rx_stamps = 0, rx_unstamped = 0;

  void forget_expected(int socket);
};

// Ids of stamps count what was sent with success, but not every kernel takes an id back when a packet fails. So after a
// failure the count starts again at zero, which the kernel does when the option is switched on.
void Prober::Io::forget_expected(int socket) {
  for (const unsigned flags : {stamp_flags, stamp_flags | SOF_TIMESTAMPING_OPT_ID}) {
    ::setsockopt(socket, SOL_SOCKET, SO_TIMESTAMPING, &flags, sizeof flags);
  }
  expected.clear();
  first_id = 0;
  ++resyncs;
}

Prober::Prober(Settings settings)
    : settings_(std::move(settings)),
      core_(settings_.node, static_cast<std::uint64_t>(read_clock(CLOCK_REALTIME)) >> 16),
      io_(std::make_unique<Io>()) {
  // Before there is a socket: packets may come long before the thread gets a core, and the map must reach back to the
  // first of them. (From two samples that are microseconds apart it would not.)
  look_at_clocks();
  open_socket();
  wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_ < 0) {
    ::close(socket_);
    throw std::runtime_error(std::string("no descriptor for a prober: ") + error_text(errno));
  }
  if (settings_.user_stamps) io_->kernel_tx = io_->kernel_rx = false;
  if (!io_->kernel_tx) core_.use_user_stamps();
  thread_ = std::thread([this] { run(); });
  ::pthread_setname_np(thread_.native_handle(), "ringfold-probe");
}

Prober::~Prober() {
  if (forked_) {  // the thread is not in this process, and may have been in the middle of anything
    thread_.detach();
    static_cast<void>(io_.release());
    return;
  }
  shutdown();
}

void Prober::open_socket() {
  const auto address = net::literal(settings_.host, settings_.port);
  const std::string where = settings_.host + " port " + std::to_string(settings_.port) + " (UDP)";
  if (!address) throw std::runtime_error("cannot probe from " + where + ": not an address");
  family_ = address->storage.ss_family;
  socket_ = ::socket(family_, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (socket_ < 0) throw std::runtime_error("cannot probe from " + where + ": " + error_text(errno));
  const int off = 0, buffer = 1 << 20;
  if (family_ == AF_INET6) ::setsockopt(socket_, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  ::setsockopt(socket_, SOL_SOCKET, SO_RCVBUF, &buffer, sizeof buffer);  // for when the thread does not get a core
  if (::bind(socket_, reinterpret_cast<const sockaddr*>(&address->storage), address->bytes) != 0) {
    const int why = errno;
    ::close(socket_);
    throw std::runtime_error("cannot probe from " + where + ": " +
                             (why == EADDRINUSE ? std::string("the port is taken") : error_text(why)));
  }
  sockaddr_storage bound{};
  socklen_t bytes = sizeof bound;
  ::getsockname(socket_, reinterpret_cast<sockaddr*>(&bound), &bytes);
  port_ = ntohs(family_ == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                    : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
  if (settings_.user_stamps) return;
  const unsigned flags = stamp_flags | SOF_TIMESTAMPING_OPT_ID;
  if (::setsockopt(socket_, SOL_SOCKET, SO_TIMESTAMPING, &flags, sizeof flags) != 0) {
    io_->kernel_tx = io_->kernel_rx = false;
  }
}

Endpoint Prober::endpoint(const Neighbour& neighbour) const {
  const std::string name = "node " + std::to_string(neighbour.node);
  if (neighbour.port == 0) throw std::invalid_argument(name + " has no port");
  auto address = net::literal(neighbour.host, neighbour.port);
  if (address && family_ == AF_INET6 && address->storage.ss_family == AF_INET) {
    address = net::literal("::ffff:" + neighbour.host, neighbour.port);
  }
  if (!address) throw std::invalid_argument(name + ": not an address: " + neighbour.host);
  if (address->storage.ss_family != family_) {
    throw std::invalid_argument(name + ": " + neighbour.host + " cannot be reached from " + settings_.host);
  }
  Endpoint out;
  out.length = static_cast<std::uint8_t>(address->bytes);
  std::memcpy(out.bytes.data(), &address->storage, address->bytes);
  return out;
}

std::vector<Link> Prober::links(const std::vector<Neighbour>& neighbours) const {
  std::vector<Link> out;
  for (const Neighbour& each : neighbours) {
    const bool twice = std::any_of(out.begin(), out.end(), [&](const Link& link) { return link.node == each.node; });
    if (twice) throw std::invalid_argument("node " + std::to_string(each.node) + " is named twice");
    if (each.node == settings_.node) throw std::invalid_argument("a node does not probe itself");
    out.push_back({each.node, endpoint(each)});
  }
  return out;
}

// Commands

void Prober::configure(const Key& key, const std::vector<Neighbour>& out, const std::vector<Neighbour>& into) {
  const auto out_links = links(out), in_links = links(into);
  {
    const std::lock_guard lock(mutex_);
    core_.configure(to_node(raw_now()), key, out_links, in_links);
  }
  wake();
}

void Prober::resume(Ns gap, Ns pause) {
  {
    const std::lock_guard lock(mutex_);
    const Ns now = raw_now();
    core_.resume(now, to_node(now), gap, pause);
  }
  wake();
}

void Prober::pause() {
  const std::lock_guard lock(mutex_);
  core_.pause();
}

std::vector<Window> Prober::rotate() {
  std::vector<Window> windows;
  Ns gap = 0;
  {
    const std::lock_guard lock(mutex_);
    const Ns now = raw_now();
    gap = core_.gap();
    windows = core_.rotate(now, to_node(now));
  }
  for (Window& each : windows) filter(each, gap);
  return windows;
}

std::vector<Window> Prober::so_far() {
  std::vector<Window> windows;
  Ns gap = 0;
  {
    const std::lock_guard lock(mutex_);
    gap = core_.gap();
    windows = core_.so_far(to_node(raw_now()));
  }
  for (Window& each : windows) filter(each, gap);
  return windows;
}

std::vector<Window> Prober::peek(std::size_t most) {
  const std::lock_guard lock(mutex_);
  return core_.peek(to_node(raw_now()), most);
}

void Prober::rename(Node node) {
  const std::lock_guard lock(mutex_);
  settings_.node = node;
  core_.rename(node);
}

Stats Prober::stats() {
  const std::lock_guard lock(mutex_);
  Stats out = counts_;
  out.core = core_.stats();
  clockid_t clock{};
  if (thread_.joinable() && ::pthread_getcpuclockid(thread_.native_handle(), &clock) == 0) out.cpu = read_clock(clock);
  return out;
}

Ns Prober::utc() const {
  const Sandwich now = sandwich();
  return now.real + pretended_.load() - to_node(now.before + (now.after - now.before) / 2);
}

void Prober::wake() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto n = ::write(wake_, &one, sizeof one);
}

void Prober::shutdown() {
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return;
    stopping_ = true;
  }
  wake();
  if (thread_.joinable()) {
    const Ns cpu = stats().cpu;
    thread_.join();
    counts_.cpu = cpu;
  }
  for (int* fd : {&socket_, &wake_}) {
    if (*fd >= 0) ::close(*fd);
    *fd = -1;
  }
}

void Prober::forked_child() {
  mutex_.unlock();
  forked_ = stopping_ = true;
  for (int* fd : {&socket_, &wake_}) {
    if (*fd >= 0) ::close(*fd);
    *fd = -1;
  }
}

// The thread

void Prober::run() {
  std::optional<Ns> due;
  request_short_time_slices();
  while (true) {
    wait(due);
    drain_packets();
    if (io_->kernel_tx) drain_stamps();
    look_at_clocks();
    Io& io = *io_;
    io.out.clear();
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) return;
      const Ns now = raw_now();
      const std::uint64_t valid = core_.stats().valid;
      if (io.clocks.step() != 0) {
        core_.stepped(now, "CLOCK_REALTIME stepped by " + std::to_string(io.clocks.step()) + " ns");
      }
      // What was stamped around a step could be of either side of it.
      const bool ambiguous = io.clocks.step() != 0;
      const auto by_node = [&](Ns real) {
        return real == 0 || ambiguous ? 0 : to_node(io.clocks.to_raw(real + io.pretended));
      };
      for (const Stamped& each : io.stamped) core_.stamped(each.owner, by_node(each.real));
      for (const Arrived& each : io.arrived) {
        core_.received(now, {each.bytes.data(), each.length}, each.from, by_node(each.real));
      }
      io.worthless = !io.arrived.empty() && core_.stats().valid == valid;
      judge_stamps();
      core_.step(now, io.out);
      io.key = core_.key();
      due = core_.due();
    }
    io.arrived.clear();
    io.stamped.clear();
    send_all();
    publish();
  }
}

void Prober::publish() {
  const Io& io = *io_;
  const std::lock_guard lock(mutex_);
  ++counts_.wakes;
  counts_.sent = io.sent;
  counts_.send_errors = io.send_errors;
  counts_.would_block = io.would_block;
  counts_.icmp_errors = io.icmp_errors;
  counts_.resyncs = io.resyncs;
  counts_.clock_noise = io.clocks.noise();
  counts_.clock_bends = io.clocks.bends();
  counts_.user_stamps = !io.kernel_tx || !io.kernel_rx;
}

// Sleeps until `due`. The socket is watched only where that matters: when nothing else is to do, or when a packet gets
// its stamp by being read.
void Prober::wait(std::optional<Ns> due) {
  const Ns now = raw_now();
  const Ns sleep = std::clamp(due ? *due - now : longest_sleep, Ns{0}, longest_sleep);
  const auto look = [&](Ns time, int descriptors) {
    pollfd watched[] = {{wake_, POLLIN, 0}, {socket_, POLLIN, 0}};
    const timespec timeout{time / second, time % second};
    ::ppoll(watched, static_cast<nfds_t>(descriptors), &timeout, nullptr);
    if ((watched[0].revents & POLLIN) != 0) {
      std::uint64_t count = 0;
      [[maybe_unused]] const auto n = ::read(wake_, &count, sizeof count);
    }
    return watched[0].revents != 0;
  };
  const bool watches_socket = !due || !io_->kernel_rx;
  if (!watches_socket) {
    if (sleep > 0) look(sleep, 1);
    return;
  }
  if (io_->worthless && look(std::min(sleep, after_garbage), 1)) return;
  look(sleep, 2);
}

void Prober::drain_packets() {
  Io& io = *io_;
  for (int round = 0; round < batches_a_wake; ++round) {
    io.messages.make_ready(batch);
    const int count = ::recvmmsg(socket_, io.messages.headers.data(), batch, MSG_DONTWAIT, nullptr);
    const Ns real = io.kernel_rx ? 0 : read_clock(CLOCK_REALTIME);
    for (int i = 0; i < count; ++i) {
      mmsghdr& header = io.messages.headers[static_cast<std::size_t>(i)];
      const Messages::Room& room = io.messages.rooms[static_cast<std::size_t>(i)];
      // A long one is cut off by the kernel; its length here is still not that of a packet.
      Arrived arrived{
          room.bytes, std::min<std::size_t>(header.msg_len, room.bytes.size()), {}, read_notes(header.msg_hdr).real};
      arrived.from.length =
          static_cast<std::uint8_t>(std::min<std::size_t>(header.msg_hdr.msg_namelen, arrived.from.bytes.size()));
      std::memcpy(arrived.from.bytes.data(), &room.name, arrived.from.length);
      ++(arrived.real != 0 ? io.rx_stamps : io.rx_unstamped);
      if (arrived.real == 0) arrived.real = real;
      io.arrived.push_back(arrived);
    }
    if (count < static_cast<int>(batch)) break;
  }
}

void Prober::drain_stamps() {
  Io& io = *io_;
  for (int round = 0; round < batches_a_wake; ++round) {
    io.messages.make_ready(batch);
    const int count = ::recvmmsg(socket_, io.messages.headers.data(), batch, MSG_DONTWAIT | MSG_ERRQUEUE, nullptr);
    for (int i = 0; i < count; ++i) {
      const Notes notes = read_notes(io.messages.headers[static_cast<std::size_t>(i)].msg_hdr);
      io.icmp_errors += notes.is_icmp;
      const std::uint32_t index = notes.id - io.first_id;
      if (!notes.is_stamp || notes.real == 0 || index >= io.expected.size()) continue;
      const Expected& expected = io.expected[index];
      // Older than its packet: a stamp from before the count was restarted. One that a queue held back until now can
      // pass; it is too early for its packet, which only widens the bound, and the packet's own stamp replaces it.
      if (notes.real >= expected.sent_real) io.stamped.push_back({expected.owner, notes.real});
    }
    if (count < static_cast<int>(batch)) break;
  }
  while (io.expected.size() > max_expected) {
    io.expected.pop_front();
    ++io.first_id;
  }
}

void Prober::look_at_clocks() {
  const Sandwich now = sandwich();
  io_->pretended = pretended_.load();
  io_->clocks.add(now.before, now.real + io_->pretended, now.after);
}

// Drivers exist that stamp nothing. Packets to a dead host get no stamp either, so a response must have come.
void Prober::judge_stamps() {
  Io& io = *io_;
  const CoreStats& stats = core_.stats();
  if (io.kernel_tx && stats.tx_stamps == 0 && io.wanted >= stampless_sent && stats.valid >= stampless_received) {
    io.kernel_tx = false;
    core_.use_user_stamps();
  }
  if (io.kernel_rx && io.rx_stamps == 0 && io.rx_unstamped >= stampless_received) {
    io.kernel_rx = false;
    core_.use_user_stamps();
  }
}

void Prober::send_all() {
  Io& io = *io_;
  std::size_t at = 0;
  while (at < io.out.size()) {
    const std::size_t count = std::min(io.kernel_tx ? batch : 1, io.out.size() - at);
    for (std::size_t i = 0; i < count; ++i) {
      Outgoing& next = io.out[at + i];
      io.messages.put(i, encode(io.key, next.packet), next.to, io.kernel_tx && !next.wants_stamp());
    }
    const Ns real = read_clock(CLOCK_REALTIME);
    const int sent = ::sendmmsg(socket_, io.messages.headers.data(), static_cast<unsigned>(count), MSG_DONTWAIT);
    for (int i = 0; i < sent; ++i) {
      const Outgoing& next = io.out[at + static_cast<std::size_t>(i)];
      if (!next.wants_stamp()) continue;
      ++io.wanted;
      if (io.kernel_tx) {
        io.expected.push_back({next.owner, real});
      } else {
        io.stamped.push_back({next.owner, real});
      }
    }
    at += static_cast<std::size_t>(std::max(sent, 0));
    io.sent += static_cast<std::uint64_t>(std::max(sent, 0));
    if (sent > 0) continue;
    const int why = errno;
    if (why == EINTR) continue;
    const bool is_full = why == EAGAIN || why == ENOBUFS;
    ++(is_full ? io.would_block : io.send_errors);
    // Without a route the packet is refused before it is given an id.
    if (io.kernel_tx && why != ENETUNREACH && why != EHOSTUNREACH && why != EINVAL) {
      drain_stamps();
      io.forget_expected(socket_);
    }
    if (is_full) return;  // probes that wait in a queue measure the queue
    ++at;
  }
}

}  // namespace ringfold::probe
