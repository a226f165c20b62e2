// How far the copies of an op's memory are, where that memory is itself a copy: of tensors on a device.
//
// The op's virtual range is cut into blocks. A block is *filled* when the copy from the device has brought the caller's
// values. Until then the op neither sends them nor writes there. A block is *final* when all of it has the result of
// the op's present attempt: it can be copied towards the device, but not to the caller's tensor, before the op is
// committed. So both copies go on while the op runs.
//
// Members of a ring do not know of each other's blocks: what travels is the same as without them.
//
// fill() and take_final() are for any thread. restart() is called before channels take up the op, add_final() by the
// threads that drive them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "ringfold/frame.hpp"

namespace ringfold {

class Blocks {
 public:
  // Where each block ends, ascending. Throws std::invalid_argument.
  explicit Blocks(std::vector<std::size_t> ends);

  std::size_t count() const { return ends_.size(); }
  std::size_t bytes() const { return ends_.back(); }

  void fill(std::size_t block);
  std::size_t filled() const { return filled_.load(std::memory_order_acquire); }
  bool are_all_filled() const { return filled() == count(); }
  bool is_filled(std::size_t from, std::size_t to) const;

  // An attempt begins: nothing is final.
  void restart();
  void add_final(std::size_t from, std::size_t to);

  struct Final {
    std::uint32_t attempt = 0;
    std::vector<std::size_t> blocks;  // that became final in this attempt, and were not taken before
  };
  // Waits until there are some, or close() was called, for `timeout` at most.
  Final take_final(Ns timeout);
  void close();

 private:
  std::size_t block_at(std::size_t at) const;
  std::size_t begin(std::size_t block) const { return block > 0 ? ends_[block - 1] : 0; }

  const std::vector<std::size_t> ends_;
  std::vector<std::atomic<bool>> is_filled_;
  std::atomic<std::size_t> filled_{0};
  std::vector<std::atomic<std::size_t>> final_bytes_;  // by block, of this attempt
  std::mutex mutex_;
  std::condition_variable changed_;
  Final final_;
  bool is_closed_ = false;
};

using BlocksPtr = std::shared_ptr<Blocks>;

}  // namespace ringfold
