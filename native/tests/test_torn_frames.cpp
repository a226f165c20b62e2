// A writer that is killed in the middle of a frame: nobody ever sees a part of it, or bytes that were not written.
//
// The writer is a process of its own, killed with SIGKILL at a random instant, again and again. The same is done with a
// pipe whose writer moves its position too early; it must be found, or the silence about the real one means nothing.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "check.hpp"
#include "ringfold/clock.hpp"
#include "ringfold/planted.hpp"
#include "ringfold/shm_pipe.hpp"

using namespace ringfold;

namespace {

constexpr Ns second = 1'000'000'000;
constexpr std::size_t header_words = 6;
constexpr std::size_t frame_words = 30'011;  // 240 KB: four fit, and none ends where the FIFO does
constexpr std::size_t frame_bytes = frame_words * sizeof(std::uint64_t);

// A word of the stream: another one at each place, so that what an earlier round has left is wrong.
std::uint64_t word_at(std::uint64_t frame, std::uint64_t place) {
  return (frame * frame_words + place + 1) * 0x9e37'79b9'7f4a'7c15U;
}

void fill(std::vector<std::uint64_t>& words, std::uint64_t frame) {
  for (std::size_t i = 0; i < words.size(); ++i) words[i] = word_at(frame, i);
}

// In a process of its own. As a lane does it: a header and a payload in one write.
[[noreturn]] void write_until_killed(int fd) {
  const auto pipe = ShmPipe::open(fd);
  if (!pipe) ::_exit(1);
  std::vector<std::uint64_t> words(frame_words);
  for (std::uint64_t frame = 0;; ++frame) {
    fill(words, frame);
    const std::array<iovec, 2> pieces{
        iovec{words.data(), header_words * sizeof(std::uint64_t)},
        iovec{words.data() + header_words, (frame_words - header_words) * sizeof(std::uint64_t)}};
    while (pipe->unread() + frame_bytes > ShmPipe::capacity) ::usleep(10);
    if (pipe->write(pieces.data(), pieces.size()) != frame_bytes) ::_exit(1);
  }
}

// What the reader of one writer finds.
struct Found {
  bool torn = false;
  std::uint64_t frames = 0;
};

// Whole frames, each with its own bytes, and nothing behind them.
void read_all(ShmPipe& pipe, Found& found) {
  const auto bytes = pipe.readable();
  found.torn |= pipe.is_broken() || bytes.size() % frame_bytes != 0;
  std::vector<std::uint64_t> words(frame_words);
  for (std::size_t at = 0; at + frame_bytes <= bytes.size(); at += frame_bytes) {
    fill(words, found.frames++);
    found.torn |= std::memcmp(bytes.data() + at, words.data(), frame_bytes) != 0;
  }
  pipe.consume(bytes.size());
}

// A pipe, and a process that writes into it.
std::unique_ptr<ShmPipe> start_writer(pid_t& writer) {
  int fd = -1;
  auto pipe = ShmPipe::create(fd);
  CHECK(pipe != nullptr);
  writer = ::fork();
  if (writer == 0) write_until_killed(fd);
  ::close(fd);
  return pipe;
}

Found outlive_a_writer(std::mt19937& rng) {
  pid_t writer = 0;
  const auto pipe = start_writer(writer);
  Found found;
  const Ns patience = monotonic_now() + 20 * second;
  while (found.frames == 0 && monotonic_now() < patience) read_all(*pipe, found);  // it has begun
  const Ns until = monotonic_now() + static_cast<Ns>(rng() % 2'000'000);
  while (monotonic_now() < until) read_all(*pipe, found);
  ::kill(writer, SIGKILL);
  int status = 0;
  CHECK(::waitpid(writer, &status, 0) == writer && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  read_all(*pipe, found);  // what a dead writer has left
  CHECK(found.frames > 0);
  return found;
}

TEST(a_writer_that_is_killed_in_the_middle_of_a_frame_leaves_whole_frames) {
  std::mt19937 rng(1);
  for (int i = 0; i < 150; ++i) CHECK_MESSAGE(!outlive_a_writer(rng).torn, "writer %d", i);
}

TEST(a_writer_that_moves_its_position_first_is_found) {
  planted_in_engine.position_first = true;
  std::mt19937 rng(2);
  bool is_found = false;
  for (int i = 0; i < 150 && !is_found; ++i) is_found = outlive_a_writer(rng).torn;
  CHECK(is_found);
  planted_in_engine = {};
}

// The same without a reader before the end: only the death can show it.
TEST(a_writer_that_moves_its_position_first_is_found_by_what_it_leaves) {
  planted_in_engine.position_first = true;
  std::mt19937 rng(3);
  bool is_found = false;
  for (int i = 0; i < 1'000 && !is_found; ++i) {
    pid_t writer = 0;
    const auto pipe = start_writer(writer);
    const Ns until = monotonic_now() + 20 * second;
    while (pipe->readable().empty() && monotonic_now() < until) {
    }
    const Ns then = monotonic_now() + static_cast<Ns>(rng() % 300'000);
    while (monotonic_now() < then) {
    }
    ::kill(writer, SIGKILL);
    CHECK(::waitpid(writer, nullptr, 0) == writer);
    Found found;
    read_all(*pipe, found);
    is_found = found.torn;
  }
  CHECK(is_found);
  planted_in_engine = {};
}

}  // namespace
