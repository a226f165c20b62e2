// Pipes in shared memory: what is written arrives, whatever the other side does.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "ringfold/shm_pipe.hpp"

using namespace ringfold;

namespace {

struct Ends {
  Ends() {
    int fd = -1;
    one = ShmPipe::create(fd);
    CHECK(one != nullptr);
    other = ShmPipe::open(fd);
    CHECK(other != nullptr);
    ::close(fd);
  }
  std::unique_ptr<ShmPipe> one, other;
};

std::size_t write(ShmPipe& pipe, const std::vector<std::byte>& bytes, std::size_t from = 0) {
  const iovec piece{const_cast<std::byte*>(bytes.data()) + from, bytes.size() - from};
  return pipe.write(&piece, 1);
}

std::vector<std::byte> pattern(std::size_t count, unsigned seed) {
  std::mt19937 rng(seed);
  std::vector<std::byte> out(count);
  for (std::byte& each : out) each = static_cast<std::byte>(rng());
  return out;
}

TEST(both_directions_carry_their_own_bytes) {
  Ends ends;
  CHECK(ends.one->word() == ends.other->word());
  const auto there = pattern(1'000, 1), back = pattern(2'000, 2);
  CHECK(write(*ends.one, there) == 1'000 && write(*ends.other, back) == 2'000);
  const auto got = ends.other->readable(), answer = ends.one->readable();
  CHECK(got.size() == 1'000 && std::memcmp(got.data(), there.data(), 1'000) == 0);
  CHECK(answer.size() == 2'000 && std::memcmp(answer.data(), back.data(), 2'000) == 0);
  CHECK(ends.one->unread() == 1'000);
  ends.other->consume(1'000);
  CHECK(ends.one->unread() == 0 && ends.other->readable().empty());
}

TEST(what_wraps_around_is_one_piece) {
  Ends ends;
  const auto most = pattern(ShmPipe::capacity - 100, 3), next = pattern(300, 4);
  CHECK(write(*ends.one, most) == most.size());
  ends.other->readable();
  ends.other->consume(most.size());
  CHECK(write(*ends.one, next) == 300);
  const auto got = ends.other->readable();
  CHECK(got.size() == 300 && std::memcmp(got.data(), next.data(), 300) == 0);
}

TEST(a_full_pipe_takes_what_fits) {
  Ends ends;
  const auto bytes = pattern(ShmPipe::capacity + 5'000, 5);
  CHECK(write(*ends.one, bytes) == ShmPipe::capacity);
  CHECK(write(*ends.one, bytes) == 0);
  ends.other->readable();
  ends.other->consume(1'000);
  CHECK(write(*ends.one, bytes, ShmPipe::capacity) == 1'000);
}

TEST(a_sleeper_is_woken_once_and_only_for_what_it_waits_for) {
  Ends ends;
  const auto bytes = pattern(100, 6);
  ends.other->readable();
  CHECK(ends.other->prepare_sleep(true, false) && ends.other->is_prepared(false) && !ends.other->is_prepared(true));
  CHECK(write(*ends.one, bytes) == 100 && ends.one->take_wake());
  CHECK(write(*ends.one, bytes) == 100 && !ends.one->take_wake());
  ends.other->end_sleep();
  CHECK(!ends.other->prepare_sleep(true, false));  // there is something that it has not seen
  CHECK(ends.other->readable().size() == 200 && ends.other->prepare_sleep(true, false));
  CHECK(write(*ends.other, bytes) == 100 && !ends.other->take_wake());  // the other end is awake

  const auto all = pattern(ShmPipe::capacity, 7);
  CHECK(write(*ends.one, all) == ShmPipe::capacity - 200);
  ends.one->readable();
  CHECK(ends.one->prepare_sleep(true, true));
  ends.other->readable();
  ends.other->consume(10);
  CHECK(ends.other->take_wake() && !ends.one->prepare_sleep(true, true));
}

// Positions that the other side has made up end the pipe, and touch no memory outside of it.
TEST(a_position_that_cannot_be_breaks_the_pipe) {
  int fd = -1;
  const auto one = ShmPipe::create(fd);
  CHECK(one != nullptr);
  auto* page = static_cast<std::uint64_t*>(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  for (const std::uint64_t lie : {ShmPipe::capacity + 1, std::uint64_t{1} << 40}) {
    const auto other = ShmPipe::open(fd);
    CHECK(other != nullptr && other->readable().empty() && !other->is_broken());
    page[8] = lie;  // the first position: what the creator has written
    CHECK(other->readable().empty() && other->is_broken());
    page[8] = 0;
    const auto again = ShmPipe::open(fd);
    page[8 + 40] = lie;  // of the way back: what the creator has read
    CHECK(write(*again, pattern(10, 8)) == 0 && again->is_broken());
    page[8 + 40] = 0;
  }
  ::munmap(page, 4096);
  ::close(fd);
}

// Otherwise the other side could cut the file, and reading it would end the process.
TEST(only_a_sealed_file_of_the_right_size_is_opened) {
  int fd = -1;
  auto one = ShmPipe::create(fd);
  CHECK(one != nullptr && ::ftruncate(fd, 0) != 0);
  const off_t size = ::lseek(fd, 0, SEEK_END);
  ::close(fd);
  const auto file = [](off_t bytes, int seals) {
    const int made = ::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(::ftruncate(made, bytes) == 0 && ::fcntl(made, F_ADD_SEALS, seals) == 0);
    return made;
  };
  constexpr int all = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  int pipes[2];
  CHECK(::pipe(pipes) == 0);
  const int wrong[] = {file(size, F_SEAL_SHRINK | F_SEAL_GROW),
                       file(size, F_SEAL_GROW | F_SEAL_SEAL),
                       file(size - 1, all),
                       file(size + 4096, all),
                       file(size, all | F_SEAL_WRITE),
                       pipes[0],
                       pipes[1],
                       ::open("/dev/null", O_RDWR | O_CLOEXEC)};
  for (const int each : wrong) {
    CHECK(ShmPipe::open(each) == nullptr);
    ::close(each);
  }
}

// Each end in a thread of its own; a sleeper waits until it is woken. Nothing is lost, and nobody sleeps for ever.
TEST(bytes_pass_between_two_threads_that_sleep) {
  Ends ends;
  constexpr std::size_t total = 20'000'000;
  const auto bytes = pattern(70'001, 9);
  std::atomic<int> bells[2] = {};
  const auto sleep = [&](ShmPipe& pipe, std::atomic<int>& bell, bool for_room) {
    if (pipe.prepare_sleep(true, for_room)) {
      while (bell.load() == 0) std::this_thread::yield();
      bell.store(0);
    }
    pipe.end_sleep();
  };
  std::thread writer([&] {
    for (std::size_t sent = 0; sent < total;) {
      const std::size_t n = write(*ends.one, bytes, sent % bytes.size());
      sent += n;
      if (ends.one->take_wake()) bells[1].store(1);
      ends.one->readable();
      if (n == 0) sleep(*ends.one, bells[0], true);
    }
  });
  std::size_t got = 0;
  while (got < total) {
    const auto view = ends.other->readable();
    std::size_t good = 0;
    while (good < view.size() && view[good] == bytes[(got + good) % bytes.size()]) ++good;
    CHECK(good == view.size());
    got += view.size();
    ends.other->consume(view.size());
    if (ends.other->take_wake()) bells[0].store(1);
    if (view.empty()) sleep(*ends.other, bells[1], false);
  }
  writer.join();
}

}  // namespace
