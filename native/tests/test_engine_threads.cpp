// The engine with its threads: several engines in one process, connected over loopback, called from many threads at
// once.
//
// What is checked here is checked elsewhere for the core alone. The point is which threads touch what at the same time,
// so this test is worth most under the thread sanitizer.
#include <algorithm>
#include <atomic>
#include <cfenv>
#include <memory>
#include <vector>

#include "check.hpp"
#include "engine_ring.hpp"
#include "ringfold/hash.hpp"

using namespace ringfold;

namespace {

// All other calls that threads of a peer make meanwhile.
void look_around(Ring& ring, const std::atomic<bool>& enough) {
  while (!enough.load()) {
    for (std::uint32_t i = 0; i < ring.size(); ++i) {
      Engine& engine = ring.engine(i);
      engine.look([&](Core& core) {
        core.ops().tags_in_flight();
        core.path_rates(monotonic_now(), (i + 1) % ring.size());
        core.path_rtts(monotonic_now(), (i + 1) % ring.size());
        return core.stats().committed;
      });
      engine.wake();
      engine.with_core([](Core& core, Ns) { core.push_event({}); });
      engine.with_core([&](Core& core, Ns) { core.set_path_shares((i + 1) % ring.size(), {{30'000, 35'535}, 0}); });
      engine.before_fork();
      engine.forked_parent();
    }
    std::this_thread::yield();
  }
}

void many_threads_call_at_once(Shape shape, std::size_t large = 9'000) {
  const DescriptorCheck check_descriptors;
  Ring ring(shape);
  std::atomic<bool> enough{false};
  Threads callers, watchers;
  watchers.start([&] { look_around(ring, enough); });
  for (std::uint32_t rank = 0; rank < ring.size(); ++rank) {
    for (std::uint64_t tag = 0; tag < 3; ++tag) {
      callers.start([&ring, rank, tag, large] { call_often(ring, rank, tag, 12, tag == 0 ? 16 : large); });
    }
  }
  callers.join();
  enough.store(true);
}

void a_lost_link_costs_an_epoch_and_no_op(Shape shape) {
  const DescriptorCheck check_descriptors;
  Ring ring(shape);
  Threads callers;
  for (std::uint32_t rank = 0; rank < ring.size(); ++rank) {
    for (std::uint64_t tag = 0; tag < 3; ++tag) {
      callers.start([&ring, rank, tag] { call_often(ring, rank, tag, 20, tag == 0 ? 16 : 9'000); });
    }
  }
  for (std::uint32_t loss = 0; loss < 4; ++loss) {
    const std::uint32_t rank = loss % ring.size();
    ring.engine(rank).with_core([](Core& core, Ns) {
      const std::vector<LaneInfo> lanes = core.lanes();
      core.close(lanes[core.stats().committed % lanes.size()].conn);
    });
    ring.next_epoch();
  }
  callers.join();
}

void a_lost_lane_of_several_costs_nothing(Shape shape) {
  const DescriptorCheck check_descriptors;
  Ring ring(shape);
  Threads callers;
  for (std::uint32_t rank = 0; rank < ring.size(); ++rank) {
    for (std::uint64_t tag = 0; tag < 2; ++tag) {
      callers.start([&ring, rank, tag] { call_often(ring, rank, tag, 12, 40'000); });
    }
  }
  for (int loss = 0; loss < 3; ++loss) {
    ring.engine(0).with_core([](Core& core, Ns) {
      for (const LaneInfo& lane : core.lanes()) {
        if (!lane.outgoing) continue;
        core.close(lane.conn);
        return;
      }
    });
    ring.peer(1).await(Event::Kind::closed);
  }
  callers.join();
  CHECK(!ring.peer(0).has(Event::Kind::link_lost) && !ring.peer(1).has(Event::Kind::link_lost));
}

void blocks_and_filler_pass_beside_ops(Shape shape) {
  const DescriptorCheck check_descriptors;
  Ring ring(shape);
  const auto [out, in] = ring.connection(0, 1);
  ring.engine(0).with_core([out = out](Core& core, Ns now) { core.make_bulk(now, out); });
  ring.engine(1).with_core([in = in](Core& core, Ns now) { core.make_bulk(now, in); });
  Threads callers;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    callers.start([&ring, rank] { call_often(ring, rank, 0, 20, 9'000); });
  }
  Bytes sent(200'000, std::byte{3}), got(sent.size());
  const std::uint64_t hash = hash_block(sent.data(), sent.size());
  for (std::uint64_t batch = 0; batch < 10; ++batch) {
    ring.engine(1).with_core([&, in = in](Core& core, Ns) {
      core.expect_blocks(in, batch, {{got.data(), got.size(), hash}}, std::make_shared<int>(0));
    });
    ring.engine(0).with_core([&, out = out](Core& core, Ns now) {
      core.fill(out, batch % 2 == 0);
      core.send_blocks(now, out, {{sent.data(), sent.size(), std::nullopt}}, std::make_shared<int>(0));
    });
    const Event blocks = ring.peer(1).await(Event::Kind::blocks);
    CHECK(blocks.batch == batch && blocks.bad.empty());
  }
  CHECK(got == sent);
  callers.join();
}

// No other peer calls the op: it is waited for, driven and given up by different threads.
void an_op_is_cancelled_by_another_thread(Shape shape) {
  const DescriptorCheck check_descriptors;
  Ring ring(shape);
  for (int i = 0; i < 10; ++i) {
    std::vector<float> values(9'000, 1.0f);
    Engine& engine = ring.engine(0);
    const std::uint64_t op = engine.submit(all_reduce(values, 7, Retry::never));
    Threads waiters;
    waiters.start([&] { CHECK(ended(engine, op)); });
    waiters.start([&] { CHECK(eventually([&] { return engine.run(op, second / 10); })); });
    CHECK(engine.with_core([&](Core& core, Ns) { return core.ops().cancel(op); }));
    waiters.join();
    CHECK(status_of(engine, op) == OpStatus::cancelled);
    CHECK(std::all_of(values.begin(), values.end(), [](float each) { return each == 1.0f; }));
    ring.next_epoch();
  }
}

// Every way of waiting ends, memory is as it was or the result, and late commands do no harm.
void shutdown_ends_whatever_is_in_progress(std::uint32_t channels, bool memory = false) {
  const DescriptorCheck check_descriptors;
  for (int round = 0; round < 12; ++round) {
    Ring ring({.size = 2, .channels = channels, .memory = memory, .spin = round % 2 == 0 ? Ns{0} : Ns{100'000}});
    constexpr std::size_t count = 200'000;
    std::vector<std::vector<float>> values(6, std::vector<float>(count, 1.0f));
    std::atomic<int> begun{0};
    std::atomic<bool> enough{false};
    Threads callers;
    for (std::uint64_t tag = 0; tag < 3; ++tag) {
      for (std::uint32_t rank = 0; rank < 2; ++rank) {
        if (tag == 2 && rank == 1) continue;  // no peer answers this one
        callers.start([&, tag, rank] {
          Engine& engine = ring.engine(rank);
          std::vector<float>& mine = values[tag * 2 + rank];
          const bool drives = (tag + rank) % 2 == 0;
          const std::uint64_t op =
              drives ? engine.submit_to_drive(all_reduce(mine, tag)) : engine.submit(all_reduce(mine, tag));
          begun.fetch_add(1);
          CHECK(drives ? eventually([&] { return engine.run(op, second / 10); }) : ended(engine, op));
          const OpStatus status = status_of(engine, op);
          const float wanted = status == OpStatus::ok ? 2.0f : 1.0f;
          CHECK(status == OpStatus::ok || status == OpStatus::failed);
          CHECK(std::all_of(mine.begin(), mine.end(), [&](float each) { return each == wanted; }));
        });
      }
    }
    callers.start([&] {
      while (!enough.load()) {
        ring.engine(0).wake();
        ring.engine(0).with_core([](Core& core, Ns) { core.push_event({}); });
        ring.engine(0).dial("127.0.0.1", ring.peer(1).port, second);
      }
    });
    CHECK(eventually([&] { return begun.load() == 5; }));
    Threads closers;
    closers.start([&] { ring.engine(0).shutdown(); });
    closers.start([&] { ring.engine(0).shutdown(); });
    closers.start([&] { ring.engine(1).shutdown(); });
    closers.join();
    enough.store(true);
    callers.join();
    ring.engine(0).wake();
    CHECK(ring.engine(0).run(~std::uint64_t{0}, second));  // there is no such op: nothing to wait for
  }
}

// A thread that stops a worker carries out what it had to do, and applies segments that came before the call.
TEST(a_thread_that_rounds_otherwise_and_looks_at_an_engine_changes_no_result) {
  Ring ring({.size = 2, .channels = 2, .segment = 32'768, .spin = 0});
  constexpr int calls = 500;
  std::atomic<int> begun{0}, submitted{0};
  Threads watchers;
  watchers.start([&] {
    std::fesetround(FE_UPWARD);
    for (int call = 0; call < calls; ++call) {
      CHECK(eventually([&] { return begun.load() > call; }));
      while (submitted.load() <= call) ring.engine(1).look([](Core&) {});
      ring.engine(1).look([](Core&) {});
    }
  });
  const auto received = [&] { return ring.engine(1).look([](Core& core) { return core.channel(1).stats(); }); };
  for (int call = 0; call < calls; ++call) {
    std::vector<float> one(40'000, 1.0f), little(one.size(), 0x1p-25f);  // their sum is nearest to 1
    const std::uint64_t before = received().received_bytes;
    const std::uint64_t first = ring.engine(0).submit(all_reduce(one, 0));
    CHECK(eventually([&] { return received().received_bytes > before + 32'768; }));
    begun.fetch_add(1);
    const std::uint64_t second = ring.engine(1).submit(all_reduce(little, 0));
    submitted.fetch_add(1);
    CHECK(ended(ring.engine(0), first) && ended(ring.engine(1), second));
    CHECK(status_of(ring.engine(0), first) == OpStatus::ok && status_of(ring.engine(1), second) == OpStatus::ok);
    const auto is_one = [](float each) { return each == 1.0f; };
    const bool are_right =
        std::all_of(one.begin(), one.end(), is_one) && std::all_of(little.begin(), little.end(), is_one);
    CHECK(are_right);
  }
}

// An op begins while its workers are asleep, without anything that they could send: nobody but they themselves will
// look whether its memory is filled.
TEST(workers_that_sleep_when_an_op_begins_notice_that_its_blocks_are_filled) {
  Ring ring({.size = 2, .channels = 3, .segment = 1 << 20, .spin = 0});
  for (int call = 0; call < 10; ++call) {
    std::vector<std::vector<float>> values(2, std::vector<float>(300'000, 1.0f));
    std::vector<std::uint64_t> ops;
    std::vector<BlocksPtr> blocks;
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      const std::size_t bytes = values[rank].size() * sizeof(float);
      OpSpec spec = all_reduce(values[rank], 0);
      spec.blocks = blocks.emplace_back(std::make_shared<Blocks>(std::vector<std::size_t>{bytes / 2, bytes}));
      ops.push_back(ring.engine(rank).submit_to_drive(std::move(spec)));
    }
    for (const BlocksPtr& each : blocks) {
      each->fill(0);
      each->fill(1);
    }
    std::atomic<bool> all_ended{true};
    Threads callers;
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      callers.start([&, rank] {
        Engine& engine = ring.engine(rank);
        if (!eventually([&] { return engine.run(ops[rank], second / 10); })) all_ended.store(false);
      });
    }
    callers.join();
    CHECK(all_ended.load());
    if (!all_ended.load()) return;
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      CHECK(status_of(ring.engine(rank), ops[rank]) == OpStatus::ok);
      CHECK(std::all_of(values[rank].begin(), values[rank].end(), [](float each) { return each == 2.0f; }));
    }
  }
}

// The thread that posts carries out the command. What the channel has to say then is for the worker to report.
TEST(a_worker_that_sleeps_reports_what_a_command_led_to) {
  EpochState epoch;
  epoch.install({1, 0, 2, {10, 20}, false, 0, 4096});
  ShareSources advice;
  const Planted planted{};
  Channel channel(1, epoch, advice, planted);
  channel.install(0);
  Mailbox<Report> reports;
  Worker worker(channel, 0, reports, [](bool) {});
  worker.go_on(false);
  BackupPool pool;
  std::vector<float> values(4'000, 1.0f);
  for (std::uint32_t sequence = 0; sequence < 100; ++sequence) {
    Op op(sequence, all_reduce(values, 0));
    op.start({.size = 2, .segment_bytes = 4096, .channels = 2}, sequence, pool);
    op.parts_to_end = 1;
    worker.post({.kind = ChannelCommand::Kind::begin, .part = op.parts.back()});
    worker.post({.kind = ChannelCommand::Kind::end, .part = op.parts.back()});
    const bool is_reported = eventually([&] { return reports.has_items(); });
    CHECK(is_reported);
    if (!is_reported) break;
    CHECK(reports.take().front().kind == Report::Kind::parts_ended);
  }
  worker.shutdown();
}

// While a worker reports, another thread that makes it stand still may carry out its commands.
TEST(a_worker_does_not_sleep_with_a_report_that_came_while_it_reported) {
  EpochState epoch;
  epoch.install({1, 0, 2, {10, 20}, false, 0, 4096});
  ShareSources advice;
  const Planted planted{};
  Channel channel(1, epoch, advice, planted);
  channel.install(0);
  BackupPool pool;
  std::vector<float> values(4'000, 1.0f);
  std::vector<std::unique_ptr<Op>> ops;
  for (std::uint64_t tag = 0; tag < 2; ++tag) {
    ops.push_back(std::make_unique<Op>(tag, all_reduce(values, tag)));
    ops.back()->start({.size = 2, .segment_bytes = 4096, .channels = 2}, 0, pool);
    ops.back()->parts_to_end = 1;
  }
  Mailbox<Report> reports;
  Worker* working = nullptr;
  bool has_settled = false;
  Worker worker(channel, 0, reports, [&](bool) {
    if (std::exchange(has_settled, true)) return;
    working->post({.kind = ChannelCommand::Kind::begin, .part = ops[1]->parts.back()});
    working->post({.kind = ChannelCommand::Kind::end, .part = ops[1]->parts.back()});
    working->stop();
    working->wait_until_stopped();
    working->execute_commands();
    working->go_on(false);
  });
  working = &worker;
  channel.begin(0, ops[0]->parts.back());
  channel.end(ops[0]->parts.back(), true);
  worker.go_on(false);
  std::size_t count = 0;
  CHECK(eventually([&] { return (count += reports.take().size()) == 2; }));
  worker.shutdown();
}

// The last one is `Leave`.
TEST(a_message_after_the_call_of_an_op_leaves_before_the_engine_ends) {
  for (int time = 0; time < 10; ++time) {
    Ring ring({.size = 2, .channels = 2, .segment = 1 << 20, .spin = 0});
    const auto [out, in] = ring.connection(0, 1);
    ring.engine(1).with_core([conn = in](Core& core, Ns now) { core.resume(now, conn); });
    std::vector<float> values(262'144, 1.0f);
    ring.engine(0).submit(all_reduce(values, 0));
    ring.engine(0).with_core([conn = out](Core& core, Ns) { core.send(conn, "leave", 5); });
    ring.engine(0).with_core([](Core& core, Ns) { core.ops().fail_all(OpStatus::failed, {}); });
    ring.engine(0).shutdown();
    CHECK(eventually([&] { return ring.peer(1).has(Event::Kind::closed) || ring.peer(1).has(Event::Kind::message); }));
    CHECK(ring.peer(1).has(Event::Kind::message));
  }
}

TEST(many_threads_call_at_once_on_three_peers) { many_threads_call_at_once({.size = 3}); }

TEST(many_threads_call_at_once_without_spinning) { many_threads_call_at_once({.size = 2, .spin = 0}); }

TEST(many_threads_call_at_once_on_two_paths) { many_threads_call_at_once({.size = 2, .lanes = 4, .paths = 2}); }

TEST(many_threads_call_at_once_on_three_channels) { many_threads_call_at_once({.size = 3, .channels = 3}); }

TEST(many_threads_call_at_once_on_channels_without_spinning) {
  many_threads_call_at_once({.size = 2, .channels = 4, .spin = 0});
}

TEST(many_threads_call_at_once_on_channels_of_two_paths) {
  many_threads_call_at_once({.size = 2, .lanes = 2, .paths = 2, .channels = 2});
}

TEST(many_threads_call_at_once_in_shared_memory) { many_threads_call_at_once({.size = 3, .memory = true}); }

TEST(many_threads_call_at_once_in_shared_memory_on_three_channels) {
  many_threads_call_at_once({.size = 2, .channels = 3, .memory = true});
}

TEST(many_threads_call_at_once_in_shared_memory_without_spinning) {
  many_threads_call_at_once({.size = 2, .channels = 2, .memory = true, .spin = 0});
}

// Frames that are longer than half a pipe are copied out of it piece by piece.
TEST(many_threads_call_at_once_with_segments_that_do_not_fit_into_a_pipe) {
  many_threads_call_at_once({.size = 3, .segment = 3 << 20, .memory = true}, 1'000'000);
}

TEST(a_lost_link_costs_an_epoch_and_no_op_in_shared_memory) {
  a_lost_link_costs_an_epoch_and_no_op({.size = 3, .channels = 2, .memory = true});
}

// The neighbour's worker may have seen the loss and not have reported it yet when the lanes of the next epoch come. The
// ring looks at its lanes in every epoch.
TEST(a_loss_that_is_reported_late_closes_no_lane_of_the_next_epoch) {
  Ring ring({.size = 2, .channels = 3, .memory = true, .spin = 0});
  for (int loss = 0; loss < 200; ++loss) {
    ring.engine(0).with_core([loss](Core& core, Ns) {
      const std::vector<LaneInfo> lanes = core.lanes();
      core.close(lanes[static_cast<std::size_t>(loss) % lanes.size()].conn);
    });
    ring.next_epoch();
  }
}

TEST(blocks_and_filler_pass_beside_ops_in_shared_memory) {
  blocks_and_filler_pass_beside_ops({.size = 2, .channels = 2, .memory = true});
}

TEST(an_op_is_cancelled_by_another_thread_in_shared_memory) {
  an_op_is_cancelled_by_another_thread({.size = 2, .channels = 2, .memory = true});
}

TEST(shutdown_ends_whatever_is_in_progress_in_shared_memory) { shutdown_ends_whatever_is_in_progress(2, true); }

TEST(a_lost_link_costs_an_epoch_and_no_op_with_one_channel) { a_lost_link_costs_an_epoch_and_no_op({.size = 3}); }

TEST(a_lost_link_costs_an_epoch_and_no_op_with_three_channels) {
  a_lost_link_costs_an_epoch_and_no_op({.size = 3, .channels = 3});
}

TEST(a_lost_lane_of_several_costs_nothing_with_one_channel) {
  a_lost_lane_of_several_costs_nothing({.size = 2, .lanes = 4, .paths = 2});
}

TEST(a_lost_lane_of_several_costs_nothing_with_two_channels) {
  a_lost_lane_of_several_costs_nothing({.size = 2, .lanes = 4, .paths = 2, .channels = 2});
}

TEST(blocks_and_filler_pass_beside_ops_with_one_channel) { blocks_and_filler_pass_beside_ops({.size = 2}); }

TEST(blocks_and_filler_pass_beside_ops_with_two_channels) {
  blocks_and_filler_pass_beside_ops({.size = 2, .channels = 2});
}

TEST(an_op_is_cancelled_by_another_thread_with_one_channel) { an_op_is_cancelled_by_another_thread({.size = 2}); }

TEST(an_op_is_cancelled_by_another_thread_with_three_channels) {
  an_op_is_cancelled_by_another_thread({.size = 2, .channels = 3});
}

TEST(shutdown_ends_whatever_is_in_progress_with_one_channel) { shutdown_ends_whatever_is_in_progress(1); }

// A program may keep it for long after that.
TEST(an_engine_that_is_shut_down_keeps_no_descriptors_of_its_workers) {
  const auto left = [](std::uint32_t channels) {
    const std::ptrdiff_t before = open_descriptors();
    Ring ring({.size = 2, .channels = channels});
    for (std::uint32_t i = 0; i < ring.size(); ++i) ring.engine(i).shutdown();
    return open_descriptors() - before;
  };
  CHECK(left(3) == left(1));
}

TEST(shutdown_ends_whatever_is_in_progress_with_three_channels) { shutdown_ends_whatever_is_in_progress(3); }

}  // namespace
