// Bulk connections for Python, and how the arrays behind blocks stay alive.
//
// The core releases an array deep inside the engine, on any thread, under the engine's mutex, where the GIL must not be
// taken. So it only queues the array there. The next bulk command or next_event, which has the GIL, releases what is
// queued.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "convert.hpp"

namespace ringfold {

using ReadArray = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WriteArray = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename Of>
using RawBlocks = std::vector<std::tuple<Of, std::size_t, std::size_t, std::optional<std::uint64_t>>>;

// Arrays that the core has released and that wait for the GIL.
class ReleaseQueue {
 public:
  ReleaseQueue() = default;
  ReleaseQueue(const ReleaseQueue&) = delete;
  ReleaseQueue& operator=(const ReleaseQueue&) = delete;
  ~ReleaseQueue() { release_queued(); }

  // Releases what is queued. With the GIL.
  void release_queued() {
    for (Held* each = top_.exchange(nullptr); each != nullptr;) delete std::exchange(each, each->next);
  }

  // An owner of `arrays`: when the core has dropped its last copy, they are queued here. With the GIL.
  template <typename Of>
  static MemoryOwner keep(const std::shared_ptr<ReleaseQueue>& release_queue, std::vector<Of> arrays) {
    auto* held = new HeldArrays<Of>(std::move(arrays));
    return MemoryOwner(static_cast<void*>(held), [release_queue, held](void*) { release_queue->put(held); });
  }

 private:
  struct Held {
    virtual ~Held() = default;
    Held* next = nullptr;
  };
  template <typename Of>
  struct HeldArrays : Held {
    explicit HeldArrays(std::vector<Of> these) : arrays(std::move(these)) {}
    std::vector<Of> arrays;
  };

  void put(Held* held) {
    held->next = top_.load();
    while (!top_.compare_exchange_weak(held->next, held)) {
    }
  }

  std::atomic<Held*> top_{nullptr};
};

// Blocks as the core wants them. Throws where a block is not inside its array.
template <typename Of>
std::pair<std::vector<Block>, std::vector<Of>> blocks_of(const RawBlocks<Of>& raw) {
  std::pair<std::vector<Block>, std::vector<Of>> out;
  for (const auto& [array, offset, length, hash] : raw) {
    if (length == 0) throw nb::value_error("a block of no bytes");
    if (offset > array.nbytes() || length > array.nbytes() - offset) {
      throw nb::value_error("a block that is not inside its array");
    }
    auto* at = reinterpret_cast<std::byte*>(const_cast<std::uint8_t*>(array.data()));
    out.first.push_back({at + offset, length, hash});
    out.second.push_back(array);
  }
  return out;
}

template <typename Class, typename With>
void bind_bulk_commands(nb::class_<Class>& cls, With with) {
  cls.def(
      "make_bulk",
      [with](Class& self, ConnId conn) { with(self, [&](Core& core, Ns now) { core.make_bulk(now, conn); }); },
      "conn"_a, "The connection carries messages, blocks and filler from now on.");
  cls.def(
      "send_blocks",
      [with](Class& self, ConnId conn, const RawBlocks<ReadArray>& raw) {
        self.release_queue()->release_queued();
        auto [blocks, arrays] = blocks_of(raw);
        std::vector<std::uint32_t> changed;
        {
          nb::gil_scoped_release free;
          changed = differing(blocks);
        }
        if (!changed.empty()) return changed;
        const MemoryOwner keep = ReleaseQueue::keep(self.release_queue(), std::move(arrays));
        with(self, [&](Core& core, Ns now) { core.send_blocks(now, conn, blocks, keep); });
        return changed;
      },
      "conn"_a, "blocks"_a.noconvert(),
      "Queue blocks, each (array, offset, length, expected hash or None). If some have another hash by now, nothing is "
      "queued and their indices are returned.");
  cls.def(
      "expect_blocks",
      [with](Class& self, ConnId conn, std::uint64_t batch, const RawBlocks<WriteArray>& raw) {
        self.release_queue()->release_queued();
        auto [blocks, arrays] = blocks_of(raw);
        MemoryOwner keep = ReleaseQueue::keep(self.release_queue(), std::move(arrays));
        with(self, [&](Core& core, Ns) { core.expect_blocks(conn, batch, std::move(blocks), std::move(keep)); });
      },
      "conn"_a, "batch"_a, "blocks"_a.noconvert(),
      "These blocks come next, in this order, each (array, offset, length, expected hash or None); the event `blocks` "
      "reports when all are in, and which have another hash.");
  cls.def(
      "fill", [with](Class& self, ConnId conn, bool on) { with(self, [&](Core& core, Ns) { core.fill(conn, on); }); },
      "conn"_a, "on"_a, "Send filler whenever nothing else is to be sent, or no more of it.");
  cls.def(
      "sample",
      [with](Class& self, ConnId conn, Ns every_ns) {
        with(self, [&](Core& core, Ns now) { core.sample(now, conn, every_ns); });
      },
      "conn"_a, "every_ns"_a, "Tell how much filler came, about every so often; 0: no more.");
}

}  // namespace ringfold
