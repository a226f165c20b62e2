// Ops on memory that is filled while they run: blocks by themselves, and in rings of engines whose memory comes block
// by block, in any order, while others read what is final.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "engine_ring.hpp"

using namespace ringfold;

namespace {

constexpr float poison = std::numeric_limits<float>::quiet_NaN();

std::vector<std::size_t> ends_of(std::size_t bytes, std::size_t block) {
  std::vector<std::size_t> ends;
  for (std::size_t at = block; at < bytes; at += block) ends.push_back(at);
  ends.push_back(bytes);
  return ends;
}

// A tensor on a device, its memory here, and its results there before they are committed.
struct Copied {
  std::vector<float> device, host, beside;
  BlocksPtr blocks;
  std::vector<std::size_t> ends;

  Copied(std::vector<float> values, std::size_t block)
      : device(std::move(values)),
        host(device.size(), poison),
        beside(device.size(), poison),
        blocks(std::make_shared<Blocks>(ends_of(device.size() * sizeof(float), block))),
        ends(ends_of(device.size() * sizeof(float), block)) {}

  std::size_t begin(std::size_t block) const { return block > 0 ? ends[block - 1] : 0; }
  void copy(std::size_t block, const std::vector<float>& from, std::vector<float>& to) const {
    const std::size_t first = begin(block) / sizeof(float), count = (ends[block] - begin(block)) / sizeof(float);
    std::memcpy(to.data() + first, from.data() + first, count * sizeof(float));
  }

  void fill_all(unsigned seed) {
    std::vector<std::size_t> order(ends.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::shuffle(order.begin(), order.end(), std::mt19937(seed));
    for (const std::size_t block : order) {
      copy(block, device, host);
      blocks->fill(block);
      for (unsigned i = 0; i < seed % 7; ++i) std::this_thread::yield();
    }
  }

  // Until the op is over: what became final in its last attempt.
  std::vector<bool> take(const std::atomic<bool>& is_over) {
    std::uint32_t attempt = 0;
    std::vector<bool> taken(ends.size(), false);
    while (true) {
      const bool was_over = is_over.load();
      const Blocks::Final final = blocks->take_final(was_over ? 0 : second / 100);
      if (std::exchange(attempt, final.attempt) != final.attempt) taken.assign(ends.size(), false);
      for (const std::size_t block : final.blocks) {
        copy(block, host, beside);
        taken[block] = true;
      }
      if (was_over) return taken;
    }
  }
};

// One call, with a thread that fills and one that takes.
void call_with_blocks(Engine& engine, Copied& copied, std::uint64_t tag, unsigned seed, bool in_place) {
  std::vector<float> target(in_place ? 0 : copied.host.size(), poison);
  OpSpec spec = all_reduce(copied.host, tag);
  spec.blocks = copied.blocks;
  if (!in_place) {
    spec.in_place = false;
    spec.spans.front().target = reinterpret_cast<std::byte*>(target.data());
  }
  std::atomic<bool> is_over{false};
  std::vector<bool> taken;
  Threads threads;
  threads.start([&] { copied.fill_all(seed); });
  if (in_place) threads.start([&] { taken = copied.take(is_over); });
  const bool drives = seed % 2 == 0;
  const std::uint64_t op = drives ? engine.submit_to_drive(std::move(spec)) : engine.submit(std::move(spec));
  CHECK(drives ? eventually([&] { return engine.run(op, second / 10); }) : ended(engine, op));
  CHECK(status_of(engine, op) == OpStatus::ok);
  is_over.store(true);
  copied.blocks->close();
  threads.join();
  CHECK(copied.blocks->are_all_filled());
  if (in_place) CHECK(std::count(taken.begin(), taken.end(), false) == 0);
  else copied.host = target;
}

std::vector<float> values_of(std::uint32_t rank, std::size_t count) {
  std::vector<float> values(count);
  for (std::size_t at = 0; at < count; ++at) values[at] = static_cast<float>((rank + 1) * (1 + at % 11));
  return values;
}

void check_sum(const std::vector<float>& found, std::uint32_t size) {
  const auto total = static_cast<float>(size * (size + 1) / 2);
  for (std::size_t at = 0; at < found.size(); ++at) {
    if (found[at] == total * static_cast<float>(1 + at % 11)) continue;
    CHECK_MESSAGE(false, "element %zu of %u ranks is %f", at, size, static_cast<double>(found[at]));
    break;
  }
}

// Rank 0 has its memory at once, as a peer without a device; the others have it block by block.
void memory_comes_while_the_op_runs(Shape shape, std::size_t count, std::size_t block, std::uint32_t losses = 0) {
  const DescriptorCheck check_descriptors;
  Ring ring(shape);
  Threads callers;
  std::atomic<unsigned> running{shape.size};
  for (std::uint32_t rank = 0; rank < ring.size(); ++rank) {
    callers.start([&, rank] {
      for (unsigned i = 0; i < 6; ++i) {
        if (rank == 0) {
          std::vector<float> values = values_of(rank, count);
          CHECK(call(ring.engine(rank), values, 0, i % 2 == 0) == OpStatus::ok);
          check_sum(values, ring.size());
          continue;
        }
        Copied copied(values_of(rank, count), block);
        const bool in_place = i % 3 != 2;
        call_with_blocks(ring.engine(rank), copied, 0, 5 * i + rank, in_place);
        check_sum(copied.host, ring.size());
        if (in_place) check_sum(copied.beside, ring.size());
      }
      --running;
    });
  }
  for (std::uint32_t loss = 0; loss < losses && running.load() == ring.size(); ++loss) {
    const auto committed = [&] { return ring.engine(1).look([](Core& core) { return core.stats().committed; }); };
    const auto before = committed();
    CHECK(eventually([&] { return committed() > before || running.load() < ring.size(); }));
    if (running.load() < ring.size()) break;
    ring.engine(1).with_core([](Core& core, Ns) { core.close(core.lanes().front().conn); });
    ring.next_epoch();
  }
  callers.join();
}

}  // namespace

TEST(blocks_know_what_is_filled_and_what_is_final) {
  Blocks blocks({64, 128, 200});
  CHECK(blocks.count() == 3 && blocks.bytes() == 200 && blocks.filled() == 0);
  CHECK(!blocks.is_filled(0, 1));
  blocks.fill(1);
  blocks.fill(1);
  CHECK(blocks.filled() == 1);
  CHECK(blocks.is_filled(64, 128) && blocks.is_filled(100, 101));
  CHECK(!blocks.is_filled(63, 65) && !blocks.is_filled(127, 129));
  blocks.fill(0);
  blocks.fill(2);
  CHECK(blocks.are_all_filled() && blocks.is_filled(0, 200));
  blocks.restart();
  blocks.add_final(0, 60);
  CHECK(blocks.take_final(0).blocks.empty());
  blocks.add_final(60, 190);
  CHECK(blocks.take_final(0).blocks == (std::vector<std::size_t>{0, 1}));
  blocks.restart();
  blocks.add_final(190, 200);
  blocks.add_final(0, 128);
  const Blocks::Final final = blocks.take_final(0);
  CHECK(final.attempt == 2 && final.blocks == (std::vector<std::size_t>{0, 1}));
}

TEST(blocks_have_ends_that_ascend) {
  for (const std::vector<std::size_t>& ends : {std::vector<std::size_t>{}, {0, 5}, {5, 5}, {5, 4}}) {
    bool refused = false;
    try {
      Blocks blocks(ends);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    CHECK(refused);
  }
  Blocks blocks({8});
  bool refused = false;
  try {
    blocks.fill(1);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
}

TEST(who_waits_for_final_blocks_is_woken) {
  Blocks blocks({8, 16});
  blocks.restart();
  Threads threads;
  std::vector<std::size_t> found;
  threads.start([&] { found = blocks.take_final(test_timeout).blocks; });
  blocks.add_final(8, 16);
  threads.join();
  CHECK(found == std::vector<std::size_t>{1});
  threads.start([&] { found = blocks.take_final(test_timeout).blocks; });
  blocks.close();
  threads.join();
  CHECK(found.empty());
}

TEST(memory_that_comes_block_by_block_in_a_pair) { memory_comes_while_the_op_runs({.size = 2}, 60'000, 8'192); }
TEST(memory_that_comes_block_by_block_in_a_ring) { memory_comes_while_the_op_runs({.size = 3}, 60'001, 5'000); }
TEST(memory_that_comes_block_by_block_in_a_square) { memory_comes_while_the_op_runs({.size = 4}, 60'000, 4'096); }
TEST(memory_that_comes_block_by_block_in_shared_memory) {
  memory_comes_while_the_op_runs({.size = 2, .channels = 2, .memory = true}, 90'000, 16'384);
}
TEST(memory_that_comes_block_by_block_on_several_channels) {
  memory_comes_while_the_op_runs({.size = 3, .channels = 3}, 90'000, 10'000);
}
TEST(memory_that_comes_block_by_block_on_several_lanes) {
  memory_comes_while_the_op_runs({.size = 2, .lanes = 3, .paths = 3}, 60'000, 8'192);
}
TEST(memory_that_comes_block_by_block_to_threads_that_sleep) {
  memory_comes_while_the_op_runs({.size = 3, .channels = 2, .spin = 0}, 60'000, 8'192);
}
TEST(memory_that_comes_block_by_block_while_links_are_lost) {
  memory_comes_while_the_op_runs({.size = 3}, 200'000, 8'192, 4);
}
