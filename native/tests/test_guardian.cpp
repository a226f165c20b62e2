// A guardian sends its message when the process that it watches dies, and ends without it otherwise.
#include "ringfold/guardian.hpp"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <string>

#include "check.hpp"
#include "ringfold/life.hpp"

using namespace ringfold;

namespace {

// A process that has a guardian, and this end of the guardian's connection.
struct Guarded {
  pid_t pid;
  int master, order;

  // All that the guardian sends until it ends.
  std::string sent() const {
    std::string all;
    char some[64];
    ssize_t got = 0;
    while ((got = ::read(master, some, sizeof some)) > 0) all.append(some, static_cast<std::size_t>(got));
    CHECK(got == 0);
    return all;
  }
  void end() const {
    int status = 0;
    CHECK(::waitpid(pid, &status, 0) == pid);
    ::close(master);
    ::close(order);
  }
};

// The process ends regularly when it gets an order.
Guarded start(const char* program, const char* message, bool& started) {
  int connection[2], order[2], report[2];
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, connection) == 0);
  CHECK(::pipe(order) == 0 && ::pipe(report) == 0);  // the guardian inherits these, and closes them
  const pid_t pid = ::fork();
  if (pid == 0) {
    for (const int fd : {connection[0], order[1], report[0]}) ::close(fd);
    const auto life = Life::create();
    life->hold();
    char said = start_guardian(program, life->fd(), connection[1], message) ? 'y' : 'n';
    if (::waitpid(-1, nullptr, WNOHANG) != -1 || errno != ECHILD) said = 'w';  // it is no child of this process
    ::close(connection[1]);
    [[maybe_unused]] auto n = ::write(report[1], &said, 1);
    n = ::read(order[0], &said, 1);
    life->let_go();
    ::_exit(0);
  }
  for (const int fd : {connection[1], order[0], report[1]}) ::close(fd);
  char said = 0;
  CHECK(::read(report[0], &said, 1) == 1 && (said == 'y' || said == 'n'));
  started = said == 'y';
  ::close(report[0]);
  return {pid, connection[0], order[1]};
}

TEST(a_death_is_reported_and_the_guardian_ends) {
  bool started = false;
  const Guarded guarded = start(RINGFOLD_GUARDIAN, "00ff41", started);
  CHECK(started);
  ::kill(guarded.pid, SIGKILL);
  CHECK(guarded.sent() == std::string("\0\xff"
                                      "A",
                                      3));
  guarded.end();
}

TEST(a_regular_end_is_not_reported) {
  bool started = false;
  const Guarded guarded = start(RINGFOLD_GUARDIAN, "00ff41", started);
  CHECK(started && ::write(guarded.order, "x", 1) == 1);
  CHECK(guarded.sent().empty());
  guarded.end();
}

TEST(a_message_that_is_none_ends_it_at_once) {
  for (const char* message : {"", "0", "0g", "AA"}) {
    bool started = false;
    const Guarded guarded = start(RINGFOLD_GUARDIAN, message, started);
    CHECK(started && guarded.sent().empty());
    ::kill(guarded.pid, SIGKILL);
    guarded.end();
  }
}

TEST(a_program_that_is_not_there_is_not_started) {
  bool started = true;
  const Guarded guarded = start("/nowhere/ringfold-guardian", "00", started);
  CHECK(!started && guarded.sent().empty());
  ::kill(guarded.pid, SIGKILL);
  guarded.end();
}

}  // namespace
