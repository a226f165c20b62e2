// A process that dies is seen to die by those who have mapped its life, and one that ends regularly is not.
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <ctime>
#include <string>
#include <thread>

#include "check.hpp"
#include "ringfold/life.hpp"

using namespace ringfold;

namespace {

template <typename Work>
pid_t child(Work work) {
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  work();
  ::_exit(0);
}

// Another process's view of the word, as a guardian has it.
class Word {
 public:
  explicit Word(int fd) : page_(::mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd, 0)) { CHECK(page_ != MAP_FAILED); }
  ~Word() { ::munmap(page_, 4096); }
  Word(const Word&) = delete;
  Word& operator=(const Word&) = delete;

  std::uint32_t now() const { return std::atomic_ref(*static_cast<std::uint32_t*>(page_)).load(); }
  // Sleeps until it is woken; false: it was not, for ten seconds.
  bool sleep(std::uint32_t value) const {
    const timespec most = {10, 0};
    return ::syscall(SYS_futex, page_, FUTEX_WAIT, value, &most, nullptr, 0) == 0 || now() != value;
  }

 private:
  void* page_;
};

TEST(a_sleeper_is_woken_by_a_regular_end) {
  const auto life = Life::create();
  const Word word(life->fd());
  std::atomic<bool> held{false}, over{false};
  std::thread holder([&] {
    life->hold();
    held = true;
    while (!over) std::this_thread::yield();
    life->let_go();
  });
  while (!held) std::this_thread::yield();
  const std::uint32_t value = word.now();
  CHECK((value & FUTEX_WAITERS) != 0 && (value & FUTEX_TID_MASK) != 0);
  over = true;
  CHECK(word.sleep(value) && word.now() == 0);
  holder.join();
}

TEST(a_regular_end_is_no_death) {
  auto life = Life::create();
  CHECK(life != nullptr);
  const auto view = LifeView::open(life->fd());
  CHECK(view != nullptr && !view->has_died());
  // Nobody else can write it, neither the mark nor the mutex's pointers.
  CHECK(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, life->fd(), 0) == MAP_FAILED);
  CHECK(::pwrite(life->fd(), "x", 1, 0) < 0);
  life->hold();
  CHECK(!view->has_died());
  life->let_go();
  CHECK(!view->has_died());
  life.reset();
  CHECK(!view->has_died());
}

TEST(a_killed_process_has_died) {
  int ready[2], sent[2];
  CHECK(::pipe(ready) == 0 && ::pipe(sent) == 0);
  // The child makes it, and the parent opens the child's descriptor by way of /proc: as good as a passed one.
  const pid_t pid = child([&] {
    const auto life = Life::create();
    life->hold();
    const int fd = life->fd();
    [[maybe_unused]] auto n = ::write(ready[1], &fd, sizeof fd);
    char any = 0;
    n = ::read(sent[0], &any, 1);
  });
  int fd = -1;
  CHECK(::read(ready[0], &fd, sizeof fd) == sizeof fd);
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const int mine = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const auto view = LifeView::open(mine);
  const Word word(mine);
  ::close(mine);
  CHECK(view != nullptr && !view->has_died());
  const std::uint32_t value = word.now();
  ::kill(pid, SIGKILL);
  CHECK(word.sleep(value) && view->has_died());
  int status = 0;
  CHECK(::waitpid(pid, &status, 0) == pid && view->has_died());
  for (const int each : {ready[0], ready[1], sent[0], sent[1]}) ::close(each);
}

TEST(another_file_is_no_life) {
  const int plain = ::memfd_create("test", MFD_CLOEXEC);
  CHECK(::ftruncate(plain, 4096) == 0 && LifeView::open(plain) == nullptr);
  ::close(plain);
  CHECK(LifeView::open(-1) == nullptr);
}

}  // namespace
