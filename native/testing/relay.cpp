#include "relay.hpp"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <string>

#include "ringfold/error_text.hpp"

namespace ringfold::relay {
namespace {

constexpr Ns second = 1'000'000'000;
constexpr int packets_a_turn = 64;  // of one descriptor; then the others get their turn
constexpr std::size_t largest_packet = 65'536 + 18;
constexpr std::size_t spare_packets = 4'096;

Ns clock_now() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return Ns{now.tv_sec} * second + now.tv_nsec;
}

// A busy machine must not look like a long cable. A nice value would count only within this session, where the kernel
// groups processes by session; so it is the lowest real-time priority, of which the kernel itself takes the last 5 %.
void take_precedence() {
  const sched_param lowest{.sched_priority = 1};
  ::pthread_setschedparam(::pthread_self(), SCHED_RR, &lowest);  // without the right to it things stay as they are
}

// An instant of the monotonic clock. A timer of its own, since a timeout of poll may be late by a thousandth of itself.
void set_alarm(int timer, Ns at) {
  itimerspec wanted{};
  wanted.it_value = {static_cast<time_t>(at / second), static_cast<long>(at % second)};
  ::timerfd_settime(timer, TFD_TIMER_ABSTIME, &wanted, nullptr);
}

int duplicate(int descriptor) {
  const int copy = ::fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) throw std::runtime_error(std::string("no descriptor for a cable: ") + error_text(errno));
  ::fcntl(copy, F_SETFL, ::fcntl(copy, F_GETFL) | O_NONBLOCK);
  return copy;
}

}  // namespace

void Line::push(Ns now, std::span<const std::uint8_t> packet) {
  ++stats_.packets;
  stats_.bytes += packet.size();
  if (is_lost()) {
    ++stats_.lost;
    return;
  }
  if (stats_.in_flight + packet.size() > capacity_) {
    ++stats_.overflowed;
    return;
  }
  Packet next;
  if (!spare_.empty()) {
    next.bytes = std::move(spare_.back());
    spare_.pop_back();
  }
  next.bytes.assign(packet.begin(), packet.end());
  next.due = last_due_ = std::max(last_due_, now + delay_);
  stats_.in_flight += packet.size();
  packets_.push_back(std::move(next));
}

std::optional<Ns> Line::due() const {
  if (packets_.empty()) return std::nullopt;
  return packets_.front().due;
}

std::optional<std::span<const std::uint8_t>> Line::front(Ns now) const {
  if (packets_.empty() || packets_.front().due > now) return std::nullopt;
  return packets_.front().bytes;
}

void Line::pop(Ns now, bool taken) {
  Packet& packet = packets_.front();
  stats_.in_flight -= packet.bytes.size();
  stats_.refused += !taken;
  stats_.latest = std::max(stats_.latest, now - packet.due);
  if (spare_.size() < spare_packets) spare_.push_back(std::move(packet.bytes));
  packets_.pop_front();
}

// splitmix64: enough for a coin, and small enough to be certain of.
bool Line::is_lost() {
  state_ += 0x9e3779b97f4a7c15;
  std::uint64_t mixed = state_;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
  mixed ^= mixed >> 31;
  return static_cast<double>(mixed >> 11) * 0x1p-53 < loss_;
}

Relay::Relay()
    : wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      alarm_(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)),
      owner_(::getpid()) {
  if (wake_ < 0 || alarm_ < 0) {
    const std::string why = error_text(errno);
    ::close(wake_);
    ::close(alarm_);
    throw std::runtime_error("no descriptor for a relay: " + why);
  }
  thread_ = std::thread([this] { run(); });
}

std::size_t Relay::add(int near, int far, Ns delay, double loss, std::uint64_t seed) {
  const int a = duplicate(near);
  int b = -1;
  try {
    b = duplicate(far);
  } catch (...) {
    ::close(a);
    throw;
  }
  auto cable = std::make_unique<Cable>(Cable{a, b, {a, b, Line(seed), false}, {b, a, Line(~seed), false}});
  cable->there.line.set(delay, loss);
  cable->back.line.set(delay, 0);
  std::size_t number = 0;
  {
    std::lock_guard lock(mutex_);
    if (stopping_) {
      ::close(a);
      ::close(b);
      throw std::runtime_error("the relay is closed");
    }
    cables_.push_back(std::move(cable));
    number = cables_.size() - 1;
  }
  wake();
  return number;
}

void Relay::set(std::size_t cable, Ns delay, double loss) {
  std::lock_guard lock(mutex_);
  cables_.at(cable)->there.line.set(delay, loss);
  cables_.at(cable)->back.line.set(delay, 0);
}

std::pair<LineStats, LineStats> Relay::stats(std::size_t cable) {
  std::lock_guard lock(mutex_);
  const Cable& each = *cables_.at(cable);
  return {each.there.line.stats(), each.back.line.stats()};
}

void Relay::close() {
  if (wake_ < 0) return;
  if (::getpid() == owner_) {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake();
    thread_.join();
  } else {
    thread_.detach();  // a forked child has no such thread, and the mutex may stay locked for ever
  }
  for (const auto& cable : cables_) {
    ::close(cable->near);
    ::close(cable->far);
  }
  cables_.clear();
  ::close(wake_);
  ::close(alarm_);
  wake_ = alarm_ = -1;
}

void Relay::wake() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_, &one, sizeof one);
}

void Relay::run() {
  ::prctl(PR_SET_NAME, "ringfold-relay");
  take_precedence();
  std::vector<std::uint8_t> buffer(largest_packet);
  std::vector<pollfd> polled;
  Ns armed = 0;
  while (true) {
    std::optional<Ns> due;
    {
      std::lock_guard lock(mutex_);
      if (stopping_) return;
      turn(buffer);
      polled.assign({{wake_, POLLIN, 0}, {alarm_, POLLIN, 0}});
      // A scan of all cables on each turn: labs have dozens, and a turn moves many packets when there is much to do.
      for (const auto& cable : cables_) {
        for (const Direction* direction : {&cable->there, &cable->back}) {
          polled.push_back({direction->is_gone ? -1 : direction->from, POLLIN, 0});
          if (const auto next = direction->line.due()) due = due ? std::min(*due, *next) : *next;
        }
      }
    }
    if (due && *due != armed) set_alarm(alarm_, *due);
    if (due) armed = *due;
    if (::poll(polled.data(), polled.size(), -1) <= 0) continue;
    for (const pollfd& each : {polled[0], polled[1]}) {
      std::uint64_t count = 0;
      if (each.revents != 0) [[maybe_unused]]
        const auto got = ::read(each.fd, &count, sizeof count);
    }
    mark_gone(polled);
    // An alarm that rang is set again also for the same instant: a turn may have left packets of it over.
    if (polled[1].revents != 0) armed = 0;
  }
}

// A descriptor whose device was taken away is an error for ever: it is not read again, or the thread would never
// sleep.
void Relay::mark_gone(const std::vector<pollfd>& polled) {
  for (std::size_t i = 2; i < polled.size(); ++i) {
    if (!(polled[i].revents & (POLLERR | POLLHUP | POLLNVAL)) || (polled[i].revents & POLLIN)) continue;
    std::lock_guard lock(mutex_);
    Cable& cable = *cables_[(i - 2) / 2];
    (i % 2 == 0 ? cable.there : cable.back).is_gone = true;
  }
}

// Takes in what has come and hands over what is due, on every cable.
void Relay::turn(std::vector<std::uint8_t>& buffer) {
  for (const auto& cable : cables_) {
    for (Direction* direction : {&cable->there, &cable->back}) {
      const Ns now = clock_now();
      for (int i = 0; i < packets_a_turn; ++i) {
        const ssize_t got = ::read(direction->from, buffer.data(), buffer.size());
        if (got <= 0) break;
        direction->line.push(now, {buffer.data(), static_cast<std::size_t>(got)});
      }
      const Ns then = clock_now();
      for (int i = 0; i < packets_a_turn; ++i) {
        const auto packet = direction->line.front(then);
        if (!packet) break;
        const bool taken = ::write(direction->to, packet->data(), packet->size()) >= 0;
        direction->line.pop(then, taken);
      }
    }
  }
}

}  // namespace ringfold::relay
