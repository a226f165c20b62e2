#include "ringfold/blocks.hpp"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

namespace ringfold {

Blocks::Blocks(std::vector<std::size_t> ends)
    : ends_(std::move(ends)), is_filled_(ends_.size()), final_bytes_(ends_.size()) {
  if (ends_.empty() || ends_.front() == 0 ||
      std::adjacent_find(ends_.begin(), ends_.end(), std::greater_equal<>()) != ends_.end()) {
    throw std::invalid_argument("the ends of blocks are ascending, from above 0 on");
  }
}

std::size_t Blocks::block_at(std::size_t at) const {
  return static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), at) - ends_.begin());
}

void Blocks::fill(std::size_t block) {
  if (block >= count()) throw std::invalid_argument("there is no such block");
  if (!is_filled_[block].exchange(true, std::memory_order_acq_rel)) filled_.fetch_add(1, std::memory_order_acq_rel);
}

bool Blocks::is_filled(std::size_t from, std::size_t to) const {
  if (are_all_filled()) return true;
  for (std::size_t block = block_at(from); block < count() && begin(block) < to; ++block) {
    if (!is_filled_[block].load(std::memory_order_acquire)) return false;
  }
  return true;
}

void Blocks::restart() {
  const std::scoped_lock lock(mutex_);
  ++final_.attempt;
  final_.blocks.clear();
  for (auto& bytes : final_bytes_) bytes = 0;
}

void Blocks::add_final(std::size_t from, std::size_t to) {
  for (std::size_t block = block_at(from); block < count() && begin(block) < to; ++block) {
    const std::size_t added = std::min(to, ends_[block]) - std::max(from, begin(block));
    const std::size_t before = final_bytes_[block].fetch_add(added, std::memory_order_acq_rel);
    if (before + added != ends_[block] - begin(block)) continue;
    const std::scoped_lock lock(mutex_);
    final_.blocks.push_back(block);
    changed_.notify_one();
  }
}

Blocks::Final Blocks::take_final(Ns timeout) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, std::chrono::nanoseconds(timeout), [this] { return !final_.blocks.empty() || is_closed_; });
  return {final_.attempt, std::exchange(final_.blocks, {})};
}

void Blocks::close() {
  const std::scoped_lock lock(mutex_);
  is_closed_ = true;
  changed_.notify_all();
}

}  // namespace ringfold
