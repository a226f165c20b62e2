#include "ringfold/life.hpp"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "engine/sealed_file.hpp"

namespace ringfold {
namespace {

constexpr std::size_t page_bytes = 4096;

// The word that the kernel marks. The C library has it at the beginning of a mutex.
std::uint32_t word_of(const void* page) {
  static_assert(offsetof(pthread_mutex_t, __data.__lock) == 0 && sizeof(pthread_mutex_t::__data.__lock) == 4);
  return std::atomic_ref(*static_cast<std::uint32_t*>(const_cast<void*>(page))).load(std::memory_order_acquire);
}

}  // namespace

std::unique_ptr<Life> Life::create() {
  const int fd = make_file("ringfold-life", page_bytes);
  if (fd < 0) return nullptr;
  void* page = ::mmap(nullptr, page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  pthread_mutexattr_t kind;
  ::pthread_mutexattr_init(&kind);
  const bool made = page != MAP_FAILED && ::madvise(page, page_bytes, MADV_DONTFORK) == 0 &&
                    ::pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED) == 0 &&
                    ::pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST) == 0 &&
                    ::pthread_mutex_init(static_cast<pthread_mutex_t*>(page), &kind) == 0 && seal_file(fd, true);
  ::pthread_mutexattr_destroy(&kind);
  if (made) return std::unique_ptr<Life>(new Life(fd, page));
  if (page != MAP_FAILED) ::munmap(page, page_bytes);
  ::close(fd);
  return nullptr;
}

Life::~Life() {
  if (page_ == nullptr) return;
  ::munmap(page_, page_bytes);
  ::close(fd_);
}

// Where nobody is known to wait, neither the kernel nor an unlock wakes anybody. A guardian can only read the page, and
// so cannot say that it waits: it is said here.
void Life::hold() {
  ::pthread_mutex_lock(static_cast<pthread_mutex_t*>(page_));
  std::atomic_ref(*static_cast<std::uint32_t*>(page_)).fetch_or(FUTEX_WAITERS);
}

void Life::let_go() { ::pthread_mutex_unlock(static_cast<pthread_mutex_t*>(page_)); }

void Life::forked_child() {
  ::close(fd_);
  page_ = nullptr;  // it was not inherited
}

std::shared_ptr<const LifeView> LifeView::open(int fd) {
  if (!is_sealed_file(fd, page_bytes)) return nullptr;
  const void* page = ::mmap(nullptr, page_bytes, PROT_READ, MAP_SHARED, fd, 0);
  if (page == MAP_FAILED) return nullptr;
  return std::shared_ptr<const LifeView>(new LifeView(page));
}

LifeView::~LifeView() { ::munmap(const_cast<void*>(page_), page_bytes); }

bool LifeView::has_died() const { return (word_of(page_) & FUTEX_OWNER_DIED) != 0; }

}  // namespace ringfold
