// The log of ended ops: a ring that forgets the oldest entries, and the order of the times of an op whatever happens to
// it.
#include <algorithm>
#include <atomic>
#include <vector>

#include "check.hpp"
#include "engine_ring.hpp"
#include "ringfold/op_log.hpp"

using namespace ringfold;

namespace {

OpEntry numbered(std::uint32_t number) {
  OpEntry entry;
  entry.sequence = number;
  return entry;
}

// What holds for every op, however it ended.
void check_order(const OpEntry& op) {
  const bool has_started = op.attempts > 0;
  CHECK(op.called > 0 && op.called <= op.ended);
  CHECK(has_started == (op.started > 0));
  if (!has_started) return;
  CHECK(op.called <= op.started && op.started <= op.ended);
  CHECK(op.local == 0 || (op.started <= op.local && op.local <= op.ended));
  CHECK((op.out_first == 0) == (op.out_last == 0));
  CHECK(op.out_first == 0 || (op.started <= op.out_first && op.out_first <= op.out_last && op.out_last <= op.ended));
  CHECK((op.in_first == 0) == (op.in_last == 0));
  CHECK(op.in_first == 0 || (op.started <= op.in_first && op.in_first <= op.in_last && op.in_last <= op.ended));
  CHECK(op.blocked >= 0 && op.blocked <= op.ended - op.started);
}

std::vector<OpEntry> log_of(Engine& engine) {
  return engine.look([](Core& core) { return core.ops().log().since(0); });
}

std::uint64_t committed(const std::vector<OpEntry>& ops) {
  return static_cast<std::uint64_t>(
      std::count_if(ops.begin(), ops.end(), [](const OpEntry& op) { return op.outcome == 0; }));
}

// The log agrees with the counters, and has an entry for each op.
void check_log(Engine& engine, std::uint64_t calls) {
  const std::vector<OpEntry> ops = log_of(engine);
  CHECK(ops.size() == calls);
  for (const OpEntry& op : ops) check_order(op);
  const Stats stats = engine.look([](Core& core) { return core.stats(); });
  CHECK(stats.committed == committed(ops));
  std::uint64_t bytes = 0, busy = 0, blocked = 0, counted = 0;
  for (const OpEntry& op : ops) {
    if (op.outcome != 0) continue;
    bytes += op.bytes;
    busy += static_cast<std::uint64_t>(op.ended - op.started);
    blocked += static_cast<std::uint64_t>(op.blocked);
  }
  for (const std::uint64_t each : stats.durations) counted += each;
  CHECK(stats.op_bytes == bytes && stats.busy == busy && stats.blocked == blocked);
  CHECK(counted == stats.committed);
  CHECK(stats.waited <= stats.busy && stats.blocked <= stats.busy);
}

void ops_of_many_threads(Shape shape, bool loses_links) {
  constexpr int calls = 20;
  const DescriptorCheck check_descriptors;
  Ring ring(shape);
  Threads callers;
  for (std::uint32_t rank = 0; rank < ring.size(); ++rank) {
    for (std::uint64_t tag = 0; tag < 3; ++tag) {
      callers.start([&ring, rank, tag] { call_often(ring, rank, tag, calls, tag == 0 ? 16 : 20'000); });
    }
  }
  for (int loss = 0; loses_links && loss < 3; ++loss) {
    ring.engine(0).with_core([](Core& core, Ns) { core.close(core.lanes().front().conn); });
    ring.next_epoch();
  }
  callers.join();
  for (std::uint32_t rank = 0; rank < ring.size(); ++rank) {
    check_log(ring.engine(rank), std::uint64_t{3} * calls);
    for (const OpEntry& op : log_of(ring.engine(rank))) {
      CHECK(op.outcome == 0 && op.attempts >= 1 && (loses_links || op.attempts == 1));
      CHECK(op.bytes == (op.tag == 0 ? 16 : 20'000) * sizeof(float) && op.small == (op.tag == 0));
      // One that a verdict commits may have sent or received nothing itself.
      CHECK(loses_links || (op.received_bytes > 0 && op.sent_bytes > 0));
      CHECK(loses_links || op.small || (op.out_first > 0 && op.in_first > 0 && op.local > 0));
    }
  }
}

}  // namespace

TEST(the_log_keeps_the_last_entries) {
  OpLog log;
  CHECK(log.count() == 0 && log.since(0).empty() && log.since(5).empty());
  constexpr std::uint32_t added = OpLog::capacity + 100;
  for (std::uint32_t i = 0; i < added; ++i) {
    log.add(numbered(i));
    if (i == 9) CHECK(log.since(0).size() == 10 && log.since(7).size() == 3 && log.since(7).front().sequence == 7);
  }
  CHECK(log.count() == added);
  const std::vector<OpEntry> all = log.since(0);
  CHECK(all.size() == OpLog::capacity);
  for (std::uint32_t i = 0; i < all.size(); ++i) CHECK(all[i].sequence == added - OpLog::capacity + i);
  CHECK(log.since(added - 1).size() == 1 && log.since(added - 1).front().sequence == added - 1);
  CHECK(log.since(added).empty() && log.since(added + 1'000).empty());
}

TEST(durations_are_counted_in_classes) {
  CHECK(duration_class(0) == 0 && duration_class(16'000) == 0 && duration_class(16'001) == 1);
  CHECK(duration_class(64'000) == 1 && duration_class(4'194'304'000) == 9);
  CHECK(duration_class(4'194'304'001) == 10 && duration_class(3'600'000'000'000) == 10);
}

TEST(times_of_ops_are_in_order_with_one_channel) { ops_of_many_threads({.size = 3}, false); }

TEST(times_of_ops_are_in_order_with_three_channels) { ops_of_many_threads({.size = 3, .channels = 3}, false); }

TEST(times_of_ops_are_in_order_with_several_lanes) { ops_of_many_threads({.size = 2, .lanes = 4, .paths = 2}, false); }

TEST(times_of_ops_are_in_order_in_shared_memory) {
  ops_of_many_threads({.size = 3, .channels = 2, .memory = true}, false);
}

TEST(times_of_ops_are_in_order_when_links_are_lost) { ops_of_many_threads({.size = 3}, true); }

TEST(times_of_ops_are_in_order_when_links_of_three_channels_are_lost) {
  ops_of_many_threads({.size = 3, .channels = 3}, true);
}

TEST(an_op_that_is_cancelled_or_fails_is_logged) {
  const DescriptorCheck check_descriptors;
  Ring ring({.size = 2, .small = 0});
  std::vector<float> alone(20'000), never(100);
  const std::uint64_t cancelled = ring.engine(0).submit(all_reduce(alone, 1));
  CHECK(ring.engine(0).with_core([&](Core& core, Ns) { return core.ops().cancel(cancelled); }));
  const std::uint64_t failed = ring.engine(0).submit(all_reduce(never, 2));
  ring.engine(0).with_core([](Core& core, Ns) { core.ops().fail_all(OpStatus::failed, {}); });
  CHECK(ended(ring.engine(0), cancelled) && ended(ring.engine(0), failed));
  check_log(ring.engine(0), 2);
  const std::vector<OpEntry> ops = log_of(ring.engine(0));
  CHECK(ops[0].tag == 1 && ops[0].outcome == static_cast<std::uint8_t>(OpStatus::cancelled));
  CHECK(ops[1].tag == 2 && ops[1].outcome == static_cast<std::uint8_t>(OpStatus::failed));
}

TEST(an_op_that_waits_for_an_epoch_has_not_started) {
  const DescriptorCheck check_descriptors;
  Ring ring({.size = 2});
  ring.engine(0).with_core([](Core& core, Ns) { core.seal(1); });
  std::vector<float> values(100);
  ring.engine(0).submit(all_reduce(values, 7));
  ring.engine(0).with_core([](Core& core, Ns) { core.ops().fail_all(OpStatus::failed, {}); });
  check_log(ring.engine(0), 1);
  CHECK(log_of(ring.engine(0)).front().attempts == 0);
}
