// What one thread leaves for another: first in, first out. Looking whether something is there costs one load.
//
// A thread that is about to sleep says so in an atomic of its own, and then looks again; one that posts looks at that
// atomic afterwards. All of it is sequentially consistent, so one of the two sees the other.
#pragma once

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

namespace ringfold {

template <typename T>
class Mailbox {
 public:
  void post(T item) {
    const std::lock_guard lock(mutex_);
    items_.push_back(std::move(item));
    has_items_.store(true);
  }
  bool has_items() const { return has_items_.load(); }
  std::vector<T> take() {
    if (!has_items()) return {};
    const std::lock_guard lock(mutex_);
    has_items_.store(false);
    return std::exchange(items_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<T> items_;
  std::atomic<bool> has_items_{false};
};

}  // namespace ringfold
