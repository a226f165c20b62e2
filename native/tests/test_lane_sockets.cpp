// The lanes of a channel over a pipe, and a neighbour that does everything wrong: the link is lost, and nothing else.
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

#include "check.hpp"
#include "ringfold/lane_sockets.hpp"

using namespace ringfold;

namespace {

constexpr ConnId conn = 2;
const std::atomic<int> no_stops{0};

// A channel of rank 0 of 2 with one lane, the neighbour's end of its pipe, and of the socket beside it.
struct Neighbours {
  explicit Neighbours(const std::string& behind_the_handshake = {}) {
    epoch.install({1, 0, 2, {10, 20}, false, 0, 256});
    int fd = -1;
    Socket socket;
    socket.pipe = ShmPipe::create(fd);
    theirs = ShmPipe::open(fd);
    ::close(fd);
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
    socket.fd = ends[0];
    socket.conn = conn;
    Connection base;
    base.id = conn;
    if (const std::size_t bytes = behind_the_handshake.size(); bytes > 0) {
      std::memcpy(base.rx.space(bytes).data(), behind_the_handshake.data(), bytes);
      base.rx.filled(bytes);
    }
    channel.add_lane(0, Lane(std::move(base), false, 20, 0, {}));
    const std::vector<LaneInfo> added = channel.take_new_lanes();
    CHECK(added.size() == 1);
    lanes.add(std::move(socket), added.front(), "host", 0);
    if (channel.has(conn)) channel.install(0);
  }
  ~Neighbours() {
    lanes.close_all();
    ::close(epoll);
    if (ends[1] >= 0) ::close(ends[1]);
  }

  void write(const std::string& bytes) {
    const iovec piece{const_cast<char*>(bytes.data()), bytes.size()};
    CHECK(theirs->write(&piece, 1) == bytes.size());
  }
  bool is_lost() { return !channel.has(conn) && channel.wants_core() && channel.take_closing().size() == 1; }

  EpochState epoch;
  ShareSources advice;
  Planted planted;
  Channel channel{0, epoch, advice, planted};
  int epoll = ::epoll_create1(EPOLL_CLOEXEC);
  LaneSockets lanes{channel, epoll};
  std::unique_ptr<ShmPipe> theirs;
  int ends[2];
};

std::string frame_of_a_mark() {
  FrameHeader mark;
  mark.epoch = 1;
  mark.header_crc = mark.crc();
  return {reinterpret_cast<const char*>(&mark), sizeof mark};
}

TEST(a_mark_passes_in_both_directions) {
  Neighbours both;
  both.write(frame_of_a_mark());
  CHECK(both.lanes.poll(0, no_stops) && both.channel.has(conn));
  const auto bytes = both.theirs->readable();
  CHECK(bytes.size() == sizeof(FrameHeader) &&
        std::memcmp(bytes.data(), frame_of_a_mark().data(), sizeof(FrameHeader)) == 0);
}

TEST(garbage_behind_the_handshake_ends_the_link) {
  Neighbours both(std::string(64, 'x'));
  CHECK(both.is_lost());
  both.lanes.poll(0, no_stops);
}

TEST(garbage_in_the_pipe_ends_the_link) {
  Neighbours both;
  both.write(std::string(64, 'x'));
  both.lanes.poll(0, no_stops);
  CHECK(both.is_lost());
}

TEST(a_position_that_cannot_be_ends_the_link_also_beside_garbage) {
  Neighbours both;
  both.write(std::string(64, 'x'));
  both.theirs->consume(12'345);  // more than was ever written
  both.lanes.flush_dirty(0);
  both.lanes.poll(0, no_stops);
  CHECK(both.is_lost());
}

TEST(what_was_written_before_the_end_is_read_before_it) {
  Neighbours both;
  both.write(frame_of_a_mark());
  ::close(std::exchange(both.ends[1], -1));
  both.lanes.on_ready(conn, EPOLLIN | EPOLLHUP, 0);
  CHECK(both.is_lost() && both.theirs->unread() == 0);
}

// A byte wakes; that it says nothing must not matter.
TEST(bytes_on_the_socket_are_only_bells) {
  Neighbours both;
  CHECK(::send(both.ends[1], "anything", 8, 0) == 8);
  both.lanes.on_ready(conn, EPOLLIN, 0);
  CHECK(both.channel.has(conn));
}

TEST(room_that_was_made_meanwhile_is_not_slept_over) {
  Neighbours both;
  CHECK(both.lanes.poll(0, no_stops));  // the mark is sent
  CHECK(both.lanes.arm());
  both.lanes.disarm();
  both.write(frame_of_a_mark());
  CHECK(!both.lanes.arm());  // there is something that it has not seen
}

// Between its fork and the engine's hook a child may map memory where the pipe is not any more.
TEST(the_child_of_a_fork_unmaps_nothing_of_its_own) {
  Neighbours both;
  const pid_t pid = ::fork();
  if (pid == 0) {
    std::vector<std::byte*> own;
    for (int i = 0; i < 16; ++i) {
      void* memory = ::mmap(nullptr, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      std::memset(memory, i + 1, 1 << 20);
      own.push_back(static_cast<std::byte*>(memory));
    }
    both.lanes.forked_child();
    for (int i = 0; i < 16; ++i) {
      if (own[static_cast<std::size_t>(i)][12'345] != static_cast<std::byte>(i + 1)) ::_exit(1);
    }
    ::_exit(0);
  }
  int status = 0;
  CHECK(::waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace
