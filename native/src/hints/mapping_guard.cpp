#include "ringfold/mapping_guard.hpp"

#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <mutex>

namespace ringfold {
namespace {

// The handler may run in any thread at any instant. A range is taken from `bytes` being stored to its being cleared.
struct Range {
  std::atomic<std::uintptr_t> base{0};
  std::atomic<std::size_t> bytes{0};
};

std::array<Range, 64> ranges;
std::mutex changing;
struct sigaction before{};

bool put_zeros(std::uintptr_t at) {
  for (const Range& range : ranges) {
    const std::size_t bytes = range.bytes.load(std::memory_order_acquire);
    const std::uintptr_t base = range.base.load(std::memory_order_acquire);
    if (bytes == 0 || at < base || at - base >= bytes) continue;
    void* const there = reinterpret_cast<void*>(base);  // NOLINT(performance-no-int-to-ptr): atomic in the table
    return ::mmap(there, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == there;
  }
  return false;
}

void on_bus_error(int number, siginfo_t* about, void* context) {
  const int kept = errno;
  // A signal that a process sent has no address.
  const bool is_fault = about->si_code > 0;
  if (is_fault && put_zeros(reinterpret_cast<std::uintptr_t>(about->si_addr))) {
    errno = kept;
    return;
  }
  if ((before.sa_flags & SA_SIGINFO) != 0) {
    before.sa_sigaction(number, about, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(number);
  } else {
    // As if there had never been a handler: a fault comes again at once, what was sent is sent again.
    ::sigaction(number, &before, nullptr);
    if (!is_fault) ::raise(number);
  }
  errno = kept;
}

void install() {
  struct sigaction ours{};
  ours.sa_sigaction = on_bus_error;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&ours.sa_mask);
  ::sigaction(SIGBUS, &ours, &before);
}

}  // namespace

void guard_mapping(const void* base, std::size_t bytes) {
  static std::once_flag installed;
  std::call_once(installed, install);
  const std::lock_guard lock(changing);
  for (Range& range : ranges) {
    if (range.bytes.load(std::memory_order_relaxed) != 0) continue;
    range.base.store(reinterpret_cast<std::uintptr_t>(base), std::memory_order_release);
    range.bytes.store(bytes, std::memory_order_release);
    return;
  }
}

void unguard_mapping(const void* base) {
  const std::lock_guard lock(changing);
  for (Range& range : ranges) {
    if (range.base.load(std::memory_order_relaxed) != reinterpret_cast<std::uintptr_t>(base)) continue;
    range.bytes.store(0, std::memory_order_release);
    range.base.store(0, std::memory_order_release);
  }
}

}  // namespace ringfold
