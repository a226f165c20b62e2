// Two children, of which the second becomes the guardian and the first only ends, so that the guardian belongs to init.
//
// Both share the memory of this process until they run something else or end, and their parent waits that long, as
// with vfork: a fork would copy the page tables of all that a training process has. The first child has no exit signal,
// so only a wait that asks for such children (__WCLONE) sees it.
#include "ringfold/guardian.hpp"

#include <fcntl.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstddef>
#include <memory>

// The thread sanitizer of GCC 13 and later takes every clone() for a fork, and gives up at one that shares memory. It
// does not know this name of the same function.
#ifdef __has_feature
#if __has_feature(thread_sanitizer)
#define RINGFOLD_THREAD_SANITIZER
#endif
#endif
#if defined(__SANITIZE_THREAD__) || defined(RINGFOLD_THREAD_SANITIZER)
extern "C" int plain_clone(int (*work)(void*), void* stack, int flags, void* argument, ...) __asm__("__clone");
#else
constexpr auto plain_clone = &::clone;
#endif

namespace ringfold {
namespace {

constexpr std::size_t stack_bytes = 64 * 1024;
constexpr int life_fd = 3, master_fd = 4;  // as the guardian finds them

struct Start {
  const char* program;
  char* const* arguments;
  int life, master;
  std::byte *first_stack, *second_stack;
  bool failed;
};

pid_t child(int (*work)(void*), std::byte* stack, Start& start) {
  return plain_clone(work, stack + stack_bytes, CLONE_VM | CLONE_VFORK, &start);
}

int second_child(void* given) {
  auto& start = *static_cast<Start*>(given);
  // Out of the way first: they may have each other's numbers.
  const int life = ::fcntl(start.life, F_DUPFD, master_fd + 1);
  const int master = ::fcntl(start.master, F_DUPFD, master_fd + 1);
  char* const environment[] = {nullptr};
  if (life >= 0 && master >= 0 && ::dup2(life, life_fd) >= 0 && ::dup2(master, master_fd) >= 0) {
    ::execve(start.program, start.arguments, environment);
  }
  start.failed = true;
  return 1;
}

int first_child(void* given) {
  auto& start = *static_cast<Start*>(given);
  if (child(second_child, start.second_stack, start) < 0) start.failed = true;
  return 0;
}

}  // namespace

bool start_guardian(const std::string& program, int life, int master, const std::string& message) {
  const auto first = std::make_unique<std::byte[]>(stack_bytes), second = std::make_unique<std::byte[]>(stack_bytes);
  std::string name = "ringfold-guardian", argument = message;
  char* const arguments[] = {name.data(), argument.data(), nullptr};
  Start start{program.c_str(), arguments, life, master, first.get(), second.get(), false};
  // A handler of this process must not run in a child that shares its memory. The guardian unblocks them again.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  const pid_t pid = child(first_child, start.first_stack, start);
  if (pid > 0) {
    while (::waitpid(pid, nullptr, __WCLONE) < 0 && errno == EINTR) {
    }
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return pid > 0 && !start.failed;
}

}  // namespace ringfold
