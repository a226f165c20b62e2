// Random schedules of engines with threads, over lanes in shared memory: ops of all sizes on several tags, while links
// are lost, epochs are sealed, settled and installed, and the process forks.
//
// A seed decides what is done, and the machine when: every result is looked at, and so are descriptors and mappings in
// the end. An engine that does not wait for one of its workers must be found.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "engine_ring.hpp"
#include "ringfold/planted.hpp"

using namespace ringfold;

namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool forks = false;  // the child of a process with threads may not allocate under a sanitizer
constexpr unsigned seeds = 5;  // and all takes ten times as long
#else
constexpr bool forks = true;
constexpr unsigned seeds = 12;
#endif

bool has_pipes() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("ringfold-lane") != std::string::npos) return true;
  }
  return false;
}

class Schedule {
 public:
  explicit Schedule(unsigned seed) : seed_(seed), rng_(seed), ring_(shape()) {}

  void run() {
    constexpr std::uint64_t tags = 3;
    Threads callers;
    std::atomic<std::uint64_t> left{ring_.size() * tags};
    for (std::uint32_t rank = 0; rank < ring_.size(); ++rank) {
      for (std::uint64_t tag = 0; tag < tags; ++tag) {
        callers.start([this, rank, tag, &left] {
          for (unsigned i = 0; i < calls; ++i) call_often(ring_, rank, tag, 1, elements(tag, i));
          left.fetch_sub(1);
        });
      }
    }
    for (int i = 0; i < 14 && left.load() > 0; ++i) disturb();
    callers.join();
  }

 private:
  static constexpr unsigned calls = 14;

  Shape shape() {
    constexpr std::size_t segments[] = {4'096, 65'536, 1 << 20};
    Shape drawn{.size = 2 + pick(2), .channels = 2 + pick(2), .memory = true};
    drawn.segment = segments[pick(3)];
    drawn.spin = pick(2) == 0 ? Ns{0} : Ns{100'000};
    return drawn;
  }

  std::uint32_t pick(std::uint32_t below) { return static_cast<std::uint32_t>(rng_() % below); }

  // The same at all ranks.
  std::size_t elements(std::uint64_t tag, unsigned call) const {
    constexpr std::size_t sizes[] = {1, 16, 1'000, 9'001, 40'000, 250'003};
    std::mt19937 rng(static_cast<unsigned>(seed_ * 1'000 + tag * 100 + call));
    return sizes[rng() % std::size(sizes)];
  }

  void disturb() {
    const Ns until = monotonic_now() + pick(4'000'000);
    while (monotonic_now() < until) std::this_thread::yield();
    switch (pick(4)) {
      case 0:
        fork_once();
        break;
      case 1:
        ring_.next_epoch();
        break;  // whatever runs is aborted, and runs again
      default: {
        const std::uint32_t draw = pick(1'000);
        ring_.engine(pick(ring_.size())).with_core([draw](Core& core, Ns) {
          const std::vector<LaneInfo> lanes = core.lanes();
          core.close(lanes[draw % lanes.size()].conn);
        });
        ring_.next_epoch();
      }
    }
  }

  // All engines of the process take part in it, as they do under Python.
  void fork_once() {
    for (std::uint32_t i = 0; i < ring_.size(); ++i) ring_.engine(i).before_fork();
    const pid_t child = forks ? ::fork() : -1;
    if (child == 0) {
      ::alarm(30);
      for (std::uint32_t i = 0; i < ring_.size(); ++i) ring_.engine(i).forked_child();
      ::_exit(has_pipes() ? 1 : 0);
    }
    for (std::uint32_t i = 0; i < ring_.size(); ++i) ring_.engine(i).forked_parent();
    if (!forks) return;
    int status = -1;
    CHECK(::waitpid(child, &status, 0) == child && status == 0);
  }

  const unsigned seed_;
  std::mt19937 rng_;
  Ring ring_;
};

void run_schedule(unsigned seed) {
  const int before = check::failures;
  {
    const DescriptorCheck check_descriptors;
    Schedule(seed).run();
  }
  CHECK(!has_pipes());
  if (check::failures > before) std::fprintf(stderr, "seed %u\n", seed);
}

TEST(commits_aborts_and_forks_in_any_order_leave_right_results) {
  for (unsigned seed = 1; seed <= seeds; ++seed) run_schedule(seed);
}

// By a wrong result, a crash, an op that never ends, or by the thread sanitizer; so in a process of its own.
TEST(a_standstill_that_does_not_wait_for_a_worker_is_found) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    const rlimit no_core{0, 0};
    ::setrlimit(RLIMIT_CORE, &no_core);
    if (std::freopen("/dev/null", "w", stderr) == nullptr) ::_exit(0);
    planted_in_engine.worker_goes_on = true;
    const int before = check::failures;
    for (unsigned seed = 1; seed <= 30 && check::failures == before; ++seed) run_schedule(seed);
    ::_exit(check::failures == before ? 0 : 1);
  }
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child && status != 0);
  if (WIFSIGNALED(status)) std::printf("it ended by signal %d\n", WTERMSIG(status));
  else std::printf("it ended with status %d\n", WEXITSTATUS(status));
}

}  // namespace
