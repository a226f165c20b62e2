// A lane in shared memory: two byte FIFOs, one there and one back, in a file without a name that two processes map.
//
// Each FIFO has one writer and one reader. A position counts bytes since the beginning and is written by one side only;
// each side keeps its own one privately and never reads it back. So the other side can spoil numbers, not memory: what
// it writes is checked before it is used (`is_broken`), and the file has all its memory and is sealed against shrinking
// and growing, so that no access can fail. A writer that dies in the middle of a frame has not moved its position: its
// bytes are never seen.
//
// The data is mapped twice in a row, so every stretch of it is contiguous.
//
// Sleeping: the side that is about to sleep says so (`prepare_sleep`) and looks once more. The other side, having
// moved its position, looks whether it is to wake it. Both use the order that all threads see (seq_cst), so one of the
// two notices. How a sleeper is woken is not decided here.
//
// Who may touch it: as the lane that it belongs to.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace ringfold {

class ShmPipe {
 public:
  // Of each FIFO: of a lane for segments, and of one that carries little.
  static constexpr std::size_t capacity = std::size_t{1} << 20, small_capacity = std::size_t{1} << 18;

  // A new one; `fd` is for the other side, and closed by the caller. nullptr: there is no such memory here.
  static std::unique_ptr<ShmPipe> create(int& fd, std::size_t capacity_of_each = capacity);
  // The other side of one. nullptr: the file is not what create() makes.
  static std::unique_ptr<ShmPipe> open(int fd);
  ~ShmPipe();
  ShmPipe(const ShmPipe&) = delete;
  ShmPipe& operator=(const ShmPipe&) = delete;

  // In the child of a fork, which has not inherited the memory.
  void abandon() { is_abandoned_ = true; }

  // A number that only those who have mapped it can know.
  std::uint64_t word() const;

  std::size_t fifo_bytes() const { return mask_ + 1; }

  // All bytes that can be read now. They stay there until consume().
  std::span<const std::byte> readable();
  void consume(std::size_t bytes);
  // Writes as much as there is room for, and returns how much.
  std::size_t write(const iovec* pieces, std::size_t count);
  // Bytes that the other side has not consumed.
  std::size_t unread() const;
  // The other side has written a position that cannot be.
  bool is_broken() const { return is_broken_; }

  // This side is about to sleep until it can read more than it has seen, or write more than it could. False: what it
  // waits for is there already.
  bool prepare_sleep(bool for_data, bool for_room);
  void end_sleep();
  bool is_prepared(bool for_room) const { return is_prepared_ && (!for_room || is_prepared_for_room_); }
  // Whether the other side sleeps, and has to be woken for what was written or consumed since the last call.
  bool take_wake();

 private:
  struct Fifo;
  struct Page;

  ShmPipe(std::byte* memory, std::size_t fifo_bytes, bool is_creator);

  const std::size_t mask_;  // of a position, for its place in the FIFO
  std::byte* const memory_;
  Page* const page_;
  Fifo& out_;
  Fifo& in_;
  std::byte* const out_bytes_;
  std::byte* const in_bytes_;
  std::uint64_t written_ = 0, read_ = 0;            // own positions
  std::uint64_t seen_written_ = 0, seen_read_ = 0;  // the other side's, as they were last looked at
  bool has_written_ = false, has_consumed_ = false;
  bool is_prepared_ = false, is_prepared_for_room_ = false, is_broken_ = false, is_abandoned_ = false;
};

}  // namespace ringfold
