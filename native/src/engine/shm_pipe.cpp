#include "ringfold/shm_pipe.hpp"

#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "engine/sealed_file.hpp"
#include "ringfold/planted.hpp"

namespace ringfold {
namespace {

constexpr std::size_t page_bytes = 64 * 1024;  // a page is no longer anywhere

constexpr std::size_t file_bytes(std::size_t fifo) { return page_bytes + 2 * fifo; }
constexpr std::size_t mapped_bytes(std::size_t fifo) { return page_bytes + 4 * fifo; }

// The page, then each FIFO twice in a row.
std::byte* map_file(int fd, std::size_t fifo) {
  void* memory = ::mmap(nullptr, mapped_bytes(fifo), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  auto* at = static_cast<std::byte*>(memory);
  const auto map = [fd](std::byte* where, std::size_t bytes, std::size_t offset) {
    return ::mmap(where, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, static_cast<off_t>(offset)) !=
           MAP_FAILED;
  };
  bool mapped = map(at, page_bytes, 0);
  for (std::size_t i = 0; i < 4; ++i) {
    mapped = mapped && map(at + page_bytes + i * fifo, fifo, page_bytes + i / 2 * fifo);
  }
  // A forked child must not keep a dead parent's memory.
  if (mapped && ::madvise(memory, mapped_bytes(fifo), MADV_DONTFORK) == 0) return at;
  ::munmap(memory, mapped_bytes(fifo));
  return nullptr;
}

}  // namespace

struct ShmPipe::Fifo {
  alignas(64) std::atomic<std::uint64_t> written{0};
  alignas(64) std::atomic<std::uint64_t> read{0};
  alignas(64) std::atomic<std::uint32_t> reader_sleeps{0};
  alignas(64) std::atomic<std::uint32_t> writer_sleeps{0};
};

struct ShmPipe::Page {
  std::uint64_t word = 0;
  Fifo there, back;
};

ShmPipe::ShmPipe(std::byte* memory, std::size_t fifo_bytes, bool is_creator)
    : mask_(fifo_bytes - 1),
      memory_(memory),
      page_(is_creator ? new (memory) Page : std::launder(reinterpret_cast<Page*>(memory))),
      out_(is_creator ? page_->there : page_->back),
      in_(is_creator ? page_->back : page_->there),
      out_bytes_(memory + page_bytes + (is_creator ? 0 : 2 * fifo_bytes)),
      in_bytes_(memory + page_bytes + (is_creator ? 2 * fifo_bytes : 0)) {
  static_assert(sizeof(Page) <= page_bytes && std::atomic<std::uint64_t>::is_always_lock_free);
}

std::unique_ptr<ShmPipe> ShmPipe::create(int& fd, std::size_t fifo) {
  fd = make_file("ringfold-lane", file_bytes(fifo));
  if (fd < 0) return nullptr;
  std::byte* memory = map_file(fd, fifo);
  std::uint64_t word = 0;
  if (memory != nullptr && seal_file(fd, false) &&
      ::getrandom(&word, sizeof word, 0) == static_cast<ssize_t>(sizeof word)) {
    std::unique_ptr<ShmPipe> pipe(new ShmPipe(memory, fifo, true));
    pipe->page_->word = word;
    return pipe;
  }
  if (memory != nullptr) ::munmap(memory, mapped_bytes(fifo));
  ::close(std::exchange(fd, -1));
  return nullptr;
}

std::unique_ptr<ShmPipe> ShmPipe::open(int fd) {
  for (const std::size_t fifo : {capacity, small_capacity}) {
    if (!is_sealed_file(fd, file_bytes(fifo))) continue;
    std::byte* memory = map_file(fd, fifo);
    return memory == nullptr ? nullptr : std::unique_ptr<ShmPipe>(new ShmPipe(memory, fifo, false));
  }
  return nullptr;
}

ShmPipe::~ShmPipe() {
  if (!is_abandoned_) ::munmap(memory_, mapped_bytes(fifo_bytes()));
}

std::uint64_t ShmPipe::word() const { return page_->word; }

std::span<const std::byte> ShmPipe::readable() {
  seen_written_ = in_.written.load(std::memory_order_acquire);
  const std::uint64_t bytes = seen_written_ - read_;
  if (bytes > fifo_bytes()) {
    is_broken_ = true;
    return {};
  }
  return {in_bytes_ + (read_ & mask_), bytes};
}

void ShmPipe::consume(std::size_t bytes) {
  read_ += bytes;
  in_.read.store(read_);
  has_consumed_ = true;
}

std::size_t ShmPipe::unread() const {
  return std::min(written_ - out_.read.load(std::memory_order_acquire), fifo_bytes());
}

std::size_t ShmPipe::write(const iovec* pieces, std::size_t count) {
  seen_read_ = out_.read.load(std::memory_order_acquire);
  const std::uint64_t before = written_ - seen_read_;
  is_broken_ |= before > fifo_bytes();
  if (is_broken_) return 0;
  std::size_t room = fifo_bytes() - before, total = 0;
  if (planted_in_engine.position_first) {
    for (std::size_t i = 0; i < count; ++i) total += pieces[i].iov_len;
    out_.written.store(written_ + std::min(room, std::exchange(total, 0)));
  }
  for (std::size_t i = 0; i < count && room > 0; ++i) {
    const std::size_t bytes = std::min(room, pieces[i].iov_len);
    std::memcpy(out_bytes_ + ((written_ + total) & mask_), pieces[i].iov_base, bytes);
    total += bytes;
    room -= bytes;
  }
  if (total == 0) return 0;
  written_ += total;
  out_.written.store(written_);
  has_written_ = true;
  return total;
}

bool ShmPipe::prepare_sleep(bool for_data, bool for_room) {
  is_prepared_ = true;
  is_prepared_for_room_ = for_room;
  if (for_data) in_.reader_sleeps.store(1);
  if (for_room) out_.writer_sleeps.store(1);
  return (!for_data || in_.written.load() == seen_written_) && (!for_room || out_.read.load() == seen_read_);
}

void ShmPipe::end_sleep() {
  if (!std::exchange(is_prepared_, false)) return;
  is_prepared_for_room_ = false;
  in_.reader_sleeps.store(0, std::memory_order_relaxed);
  out_.writer_sleeps.store(0, std::memory_order_relaxed);
}

bool ShmPipe::take_wake() {
  const bool wakes = (std::exchange(has_written_, false) && out_.reader_sleeps.load() != 0) ||
                     (has_consumed_ && in_.writer_sleeps.load() != 0);
  has_consumed_ = false;
  // Once: the sleeper says again that it sleeps.
  if (wakes) {
    out_.reader_sleeps.store(0);
    in_.writer_sleeps.store(0);
  }
  return wakes;
}

}  // namespace ringfold
